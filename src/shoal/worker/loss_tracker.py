"""Losses of an array's training steps: the first that is not finite, and their summary for the engine."""

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.core.event import Event, Reported, TurnStats
from shoal.core.trial import Report
from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["LossTracker"]

READ_STEPS, READ_SECONDS = 64, 1.0
"""Steps or seconds after which losses are read from the device, if nothing else reads them before. The engine gets
their summary as often, however long an epoch is."""


class LossTracker:
    """Collects losses on the device, and reads several at once: each reading waits for the device.

    A reading sets `TrialRuntime.bad` where a loss is not finite. The next report carries a summary of the readings.

    Args:
        job: Id of the job, for the reports.
        events: List that the reports are appended to.
        check: Whether to look for losses that are not finite.
    """

    def __init__(self, job: str, events: list[Event], check: bool = True) -> None:
        self._job = job
        self._events = events
        self._check = check
        self._runtimes: Sequence[TrialRuntime] = ()
        self._losses: list[Tensor] = []  # [B] each, not read yet
        self._began = self._reported = time.perf_counter()
        self._summary: TurnStats | None = None  # since the last report, of the best member at each step

    def begin_step(self) -> None:
        """Start the clock, if all losses so far have been read."""
        if not self._losses:
            self._began = time.perf_counter()

    def add(self, runtimes: Sequence[TrialRuntime], losses: Tensor) -> None:
        """Add the losses of a step, [B]. The runtimes must stay the same until the next `flush`."""
        self._runtimes = runtimes
        self._losses.append(losses)

    def end_step(self) -> None:
        """Read the losses and report their summary, each if it is time. Call it once runtimes have counted the step."""
        now = time.perf_counter()
        if len(self._losses) == READ_STEPS or now - self._began >= READ_SECONDS:
            self.flush()
        if now - self._reported >= READ_SECONDS:
            self.report_rest()

    def flush(self) -> None:
        """Read all losses from the device."""
        if not self._losses:
            return
        losses, self._losses = torch.stack(self._losses), []
        finite = losses.isfinite()
        if self._check and not finite.all():
            self._mark_bad(finite)
        best = losses.where(finite, torch.inf).amin(1)
        highest, lowest, last = torch.stack([best.max(), best.min(), best[-1]]).tolist()
        read = TurnStats(highest, lowest, last, len(best), time.perf_counter() - self._began)
        self._summary = read if self._summary is None else self._summary.followed_by(read)

    def _mark_bad(self, finite: Tensor) -> None:
        """Set `TrialRuntime.bad` of runtimes with a loss that is not finite.

        Args:
            finite: Whether the losses of the last steps are finite, [steps, B].
        """
        for runtime, steps in zip(self._runtimes, finite.T.tolist(), strict=True):
            if not runtime.bad and not all(steps):
                runtime.bad = runtime.step - len(steps) + steps.index(False) + 1

    def report(self, reports: Iterable[Report]) -> None:
        """Append an event with these reports and the summary of the losses since the last one."""
        self._events.append(Reported(self._job, tuple(reports), self._summary))
        self._summary, self._reported = None, time.perf_counter()

    def report_rest(self) -> None:
        """Append an event with the summary alone, if there is one."""
        if self._summary is not None:
            self.report(())
