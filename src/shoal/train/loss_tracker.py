"""Tracks the losses of an array's training steps: detects failed trials, and summarizes the losses for the engine."""

import time
from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from shoal.core.event import Event, Reported, TurnStats
from shoal.core.trial import Report
from shoal.train.trial_runtime import TrialRuntime

__all__ = ["LossTracker"]

READ_STEPS, READ_SECONDS = 64, 1.0
"""Steps or seconds after which losses are read from the device, unless they were read before. The engine gets a summary
each READ_SECONDS at the latest, however long an epoch is."""

MIN_SCALE_EXPONENT = -14
"""Exponent of the smallest loss scale, the smallest normal float16. A trial fails if its scale, at first 2**16, is
lower."""


class LossTracker:
    """Collects losses on the device, and reads several at once, since each read waits for the device.

    With `check`, a read sets the failure of trials with a loss that is not finite, unless their loss scale skipped the
    step, and of those with a scale below 2**`MIN_SCALE_EXPONENT`. The next report contains a summary of the losses.
    """

    def __init__(self, job: str, events: list[Event], check: bool = True) -> None:
        self._job = job
        self._events = events
        self._check = check
        self._runtimes: Sequence[TrialRuntime] = ()
        self._losses: list[Tensor] = []  # losses not read yet, [B] each
        self._skipped: list[list[bool]] = []  # whether an overflow skipped the step, [B] each
        self._began = self._reported = time.perf_counter()
        self._summary: TurnStats | None = None  # of the best member at each step, since the last report

    def begin_step(self) -> None:
        """Start the clock, if all losses so far have been read."""
        if not self._losses:
            self._began = time.perf_counter()

    def add(self, runtimes: Sequence[TrialRuntime], losses: Tensor) -> None:
        """Add the losses of a step, [B]. The runtimes must stay the same until the next `flush`."""
        scales = [runtime.loss_scale for runtime in runtimes]
        small = [scale is not None and scale.scale < 2.0**MIN_SCALE_EXPONENT for scale in scales]
        if self._check and any(small):
            self.flush()  # so that an earlier loss that is not finite is the reported reason
            self._mark_overflows(compress(runtimes, small))
        self._runtimes = runtimes
        self._losses.append(losses)
        self._skipped.append([scale is not None and scale.overflowed for scale in scales])

    def end_step(self) -> None:
        """Read the losses, and report their summary, if due. Call it after the runtimes have counted the step."""
        now = time.perf_counter()
        if len(self._losses) == READ_STEPS or now - self._began >= READ_SECONDS:
            self.flush()
        if now - self._reported >= READ_SECONDS:
            self.report_summary()

    def flush(self) -> None:
        """Read all losses from the device."""
        if not self._losses:
            return
        losses, self._losses = torch.stack(self._losses), []
        skipped, self._skipped = self._skipped, []
        finite = losses.isfinite()
        if self._check and not finite.all():
            self._mark_losses(finite, skipped)
        best = losses.where(finite, torch.inf).amin(1)
        highest, lowest, last = torch.stack([best.max(), best.min(), best[-1]]).tolist()
        read = TurnStats(highest, lowest, last, len(best), time.perf_counter() - self._began)
        self._summary = read if self._summary is None else self._summary.followed_by(read)

    def _mark_losses(self, finite: Tensor, skipped: list[list[bool]]) -> None:
        """Set `TrialRuntime.failure` of runtimes with a loss that is not finite."""
        for runtime, *members in zip(self._runtimes, finite.T.tolist(), zip(*skipped, strict=True), strict=True):
            fine = [ends or without for ends, without in zip(*members, strict=True)]
            if not runtime.failure and not all(fine):
                step = runtime.step - len(fine) + fine.index(False) + 1
                runtime.failure = f"loss is not finite at step {step} of epoch {runtime.epoch + 1}"

    @staticmethod
    def _mark_overflows(runtimes: Iterable[TrialRuntime]) -> None:
        """Set `TrialRuntime.failure` of runtimes whose loss scale is too small after the step being added."""
        for runtime in runtimes:
            if not runtime.failure:
                runtime.failure = (
                    f"float16 overflow in step after step: the loss scale fell below 2**{MIN_SCALE_EXPONENT} at step "
                    f'{runtime.step + 1} of epoch {runtime.epoch + 1}; return "bf16-mixed" or "32" from the task\'s '
                    "`precision`, or scale inputs and loss down"
                )

    def report(self, reports: Iterable[Report]) -> None:
        """Append an event with these reports and the summary of the losses since the last event."""
        self._events.append(Reported(self._job, tuple(reports), self._summary))
        self._summary, self._reported = None, time.perf_counter()

    def report_summary(self) -> None:
        """Append an event with the summary alone, if there is one."""
        if self._summary is not None:
            self.report(())
