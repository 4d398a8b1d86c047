"""Entry point of the process that runs a user's function. It imports little, since it runs at each start of a trial."""

import json
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress

from shoal.core.errors import UnusableTaskError
from shoal.pickling import loaded, why_not_loaded
from shoal.trainable import TrainingStopped

__all__ = ["main"]


def main() -> None:
    """Read a function and a config from standard input, and call the function."""
    content, config = pickle.load(sys.stdin.buffer)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (it stays open)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study handles Ctrl-C
    signal.signal(signal.SIGTERM, _stop)
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
        from shoal.worker.postponed_compiler import postpone_compiler  # imports torch

        postpone_compiler()
    function(config)


def _send(error: Exception) -> None:
    """Send an error to the worker."""
    from shoal.worker.failures import describe  # slow to import

    outcome, message = describe(error)
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SHOAL_REPORT"])
        connection.sendall(json.dumps({"outcome": outcome, "message": message}).encode() + b"\n")
