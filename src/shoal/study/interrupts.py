"""Signals that stop a study."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["interruptible"]


@contextmanager
def interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Within this context the first Ctrl-C or SIGTERM calls `interrupt`; the second has its usual effect."""
    if threading.current_thread() is not threading.main_thread():  # signals need the main thread
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def first(number: int, frame: object) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        interrupt()

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
