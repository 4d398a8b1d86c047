"""Takes the training steps of an array in the mode (eager, plain, captured, compiled) that is fastest."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from typing import Any

from torch import Tensor

from shoal.core.demand import Profile
from shoal.cost.estimate import MIN_STEPS_TO_CAPTURE, fused_gain
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.scaler import GradScaler
from shoal.fuse.step import StepMode, TrainingStep
from shoal.worker.compile_decision import CompileDecision
from shoal.worker.stepper import TeamGradients

__all__ = ["AdaptiveStep"]


class AdaptiveStep:
    """Takes the training steps of an array in the mode (eager, plain, captured, compiled) that is fastest.

    The first steps time the modes. The results go into the profile for the next array of the structure.

    Args:
        array: Models of the trials.
        optimizer: Optimizer of the array.
        loss: Loss function as for `ModelArray.map`.
        profile: Profile of the structure, or None.
        compiling: Decides when the step is compiled; None: never.
        clock: Clock in seconds.
        max_norm: Maximum gradient norm of each member, or None.
        scaler: Loss scales of the members, or None.
    """

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        loss: Callable[..., Any],
        profile: Profile | None,
        compiling: CompileDecision | None,
        clock: Callable[[], float] = time.perf_counter,
        max_norm: Sequence[float] | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self._members = len(array)
        self._profile = profile
        self._compiling = compiling
        ask = compiling or (lambda seconds: False)
        self._step = TrainingStep(array, optimizer, loss, self._ways(), ask, clock, max_norm, scaler)
        self.new_profile: Profile | None = None
        """The profile with the measurements of the first steps; None if it has not changed."""

    @property
    def gain(self) -> float | None:
        """Speed-up of fused steps over plain ones; None unless both were timed."""
        seconds = self._step.seconds
        return seconds["plain"] / seconds["eager"] if {"eager", "plain"} <= seconds.keys() else None

    @property
    def settled(self) -> bool:
        """Whether the fastest mode was found."""
        return self._step.way is not None

    @property
    def plain(self) -> bool:
        """Whether the fastest mode is plain PyTorch, and remains so."""
        return self._step.way == "plain" and not (self._compiling and self._compiling.waits)

    def _ways(self) -> tuple[StepMode, ...]:
        """Return the modes to try: those that can pay off in the remaining steps.

        Of eager and plain, it is only the faster one if the profile shows which one is faster.
        """
        known = self._profile if self._members > 1 else None
        gain = None if known is None else fused_gain(known, self._members)
        uncaptured: tuple[StepMode, ...] = ("eager", "plain")
        if gain is not None:
            uncaptured = ("eager",) if gain >= 1 else ("plain",)
        if self._compiling is not None and self._compiling.steps < MIN_STEPS_TO_CAPTURE:
            return (*uncaptured, "compiled")
        return (*uncaptured, "captured", "compiled")

    def step(self, batch: Any) -> Tensor:
        """Take one step of the array; return the losses, [B], detached."""
        if self._compiling is not None:
            self._compiling.steps -= 1
            if self._compiling.may_retry():
                self._step.reconsider_compiling()
        if self.settled:
            return self._step(batch)
        try:
            losses = self._step(batch)
        finally:
            if self._compiling is not None:
                self._compiling.end(compiled=self._step.compiled)
        if self.settled and self._profile is not None:
            self._record_measurements(self.new_profile or self._profile)
        return losses

    def team_step(
        self, gradients: TeamGradients, batch: Any, precision: str, context: Callable[[], AbstractContextManager[None]]
    ) -> Tensor:
        """As `step`, with the gradients of a team."""
        losses = gradients(self._step, batch, precision, context)
        self._step.update()
        if self._compiling is not None:
            self._compiling.steps -= 1
        return losses

    def _record_measurements(self, profile: Profile) -> None:
        """Set `new_profile` to the profile with the times measured here.

        The step time is added only if this size is larger than all measured ones. The gain of compiling is 1 if the
        step cannot be compiled or the compiled step is slower, so that no other array tries again. A reload that took
        as long as compiling did not find the code, and says nothing about reloads.
        """
        found = profile
        uncompiled = [seconds for way, seconds in self._step.seconds.items() if way != "compiled"]
        if self._members > max(found.step_seconds) and uncompiled:
            found = replace(found, step_seconds={**found.step_seconds, self._members: min(uncompiled)})
        if self.gain is not None:
            found = replace(found, fused_gain={**found.fused_gain, self._members: self.gain})
        if self._step.compile_seconds and self._compiling is not None:
            plain = min(seconds for way, seconds in self._step.seconds.items() if way != "compiled")
            gain = plain / self._step.seconds["compiled"] if self._step.way == "compiled" else 1.0
            gains = {**found.compiled_gain, self._members: gain}
            found = replace(found, compiled_gain=gains)
            if not self._compiling.reloads:
                found = replace(found, compile_seconds=self._step.compile_seconds)
            elif self._step.compile_seconds < (found.compile_seconds or inf):
                found = replace(found, reload_seconds=self._step.compile_seconds)
        if found is not profile:
            self.new_profile = found
