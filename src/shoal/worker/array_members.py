"""Trials of an array in a worker: how they join, leave, and are restored, saved and cached."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from torch import nn

from shoal.core.activity import Activity
from shoal.core.array import Member
from shoal.core.trial import Report, TrialState
from shoal.cost.activity_clock import during
from shoal.fuse.frozen import is_worth_sharing, share_frozen
from shoal.worker.loss_tracker import LossTracker
from shoal.worker.step_plan import StepPlan
from shoal.worker.trial_runtime import TrialRuntime, build, side_by_side
from shoal.worker.worker_state import WorkerState

__all__ = ["ArrayMembers"]


class ArrayMembers:
    """The trials of an array: those in training, and those that wait to join.

    Args:
        members: Trials that join first.
        worker_state: State of the process.
        losses: Loss tracker of the array, which sends the reports.
        lenders: Function that returns models whose large frozen parameters new models may use; see `ArrayTrainer`.
        beat: Function to call before anything that may take long.
        schedulers: Whether trials use their LR schedulers.
    """

    def __init__(
        self,
        members: Iterable[Member],
        worker_state: WorkerState,
        losses: LossTracker,
        lenders: Callable[[], Iterable[nn.Module]],
        beat: Callable[[], None],
        schedulers: bool = True,
    ) -> None:
        self.runtimes: list[TrialRuntime] = []
        """Trials in training."""
        self.joining: list[Member] = list(members)
        """Trials that wait to join."""
        self.failures: list[tuple[frozenset[int], Exception | SystemExit]] = []
        """Numbers of trials that could not be built while others train, and the exception."""
        self._state = worker_state
        self._losses = losses
        self._lenders = lenders
        self._beat = beat
        self._schedulers = schedulers
        self._owed: set[int] = set()  # trials that train one more epoch before others join

    @property
    def trials(self) -> frozenset[int]:
        """Numbers of the trials in training and of those that wait to join."""
        return frozenset(x.trial.number for x in self.runtimes) | {x.trial.number for x in self.joining}

    def admit(self, mixes: bool) -> None:
        """Build the trials that wait to join, and report their epochs that the journal lacks.

        Args:
            mixes: Whether trials at different epochs train as one. If not, trials join only after those in training
                have had an epoch since the last ones joined.
        """
        if not mixes and self._owed:
            return
        if self.joining:
            self._owed = {runtime.trial.number for runtime in self.runtimes}
        while self.joining:
            member = self.joining[0]
            self._beat()
            try:
                with during(Activity.BUILD):
                    runtime = self._runtime(member)
            except (Exception, SystemExit) as error:
                if not self.runtimes:
                    raise
                self.save()  # the other trials lose nothing
                self.failures.append((frozenset({member.trial.number}), error))
                del self.joining[0]
                continue
            del self.joining[0]
            self._report_known(runtime)
            if runtime.epoch < member.target:
                self.runtimes.append(runtime)
                self._lend(runtime.model)

    def _runtime(self, member: Member) -> TrialRuntime:
        """A trial from the cache of this process, from its checkpoint, or from its start."""
        runtime = self._state.paused.take(member, self._state.directory)
        if runtime is None:
            runtime = build(self._state.task, member, self._state.device)
            runtime.restore(self._state.directory, self._epoch_steps(member))
        return runtime if self._schedulers else dataclasses.replace(runtime, scheduler=None)

    def _epoch_steps(self, member: Member) -> int:
        config = member.trial.config
        return StepPlan.of(self._state.task, config, *self._state.sets.of(config)).epoch_steps

    def _report_known(self, runtime: TrialRuntime) -> None:
        """Report the epochs of a checkpoint that the journal lacks, or the last one if the target is reached."""
        member = runtime.member
        missing = [r for r in runtime.reports if member.start < r.epoch <= member.target]
        if missing:
            self._losses.report(_with_state(runtime, report) for report in missing)
        elif runtime.epoch >= member.target and runtime.reports:
            self._losses.report([_with_state(runtime, runtime.reports[-1])])

    def _lend(self, model: nn.Module) -> None:
        """Let a new model use large frozen parameters of models in this process."""
        if is_worth_sharing(model):
            for lender in (self.runtimes[0].model, *self._lenders()):
                if lender is not model:
                    share_frozen(lender, model)

    def next_group(self, mixes: bool) -> list[TrialRuntime]:
        """The trials to train next as one: all at the same step of their epochs.

        Trials in the middle of an epoch come first. If trials at different epochs cannot train as one, the epoch that
        is furthest behind comes first.

        Args:
            mixes: Whether trials at different epochs train as one.
        """

        def place(runtime: TrialRuntime) -> tuple[int, int]:
            return (0 if mixes else runtime.epoch, -runtime.step)

        first = min(map(place, self.runtimes))
        return side_by_side(runtime for runtime in self.runtimes if place(runtime) == first)

    def end_epoch(
        self, group: Sequence[TrialRuntime], metrics: Sequence[dict[str, float]], seconds: float
    ) -> list[Report]:
        """End an epoch of these trials; those that reached their targets or failed leave.

        Args:
            group: Trials that ended the epoch.
            metrics: Metrics of each trial on the validation set.
            seconds: Wall time of the epoch for each trial.
        """
        reports = []
        for runtime, values in zip(group, metrics, strict=True):
            failure = runtime.failure
            report = runtime.end_epoch(values, seconds)
            self._owed.discard(runtime.trial.number)
            if failure:
                report = dataclasses.replace(report, state=TrialState.FAILED, reason=failure)
            else:
                report = _with_state(runtime, report)
            if report.state is TrialState.PAUSED:
                with during(Activity.CHECKPOINTS):
                    runtime.save(self._state.directory)
                    self._state.paused.keep(runtime)
            if report.state is not TrialState.RUNNING:
                self._remove(runtime)
            reports.append(report)
        return reports

    def leave(self, numbers: AbstractSet[int]) -> set[int]:
        """Save and remove the trials with these numbers; returns the numbers that were in the array."""
        gone = {member.trial.number for member in self.joining} & numbers
        self.joining = [member for member in self.joining if member.trial.number not in gone]
        leaving = [runtime for runtime in self.runtimes if runtime.trial.number in numbers]
        if leaving:
            self._losses.flush()
        for runtime in leaving:
            self._save(runtime)
            self._remove(runtime)
            gone.add(runtime.trial.number)
        return gone

    def rebuild(self, group: Sequence[TrialRuntime]) -> None:
        """Let trials begin again from their newest checkpoints: they wait to join, before all others."""
        self.runtimes = [runtime for runtime in self.runtimes if runtime not in group]
        self.joining = [*(runtime.member for runtime in group), *self.joining]
        self._owed.clear()

    def save(self) -> None:
        """Write checkpoints of all trials in training."""
        self._losses.flush()
        for runtime in self.runtimes:
            self._save(runtime)

    def suspend(self) -> None:
        """Save all trials, and cache them for the next job of this process."""
        self.save()
        with during(Activity.CHECKPOINTS):
            for runtime in self.runtimes:
                if not runtime.failure:
                    self._state.paused.keep(runtime)

    def _save(self, runtime: TrialRuntime) -> None:
        """Save a trial, unless it is about to fail: restored from its last checkpoint it fails at the same step."""
        if not runtime.failure:
            with during(Activity.CHECKPOINTS):
                runtime.save(self._state.directory)

    def _remove(self, runtime: TrialRuntime) -> None:
        self.runtimes.remove(runtime)
        self._owed.discard(runtime.trial.number)


def _with_state(runtime: TrialRuntime, report: Report) -> Report:
    reached = report.epoch >= runtime.member.target
    return dataclasses.replace(report, state=TrialState.PAUSED if reached else TrialState.RUNNING)
