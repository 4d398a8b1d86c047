"""How a program of the user's reaches its worker: over a socket, where it waits for an answer, or by its output."""

import json
import os
import selectors
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from shoal.cluster.temporary import TemporaryFolder

__all__ = ["Channel", "Failed", "Said"]

_PATIENCE_SECONDS = 10.0
"""For the rest of a message whose sender was killed."""

_CHUNK = 1 << 16
_MOST_PENDING = 1 << 20
"""Bytes of a line of output; a longer one is no report."""


@dataclass(frozen=True)
class Said:
    """A report.

    Args:
        metrics: as they came; of a line of output not all need be numbers.
        step: as it came; None where there was none.
        caller: who waits for an answer; None of a line of output.
    """

    metrics: Mapping[str, Any]
    step: Any
    caller: socket.socket | None = None

    def answer(self, **content: object) -> None:
        """Let the caller go on, or not."""
        if self.caller is None:
            return
        with self.caller:
            try:
                self.caller.sendall(json.dumps(content).encode() + b"\n")
            except OSError:  # it was killed while it waited
                return


@dataclass(frozen=True)
class Failed:
    """A function has raised: the outcome, and what its user can act on."""

    outcome: str
    message: str


class Channel:
    """What a program says, in order.

    Args:
        metrics: a line of JSON is a report if it has all of these.
        log: the file that gets all other output, and the reports too.
    """

    def __init__(self, metrics: Sequence[str], log: BinaryIO) -> None:
        self._metrics = metrics
        self._log = log
        self._folder = TemporaryFolder()  # the path of a socket has to be short
        self.address = str(self._folder.path / "report")
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._callers: list[socket.socket] = []
        self._output: int | None = None
        self._pending = b""

    def read(self, output: BinaryIO) -> None:
        """Listen to the output of a program as well."""
        self._output = output.fileno()
        self._selector.register(self._output, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[Said | Failed]:
        """What was said since the last call; waits so long at most for anything."""
        messages: list[Said | Failed] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                messages += self._accept()
            else:
                messages += self._read()
        return messages

    def finish(self) -> list[Said | Failed]:
        """The last words of a program that has ended: all that is there now."""
        messages: list[Said | Failed] = []
        while self._selector.select(0):
            messages += self.wait(0)
        messages += self._lines(self._pending + b"\n" if self._pending else b"")
        return messages

    def close(self) -> None:
        """Who is still to report, or to be answered, finds nobody."""
        for caller in self._callers:
            caller.close()
        self._selector.close()
        self._listener.close()
        self._folder.close()

    def _accept(self) -> list[Said | Failed]:
        caller, _ = self._listener.accept()
        caller.settimeout(_PATIENCE_SECONDS)
        try:
            with caller.makefile("rb") as stream:
                message = json.loads(stream.readline())
        except (OSError, ValueError):  # it was killed before it had said it all
            caller.close()
            return []
        if "outcome" in message:
            caller.close()
            return [Failed(message["outcome"], message["message"])]
        self._callers = [*(other for other in self._callers if other.fileno() >= 0), caller]
        return [Said(message["metrics"], message["step"], caller)]

    def _read(self) -> list[Said | Failed]:
        assert self._output is not None
        data = os.read(self._output, _CHUNK)
        if not data:
            self._selector.unregister(self._output)
            return []
        self._log.write(data)
        self._log.flush()
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest[-_MOST_PENDING:]
        return self._lines(whole + newline)

    def _lines(self, data: bytes) -> list[Said | Failed]:
        found: list[Said | Failed] = []
        for line in data.splitlines():
            text = line.strip()
            if not (text.startswith(b"{") and text.endswith(b"}")):
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError):  # other output, or a line that was never finished
                continue
            if all(name in values for name in self._metrics):
                step = values.pop("step", None)
                found.append(Said(values, step))
        return found
