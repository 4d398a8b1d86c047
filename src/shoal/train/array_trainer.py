"""Trains the trials of one array up to their budgets, step by step; trials may leave and join between steps."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.activity import Activity
from shoal.core.array import Array, Member
from shoal.core.event import Event, Noted, Profiled, Proven
from shoal.core.trial import TrialState
from shoal.fuse.capture import records_graphs
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.compile_cache import CompileRecord
from shoal.host.activity_clock import during
from shoal.plan.cost.cost import Cost
from shoal.train.array_members import ArrayMembers, LossTracker, call_end_epoch
from shoal.train.data.loader import augmentation_seed
from shoal.train.make_stepper import make_stepper
from shoal.train.outside import refuse_lasting_change, shares_outside
from shoal.train.proof import Proof, ProofRecord
from shoal.train.step_settings import MicroBatch, StepPlan, mixes_steps
from shoal.train.step_threads import StepThreads
from shoal.train.stepper import MixedEpochsError, PlainStepper, Stepper, StepRefusedError
from shoal.train.team.leader import TeamLeader
from shoal.train.trial_runtime import TrialRuntime
from shoal.train.worker_state import WorkerState

__all__ = ["ArrayTrainer", "averaged", "update_averages"]

_log = logging.getLogger("shoal.train")

JOIN_WAIT_SHARE = 0.1
"""Fraction of an epoch's seconds that the array waits for trials to replace those that left."""


@torch.no_grad()
def update_averages(runtimes: Sequence[TrialRuntime]) -> None:
    """Update the averages of the trials that have them after a training step."""
    for runtime in runtimes:
        if (ema_decay := runtime.settings.ema_decay) is None:
            continue
        parameters = _trained(runtime.model)
        for name in parameters.keys() - runtime.average.keys():  # at the first step all, later those unfrozen since
            runtime.average[name] = parameters[name].detach().clone()
        torch._foreach_lerp_([runtime.average[name] for name in parameters], [*parameters.values()], 1 - ema_decay)


@contextmanager
def averaged(runtimes: Sequence[TrialRuntime]) -> Iterator[None]:
    """Replace the parameters of trials with their averages within the context, and restore them exactly afterwards."""
    swapped: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for runtime in runtimes:
            for name, average in runtime.average.items():
                parameter = runtime.model.get_parameter(name)
                swapped.append((parameter, parameter.detach().clone()))
                parameter.copy_(average)
    try:
        yield
    finally:
        with torch.no_grad():
            for averaged_one, own in swapped:
                averaged_one.copy_(own)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


