"""Trains the trials of an array up to their budgets, epoch by epoch."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoal.cost.demand import Profile
from shoal.fuse.frozen import lend_frozen
from shoal.planner.job import Array
from shoal.task import Task
from shoal.trial import Report, TrialState, derive_seed
from shoal.worker.data import Batches, DataSets, epoch_order
from shoal.worker.learner import Learner, batch_size, build
from shoal.worker.stepper import Stepper, make_stepper

__all__ = ["Trainer"]


class Trainer:
    """Trains arrays of one study in this process.

    Args:
        task: the user's.
        device: where to train.
        directory: of the study, for checkpoints.
        checkpoint_seconds: longest wall time between two checkpoints.
        stopping: asked after every step; once true, all is saved and training ends.
    """

    def __init__(
        self,
        task: Task,
        sets: DataSets,
        device: torch.device,
        directory: Path,
        checkpoint_seconds: float,
        stopping: Callable[[], bool],
    ) -> None:
        self._task = task
        self._sets = sets
        self._device = device
        self._directory = directory
        self._checkpoint_seconds = checkpoint_seconds
        self._stopping = stopping
        self._saved = time.monotonic()
        self.finding: Profile | None = None
        """What training showed of the cost of its array, beyond what was known."""

    def run(self, array: Array) -> Iterator[tuple[Report, ...]]:
        """Train an array; yields the reports of its trials, those that end an epoch together in one tuple.

        A trial that reaches its target is saved before it is reported as PAUSED.
        """
        waiting: dict[tuple[str, int, int, int], list[Learner]] = {}
        for member in array.members:
            learner = build(self._task, member, self._device)
            learner.restore(self._directory)
            missing = [r for r in learner.reports if learner.member.start < r.epoch <= learner.member.target]
            if missing:  # they were saved, but the journal did not get them any more
                yield tuple(self._with_state(learner, report) for report in missing)
            elif learner.epoch >= learner.member.target and learner.reports:
                yield (self._with_state(learner, learner.reports[-1]),)
            if learner.epoch < learner.member.target:
                alike = waiting.setdefault(self._place(learner), [])
                alike.append(learner)
                lend_frozen(alike[0].model, learner.model)
        for place in sorted(waiting):
            if self._stopping():
                return
            yield from self._train(waiting.pop(place), array)

    def _place(self, learner: Learner) -> tuple[str, int, int, int]:
        """Learners that agree on this can share their batches."""
        return (repr(self._sets.key(learner.trial.config)), learner.trial.data_seed, learner.epoch, learner.step)

    def _train(self, learners: list[Learner], array: Array) -> Iterator[tuple[Report, ...]]:
        train, valid = self._sets.of(learners[0].trial.config)
        size = batch_size(self._task, learners[0].trial.config)  # the key of a trial that was not looked at has none
        stepper = self._stepper(learners, array, train.steps(size))
        self._saved = time.monotonic()
        while stepper.learners:
            began = time.monotonic()
            first_bad = self._epoch(stepper, train, size)
            if first_bad is None:
                return
            self.finding = stepper.finding or self.finding
            metrics = stepper.validate(valid.walk(size, seed=derive_seed(learners[0].trial.data_seed, "valid")))
            seconds = (time.monotonic() - began) / len(stepper.learners)
            yield self._end_epoch(stepper.learners, metrics, seconds, first_bad)
            left = [x for x, bad in zip(stepper.learners, first_bad, strict=True) if self._goes_on(x, bad)]
            if left and len(left) < len(stepper.learners):
                stepper = self._stepper(left, array, train.steps(size))
            elif not left:
                return

    def _stepper(self, learners: list[Learner], array: Array, epoch_steps: int) -> Stepper:
        lead = learners[0]
        epochs = max(learner.member.target for learner in learners) - lead.epoch
        steps = epochs * epoch_steps - lead.step
        return make_stepper(self._task, learners, self.finding or array.profile, steps)

    def _epoch(self, stepper: Stepper, train: Batches, size: int) -> list[int] | None:
        """The rest of an epoch; the first step with a loss that is no number, by learner (0: none).

        Returns:
            None when it was broken off because the job is to stop; everything is saved then.
        """
        lead = stepper.learners[0]
        seed = derive_seed(lead.trial.data_seed, "noise", lead.epoch)
        order = epoch_order(train.samples, lead.trial.data_seed, lead.epoch)
        steps = train.steps(size)
        first_bad = torch.zeros(len(stepper.learners), dtype=torch.int64, device=self._device)
        for step, batch in enumerate(train.walk(size, order, lead.step, seed), start=lead.step):
            losses = stepper.train_step(batch, lead.epoch * steps + step)
            first_bad = _note(first_bad, losses, step + 1)
            for learner in stepper.learners:
                learner.step = step + 1
            stopping = self._stopping()
            if stopping or time.monotonic() - self._saved >= self._checkpoint_seconds:
                self._save(stepper.learners, first_bad)
            if stopping:
                return None
        return [int(step) for step in first_bad.tolist()]

    def _end_epoch(
        self, learners: Sequence[Learner], metrics: list[dict[str, float]], seconds: float, first_bad: list[int]
    ) -> tuple[Report, ...]:
        reports = []
        for learner, values, bad in zip(learners, metrics, first_bad, strict=True):
            report = learner.end_epoch(values, seconds)
            if bad:
                reason = f"loss is not finite at step {bad} of epoch {learner.epoch}"
                reports.append(dataclasses.replace(report, state=TrialState.FAILED, reason=reason))
                continue
            if learner.epoch == learner.member.target:
                learner.save(self._directory)
            reports.append(self._with_state(learner, report))
        return tuple(reports)

    def _with_state(self, learner: Learner, report: Report) -> Report:
        reached = report.epoch >= learner.member.target
        return dataclasses.replace(report, state=TrialState.PAUSED if reached else TrialState.RUNNING)

    def _goes_on(self, learner: Learner, bad: int) -> bool:
        return not bad and learner.epoch < learner.member.target

    def _save(self, learners: Sequence[Learner], first_bad: Tensor) -> None:
        """Save all but those that are about to fail: they fail again, at the same step, from where they were sound."""
        for learner, bad in zip(learners, first_bad.tolist(), strict=True):
            if not bad:
                learner.save(self._directory)
        self._saved = time.monotonic()


def _note(first_bad: Tensor, losses: Tensor, step: int) -> Tensor:
    """Without asking the device: where a loss is not finite for the first time, the step's number."""
    return torch.where((first_bad == 0) & ~losses.isfinite(), step, first_bad)
