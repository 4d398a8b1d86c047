"""Eager or compiled steps: whichever is faster over what is left of the budget, by measurement."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shoal.cost.compiling import repays
from shoal.cost.demand import Profile
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep, capture
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.worker.learner import wait

__all__ = ["Pace"]

_log = logging.getLogger("shoal.worker")

MEASURED = 10
"""Steps of each kind that are timed; one before them is dropped."""

Loss = Callable[..., Any]


class Pace:
    """Takes the training steps of an array.

    The first steps are eager and timed. Where compiling is expected to repay itself, the step is compiled once, timed
    as well, and kept only if it is faster. What was measured goes into the profile, for the next array of its kind.

    Args:
        array: the models.
        optimizer: theirs.
        loss: as given to `ModelArray.map`.
        profile: what is known of the structure.
        steps: that the array still has before it.
    """

    def __init__(
        self, array: ModelArray, optimizer: FusedOptimizer, loss: Loss, profile: Profile | None, steps: int
    ) -> None:
        self._array = array
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._optimizer = optimizer
        self._loss = loss
        self._profile = profile
        self._left = steps
        self._times: list[float] = []
        self._eager_seconds: float | None = None
        self._captured: CapturedStep | None = None
        self._settled = False
        self.finding: Profile | None = None
        """The profile with what compiling showed; None while nothing was compiled."""

    def step(self, batch: Any) -> Tensor:
        """One step of the whole array; returns the losses, shape [B], part of no graph."""
        self._left -= 1
        if self._settled:
            return self._run(batch)
        wait(self._device)
        began = time.perf_counter()
        losses = self._run(batch)
        wait(self._device)
        self._times.append(time.perf_counter() - began)
        if len(self._times) > MEASURED:
            self._decide(median(self._times[1:]), batch)
            self._times = []
        return losses

    def _run(self, batch: Any) -> Tensor:
        if self._captured is not None and self._captured.fits(batch):
            return self._captured(batch)
        self._optimizer.zero_grad()
        losses: Tensor = self._array.map(self._loss, batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return losses.detach()

    def _decide(self, seconds: float, batch: Any) -> None:
        if self._eager_seconds is not None:
            self._judge(self._eager_seconds / seconds)
            return
        self._eager_seconds = seconds
        if not repays(self._profile, len(self._array), seconds, self._left):
            self._settled = True
            return
        began = time.perf_counter()
        self._captured = capture(self._array, self._optimizer, self._loss, batch)
        self._compile_seconds = time.perf_counter() - began
        if self._captured is None:
            self._judge(1.0)

    def _judge(self, gain: float) -> None:
        """Keep what is faster, and note the gain; 1 for a step that cannot be compiled, so that none tries again."""
        self._settled = True
        if gain <= 1:
            self._captured = None
        choice = "eager" if self._captured is None else "compiled"
        _log.info("%d members: a compiled step is %.2f times as fast: %s", len(self._array), gain, choice)
        if self._profile is not None:
            gains = {**self._profile.compiled_gain, len(self._array): gain}
            self.finding = replace(self._profile, compiled_gain=gains, compile_seconds=self._compile_seconds)
