"""Membership of an array in a worker: trials join, leave, and are restored, saved and cached."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from torch import nn

from shoal.core.activity import Activity
from shoal.core.array import Member
from shoal.core.trial import Report, TrialState
from shoal.fuse.frozen import large_frozen, share_frozen
from shoal.host.activity_clock import during
from shoal.train.checkpoint_paths import remove_later_checkpoints
from shoal.train.loss_tracker import LossTracker
from shoal.train.step_plan import StepPlan
from shoal.train.trial_runtime import TrialRuntime, sort_by_optimizer
from shoal.train.worker_state import WorkerState

__all__ = ["ArrayMembers"]


class ArrayMembers:
    """Manages the trials of an array: those in training, and those that wait to join.

    Args:
        frozen_sources: Function that returns models whose large frozen parameters new models may share.
        heartbeat: Function to call before each operation that may take long.
        note: Function to call with a text for the user.
    """

    def __init__(
        self,
        members: Iterable[Member],
        worker_state: WorkerState,
        losses: LossTracker,
        frozen_sources: Callable[[], Iterable[nn.Module]],
        heartbeat: Callable[[], None],
        note: Callable[[str], None],
        use_schedulers: bool = True,
    ) -> None:
        self.runtimes: list[TrialRuntime] = []
        """Trials in training."""
        self.joining: list[Member] = list(members)
        """Trials that wait to join."""
        self.failures: list[tuple[frozenset[int], Exception | SystemExit]] = []
        """Trials that could not be built while others train: their numbers, and the exception."""
        self._state = worker_state
        self._losses = losses
        self._frozen_sources = frozen_sources
        self._heartbeat = heartbeat
        self._note = note
        self._use_schedulers = use_schedulers
        self._epoch_due: set[int] = set()  # trials that must train one epoch before others join

    @property
    def trials(self) -> frozenset[int]:
        """Numbers of the trials in training and of those that wait to join."""
        return frozenset(x.trial.number for x in self.runtimes) | {x.trial.number for x in self.joining}

    def admit(self, mixed_epochs: bool) -> None:
        """Build the trials that wait to join, and report their epochs that the journal lacks.

        Without `mixed_epochs`, trials join only after each trial in training has finished an epoch since the last join.
        """
        if not mixed_epochs and self._epoch_due:
            return
        if self.joining:
            self._epoch_due = {runtime.trial.number for runtime in self.runtimes}
        while self.joining:
            member = self.joining[0]
            self._heartbeat()
            try:
                with during(Activity.BUILD):
                    runtime = self._runtime(member)
            except (Exception, SystemExit) as error:
                if not self.runtimes:
                    raise
                self.save()  # so the other trials lose nothing
                self.failures.append((frozenset({member.trial.number}), error))
                del self.joining[0]
                continue
            del self.joining[0]
            self._report_unrecorded(runtime)
            if runtime.epoch < member.target:
                self.runtimes.append(runtime)
                self._share_frozen(runtime.model)

    def _runtime(self, member: Member) -> TrialRuntime:
        """Return a trial from the cache of this process, else built and restored from its newest checkpoint."""
        runtime = self._state.trial_cache.take(member, self._state.directory)
        if runtime is None:
            epoch_steps = self._epoch_steps(member)  # first, since snapshots leave out the data sets that it loads
            runtime = self._state.build(member)
            self._state.outside.begin(member.trial.number, runtime.model)
            runtime.restore(self._state.directory, epoch_steps)
        return runtime if self._use_schedulers else dataclasses.replace(runtime, scheduler=None)

    def _epoch_steps(self, member: Member) -> int:
        config = member.trial.config
        return StepPlan.of(self._state.task, config, *self._state.sets.of(config)).epoch_steps

    def _report_unrecorded(self, runtime: TrialRuntime) -> None:
        """Report the epochs of a checkpoint that the journal lacks, or the last one again at the target."""
        member = runtime.member
        missing = [r for r in runtime.reports if member.start < r.epoch <= member.target]
        if missing:
            self._losses.report(_with_state(runtime, report) for report in missing)
        elif runtime.epoch >= member.target and runtime.reports:
            self._losses.report([_with_state(runtime, runtime.reports[-1])])

    def _share_frozen(self, model: nn.Module) -> None:
        """Share large frozen parameters of other models of this process with a new model."""
        if large_frozen(model):
            for source in (self.runtimes[0].model, *self._frozen_sources()):
                if source is not model:
                    share_frozen(source, model)

    def next_cohort(self, mixed_epochs: bool) -> list[TrialRuntime]:
        """Return the next cohort, trained as one array: trials at the same step of their epochs.

        Trials in the middle of an epoch come first; without `mixed_epochs`, then those at the lowest epoch.
        """

        def sort_key(runtime: TrialRuntime) -> tuple[int, int]:
            return (0 if mixed_epochs else runtime.epoch, -runtime.step)

        first = min(map(sort_key, self.runtimes))
        return sort_by_optimizer(runtime for runtime in self.runtimes if sort_key(runtime) == first)

    def end_epoch(
        self, cohort: Sequence[TrialRuntime], metrics: Sequence[dict[str, float]], seconds: float
    ) -> list[Report]:
        """End an epoch of these trials, and return their reports; trials at their targets or failed leave the array."""
        reports = []
        for runtime, values in zip(cohort, metrics, strict=True):
            failure = runtime.failure
            report = runtime.end_epoch(values, seconds)
            self._epoch_due.discard(runtime.trial.number)
            if failure:
                report = dataclasses.replace(report, state=TrialState.FAILED, reason=failure)
            else:
                report = _with_state(runtime, report)
            if report.state is TrialState.PAUSED:
                self._save(runtime)
                with during(Activity.CHECKPOINTS):
                    self._state.trial_cache.put(runtime)
            if report.state is not TrialState.RUNNING:
                self._remove(runtime)
            reports.append(dataclasses.replace(report, checkpoint=runtime.checkpoint))
        return reports

    def leave(self, numbers: AbstractSet[int]) -> set[int]:
        """Save and remove the trials with these numbers; return the numbers that were in the array."""
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

    def rebuild(self, cohort: Sequence[TrialRuntime]) -> None:
        """Restart trials from the newest checkpoints that are known to be right: they join again before all others."""
        self.runtimes = [runtime for runtime in self.runtimes if runtime not in cohort]
        self._state.writer.wait()  # else a checkpoint of a later step may come after those are removed
        for runtime in cohort:
            remove_later_checkpoints(self._state.directory, runtime.trial.number, *runtime.proven)
        self.joining = [*(dataclasses.replace(one.member, checkpoint="") for one in cohort), *self.joining]
        self._epoch_due.clear()

    def save(self) -> None:
        """Save all trials in training."""
        self._losses.flush()
        for runtime in self.runtimes:
            self._save(runtime)

    def suspend(self) -> None:
        """Save all trials, and put them in the cache for the next job of this process."""
        self.save()
        with during(Activity.CHECKPOINTS):
            for runtime in self.runtimes:
                if not runtime.failure:
                    self._state.trial_cache.put(runtime)

    def _save(self, runtime: TrialRuntime) -> None:
        """Save a trial, unless it has failed: restored from its last checkpoint, it fails again at the same step."""
        if not runtime.failure:
            with during(Activity.CHECKPOINTS):
                note = runtime.save(self._state.writer, self._state.outside.changed)
            if note:
                self._note(note)

    def _remove(self, runtime: TrialRuntime) -> None:
        self.runtimes.remove(runtime)
        self._epoch_due.discard(runtime.trial.number)


def _with_state(runtime: TrialRuntime, report: Report) -> Report:
    reached = report.epoch >= runtime.member.target
    state = TrialState.PAUSED if reached else TrialState.RUNNING
    return dataclasses.replace(report, state=state, checkpoint=runtime.checkpoint)
