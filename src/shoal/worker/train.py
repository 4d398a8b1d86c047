"""Trains the trials of an array up to their budgets, epoch by epoch, and lets trials leave and join meanwhile."""

import dataclasses
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.cost.demand import Profile
from shoal.fuse.frozen import lend_frozen
from shoal.planner.event import Event, Reported, Surveyed
from shoal.planner.job import Array, Member, Workplace
from shoal.planner.orders import Orders
from shoal.task import Task
from shoal.trial import Report, TrialState, derive_seed
from shoal.worker.data import Batches, DataSets, epoch_order
from shoal.worker.describe import Describer
from shoal.worker.learner import Learner, batch_size, build
from shoal.worker.stepper import MixedEpochsError, Stepper, make_stepper

__all__ = ["Trainer"]

_log = logging.getLogger("shoal.worker")

LINGER, LONGEST_LINGER = 0.1, 0.05
"""Of an epoch's seconds, and seconds at most: how long the others wait for who takes the place of those that left."""


class Trainer:
    """Trains an array of one study in this process.

    Its learners need not be at the same epoch: those that are at the same step of theirs are trained as one. A learner
    leaves when it has reached its target, when its loss is no number, or, before the next step, when it is told to;
    others join at the end of an epoch. When some have reached their targets, it waits for a moment for who takes their
    places, so that the others need not go on without.

    Args:
        job: id of the job that the array belongs to.
        task: the user's.
        sets: of the task, on `device`.
        describer: of the task, for trials that are to be looked at meanwhile.
        device: where to train.
        workplace: of the study; checkpoints are written there.
        orders: looked at after every step; when it is to stop, all is saved and training ends.
    """

    def __init__(
        self,
        job: str,
        task: Task,
        sets: DataSets,
        describer: Describer,
        device: torch.device,
        workplace: Workplace,
        orders: Orders,
    ) -> None:
        self._job = job
        self._task = task
        self._sets = sets
        self._describer = describer
        self._device = device
        self._directory = workplace.directory
        self._checkpoint_seconds = workplace.checkpoint_seconds
        self._orders = orders
        self._saved = time.monotonic()
        self._learners: list[Learner] = []
        self._joining: list[Member] = []
        self._data: dict[int, str] = {}  # number of a trial -> what tells its data sets from others
        self._stepper: Stepper | None = None
        self._mixes = True
        self._profile: Profile | None = None
        self.finding: Profile | None = None
        """What training showed of the cost of its array, beyond what was known."""

    def run(self, array: Array) -> Iterator[Event]:
        """Train an array; yields the reports of its trials, those that end an epoch together in one event.

        A trial that reaches its target is saved before it is reported as PAUSED.
        """
        self._profile = array.profile
        self._joining = list(array.members)
        while True:
            yield from self._hear()
            yield from self._admit()
            if not self._learners:
                return
            if self._orders.stopping():
                self._save()
                return
            yield from self._train(self._company())

    def _hear(self) -> Generator[Event, None, bool]:
        """Let learners go that are to leave, note who is to join, look at who is to be looked at.

        Returns:
            Whether any has left.
        """
        before = len(self._learners)
        for change in self._orders.changes():
            self._joining = [x for x in (*self._joining, *change.join) if x.trial.number not in change.leave]
            self._learners = [x for x in self._learners if x.trial.number not in change.leave]
            if change.look:
                yield Surveyed(self._job, *self._describer.survey(change.look))
        return len(self._learners) < before

    def _linger(self, seconds: float) -> Iterator[Event]:
        """Wait until somebody joins, but not for long; hear meanwhile."""
        deadline = time.monotonic() + min(LINGER * seconds, LONGEST_LINGER)
        while not self._joining and not self._orders.stopping() and self._orders.wait(deadline - time.monotonic()):
            yield from self._hear()

    def _admit(self) -> Iterator[Event]:
        """Let those join that are to; yields what they have reported already and the journal did not get any more."""
        while self._joining:
            member = self._joining.pop(0)
            learner = build(self._task, member, self._device)
            learner.restore(self._directory)
            missing = [r for r in learner.reports if member.start < r.epoch <= member.target]
            if missing:
                yield Reported(self._job, tuple(_with_state(learner, report) for report in missing))
            elif learner.epoch >= member.target and learner.reports:
                yield Reported(self._job, (_with_state(learner, learner.reports[-1]),))
            if learner.epoch < member.target:
                data = self._data[member.trial.number] = repr(self._sets.key(member.trial.config))
                self._learners.append(learner)
                lead = next(x for x in self._learners if self._data[x.trial.number] == data)
                lend_frozen(lead.model, learner.model)

    def _company(self) -> list[Learner]:
        """Who trains next: learners that can share their batches, or at least stack them.

        Those that were stopped within an epoch end it first. Where epochs do not mix, those that are behind catch up.
        """

        def place(learner: Learner) -> tuple[str, int, int, int]:
            epoch = 0 if self._mixes else learner.epoch
            return (self._data[learner.trial.number], learner.trial.data_seed, epoch, -learner.step)

        first = min(map(place, self._learners))
        return [learner for learner in self._learners if place(learner) == first]

    def _train(self, company: list[Learner]) -> Iterator[Event]:
        """The rest of an epoch of a company, and what that showed."""
        lead = company[0].trial
        train, valid = self._sets.of(lead.config)
        size = batch_size(self._task, lead.config)  # the key of a trial that was not looked at has none
        began = time.monotonic()
        try:
            first_bad = yield from self._epoch(company, train, size)
        except MixedEpochsError as reason:
            _log.warning("trials at different epochs take turns: %s", reason)
            self._mixes = False
            return
        if first_bad is None or self._stepper is None:
            return
        self.finding = self._stepper.finding or self.finding
        metrics = self._stepper.validate(valid.walk(size, seed=derive_seed(lead.data_seed, "valid")))
        seconds = time.monotonic() - began
        reports = self._end_epoch(self._stepper.learners, metrics, seconds / len(first_bad), first_bad)
        yield Reported(self._job, reports)
        if self._learners and any(report.state is not TrialState.RUNNING for report in reports):
            yield from self._linger(seconds)

    def _epoch(self, company: list[Learner], train: Batches, size: int) -> Generator[Event, None, list[int] | None]:
        """The rest of an epoch; the first step with a loss that is no number, for each learner that is left (0: none).

        Returns:
            None when it was broken off because the job is to stop, or all have left.
        """
        steps, begin = train.steps(size), company[0].step
        walks = {epoch: self._walk(train, size, company[0].trial.data_seed, epoch, begin) for epoch in _epochs(company)}
        first_bad = torch.zeros(len(company), dtype=torch.int64, device=self._device)
        for step in range(begin, steps):
            if self._stepper is None or self._stepper.learners != company:
                self._stepper = self._stepper_for(company, steps)
            batches = {epoch: next(walks[epoch]) for epoch in _epochs(company)}
            ticks = [learner.epoch * steps + step for learner in company]
            losses = self._stepper.train_step([batches[learner.epoch] for learner in company], ticks)
            first_bad = _note(first_bad, losses, step + 1)
            for learner in company:
                learner.step = step + 1
            if self._orders.stopping():
                self._save(company, first_bad)
                return None
            if time.monotonic() - self._saved >= self._checkpoint_seconds:
                self._save(company, first_bad)
            if (yield from self._hear()):
                left = [b for b, learner in enumerate(company) if learner in self._learners]
                company, first_bad = [company[b] for b in left], first_bad[left]
            if not company:
                return None
        if self._stepper is None or self._stepper.learners != company:
            self._stepper = self._stepper_for(company, steps)
        return [int(step) for step in first_bad.tolist()]

    def _walk(self, train: Batches, size: int, data_seed: int, epoch: int, first: int) -> Iterator[Any]:
        """An epoch's batches from the first that is still to come."""
        seed = derive_seed(data_seed, "noise", epoch)
        return train.walk(size, epoch_order(train.samples, data_seed, epoch), first, seed)

    def _stepper_for(self, company: list[Learner], epoch_steps: int) -> Stepper:
        steps = max((x.member.target - x.epoch) * epoch_steps - x.step for x in company)
        if self._stepper is not None:
            self.finding = self._stepper.finding or self.finding
        return make_stepper(self._task, company, self.finding or self._profile, steps)

    def _end_epoch(
        self, company: Sequence[Learner], metrics: list[dict[str, float]], seconds: float, first_bad: list[int]
    ) -> tuple[Report, ...]:
        reports = []
        for learner, values, bad in zip(company, metrics, first_bad, strict=True):
            report = learner.end_epoch(values, seconds)
            if bad:
                reason = f"loss is not finite at step {bad} of epoch {learner.epoch}"
                report = dataclasses.replace(report, state=TrialState.FAILED, reason=reason)
            else:
                report = _with_state(learner, report)
            if report.state is TrialState.PAUSED:
                learner.save(self._directory)
            if report.state is not TrialState.RUNNING:
                self._learners.remove(learner)
            reports.append(report)
        return tuple(reports)

    def _save(self, company: Sequence[Learner] = (), first_bad: Tensor | None = None) -> None:
        """Save all but those that are about to fail: they fail again, at the same step, from where they were sound."""
        bad = {} if first_bad is None else dict(zip(map(id, company), first_bad.tolist(), strict=True))
        for learner in self._learners:
            if not bad.get(id(learner)):
                learner.save(self._directory)
        self._saved = time.monotonic()


def _epochs(company: Sequence[Learner]) -> list[int]:
    return sorted({learner.epoch for learner in company})


def _with_state(learner: Learner, report: Report) -> Report:
    reached = report.epoch >= learner.member.target
    return dataclasses.replace(report, state=TrialState.PAUSED if reached else TrialState.RUNNING)


def _note(first_bad: Tensor, losses: Tensor, step: int) -> Tensor:
    """Without asking the device: where a loss is not finite for the first time, the step's number."""
    return torch.where((first_bad == 0) & ~losses.isfinite(), step, first_bad)