class ArrayTrainer:
    """Trains one array of a job, one step per call of `advance`; implements `shoal.train.lane_scheduler.Lane`.

    Trials at the same step of their epochs train as one array, even at different epochs. A trial leaves when it has
    reached its target, when its loss is not finite, or by `leave`. Others join at the end of an epoch.

    Args:
        frozen_sources: Function that returns models of other arrays in this process. If a large frozen parameter of a
            new model equals the one of the same name in such a model, both share its memory.
        heartbeat: Function to call at each step and validation batch, and before each operation that may take long.
    """

    def __init__(
        self,
        job: str,
        array: Array,
        worker_state: WorkerState,
        frozen_sources: Callable[[], Iterable[nn.Module]] = tuple,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self.key = array.key
        self.position = 0
        """Number of samples that a member has trained on, counted from the start of its first epoch in this trainer."""
        self.ready = False
        """Whether the next `advance` takes a training step."""
        self.events: list[Event] = []
        """Events for the engine; the owner of the trainer removes them."""
        self.join_wait = 0.0
        """Seconds to wait for trials to join, after some have left and others continue."""
        self.team: TeamLeader | None = None
        """Helpers that compute a part of the gradients; None without helpers."""
        self._job = job
        self._state = worker_state
        self._heartbeat = heartbeat
        self._losses = LossTracker(job, self.events)
        self._members = ArrayMembers(
            array.members,
            worker_state,
            self._losses,
            frozen_sources,
            heartbeat,
            note=lambda text: self.events.append(Noted(job, text)),
        )
        self.failures = self._members.failures
        """Trials that could not be built while others train: their numbers, and the exception."""
        self._stepper: Stepper | None = None
        self._threads = StepThreads(worker_state.threads)
        self._profile = array.profile
        self._later, self._size = array.later, len(array.members)
        self._cohort: list[TrialRuntime] = []  # trials at the same step of their epochs, in training now
        self._mixed_epochs = True  # whether trials at different epochs train as one array
        self._began, self._spent = 0.0, 0.0  # start of the current call, and seconds of the epoch before it
        self._lockstep = False
        self._plan: StepPlan | None = None
        self._reported: dict[int, str] = {}  # trials of reported arrays -> why they train in plain PyTorch
        self._record = worker_state.proofs.setdefault(array.key, ProofRecord(worker_state.proof_cost))
        self._proof: Proof | None = None
        if worker_state.task.exact:
            self._proof = Proof(worker_state.task, worker_state.outside, self._record)
        self._training = self._train_all()

    @property
    def done(self) -> bool:
        """Whether there are no trials to train."""
        return not self._members.runtimes and not self._members.joining

    @property
    def models(self) -> list[nn.Module]:
        """Models in training."""
        return [runtime.model for runtime in self._members.runtimes]

    @property
    def trials(self) -> frozenset[int]:
        """Numbers of the trials in training and of those that wait to join."""
        return self._members.trials

    @property
    def settled(self) -> bool:
        """Whether the fastest step mode was found."""
        return self._stepper is not None and self._stepper.settled

    @property
    def steady(self) -> bool:
        """Whether the array only takes steps now, without loading, building or compiling."""
        return self.settled and not self._members.joining

    @property
    def pass_position(self) -> tuple[object, int] | None:
        """Data seed, number of the pass, and position in it; None if samples are shared at any position."""
        if not self._lockstep or not self._cohort or self._plan is None:
            return None
        lead, size = self._cohort[0], self._plan.settings.batch_size
        number, first = self._plan.locate(lead.epoch, lead.step)
        if self._plan.train.endless:  # each epoch is a pass: lanes at other epochs would take long to catch up
            begin = self._plan.locate(lead.epoch, 0)[1]
            number, first = begin * size, first - begin
        return (lead.trial.data_seed, number), first * size

    def prepare(self) -> None:
        """Do all work that precedes the next step, while no lane takes a step.

        The end of an epoch takes two calls: the first one validates, the second one admits trials and builds the array.
        """
        if not self.ready:
            self.ready = self._resume_training()

    def advance(self) -> bool:
        """Take a step; return False if it was the last one of an epoch, or if no step was ready."""
        self.join_wait = 0.0
        if self.ready:
            self.ready = self._resume_training()
        return self.ready

    def _resume_training(self) -> bool:
        self._began = time.perf_counter()
        try:
            return next(self._training)
        finally:
            self._spent += time.perf_counter() - self._began

    def leave(self, numbers: AbstractSet[int]) -> set[int]:
        """Save and remove the trials with these numbers; return the numbers that were in the array."""
        self._synchronize()
        return self._members.leave(numbers)

    def join(self, members: Iterable[Member]) -> None:
        """Add trials, which join at the end of the epoch."""
        self._members.joining += members

    def save(self) -> None:
        """Write checkpoints of all trials."""
        self._synchronize()
        self._members.save()

    def suspend(self) -> None:
        """Save all trials, put them in the cache for the next job of this process, and report the remaining losses."""
        self._synchronize()
        self._members.suspend()
        self._losses.report_summary()

    def _train_all(self) -> Iterator[bool]:
        """Yield True before each training step, and False before any other work."""
        while True:
            self._members.admit(self._mixed_epochs)
            if not self._members.runtimes:
                yield False
                continue
            yield from self._train_epoch(self._members.next_cohort(self._mixed_epochs))

    def _train_epoch(self, cohort: list[TrialRuntime]) -> Iterator[bool]:
        """Train a cohort for the rest of its epoch, validate it and report the metrics; yield as `_train_all`."""
        lead = cohort[0].trial
        self._heartbeat()
        train, valid = self._state.sets.of(lead.config)
        self._plan = plan = StepPlan.of(self._state.task, lead.config, train, valid)
        steps = plan.steps(cohort[0].epoch)  # epochs that are shares of a pass may differ by one
        cohort = [runtime for runtime in cohort if plan.steps(runtime.epoch) == steps]
        self._spent = self._began - time.perf_counter()
        self._lockstep = train.lockstep
        watched = self._proof is not None and not (self._state.outside.changed and self.key in self._state.plain_keys)
        refuse_outside = _watch_outside(self._state, cohort[0].model, self._record) if watched else lambda: None
        try:
            mixed = mixes_steps(runtime.settings for runtime in cohort)
            yield from self._train_parts(cohort, plan) if mixed else self._train_steps(cohort, plan)
            refuse_outside()
        except MixedEpochsError as reason:
            _log.warning("trials at different epochs take turns: %s", reason)
            self._mixed_epochs = False
            if reason.corrupted:
                self._roll_back()
            self._cohort = []
        except StepRefusedError as reason:
            self._fall_back_to_plain(reason)
        yield False
        self._remove_departed()
        if not self._cohort:
            return
        stepper = self._stepper_for(plan)
        try:  # nothing is saved between this and the end of the epoch, so a resume does not call the hook twice
            stepper.synchronize()
            fused = not isinstance(stepper, PlainStepper)
            renew = call_end_epoch(self._state.task, stepper.runtimes, fused, self._state.outside)
        except StepRefusedError as reason:
            self._fall_back_to_plain(reason)
            return
        if renew:
            self._drop_stepper()
            stepper = self._stepper_for(plan)
        order = valid.order(lead.data_seed, None)
        batches = valid.iterate(plan.settings.eval_batch_size, order, seed=augmentation_seed(lead.data_seed, None))
        try:
            with during(Activity.VALIDATION), averaged(self._cohort):
                metrics = stepper.validate(_with_heartbeats(batches, self._heartbeat))
            stepper.synchronize()
            refuse_outside()
            self._record.has_trained = True
        except StepRefusedError as reason:
            self._fall_back_to_plain(reason)
            return
        seconds = self._spent + time.perf_counter() - self._began
        refusal = stepper.refusal if len(self._cohort) > 1 else ""
        self._report_checks(self._state.plain_keys.get(self.key, refusal))
        reports = self._members.end_epoch(stepper.runtimes, metrics, seconds / len(metrics))
        self._cohort = []
        self._losses.report(reports)
        if (profile := stepper.new_profile) is not None and profile != self._profile:
            self._profile = profile
            self.events.append(Profiled(self._job, self.key, profile))
        if self._members.runtimes and any(report.state is not TrialState.RUNNING for report in reports):
            self.join_wait = JOIN_WAIT_SHARE * seconds
        yield False

    def _report_checks(self, refusal: str, step: int = 0) -> None:
        """Report that the cohort is an array, its checks since the last report, or why it trains in plain PyTorch."""
        trials = {runtime.trial.number: runtime.epoch for runtime in self._cohort}
        rows = () if self._proof is None else self._proof.take_rows()
        is_reported = all(self._reported.get(number) == refusal for number in trials)
        if rows or not (is_reported or (len(trials) == 1 and not refusal)):
            self._reported |= dict.fromkeys(trials, refusal)
            self.events.append(Proven(self._job, self.key, trials, rows, refusal, step))

    def _train_steps(self, cohort: list[TrialRuntime], plan: StepPlan) -> Iterator[bool]:
        """Take the remaining training steps of an epoch with `_cohort`, the trials left; yield as `_train_all`."""
        steps, data_seed = plan.steps(cohort[0].epoch), cohort[0].trial.data_seed
        iterators = {runtime.epoch: plan.step_batches(runtime.epoch, runtime.step, data_seed) for runtime in cohort}
        if self._stepper is None and not self.position:
            self.position = cohort[0].step * plan.settings.batch_size * plan.settings.accumulate
        self._cohort = cohort
        stepper = self._stepper_for(plan)
        profiled = self._profiled_rate(plan.settings.accumulate)
        try:
            for step in range(cohort[0].step, steps):
                yield True
                departed = self._remove_departed()
                if not self._cohort:
                    return
                if departed:
                    iterators = {
                        k: iterator for k, iterator in iterators.items() if any(x.epoch == k for x in self._cohort)
                    }
                stepper = self._stepper_for(plan)
                self._losses.begin_step()
                batches = {epoch: next(iterator) for epoch, iterator in iterators.items()}
                ticks = [plan.tick(runtime.epoch, step) for runtime in self._cohort]
                samples = plan.samples(self._cohort[0].epoch, step)
                losses = self._take_step(stepper, [batches[runtime.epoch] for runtime in self._cohort], ticks, samples)
                update_averages(self._cohort)
                self._losses.add(self._cohort, losses)
                self._heartbeat()
                for runtime in self._cohort:
                    runtime.end_step()
                self.position += samples
                self._losses.end_step(self._cohort, step + 1, steps, settled=self.settled, profiled=profiled)
        finally:
            self._losses.flush()

    def _train_parts(self, cohort: list[TrialRuntime], plan: StepPlan) -> Iterator[bool]:
        """As `_train_steps`, for trials of one epoch whose steps have different numbers of batches.

        They train on each batch at once, and leave where the steps of all of them end.
        """
        lead, size = cohort[0], plan.settings.batch_size
        position = lead.step * lead.settings.accumulate
        order, seed = plan.train.order(lead.trial.data_seed, lead.epoch), lead.trial.data_seed
        first_tick = lead.epoch * plan.pass_batches
        if self._stepper is None and not self.position:
            self.position = position * size
        self._cohort = cohort
        runs: Iterator[list[MicroBatch]] | None = None
        try:
            while position < plan.pass_batches:
                yield True
                departed = self._remove_departed()
                if not self._cohort:
                    return
                if departed or runs is None:
                    members = [runtime.settings for runtime in self._cohort]
                    runs = plan.parts(position, members, order, augmentation_seed(seed, lead.epoch))
                stepper = self._stepper_for(plan)
                for part in next(runs):
                    self._losses.begin_step()
                    losses = stepper.train_part(part, first_tick)
                    self._heartbeat()
                    ended = [self._cohort[b] for b in part.steps]
                    if ended:
                        update_averages(ended)
                        self._losses.add(ended, losses[[*part.steps]])
                        for runtime in ended:
                            runtime.end_step()
                        self._losses.flush()  # the next steps may be those of others
                    self.position += min(size, plan.train.samples - part.number * size)
                    position = part.number + 1
                    of, profiled = plan.pass_batches, self._profiled_rate(1)
                    self._losses.end_step(self._cohort, position, of, settled=self.settled, profiled=profiled)
        finally:
            self._losses.flush()

    def _profiled_rate(self, batches: int) -> float | None:
        """Steps of so many batches per second by the profile, if there is one."""
        seconds = 0.0 if self._profile is None else Cost(self._profile).step_seconds(len(self._cohort), batches)
        return 1 / seconds if seconds else None

    def _take_step(self, stepper: Stepper, batches: Sequence[Any], ticks: Sequence[int], samples: int) -> Tensor:
        """Take a step, with the helpers that are ready."""
        alone = partial(self._threads.take, partial(stepper.train_step, batches, ticks), samples, stepper.settled)
        if self.team is None:
            return alone()
        losses = self.team.train_step(self.key, stepper, batches, ticks, alone)
        self.events += self.team.events
        self.team.events.clear()
        return losses

    def _remove_departed(self) -> bool:
        """Remove trials that have left from the cohort; return whether there were any."""
        if all(runtime in self._members.runtimes for runtime in self._cohort):
            return False
        self._losses.flush()
        self._cohort = [runtime for runtime in self._cohort if runtime in self._members.runtimes]
        return True

    def _fall_back_to_plain(self, reason: StepRefusedError) -> None:
        """Train trials of this key in plain PyTorch from now on; the cohort restarts from its checkpoints."""
        whose = [runtime.trial.number for runtime in self._cohort]
        _log.warning("trials %s go back to their checkpoints, and train in plain PyTorch from there: %s", whose, reason)
        alone = self._stepper is not None and self._stepper.may_be_array
        if alone:  # its steps were plain, and earlier epochs ended without a refusal
            self._cohort[0].proven = (self._cohort[0].epoch, 0)
        if reason.trial is None:
            text, late = str(reason), [one.proven[0] + 1 for one in self._cohort if one.epoch > one.proven[0]]
            if reason.since_check and late:
                text += f"; reports of epoch {min(late)} and later ones were of such steps, and stay recorded"
            self._report_checks(text, 0 if alone else self._cohort[0].step)
            self._state.plain_keys[self.key] = text
        else:
            self._state.global_rng.add(reason.trial)
        if self._proof is not None and not self._state.outside.changed:
            self._state.outside.changed = self._proof.changed_outside
        self._roll_back(reason.since_check)

    def _roll_back(self, since_check: bool = False) -> None:
        """Restart the cohort from its checkpoints, or from those before the last check that passed."""
        for runtime in () if since_check else self._cohort:
            runtime.proven = (runtime.epoch, runtime.step)
        self._drop_stepper()  # first, since it holds as much memory as the models that are built next
        self._members.rebuild(self._cohort)
        self._cohort = []

    def _synchronize(self) -> None:
        """Copy what the cohort's steps have changed to its models, or fall back to plain PyTorch if that cannot be."""
        if self._stepper is not None and self._stepper.runtimes == self._cohort:  # else nothing is left to copy
            try:
                self._stepper.synchronize()
            except StepRefusedError as reason:
                self._fall_back_to_plain(reason)

    def _stepper_for(self, plan: StepPlan) -> Stepper:
        """Return the stepper of the cohort, or a new one if the cohort has changed, or its trial has got helpers."""
        last, divided = self._stepper, self.team is not None
        if last is not None and last.runtimes == self._cohort and not (divided and last.may_be_array):
            return last
        self._drop_stepper()
        self._heartbeat()
        state, size = self._state, len(self._cohort)
        mixed = mixes_steps(x.settings for x in self._cohort)  # so a step of the array takes one batch
        epoch_steps = plan.pass_batches if mixed else plan.epoch_steps
        steps = max(
            (x.member.target - x.epoch) * epoch_steps - x.step * (x.settings.accumulate if mixed else 1)
            for x in self._cohort
        )
        later = {epochs * epoch_steps: count for epochs, count in self._later.items()} if size == self._size else {}
        epochs = len({runtime.epoch for runtime in self._cohort})
        known = (self.key.structure, self.key.data, self.key.batch_size, size, epochs > 1, mixed)
        record = CompileRecord(f"{known} on {state.device.type} by {torch.get_num_threads()} threads")
        compiling = CaptureDecision(self._profile, size, steps, later, record, ahead=records_graphs(state.device))
        plain = self.key in state.plain_keys
        with during(Activity.BUILD):
            self._stepper = make_stepper(
                state.task,
                self._cohort,
                self._profile,
                compiling,
                plain,
                state.global_rng,
                self._proof,
                state.outside,
                divided,
            )
        return self._stepper

    def _drop_stepper(self) -> None:
        if self._stepper is not None:
            self._profile = self._stepper.new_profile or self._profile
            for runtime in self._stepper.runtimes:
                runtime.gradients.leave()
            self._stepper = None
            self._threads = StepThreads(self._state.threads)
            if self._state.device.type == "cuda":
                gc.collect()  # its array is a reference cycle that holds device memory


def _watch_outside(state: WorkerState, model: nn.Module, record: ProofRecord) -> Callable[[], None]:
    """Return a function that refuses what has changed outside of models since this call, while trials share it.

    A new entry of a dict or set counts after the first epoch of the structure; before, it is taken for that of a cache.
    """
    outside, entries = state.outside, record.has_trained
    before = outside.snapshot(model)

    def refuse() -> None:
        refuse_lasting_change(before)
        label = next((each for each in before.changes(entries) if each not in outside.built), "")
        if label:
            outside.changed = outside.changed or label
            raise StepRefusedError(shares_outside(label), since_check=True)

    return refuse


def _with_heartbeats(batches: Iterable[Any], heartbeat: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches, with a heartbeat after each."""
    for batch in batches:
        yield batch
        heartbeat()
