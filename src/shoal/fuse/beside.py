"""Arrays that run in several threads of one process at once, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from shoal.core.errors import FusionError

__all__ = ["accompanied", "beside", "usual_threads"]

_alone: ContextVar[int] = ContextVar("alone", default=0)
"""In a thread that runs beside others, the intra-op threads that it would have alone; else 0."""


@contextmanager
def beside(threads: int, alone: int) -> Iterator[None]:
    """Within, this thread runs arrays while others run other arrays; each of these threads has to say so.

    What all threads share is left as it is. Lowerings are not timed, since who shares the cores distorts that: they are
    those that were found before. Generators are not seeded again for each member, which would disturb whoever draws
    from them elsewhere: so arrays whose functions draw from them must run alone. And members are never run silently:
    what they drew from torch's generators would get into others' runs.

    Args:
        threads: intra-op threads of this thread meanwhile; torch keeps that number for each thread.
        alone: those it would have alone, by which lowerings were found; it has them again afterwards.

    Raises:
        FusionError: one of them is not positive.
    """
    if min(threads, alone) < 1:
        raise FusionError(f"`threads` and `alone` must be positive integers, got {threads} and {alone}")
    torch.set_num_threads(threads)
    token = _alone.set(alone)
    try:
        yield
    finally:
        _alone.reset(token)
        torch.set_num_threads(alone)


def accompanied() -> bool:
    """Whether arrays run in other threads while this one runs."""
    return _alone.get() > 0


def usual_threads() -> int:
    """Intra-op threads of this thread when it runs alone."""
    return _alone.get() or torch.get_num_threads()
