"""Entry point of the process for a user's function. It imports little, for fast starts of trials."""

import atexit
import json
import logging
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from shoal.core.errors import TaskError, UnusableTaskError
from shoal.core.names import explain_missing_name
from shoal.host.machine import limit_threads
from shoal.host.pickling import loaded, why_not_loaded
from shoal.programs.memory_limits import limit_gpu_memory, limit_main_memory
from shoal.programs.trainable import TrainingStopped, connected, forget_reports, step

__all__ = ["main", "main_of_fork"]


_main_of_caller: ModuleType | None = None
"""Keeps the objects of the caller's script from being finalized in a fork."""


def main() -> None:
    """Read a function and a config from standard input, and call the function."""
    content, config = pickle.load(sys.stdin.buffer)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (it stays open)
    _train(content, config)


def main_of_fork(content: bytes, config: dict[str, object], environment: Mapping[str, str]) -> None:
    """Call a function in a fork of a worker, with the state of a new process but for the imported modules."""
    global _main_of_caller
    _main_of_caller = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # a process that the function spawns does not import the caller's
    os.environ.update(environment)
    limit_threads(int(environment["OMP_NUM_THREADS"]))
    forget_reports()
    _reset_random_numbers()
    _forget_exit_handlers()
    try:
        _train(content, config)
    finally:
        _exit_orderly()


def _reset_random_numbers() -> None:
    """Seed the global generators from the system, as in a new process, instead of with a state that all forks share."""
    random.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def _forget_exit_handlers() -> None:
    """Drop the exit handlers and finalizers of the process that was forked, such as those of temporary directories."""
    atexit._clear()
    atexit.register(logging.shutdown)
    finalizers: Any = weakref.finalize
    finalizers._registry.clear()
    finalizers._registered_with_atexit = False


def _exit_orderly() -> None:
    """Do what a new process does at its end, in its order: wait for threads, and call the exit handlers.

    `multiprocessing`, the caller, has waited for child processes, but for those that end with a `ProcessPoolExecutor`.
    """
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()


def _train(content: bytes, config: dict[str, object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study handles Ctrl-C
    signal.signal(signal.SIGTERM, _stop)
    limit_main_memory()
    try:
        _call(content, config)
    except Exception as error:  # the worker gets the error, and the exit status is 1
        traceback.print_exc()
        _send(error)
        sys.exit(1)


def _stop(number: int, frame: object) -> None:
    """Raise `TrainingStopped`, so that `finally` blocks of the function run."""
    raise TrainingStopped(128 + number)


def _call(content: bytes, config: dict[str, object]) -> None:
    try:
        function = loaded(content)
    except (Exception, SystemExit) as error:
        raise UnusableTaskError(f"the function cannot be loaded in its process: {why_not_loaded(error)}") from error
    if "torch" in sys.modules:
        from shoal.train.postponed_compiler import postpone_compiler  # imports torch

        postpone_compiler()
    limit_gpu_memory()
    before = step()
    try:
        returned = function(config)
    except KeyError as error:
        explain_missing_name(error, config)
        raise
    if isinstance(returned, (CoroutineType, GeneratorType, AsyncGeneratorType)) and step() == before:
        kind = type(returned).__name__.replace("_", " ")
        raise TaskError(f"the function returned a {kind}, of which nothing ran; let the function itself train")


def _send(error: Exception) -> None:
    """Send an error to the worker."""
    from shoal.train.failures import describe  # slow to import

    outcome, message = describe(error)
    with suppress(OSError), connected(os.environ["SHOAL_REPORT"]) as connection:
        connection.sendall(json.dumps({"outcome": outcome, "message": message}).encode() + b"\n")
