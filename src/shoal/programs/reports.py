"""Reports of a program: how they arrive, and checks that steps count 1, 2, 3, ... without gaps.

A program sends them over a socket, on which it waits for answers, or prints them.
"""

import json
import os
import selectors
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from shoal.core.event import Outcome
from shoal.core.objective import metric_fault
from shoal.core.space import is_number
from shoal.core.trial import Report
from shoal.host.process_lock import TemporaryFolder
from shoal.train.failures import ProgramFailedError

__all__ = ["OutputReports", "ProgramChannel", "ProgramReport", "ProgramReports"]


@dataclass(frozen=True)
class ProgramReport:
    """Report as received from the program, not validated.

    On a `connection` the program waits for an answer; there is none for a line of output.

    Args:
        returns: True for the value that a function returns, which replaces its last report; False for the reports
            before that value; None for a program that returns no value.
    """

    metrics: Mapping[str, Any]
    step: Any
    connection: socket.socket | None = None
    returns: bool | None = None

    def answer(self, **content: object) -> None:
        """Send an answer, if the program waits for one."""
        if self.connection is None:
            return
        with self.connection:
            try:
                self.connection.sendall(json.dumps(content).encode() + b"\n")
            except OSError:  # the program was killed while waiting
                return


class ProgramReports:
    """Reports of one trial in the order of their steps, for one run of its program.

    Args:
        step: Number of the last report before the state from which the program starts.
        metrics: Names of metrics that must be numbers; None for all.
        own_state: Whether the program saves its state itself, so that the state may be ahead of the reports.
    """

    def __init__(
        self,
        trial: int,
        reports: Sequence[Report],
        step: int,
        metrics: Sequence[str] | None = None,
        recorded: int = 0,
        *,
        own_state: bool = False,
    ) -> None:
        self.reports = list(reports)
        self.awaits_first = True
        """Whether the program has not sent a report in this run."""
        self._trial = trial
        self._step = step
        self._metrics = metrics
        self._own_state = own_state
        self._recorded = max(recorded, self.last)

    @property
    def last(self) -> int:
        """Step of the last report; 0 before the first."""
        return self.reports[-1].epoch if self.reports else 0

    def find_error(self, program_report: ProgramReport) -> str:
        """Return a message about the error in a report; "" if there is none."""
        for name, value in program_report.metrics.items():
            wanted = self._metrics is None or name in self._metrics
            if wanted and (error := metric_fault(name, value)):
                return error
        step = program_report.step
        if step is None:
            return ""
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            return f"`step` of a report must be a whole number, at least 1, got {step!r}"
        expected = self._next_step()
        if step == expected or (self.awaits_first and (self._own_state or step <= self._recorded + 1)):
            return ""
        return (
            f"`step` counts the reports of a trial, as its budget does: 1, 2, 3, ...; after {expected - 1} came "
            f"{step}. Report at every step that is counted, or leave `step` out"
        )

    def leaves_gap(self, program_report: ProgramReport) -> bool:
        """Return whether reports before this one are missing, because the program was killed before it sent them."""
        return self._step_of(program_report) > self._recorded + 1

    def add(self, program_report: ProgramReport, seconds: float) -> Report:
        """Add a report without errors or gaps. It replaces earlier reports of its step and of later steps."""
        report = Report(self._trial, self._step_of(program_report), _numbers(program_report), seconds)
        self.reports = [*(x for x in self.reports if x.epoch < report.epoch), report]
        self.awaits_first, self._step, self._recorded = False, report.epoch, max(self._recorded, report.epoch)
        return report

    def replace_last(self, program_report: ProgramReport) -> None:
        """Replace the metrics of the last report."""
        self.reports[-1] = replace(self.reports[-1], metrics=_numbers(program_report))

    def _step_of(self, program_report: ProgramReport) -> int:
        step: int = self._next_step() if program_report.step is None else program_report.step
        return step

    def _next_step(self) -> int:
        """Return the step of a report without `step`."""
        return self._step + 1


def _numbers(program_report: ProgramReport) -> dict[str, float]:
    """Return the metrics of a report that are numbers."""
    return {name: float(value) for name, value in program_report.metrics.items() if is_number(value)}


_MESSAGE_TIMEOUT_SECONDS = 10.0
"""Maximum seconds to wait for the rest of a message, since its sender may have been killed."""

_POLL_SECONDS = 0.01
"""Seconds between two reads of the output of a program."""

_MAX_LINE_BYTES = 1 << 20


