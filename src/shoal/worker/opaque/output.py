"""What a command prints: a file, of which nothing is lost with the worker that reads it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from shoal.worker.opaque.reports import ProgramReport

__all__ = ["OutputReports"]

_MOST_PENDING = 1 << 20
"""Bytes of a line; a longer one is no report."""


class OutputReports:
    """The reports among the lines of a file to which a program may still be writing.

    Args:
        path: of the file.
        metrics: a line of JSON is a report if it has all of these.
        log: gets a copy of the whole file.
    """

    def __init__(self, path: Path, metrics: Sequence[str], log: BinaryIO | None = None) -> None:
        self._file = path.open("rb", buffering=0)
        self._metrics = metrics
        self._log = log
        self._pending = b""

    def read(self) -> list[ProgramReport]:
        """The reports of the whole lines that were written since the last call."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # it was opened anew, as by `echo > /dev/stdout`
            self._file.seek(0)
        data = self._file.read()
        if not data:
            return []
        if self._log is not None:
            self._log.write(data)
            self._log.flush()
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest[-_MOST_PENDING:]
        return self._reports(whole + newline)

    def rest(self) -> list[ProgramReport]:
        """The reports of all that there is now; nobody writes any more."""
        found = self.read()
        last, self._pending = self._pending, b""
        return [*found, *self._reports(last)]

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def _reports(self, data: bytes) -> list[ProgramReport]:
        found: list[ProgramReport] = []
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
                found.append(ProgramReport(values, step))
        return found
