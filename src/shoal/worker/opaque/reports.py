"""Reports of a program, checked so that steps count 1, 2, 3, ... without gaps."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.objective import metric_fault
from shoal.core.space import is_number
from shoal.core.trial import Report

__all__ = ["ProgramReport", "ProgramReports"]


@dataclass(frozen=True)
class ProgramReport:
    """A report as the program made it.

    Args:
        metrics: Metrics, not checked; in a line of output some may not be numbers.
        step: Step, not checked; None if the report has none.
        caller: Connection that waits for an answer; None for a line of output.
    """

    metrics: Mapping[str, Any]
    step: Any
    caller: socket.socket | None = None

    def answer(self, **content: object) -> None:
        """Send an answer, if the caller waits for one."""
        if self.caller is None:
            return
        with self.caller:
            try:
                self.caller.sendall(json.dumps(content).encode() + b"\n")
            except OSError:  # the program was killed while it waited
                return


class ProgramReports:
    """The reports of one trial in the order of their steps, since one start of its program.

    Args:
        trial: Number of the trial.
        reports: Reports before the start.
        step: Number of the report after which the program's state was made.
        metrics: Names of metrics that must be numbers; None for all.
        recorded: Number of epochs that the study has recorded.
        own: Whether the program keeps its state itself, so that the state may be ahead of the reports.
    """

    def __init__(
        self,
        trial: int,
        reports: Sequence[Report],
        step: int,
        metrics: Sequence[str] | None = None,
        recorded: int = 0,
        *,
        own: bool = False,
    ) -> None:
        self.reports = list(reports)
        self.begins = True
        """Whether the program has made no report since its start."""
        self._trial = trial
        self._step = step
        self._metrics = metrics
        self._own = own
        self._known = max(recorded, self.last)

    @property
    def last(self) -> int:
        """Step of the last report; 0 before the first."""
        return self.reports[-1].epoch if self.reports else 0

    def fault(self, said: ProgramReport) -> str:
        """The error in a report; "" if there is none."""
        for name, value in said.metrics.items():
            wanted = self._metrics is None or name in self._metrics
            if wanted and (fault := metric_fault(name, value)):
                return fault
        step = said.step
        if step is None:
            return ""
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            return f"`step` of a report must be a whole number, at least 1, got {step!r}"
        expected = self._next()
        if step == expected or (self.begins and (self._own or step <= self._known + 1)):
            return ""
        return (
            f"`step` counts the reports of a trial, as its budget does: 1, 2, 3, ...; after {expected - 1} came "
            f"{step}. Report at every step that is counted, or leave `step` out"
        )

    def skips(self, said: ProgramReport) -> bool:
        """Whether reports before this one are missing, because the program was killed before it made them."""
        return self._of(said) > self._known + 1

    def add(self, said: ProgramReport, seconds: float) -> Report:
        """Add a report without fault and gap. It replaces earlier reports of its step and of later ones."""
        report = Report(self._trial, self._of(said), _numbers(said), seconds)
        self.reports = [*(x for x in self.reports if x.epoch < report.epoch), report]
        self.begins, self._step, self._known = False, report.epoch, max(self._known, report.epoch)
        return report

    def _of(self, said: ProgramReport) -> int:
        step: int = self._next() if said.step is None else said.step
        return step

    def _next(self) -> int:
        """The step of a report without `step`."""
        return self._step + 1


def _numbers(said: ProgramReport) -> dict[str, float]:
    """The metrics of a report that are numbers."""
    return {name: float(value) for name, value in said.metrics.items() if is_number(value)}
