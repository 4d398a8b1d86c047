"""Training steps of an array, compiled where the rest of its budget repays that."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.core.demand import Profile
from shoal.cost.estimate import fused_gain, repays
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.step import TrainingStep, Way

__all__ = ["AdaptiveStep"]


class AdaptiveStep:
    """Takes the training steps of an array, in the way that its first steps show to be the fastest.

    What is measured of compiling goes into the profile, for the next array of its kind.

    Args:
        array: the models.
        optimizer: theirs.
        loss: as given to `ModelArray.map`.
        profile: what is known of the structure.
        steps: that the array still has before it; 0 rules compiling out.
        clock: in seconds.
    """

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        loss: Callable[..., Any],
        profile: Profile | None,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._members = len(array)
        self._profile = profile
        self._left = steps
        self._step = TrainingStep(array, optimizer, loss, self._ways(), self._repays, clock)
        self.finding: Profile | None = None
        """The profile with what the first steps showed; None while they show nothing that it does not say."""

    @property
    def gain(self) -> float | None:
        """How many times as fast steps of all at once were as of one after another; None if not both were timed."""
        seconds = self._step.seconds
        return seconds["plain"] / seconds["eager"] if {"eager", "plain"} <= seconds.keys() else None

    @property
    def settled(self) -> bool:
        """Whether the fastest way was found."""
        return self._step.way is not None

    @property
    def plain(self) -> bool:
        """Whether that is to train the members in plain PyTorch."""
        return self._step.way == "plain"

    def _ways(self) -> tuple[Way, ...]:
        """Those to be tried; of eager and plain steps only the faster, where that is known."""
        known = self._profile if self._members > 1 else None
        gain = None if known is None else fused_gain(known, self._members)
        if gain is None:
            return ("eager", "plain", "captured", "compiled")
        return ("eager" if gain >= 1 else "plain", "captured", "compiled")

    def step(self, batch: Any) -> Tensor:
        """One step of the whole array; returns the losses, shape [B], part of no graph."""
        self._left -= 1
        if self._step.way is not None:
            return self._step(batch)
        losses = self._step(batch)
        if self._step.way is not None and self._profile is not None:
            self._note(self._profile)
        return losses

    def _repays(self, seconds: float) -> bool:
        return repays(self._profile, self._members, seconds, self._left)

    def _note(self, profile: Profile) -> None:
        """Let the finding be what the profile is with what was timed now.

        The gain of compiling is 1 where a step cannot be compiled, or is not taken so, so that none tries again.
        """
        found = profile
        if self.gain is not None:
            found = replace(found, fused_gain={**found.fused_gain, self._members: self.gain})
        if self._step.compile_seconds:
            plain = min(seconds for way, seconds in self._step.seconds.items() if way != "compiled")
            gain = plain / self._step.seconds["compiled"] if self._step.way == "compiled" else 1.0
            gains = {**found.compiled_gain, self._members: gain}
            found = replace(found, compiled_gain=gains, compile_seconds=self._step.compile_seconds)
        if found is not profile:
            self.finding = found