class OutputReports:
    """Reads lines of JSON with these metrics from a file to which a program may still write, beyond this worker."""

    def __init__(self, path: Path, metrics: Sequence[str], log: BinaryIO | None = None) -> None:
        self._file = path.open("rb", buffering=0)
        self._metrics = metrics
        self._log = log
        self.other_names: tuple[str, ...] = ()
        """Names in the last line of JSON that lacks a metric."""
        self._pending = b""

    def read(self) -> list[ProgramReport]:
        """Return the reports in the complete lines that were written since the last call."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # truncated, as by `echo > /dev/stdout`
            self._file.seek(0)
        data = self._file.read()
        if not data:
            return []
        if self._log is not None:
            self._log.write(data)
            self._log.flush()
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest[-_MAX_LINE_BYTES:]
        return self._reports(whole + newline)

    def read_rest(self) -> list[ProgramReport]:
        """Return the reports in the rest of the file, once no process writes to it any more."""
        found = self.read()
        last, self._pending = self._pending, b""
        return [*found, *self._reports(last)]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _reports(self, data: bytes) -> list[ProgramReport]:
        found: list[ProgramReport] = []
        for line in data.splitlines():
            text = line.strip()
            if not (text.startswith(b"{") and text.endswith(b"}")):
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError):  # other output, or an incomplete line
                continue
            if all(name in values for name in self._metrics):
                step = values.pop("step", None)
                found.append(ProgramReport(values, step))
            else:
                self.other_names = tuple(values)
        return found


class ProgramChannel:
    """Receives the messages of a program, in order."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder()  # the path of a socket must be short
        self.address = str(self._folder.path / "report")
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[socket.socket] = []
        _OPEN.add(self)
        self._output: OutputReports | None = None
        self.ends_study: bool | None = None
        """Whether the program has asked that no trial begins after the running ones; False if one did so before it."""

    def read(self, output: OutputReports) -> None:
        """Read reports from the output of a program, too."""
        self._output = output

    @property
    def other_names(self) -> tuple[str, ...]:
        """Names in the last line of JSON in the output that lacks a metric."""
        return () if self._output is None else self._output.other_names

    def wait(self, seconds: float) -> list[ProgramReport | ProgramFailedError]:
        """Return the messages since the last call; wait up to `seconds` for the first one."""
        deadline = time.monotonic() + seconds
        while True:
            messages: list[ProgramReport | ProgramFailedError] = [] if self._output is None else [*self._output.read()]
            left = 0.0 if messages else max(0.0, deadline - time.monotonic())
            for _ in self._selector.select(left if self._output is None else min(left, _POLL_SECONDS)):
                messages += self._accept()
            if messages or left == 0:
                return messages

    def finish(self) -> list[ProgramReport | ProgramFailedError]:
        """Return the remaining messages, once the program has ended."""
        messages: list[ProgramReport | ProgramFailedError] = []
        while self._selector.select(0):
            messages += self._accept()
        return messages if self._output is None else [*messages, *self._output.read_rest()]

    def close(self) -> None:
        """Close all connections; a program that waits for an answer gets an error."""
        for connection in self._connections:
            connection.close()
        self._selector.close()
        self._listener.close()
        if self._output is not None:
            self._output.close()
        self._folder.close()

    def detach(self) -> None:
        """Close the sockets and leave the channel alone: the caller is a fork of its process."""
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> list[ProgramReport | ProgramFailedError]:
        connection, _ = self._listener.accept()
        connection.settimeout(_MESSAGE_TIMEOUT_SECONDS)
        try:
            with connection.makefile("rb") as stream:
                message = json.loads(stream.readline())
        except (OSError, ValueError):  # the program was killed before the message was complete
            connection.close()
            return []
        if "ends_study" in message:
            connection.close()
            self.ends_study = message["ends_study"]
            return []
        if "outcome" in message:
            connection.close()
            return [ProgramFailedError(Outcome(message["outcome"]), message["message"])]
        self._connections = [*(other for other in self._connections if other.fileno() >= 0), connection]
        return [ProgramReport(message["metrics"], message["step"], connection, message.get("returns"))]


_OPEN: weakref.WeakSet[ProgramChannel] = weakref.WeakSet()


def _detach_all() -> None:
    for channel in list(_OPEN):
        channel.detach()


# Otherwise a function that runs in a fork of the worker would wait for an answer of a worker that was killed.
os.register_at_fork(after_in_child=_detach_all)
