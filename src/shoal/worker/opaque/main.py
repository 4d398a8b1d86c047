"""What the process of a user's function does; it imports little, since it is started for each stretch of a trial."""

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
    """Call the function with its config, both of which standard input brings."""
    content, config = pickle.load(sys.stdin.buffer)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (it stays open)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, _stop)
    try:
        _call(content, config)
    except Exception as error:  # not hidden: the worker is told, and the status is 1
        traceback.print_exc()
        _tell(error)
        sys.exit(1)


def _stop(number: int, frame: object) -> None:
    """So that `finally` blocks of the function are run."""
    raise TrainingStopped(128 + number)


def _call(content: bytes, config: dict[str, object]) -> None:
    try:
        function = loaded(content)
    except (Exception, SystemExit) as error:
        raise UnusableTaskError(f"the function cannot be loaded in its process: {why_not_loaded(error)}") from error
    function(config)


def _tell(error: Exception) -> None:
    """Say to the worker what went wrong."""
    from shoal.worker.failures import described  # what it needs takes a while to import

    outcome, message = described(error)
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SHOAL_REPORT"])
        connection.sendall(json.dumps({"outcome": outcome, "message": message}).encode() + b"\n")
