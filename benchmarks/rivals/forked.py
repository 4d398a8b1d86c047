"""A function in a process of its own, forked from one that has imported all that it needs."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from shoal.run.caller_fork import prepare_fork

__all__ = ["in_a_fork"]


def in_a_fork(function: Callable[..., Any], *given: Any) -> Any:
    """Return the value of `function(*given)` in a fork, which can begin threads of OpenMP: those of this process end.

    Raises:
        SystemExit: this process cannot be forked, or the function has raised, whose error is printed.
    """
    if (reason := prepare_fork()) is not None:
        raise SystemExit(f"this process cannot be forked: {reason}")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, given))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit("a run has failed; its error is above") from None
    finally:
        process.join()


def _answer(connection: Connection, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    try:
        connection.send(function(*given))
    except Exception:
        traceback.print_exc()
