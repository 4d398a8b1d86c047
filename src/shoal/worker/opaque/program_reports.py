"""Reports of a program, with checks that steps count 1, 2, 3, ... without gaps."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.objective import metric_fault
from shoal.core.space import is_number
from shoal.core.trial import Report

__all__ = ["ProgramReport", "ProgramReports"]


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
