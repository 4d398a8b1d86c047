"""Trains the trials of one array up to their budgets, step by step, and lets trials leave and join meanwhile."""

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.array import Array, Member
from shoal.core.event import Event, Profiled, Reported, TurnStats
from shoal.core.trial import Report, TrialState
from shoal.data.batches import Batches, epoch_order, noise_seed
from shoal.fuse.frozen import lend_frozen, worth_lending
from shoal.worker.fused_stepper import make_stepper
from shoal.worker.stepper import MixedEpochsError, Stepper, StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime, batch_size, build, side_by_side
from shoal.worker.worker_state import WorkerState

__all__ = ["ArrayTrainer"]

_log = logging.getLogger("shoal.worker")

LINGER, LONGEST_LINGER = 0.1, 0.05
"""Of an epoch's seconds, and seconds at most: how long the others wait for who takes the place of those that left."""

LOOK_STEPS, LOOK_SECONDS = 64, 1.0
"""Steps or seconds after which it is looked what the losses were, if nothing else asks for it before. They are told so
often too, however long an epoch is."""


class ArrayTrainer:
    """Trains one array of a job, a step at each `advance`; a `shoal.worker.lane_scheduler.Lane`.

    Its runtimes need not be at the same epoch: those that are at the same step of theirs are trained as one. A runtime
    leaves when it has reached its target, when its loss is no number, or when it is told to; others join when an epoch
    ends.

    Args:
        job: id of the job that the array belongs to.
        array: whom to train, each from its checkpoint or its very start.
        worker_state: of the process.
        lenders: models that are trained beside its own; frozen parameters of theirs serve as those of its own that are
            called alike and equal, where those are large.
        beat: called at each step, of validation too, and before anything that may take long.
    """

    def __init__(
        self,
        job: str,
        array: Array,
        worker_state: WorkerState,
        lenders: Callable[[], Iterable[nn.Module]] = tuple,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.key = array.key
        self.position = 0
        """Samples that a member has taken in since the epoch began in which it was first trained here."""
        self.events: list[Event] = []
        """What has happened and was not told yet."""
        self.failures: list[tuple[frozenset[int], Exception | SystemExit]] = []
        """Newcomers that could not be built, and why."""
        self.linger = 0.0
        """Seconds for which it is worthwhile to wait for incoming trials, as some have just left and others go on."""
        self._job = job
        self._task = worker_state.task
        self._sets = worker_state.sets
        self._paused = worker_state.paused
        self._device = worker_state.device
        self._directory = worker_state.directory
        self._lenders = lenders
        self._beat = beat
        self._runtimes: list[TrialRuntime] = []
        self._joining: list[Member] = list(array.members)
        self._owed: set[int] = set()  # trials that are to have an epoch before others join
        self._stepper: Stepper | None = None
        self._mixes = True
        self._shown = False  # whether several of its runtimes have taken a step as an array
        self._profile = array.profile
        self._company: list[TrialRuntime] = []  # who is within an epoch now
        self._losses: list[Tensor] = []  # of the company, [B] each, since it was last looked whether they are numbers
        self._refused = worker_state.refused
        self._unkeyed = worker_state.unkeyed
        self._looked = self._told = time.perf_counter()  # when losses were last looked at, and told
        self._lowest: TurnStats | None = None  # the losses since they were told, of the best member at each step
        self._began, self._spent = 0.0, 0.0  # this advance, and seconds of this epoch before it
        self._ready = self._abreast = False
        self._size = 0  # of a batch
        self._course = self._train_all()

    @property
    def ready(self) -> bool:
        """Whether there is a step to be taken."""
        return self._ready

    @property
    def done(self) -> bool:
        """Whether there is nobody to be trained."""
        return not self._runtimes and not self._joining

    @property
    def models(self) -> list[nn.Module]:
        """Those that are trained."""
        return [runtime.model for runtime in self._runtimes]

    @property
    def trials(self) -> frozenset[int]:
        """Numbers of those that are trained, or about to be."""
        return frozenset(x.member.trial.number for x in self._runtimes) | {x.trial.number for x in self._joining}

    @property
    def settled(self) -> bool:
        """Whether its steps are taken in the way that was found the fastest."""
        return self._stepper is not None and self._stepper.settled

    @property
    def stepping(self) -> bool:
        """Whether it only takes steps, and does not load, build or compile anything."""
        return self.settled and not self._joining

    @property
    def place(self) -> tuple[object, int] | None:
        """The order of samples, the epoch, and samples of that which are behind it; None where others share samples
        with it wherever they are.
        """
        if not self._abreast or not self._company:
            return None
        lead = self._company[0]
        return (lead.trial.data_seed, lead.epoch), lead.step * self._size

    def prepare(self) -> None:
        """Do what comes before the next step, in two goes where an epoch has ended: validate it; then let others come
        in and make the next company an array. To be called when no lane steps.
        """
        if not self._ready:
            self._ready = self._go_on()

    def advance(self) -> bool:
        """Take a step; false when that was the last one of an epoch, or there is none to be taken."""
        self.linger = 0.0
        if self._ready:
            self._ready = self._go_on()
        return self._ready

    def _go_on(self) -> bool:
        self._began = time.perf_counter()
        try:
            return next(self._course)
        finally:
            self._spent += time.perf_counter() - self._began

    def leave(self, numbers: AbstractSet[int]) -> set[int]:
        """Let go who is to leave, saved; returns the numbers of those that were here."""
        gone = {member.trial.number for member in self._joining} & numbers
        self._joining = [member for member in self._joining if member.trial.number not in gone]
        leaving = [runtime for runtime in self._runtimes if runtime.trial.number in numbers]
        if leaving:
            self._write_down()
        for runtime in leaving:
            self._save_one(runtime)
            self._let_go(runtime)
            gone.add(runtime.trial.number)
        return gone

    def join(self, members: Iterable[Member]) -> None:
        """Let others come in at the end of the epoch."""
        self._joining += members

    def save(self) -> None:
        """Write checkpoints of all."""
        self._write_down()
        for runtime in self._runtimes:
            self._save_one(runtime)

    def suspend(self) -> None:
        """Keep all, saved, at hand for the next job of this process, and tell what was not told yet."""
        self.save()
        for runtime in filter(self._is_sound, self._runtimes):
            self._paused.keep(runtime)
        if self._lowest is not None:
            self._tell(())

    def _let_go(self, runtime: TrialRuntime) -> None:
        self._runtimes.remove(runtime)
        self._owed.discard(runtime.trial.number)

    def _train_all(self) -> Iterator[bool]:
        """Yields true before each step, false where something else comes next."""
        while True:
            if self._mixes or not self._owed:
                self._admit()
            if not self._runtimes:
                yield False
                continue
            yield from self._train(self._next_company())

    def _admit(self) -> None:
        """Let those join that are to, and tell what they have reported already and the journal did not get any more."""
        if self._joining:
            self._owed = {runtime.trial.number for runtime in self._runtimes}
        while self._joining:
            member = self._joining[0]
            self._beat()
            try:
                runtime = self._runtime(member)
            except (Exception, SystemExit) as error:
                if not self._runtimes:
                    raise
                self.save()  # of the others nothing is lost
                self.failures.append((frozenset({member.trial.number}), error))
                del self._joining[0]
                continue
            del self._joining[0]
            missing = [r for r in runtime.reports if member.start < r.epoch <= member.target]
            if missing:
                self._tell(_with_state(runtime, report) for report in missing)
            elif runtime.epoch >= member.target and runtime.reports:
                self._tell([_with_state(runtime, runtime.reports[-1])])
            if runtime.epoch < member.target:
                self._runtimes.append(runtime)
                lenders = (self._runtimes[0].model, *self._lenders()) if worth_lending(runtime.model) else ()
                for lender in lenders:
                    if lender is not runtime.model:
                        lend_frozen(lender, runtime.model)

    def _tell(self, reports: Iterable[Report]) -> None:
        self.events.append(Reported(self._job, tuple(reports), self._lowest))
        self._lowest, self._told = None, time.perf_counter()

    def _runtime(self, member: Member) -> TrialRuntime:
        """A member as it was left here, or as its checkpoint has it, or at its very start."""
        runtime = self._paused.take(member, self._directory)
        if runtime is None:
            runtime = build(self._task, member, self._device)
            runtime.restore(self._directory, self._epoch_steps(member))
        return runtime

    def _epoch_steps(self, member: Member) -> int:
        config = member.trial.config
        return self._sets.of(config)[0].steps(batch_size(self._task, config))

    def _next_company(self) -> list[TrialRuntime]:
        """Who trains next: runtimes that can share their batches, or at least stack them.

        Those that were stopped within an epoch end it first. Where epochs do not mix, those that are behind catch up.
        """

        def place(runtime: TrialRuntime) -> tuple[int, int]:
            return (0 if self._mixes else runtime.epoch, -runtime.step)

        first = min(map(place, self._runtimes))
        return side_by_side(runtime for runtime in self._runtimes if place(runtime) == first)

    def _train(self, company: list[TrialRuntime]) -> Iterator[bool]:
        """The rest of an epoch of a company, and what that showed."""
        lead = company[0].trial
        self._beat()
        train, valid = self._sets.of(lead.config)
        self._size = size = batch_size(self._task, lead.config)  # the key of a trial that was not looked at has none
        self._spent = self._began - time.perf_counter()
        self._abreast = train.abreast
        try:
            yield from self._epoch(company, train, size)
        except MixedEpochsError as reason:
            self._part(reason)
        except StepRefusedError as reason:
            self._train_apart(reason)
        yield False
        self._everybody_stays()
        if not self._company:
            return
        stepper = self._stepper_of(train.steps(size))
        batches = valid.walk(size, seed=noise_seed(lead.data_seed, None))
        try:
            metrics = stepper.validate(self._heard(batches))
        except StepRefusedError as reason:
            self._train_apart(reason)
            return
        seconds = self._spent + time.perf_counter() - self._began
        reports = self._end_epoch(stepper.runtimes, metrics, seconds / len(metrics))
        self._tell(reports)
        if stepper.finding is not None and stepper.finding is not self._profile:
            self._profile = stepper.finding
            self.events.append(Profiled(self._job, self.key, self._profile))
        if self._runtimes and any(report.state is not TrialState.RUNNING for report in reports):
            self.linger = min(LINGER * seconds, LONGEST_LINGER)
        yield False

    def _epoch(self, company: list[TrialRuntime], train: Batches, size: int) -> Iterator[bool]:
        """The rest of the training steps of an epoch; `_company` are those who are still there."""
        steps, data_seed = train.steps(size), company[0].trial.data_seed
        walks = {runtime.epoch: self._walk(train, size, data_seed, runtime) for runtime in company}
        if self._stepper is None and not self.position:
            self.position = company[0].step * size
        self._company = company
        stepper = self._stepper_of(steps)
        try:
            for step in range(company[0].step, steps):
                yield True
                stayed = self._everybody_stays()
                if not self._company:
                    return
                if not stayed:
                    walks = {k: walk for k, walk in walks.items() if any(x.epoch == k for x in self._company)}
                    stepper = self._stepper_of(steps)
                if not self._losses:
                    self._looked = time.perf_counter()
                batches = {epoch: next(walk) for epoch, walk in walks.items()}
                ticks = [runtime.epoch * steps + step for runtime in self._company]
                losses = stepper.train_step([batches[runtime.epoch] for runtime in self._company], ticks)
                self._losses.append(losses)
                self._shown = self._shown or (len(self._company) > 1 and not stepper.refusal)
                self._beat()
                for runtime in self._company:
                    runtime.end_step()
                self.position += min(size, train.samples - step * size)
                now = time.perf_counter()
                if len(self._losses) == LOOK_STEPS or now - self._looked >= LOOK_SECONDS:
                    self._write_down()
                if self._lowest is not None and now - self._told >= LOOK_SECONDS:
                    self._tell(())
        finally:
            self._write_down()

    def _heard(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each of which is progress."""
        for batch in batches:
            yield batch
            self._beat()

    def _walk(self, train: Batches, size: int, data_seed: int, runtime: TrialRuntime) -> Iterator[Any]:
        """The batches of a runtime's epoch from the first that is still to come."""
        order = epoch_order(train.samples, data_seed, runtime.epoch)
        return train.walk(size, order, runtime.step, noise_seed(data_seed, runtime.epoch))

    def _everybody_stays(self) -> bool:
        """Whether nobody of the company has left; else it is reduced to those that are still there."""
        if all(runtime in self._runtimes for runtime in self._company):
            return True
        self._write_down()
        self._company = [runtime for runtime in self._company if runtime in self._runtimes]
        return False

    def _write_down(self) -> None:
        """Note how the losses went, and the first step at which one was no number. The device is asked for that now and
        then only.
        """
        if not self._losses:
            return
        losses, self._losses = torch.stack(self._losses), []
        finite = losses.isfinite()
        self._judge(finite)
        best = losses.where(finite, torch.inf).amin(1)
        highest, lowest, last = torch.stack([best.max(), best.min(), best[-1]]).tolist()
        told = TurnStats(highest, lowest, last, len(best), time.perf_counter() - self._looked)
        self._lowest = told if self._lowest is None else self._lowest.followed_by(told)

    def _judge(self, finite: Tensor) -> None:
        """Note where losses of the last steps, [steps, B], were no numbers."""
        if finite.all():
            return
        for runtime, steps in zip(self._company, finite.T.tolist(), strict=True):
            if not runtime.bad and not all(steps):
                runtime.bad = runtime.step - len(steps) + steps.index(False) + 1

    def _part(self, reason: MixedEpochsError) -> None:
        """From now on runtimes at different epochs take turns.

        If a step was done before that was known, they go back to their checkpoints, which are from before it.
        """
        _log.warning("trials at different epochs take turns: %s", reason)
        self._mixes = False
        if reason.spoilt:
            self._go_back()
        self._company = []

    def _train_apart(self, reason: StepRefusedError) -> None:
        """From now on runtimes of this key train by themselves. Those of the company go back."""
        _log.warning(
            "trials %s go back to their checkpoints, and are trained by themselves from there: %s",
            [runtime.trial.number for runtime in self._company],
            reason,
        )
        if reason.trial is None:
            self._refused.add(self.key)
        else:
            self._unkeyed.add(reason.trial)
        self._go_back()

    def _go_back(self) -> None:
        """Those of the company begin again where their checkpoints are, which were written before they went wrong."""
        self._drop_stepper()  # before others are built: it holds as much memory as they will
        self._runtimes = [runtime for runtime in self._runtimes if runtime not in self._company]
        self._joining = [*(runtime.member for runtime in self._company), *self._joining]
        self._owed.clear()
        self._company = []

    def _stepper_of(self, epoch_steps: int) -> Stepper:
        """The one that the company has, or a new one."""
        if self._stepper is None or self._stepper.runtimes != self._company:
            self._drop_stepper()
            steps = max((x.member.target - x.epoch) * epoch_steps - x.step for x in self._company)
            self._beat()
            refused = self.key in self._refused
            self._stepper = make_stepper(
                self._task, self._company, self._profile, steps, self._shown, refused, self._unkeyed
            )
        return self._stepper

    def _drop_stepper(self) -> None:
        """Let go of the stepper, but for what it found."""
        if self._stepper is not None:
            self._profile = self._stepper.finding or self._profile
            self._stepper = None
            if self._device.type == "cuda":
                gc.collect()  # its array is a cycle, and holds memory of the device

    def _end_epoch(
        self, company: Sequence[TrialRuntime], metrics: list[dict[str, float]], seconds: float
    ) -> tuple[Report, ...]:
        reports = []
        for runtime, values in zip(company, metrics, strict=True):
            bad = runtime.bad
            report = runtime.end_epoch(values, seconds)
            self._owed.discard(runtime.trial.number)
            if bad:
                reason = f"loss is not finite at step {bad} of epoch {runtime.epoch}"
                report = dataclasses.replace(report, state=TrialState.FAILED, reason=reason)
            else:
                report = _with_state(runtime, report)
            if report.state is TrialState.PAUSED:
                runtime.save(self._directory)
                self._paused.keep(runtime)
            if report.state is not TrialState.RUNNING:
                self._let_go(runtime)
            reports.append(report)
        self._company = []
        return tuple(reports)

    def _save_one(self, runtime: TrialRuntime) -> None:
        if self._is_sound(runtime):
            runtime.save(self._directory)

    def _is_sound(self, runtime: TrialRuntime) -> bool:
        """Whether one may be saved: not if it is about to fail, which it does again, at the same step, from where it
        was sound.
        """
        return not runtime.bad


def _with_state(runtime: TrialRuntime, report: Report) -> Report:
    reached = report.epoch >= runtime.member.target
    return dataclasses.replace(report, state=TrialState.PAUSED if reached else TrialState.RUNNING)
