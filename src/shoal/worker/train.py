"""Trains the trials of an array up to their budgets, epoch by epoch, and lets trials leave and join meanwhile."""

import dataclasses
import gc
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.cost.demand import Profile
from shoal.fuse.frozen import lend_frozen
from shoal.planner.event import Event, Profiled, Reported, Surveyed
from shoal.planner.job import Array, Member, Workplace
from shoal.planner.orders import Orders
from shoal.task import Task
from shoal.trial import Report, TrialState, derive_seed
from shoal.worker.data import Batches, DataSets, epoch_order
from shoal.worker.describe import Describer
from shoal.worker.learner import Learner, batch_size, build
from shoal.worker.paused import Paused
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
        paused: learners of the task that have paused in this process.
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
        paused: Paused,
        device: torch.device,
        workplace: Workplace,
        orders: Orders,
    ) -> None:
        self._job = job
        self._task = task
        self._sets = sets
        self._describer = describer
        self._paused = paused
        self._device = device
        self._directory = workplace.directory
        self._checkpoint_seconds = workplace.checkpoint_seconds
        self._orders = orders
        self._saved = time.monotonic()
        self._learners: list[Learner] = []
        self._joining: list[Member] = []
        self._owed: set[int] = set()  # trials that are to have an epoch before others join
        self._stepper: Stepper | None = None
        self._mixes = True
        self._profile: Profile | None = None
        self._looking = 0.0  # seconds of this epoch that went to other trials

    def run(self, array: Array) -> Iterator[Event]:
        """Train an array; yields the reports of its trials, those that end an epoch together in one event.

        A trial that reaches its target is saved before it is reported as PAUSED.
        """
        self._profile = array.profile
        self._joining = list(array.members)
        while True:
            yield from self._hear()
            if not self._learners and not self._joining:
                return
            if self._orders.stopping():
                self._save()
                return
            if self._mixes or not self._owed:
                yield from self._admit()
            if not self._learners:
                return
            yield from self._train(self._company())

    def _hear(self) -> Iterator[Event]:
        """Let learners go that are to leave, note who is to join, look at who is to be looked at."""
        for change in self._orders.changes():
            self._joining = [x for x in (*self._joining, *change.join) if x.trial.number not in change.leave]
            for learner in [x for x in self._learners if x.trial.number in change.leave]:
                self._save_one(learner)
                self._let_go(learner)
            if change.look:
                began = time.monotonic()
                found = Surveyed(self._job, *self._describer.survey(change.look, load=False))
                self._looking += time.monotonic() - began
                yield found

    def _let_go(self, learner: Learner) -> None:
        self._learners.remove(learner)
        self._owed.discard(learner.trial.number)

    def _linger(self, seconds: float) -> Iterator[Event]:
        """Wait until somebody joins, but not for long; hear meanwhile."""
        deadline = time.monotonic() + min(LINGER * seconds, LONGEST_LINGER)
        while not self._joining and not self._orders.stopping() and self._orders.wait(deadline - time.monotonic()):
            yield from self._hear()

    def _admit(self) -> Iterator[Event]:
        """Let those join that are to; yields what they have reported already and the journal did not get any more."""
        if self._joining:
            self._owed = {learner.trial.number for learner in self._learners}
        while self._joining:
            member = self._joining.pop(0)
            try:
                learner = self._learner(member)
            except Exception:
                self._save()  # of the others nothing is lost
                raise
            missing = [r for r in learner.reports if member.start < r.epoch <= member.target]
            if missing:
                yield Reported(self._job, tuple(_with_state(learner, report) for report in missing))
            elif learner.epoch >= member.target and learner.reports:
                yield Reported(self._job, (_with_state(learner, learner.reports[-1]),))
            if learner.epoch < member.target:
                self._learners.append(learner)
                lend_frozen(self._learners[0].model, learner.model)

    def _learner(self, member: Member) -> Learner:
        """A member as it was left here, or as its checkpoint has it, or at its very start."""
        learner = self._paused.take(member, self._directory)
        if learner is None:
            learner = build(self._task, member, self._device)
            learner.restore(self._directory)
        return learner

    def _company(self) -> list[Learner]:
        """Who trains next: learners that can share their batches, or at least stack them.

        Those that were stopped within an epoch end it first. Where epochs do not mix, those that are behind catch up.
        """

        def place(learner: Learner) -> tuple[int, int]:
            return (0 if self._mixes else learner.epoch, -learner.step)

        first = min(map(place, self._learners))
        return [learner for learner in self._learners if place(learner) == first]

    def _train(self, company: list[Learner]) -> Iterator[Event]:
        """The rest of an epoch of a company, and what that showed."""
        lead = company[0].trial
        train, valid = self._sets.of(lead.config)
        size = batch_size(self._task, lead.config)  # the key of a trial that was not looked at has none
        began, self._looking = time.monotonic(), 0.0
        try:
            stepper = yield from self._epoch(company, train, size)
        except MixedEpochsError as reason:
            self._part(company, reason)
            return
        if stepper is None:
            return
        metrics = stepper.validate(valid.walk(size, seed=derive_seed(lead.data_seed, "valid")))
        seconds = time.monotonic() - began - self._looking
        reports = self._end_epoch(stepper.learners, metrics, seconds / len(metrics))
        yield Reported(self._job, reports)
        if stepper.finding is not None and stepper.finding is not self._profile:
            self._profile = stepper.finding
            yield Profiled(self._job, self._profile)
        if self._learners and any(report.state is not TrialState.RUNNING for report in reports):
            yield from self._linger(seconds)

    def _epoch(self, company: list[Learner], train: Batches, size: int) -> Generator[Event, None, Stepper | None]:
        """The rest of an epoch.

        Returns:
            Of those that are still there; None when it was broken off because the job is to stop, or all have left.
        """
        steps, data_seed = train.steps(size), company[0].trial.data_seed
        walks = {learner.epoch: _walk(train, size, data_seed, learner) for learner in company}
        stepper = self._stepper_of(company, steps)
        bad = torch.tensor([learner.bad for learner in company], device=self._device)
        try:
            for step in range(company[0].step, steps):
                batches = {epoch: next(walk) for epoch, walk in walks.items()}
                ticks = [learner.epoch * steps + step for learner in company]
                losses = stepper.train_step([batches[learner.epoch] for learner in company], ticks)
                bad = _note(bad, losses, step + 1)
                for learner in company:
                    learner.step = step + 1
                if self._orders.stopping():
                    return None
                if time.monotonic() - self._saved >= self._checkpoint_seconds:
                    _write_down(company, bad)
                    self._save()
                if not self._orders.wait(0):
                    continue
                _write_down(company, bad)
                before = len(self._learners)
                yield from self._hear()
                if len(self._learners) < before:
                    left = [b for b, learner in enumerate(company) if learner in self._learners]
                    company, bad = [company[b] for b in left], bad[left]
                    if not company:
                        return None
                    walks = {epoch: walk for epoch, walk in walks.items() if any(x.epoch == epoch for x in company)}
                    stepper = self._stepper_of(company, steps)
        finally:
            _write_down(company, bad)
        return stepper

    def _part(self, company: list[Learner], reason: MixedEpochsError) -> None:
        """From now on learners at different epochs take turns.

        If a step was done before that was known, they go back to their checkpoints, which are from before it.
        """
        _log.warning("trials at different epochs take turns: %s", reason)
        self._mixes, self._stepper = False, None
        if reason.spoilt:
            self._learners = [learner for learner in self._learners if learner not in company]
            self._joining = [*(learner.member for learner in company), *self._joining]
            self._owed.clear()

    def _stepper_of(self, company: list[Learner], epoch_steps: int) -> Stepper:
        """The one that a company has, or a new one."""
        if self._stepper is None or self._stepper.learners != company:
            if self._stepper is not None:
                self._profile = self._stepper.finding or self._profile
                self._stepper = None
                if self._device.type == "cuda":
                    gc.collect()  # the array of before is a cycle, and holds memory of the device
            steps = max((x.member.target - x.epoch) * epoch_steps - x.step for x in company)
            self._stepper = make_stepper(self._task, company, self._profile, steps)
        return self._stepper

    def _end_epoch(
        self, company: Sequence[Learner], metrics: list[dict[str, float]], seconds: float
    ) -> tuple[Report, ...]:
        reports = []
        for learner, values in zip(company, metrics, strict=True):
            bad = learner.bad
            report = learner.end_epoch(values, seconds)
            self._owed.discard(learner.trial.number)
            if bad:
                reason = f"loss is not finite at step {bad} of epoch {learner.epoch}"
                report = dataclasses.replace(report, state=TrialState.FAILED, reason=reason)
            else:
                report = _with_state(learner, report)
            if report.state is TrialState.PAUSED:
                learner.save(self._directory)
                self._paused.keep(learner)
            if report.state is not TrialState.RUNNING:
                self._let_go(learner)
            reports.append(report)
        return tuple(reports)

    def _save(self) -> None:
        for learner in self._learners:
            self._save_one(learner)
        self._saved = time.monotonic()

    def _save_one(self, learner: Learner) -> None:
        """Save one that is not about to fail: it fails again, at the same step, from where it was sound."""
        if not learner.bad:
            learner.save(self._directory)


def _walk(train: Batches, size: int, data_seed: int, learner: Learner) -> Iterator[Any]:
    """The batches of a learner's epoch from the first that is still to come."""
    order = epoch_order(train.samples, data_seed, learner.epoch)
    return train.walk(size, order, learner.step, derive_seed(data_seed, "noise", learner.epoch))


def _with_state(learner: Learner, report: Report) -> Report:
    reached = report.epoch >= learner.member.target
    return dataclasses.replace(report, state=TrialState.PAUSED if reached else TrialState.RUNNING)


def _note(bad: Tensor, losses: Tensor, step: int) -> Tensor:
    """Without asking the device: where a loss is not finite for the first time, the step's number."""
    return torch.where((bad == 0) & ~losses.isfinite(), step, bad)


def _write_down(company: Sequence[Learner], bad: Tensor) -> None:
    for learner, step in zip(company, bad.tolist(), strict=True):
        learner.bad = int(step)
