"""Trains the trials of one array up to their budgets, step by step; trials may leave and join in between."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn

from shoal.core.activity import Activity
from shoal.core.array import Array, Member
from shoal.core.event import Event, Profiled
from shoal.core.trial import TrialState
from shoal.cost.activity_clock import during
from shoal.data.loader import noise_seed
from shoal.worker.array_members import ArrayMembers
from shoal.worker.fused_stepper import make_stepper
from shoal.worker.loss_tracker import LossTracker
from shoal.worker.step_plan import StepPlan
from shoal.worker.stepper import MixedEpochsError, Stepper, StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime
from shoal.worker.weight_average import averaged, update_averages
from shoal.worker.worker_state import WorkerState

__all__ = ["ArrayTrainer"]

_log = logging.getLogger("shoal.worker")

LINGER, LONGEST_LINGER = 0.1, 0.05
"""Share of an epoch's seconds, and most seconds, that the array waits for trials in place of those that left."""


class ArrayTrainer:
    """Trains one array of a job, a step at each `advance`; a `shoal.worker.lane_scheduler.Lane`.

    Trials at the same step of an epoch train as one, also at different epochs. A trial leaves when it has reached its
    target, when its loss is not finite, or by `leave`. Others join at the end of an epoch.

    Args:
        job: Id of the job that the array belongs to.
        array: Trials to train, each from its checkpoint or from its start.
        worker_state: State of the process.
        lenders: Function that returns models of other arrays in this process. If large frozen parameters of theirs
            equal those of the same name in a new model, that model uses their memory.
        beat: Function to call at each step and validation batch, and before anything that may take long.
        timing_only: Whether steps are only timed: losses need not be finite, and LR schedulers, which may end with the
            budget, are not used.
    """

    def __init__(
        self,
        job: str,
        array: Array,
        worker_state: WorkerState,
        lenders: Callable[[], Iterable[nn.Module]] = tuple,
        beat: Callable[[], None] = lambda: None,
        timing_only: bool = False,
    ) -> None:
        self.key = array.key
        self.position = 0
        """Samples that a member has trained on, counted from the start of its first epoch here."""
        self.ready = False
        """Whether there is a step to take."""
        self.events: list[Event] = []
        """Events that nobody has taken yet."""
        self.linger = 0.0
        """Seconds to wait for trials that join, after some have left and others go on."""
        self._job = job
        self._state = worker_state
        self._beat = beat
        self._losses = LossTracker(job, self.events, check=not timing_only)
        self._members = ArrayMembers(
            array.members, worker_state, self._losses, lenders, beat, schedulers=not timing_only
        )
        self.failures = self._members.failures
        """Numbers of trials that could not be built while others train, and the exception."""
        self._stepper: Stepper | None = None
        self._profile = array.profile
        self._group: list[TrialRuntime] = []  # trials within an epoch now
        self._mixes = True  # whether trials at different epochs train as one
        self._shown = False  # whether several trials have taken a step as an array
        self._began, self._spent = 0.0, 0.0  # start of this advance, and seconds of this epoch before it
        self._abreast = False
        self._plan: StepPlan | None = None
        self._course = self._train_all()

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
        """Whether the search for the fastest kind of step is over."""
        return self._stepper is not None and self._stepper.settled

    @property
    def stepping(self) -> bool:
        """Whether the array only takes steps: it does not load, build or compile anything."""
        return self.settled and not self._members.joining

    @property
    def place(self) -> tuple[object, int] | None:
        """Order of samples with its epoch, and position in that order; None if samples are shared at any position."""
        if not self._abreast or not self._group or self._plan is None:
            return None
        lead, size = self._group[0], self._plan.settings.batch_size
        number, first = self._plan.place(lead.epoch, lead.step)
        if self._plan.train.endless:  # an epoch stands for a pass: a lane at another epoch would take long to catch up
            begin = self._plan.place(lead.epoch, 0)[1]
            number, first = begin * size, first - begin
        return (lead.trial.data_seed, number), first * size

    def prepare(self) -> None:
        """Do what precedes the next step; call it while no lane steps.

        The end of an epoch takes two calls: the first validates, the second lets trials join and makes the array.
        """
        if not self.ready:
            self.ready = self._go_on()

    def advance(self) -> bool:
        """Take a step; returns false if it was the last one of an epoch, or if there was none."""
        self.linger = 0.0
        if self.ready:
            self.ready = self._go_on()
        return self.ready

    def _go_on(self) -> bool:
        self._began = time.perf_counter()
        try:
            return next(self._course)
        finally:
            self._spent += time.perf_counter() - self._began

    def leave(self, numbers: AbstractSet[int]) -> set[int]:
        """Save and remove the trials with these numbers; returns the numbers that were in the array."""
        return self._members.leave(numbers)

    def join(self, members: Iterable[Member]) -> None:
        """Let trials join at the end of the epoch."""
        self._members.joining += members

    def save(self) -> None:
        """Write checkpoints of all trials."""
        self._members.save()

    def suspend(self) -> None:
        """Save all trials, cache them for the next job of this process, and report the rest of the losses."""
        self._members.suspend()
        self._losses.report_rest()

    def _train_all(self) -> Iterator[bool]:
        """Yields true before each training step, false where something else comes next."""
        while True:
            self._members.admit(self._mixes)
            if not self._members.runtimes:
                yield False
                continue
            yield from self._train_epoch(self._members.next_group(self._mixes))

    def _train_epoch(self, group: list[TrialRuntime]) -> Iterator[bool]:
        """Train a group for the rest of its epoch, validate it and report the metrics; yields as `_train_all`."""
        lead = group[0].trial
        self._beat()
        train, valid = self._state.sets.of(lead.config)
        self._plan = plan = StepPlan.of(self._state.task, lead.config, train, valid)
        self._spent = self._began - time.perf_counter()
        self._abreast = train.abreast
        try:
            yield from self._train_steps(group, plan)
        except MixedEpochsError as reason:
            self._separate_epochs(reason)
        except StepRefusedError as reason:
            self._refuse(reason)
        yield False
        self._drop_left()
        if not self._group:
            return
        stepper = self._stepper_of(plan.epoch_steps)
        order = valid.order(lead.data_seed, None)
        batches = valid.walk(plan.settings.eval_batch_size, order, seed=noise_seed(lead.data_seed, None))
        try:
            with during(Activity.VALIDATION), averaged(self._group):
                metrics = stepper.validate(_beating(batches, self._beat))
        except StepRefusedError as reason:
            self._refuse(reason)
            return
        seconds = self._spent + time.perf_counter() - self._began
        reports = self._members.end_epoch(stepper.runtimes, metrics, seconds / len(metrics))
        self._group = []
        self._losses.report(reports)
        if stepper.finding is not None and stepper.finding is not self._profile:
            self._profile = stepper.finding
            self.events.append(Profiled(self._job, self.key, self._profile))
        if self._members.runtimes and any(report.state is not TrialState.RUNNING for report in reports):
            self.linger = min(LINGER * seconds, LONGEST_LINGER)
        yield False

    def _train_steps(self, group: list[TrialRuntime], plan: StepPlan) -> Iterator[bool]:
        """The rest of the training steps of an epoch; `_group` holds the trials that have not left."""
        steps, data_seed = plan.epoch_steps, group[0].trial.data_seed
        walks = {runtime.epoch: plan.walk(runtime.epoch, runtime.step, data_seed) for runtime in group}
        if self._stepper is None and not self.position:
            self.position = group[0].step * plan.settings.batch_size * plan.settings.accumulate
        self._group = group
        stepper = self._stepper_of(steps)
        try:
            for step in range(group[0].step, steps):
                yield True
                if self._drop_left():
                    if not self._group:
                        return
                    walks = {k: walk for k, walk in walks.items() if any(x.epoch == k for x in self._group)}
                    stepper = self._stepper_of(steps)
                self._losses.begin_step()
                batches = {epoch: next(walk) for epoch, walk in walks.items()}
                ticks = [plan.tick(runtime.epoch, step) for runtime in self._group]
                losses = _take_step(stepper, [batches[runtime.epoch] for runtime in self._group], ticks)
                update_averages(self._group)
                self._losses.add(self._group, losses)
                self._shown = self._shown or (len(self._group) > 1 and not stepper.refusal)
                self._beat()
                for runtime in self._group:
                    runtime.end_step()
                self.position += plan.samples(self._group[0].epoch, step)
                self._losses.end_step()
        finally:
            self._losses.flush()

    def _drop_left(self) -> bool:
        """Drop trials that have left from the group; returns whether there were any."""
        if all(runtime in self._members.runtimes for runtime in self._group):
            return False
        self._losses.flush()
        self._group = [runtime for runtime in self._group if runtime in self._members.runtimes]
        return True

    def _separate_epochs(self, reason: MixedEpochsError) -> None:
        """Train trials at different epochs in turns from now on; after a wrong step, from their checkpoints."""
        _log.warning("trials at different epochs take turns: %s", reason)
        self._mixes = False
        if reason.spoilt:
            self._go_back()
        self._group = []

    def _refuse(self, reason: StepRefusedError) -> None:
        """Train trials of this key in plain PyTorch from now on; the group begins again at its checkpoints."""
        _log.warning(
            "trials %s go back to their checkpoints, and train in plain PyTorch from there: %s",
            [runtime.trial.number for runtime in self._group],
            reason,
        )
        if reason.trial is None:
            self._state.refused.add(self.key)
        else:
            self._state.unkeyed.add(reason.trial)
        self._go_back()

    def _go_back(self) -> None:
        """Let the group begin again at its checkpoints, which were written before the failed step."""
        self._drop_stepper()  # before others are built: it holds as much memory as they will
        self._members.rebuild(self._group)
        self._group = []

    def _stepper_of(self, epoch_steps: int) -> Stepper:
        """The stepper of the group, or a new one if the group has changed."""
        if self._stepper is None or self._stepper.runtimes != self._group:
            self._drop_stepper()
            steps = max((x.member.target - x.epoch) * epoch_steps - x.step for x in self._group)
            self._beat()
            state, refused = self._state, self.key in self._state.refused
            with during(Activity.BUILD):
                self._stepper = make_stepper(
                    state.task, self._group, self._profile, steps, self._shown, refused, state.unkeyed
                )
        return self._stepper

    def _drop_stepper(self) -> None:
        """Drop the stepper; its finding stays."""
        if self._stepper is not None:
            self._profile = self._stepper.finding or self._profile
            self._stepper = None
            if self._state.device.type == "cuda":
                gc.collect()  # its array is a reference cycle that holds memory of the device


def _take_step(stepper: Stepper, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
    if stepper.settled:
        return stepper.train_step(batches, ticks)
    with during(Activity.TIMED_STEPS):
        return stepper.train_step(batches, ticks)


def _beating(batches: Iterable[Any], beat: Callable[[], None]) -> Iterator[Any]:
    """The batches, with a beat after each."""
    for batch in batches:
        yield batch
        beat()
