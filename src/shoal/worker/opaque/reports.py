"""The reports of a trial whose program makes them: each keeps its own step, and none is missing before another."""

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


class ProgramReports:
    """The reports of one trial, in the order of their steps, from one start of its program on.

    Args:
        trial: its number.
        reports: what is known of it already.
        step: reports that the state has behind it from which the program goes on.
        metrics: names that have to be numbers; None: all.
        recorded: epochs that the study has recorded.
        own: whether the program keeps that state itself, so that it may be further than was reported.
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
        """Whether the program has made no report since it was started."""
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
        """What is wrong with a report; "" if nothing is."""
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
        """Whether reports between the last one and this one were never made: its program was killed before it did."""
        return self._of(said) > self._known + 1

    def add(self, said: ProgramReport, seconds: float) -> Report:
        """Take a report without fault that skips none; what was known of its step and later ones is so no more."""
        report = Report(self._trial, self._of(said), _numbers(said), seconds)
        self.reports = [*(x for x in self.reports if x.epoch < report.epoch), report]
        self.begins, self._step, self._known = False, report.epoch, max(self._known, report.epoch)
        return report

    def _of(self, said: ProgramReport) -> int:
        step: int = self._next() if said.step is None else said.step
        return step

    def _next(self) -> int:
        """The step of a report that does not say it."""
        return self._step + 1


def _numbers(said: ProgramReport) -> dict[str, float]:
    """The metrics of a report; what else a line of output holds is left out."""
    return {name: float(value) for name, value in said.metrics.items() if is_number(value)}
