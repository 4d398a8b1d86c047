"""The loop of a study: ask the algorithm, place what waits, hear what came of it, until all is decided."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from shoal.algorithms.base import Algorithm
from shoal.backend.base import Backend
from shoal.cluster.device import Cluster, Device
from shoal.cost.demand import Profile
from shoal.cost.history import History
from shoal.errors import (
    AlgorithmError,
    CheckpointError,
    DeviceError,
    JournalError,
    ShoalError,
    StorageFullError,
    StudyInterrupted,
    TaskError,
)
from shoal.journal.rows import Ask
from shoal.journal.writer import Journal
from shoal.objective import check_reported, missing, named
from shoal.planner.event import Ended, Event, Outcome, Profiled, Reported, Surveyed
from shoal.planner.job import Array, ArrayKey, Change, Job, Member, Purpose
from shoal.planner.planner import Planner
from shoal.planner.speeds import Speeds
from shoal.planner.standings import Standing, Standings
from shoal.report.progress import Progress
from shoal.schedule.base import Policy
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.trial import Decision, Report, Trial, TrialGroup, TrialState
from shoal.worker.files import inherit

__all__ = ["Engine", "Setting"]

TURN_SECONDS = 0.25
"""Longest wait for an event, after which the display and an interrupt are looked at."""

_NO_KEY = ArrayKey("not looked at", "", 1)


@dataclass
class Setting:
    """What an engine works with.

    Args:
        cluster: the devices.
        policy: decides which job runs where.
        backend: runs them.
        history: what is known of jobs, across studies.
        retries: how often a trial whose job failed is tried again.
        tuner: finds how many times the compute of the devices may be promised, from what jobs report; by default it
            leaves all of them as they are.
    """

    cluster: Cluster
    policy: Policy
    backend: Backend
    history: History
    retries: int = 2
    tuner: OversubscriptionTuner = field(default_factory=lambda: OversubscriptionTuner(kinds=()))


class Engine:
    """Runs one study to its end.

    Every change is in the journal before anything is done about it, so an engine that is killed at any moment is
    followed by another that begins with `replay`.
    """

    def __init__(self, journal: Journal, algorithm: Algorithm, setting: Setting, progress: Progress) -> None:
        self._journal = journal
        self._algorithm = algorithm
        self._setting = setting
        self._progress = progress
        self._planner = Planner(setting.policy, self._profile, self._new_id, setting.backend.elastic)
        self._speeds = Speeds(setting.tuner)
        self._jobs = len(journal.jobs())
        self._running: dict[str, tuple[Job, Device]] = {}
        self._events: deque[Event] = deque()  # polled, not yet handled
        self._trials = Standings()
        self._keys: dict[int, ArrayKey] = {}
        self._looks: dict[str, list[set[int]]] = {}  # job -> trials that it was asked to look at beside its training
        self._unseen: set[int] = set()  # trials that no job can look at beside its training
        self._unmeasurable: set[tuple[ArrayKey, str]] = set()
        self._suspects: set[int] = set()  # trials of a survey that crashed
        self._interrupted = False

    def run(self) -> None:
        """Go on until the algorithm has finished.

        Raises:
            StudyInterrupted: `interrupt` was called; everything is saved.
            TaskError: the task breaks its contract.
            StorageFullError: there is no room for the journal or a checkpoint.
        """
        with self._progress:
            try:
                self._loop()
            except ShoalError as error:
                unsaved = self._wind_up(record=not isinstance(error, StorageFullError))
                if unsaved:
                    error.add_note(f"while stopping: {'; '.join(unsaved)}; these trials go on from older checkpoints")
                raise
            self._wind_up()

    def interrupt(self) -> None:
        """Let `run` save everything and stop at its next turn. Safe to call from a signal handler."""
        self._interrupted = True

    def replay(self) -> None:
        """Bring the algorithm and this engine to where the journal is; nothing may have run yet.

        Raises:
            JournalError: the algorithm does not do again what it did.
        """
        self._journal.requeue_running()
        decisions: list[Decision] = []
        for event in self._journal.events():
            if isinstance(event, Ask):
                groups = tuple(self._algorithm.next_groups(event.free))
                if groups != event.groups:
                    raise JournalError(
                        f"the algorithm of the study in {self._journal.directory} proposes other trials than it did; "
                        "go on with the version of shoal that began it, and with a sampler that does the same again"
                    )
            else:
                decisions += self._algorithm.observe(event)
        self._journal.decided(decisions)
        for row in self._journal.trials():
            self._trials.move(Standing(row.trial, row.target, row.epoch, failures=row.failures), row.state)
            if row.failures > 0 and row.state is TrialState.PENDING:
                self._trials.alone.add(row.number)
        for standing in self._trials.waiting():
            self._inherit(standing)

    def _loop(self) -> None:
        while not self._algorithm.finished:
            self._ask()
            self._survey()
            self._place()
            self._check_alive()
            self._hear(TURN_SECONDS)
            self._progress.update()
            if self._interrupted:
                raise StudyInterrupted(
                    f"stopped; everything is saved. Go on with: shoal resume {self._journal.directory}"
                )

    def _ask(self) -> None:
        """What does the algorithm want next?"""
        idle = len(self._idle())
        groups = self._algorithm.next_groups(idle)
        self._journal.asked(idle, groups)
        for group in groups:
            self._enlist(group)

    def _enlist(self, group: TrialGroup) -> None:
        for trial in group.trials:
            standing = self._trials.get(trial.number) or Standing(trial, 0, trial.start)
            standing.target = group.budget.epochs
            self._trials.move(standing, TrialState.PENDING)
            self._inherit(standing)

    def _inherit(self, standing: Standing) -> None:
        """Give a trial that begins as a copy the checkpoint of the other, before that one trains on."""
        try:
            inherit(self._journal.directory, standing.trial)
        except CheckpointError as error:
            self._observe("", [self._failure(standing, str(error))])

    def _survey(self) -> None:
        """Have the models of new trials looked at, so that the planner knows which are one structure.

        Workers do it, as many as there are idle devices: none of them starts later than it must, and user code that
        crashes does not take the engine along. Where none is idle, those that train do it between two steps.
        """
        asked = self._surveyed()
        unknown = [x.member for x in self._trials.waiting() if x.number not in self._keys and x.number not in asked]
        idle = self._idle()
        if not idle:
            self._look([member.trial for member in unknown])
            return
        if any(member.trial.number in self._suspects for member in unknown):
            unknown = [member for member in unknown if member.trial.number in self._suspects][: len(idle)]
        shares = [unknown[place :: len(idle)] for place in range(len(idle))]
        self._start(
            (Job(self._new_id(), (Array(_NO_KEY, tuple(share)),), Purpose.SURVEY), device)
            for share, device in zip(shares, idle, strict=True)
            if share
        )

    def _surveyed(self) -> set[int]:
        """The trials that surveys are looking at."""
        surveys = [job for job, _ in self._running.values() if job.purpose is Purpose.SURVEY]
        return {member.trial.number for job in surveys for member in job.members}

    def _look(self, trials: Sequence[Trial]) -> None:
        """Have the jobs that train look at trials, each at its share."""
        training = [job.id for job, _ in self._running.values() if job.purpose is Purpose.TRAIN]
        if not training or not self._setting.backend.elastic:
            return
        asked = self._unseen.union(self._suspects, *chain(*self._looks.values()))
        trials = [trial for trial in trials if trial.number not in asked]
        for place, job in enumerate(training):
            share = tuple(trials[place :: len(training)])
            if share:
                self._looks.setdefault(job, []).append({trial.number for trial in share})
                self._setting.backend.change(job, Change(look=share))

    def _place(self) -> None:
        """Fuse and place what waits, once surveys have looked at all of it; note why the rest does."""
        surveyed = self._surveyed()
        everyone = self._trials.waiting()
        waiting = [x for x in everyone if x.number in self._keys]
        unknown = [x for x in everyone if x.number not in self._keys]
        reasons = {x.number: "its model has to be looked at first" for x in unknown}
        if any(x.number in surveyed for x in unknown):
            reasons |= {x.number: "waits for those whose models are looked at" for x in waiting}
            self._journal.waiting_reasons(reasons)
            return
        cluster = self._speeds.cluster(self._setting.cluster)
        devices = {device.name: device for _, device in cluster}
        placement = self._planner.plan(
            [(x.member, self._keys[x.number]) for x in waiting],
            [(self._as_it_is(job), devices[device.name]) for job, device in self._running.values()],
            cluster,
            time.monotonic(),
            alone=self._trials.alone,
            unmeasurable=self._unmeasurable,
        )
        self._journal.waiting_reasons({**reasons, **placement.refusals})
        self._start(placement.starts)
        for job, members in placement.joins.items():
            self._let_join(job, members)

    def _as_it_is(self, job: Job) -> Job:
        """A training job with those members that it still trains, from where they are now."""
        if job.purpose is not Purpose.TRAIN:
            return job
        (array,) = job.arrays
        standings = [self._trials[member.trial.number] for member in array.members]
        present = tuple(x.member for x in standings if x.state is TrialState.RUNNING and x.job == job.id)
        return replace(job, arrays=(replace(array, members=present),))

    def _let_join(self, number: str, members: Sequence[Member]) -> None:
        """Let trials join a running job."""
        job, device = self._running[number]
        (array,) = job.arrays
        self._journal.joined(job.id, device.name, members)
        self._setting.backend.change(job.id, Change(join=tuple(members)))
        new = [x for x in members if all(x.trial.number != other.trial.number for other in array.members)]
        self._running[number] = (replace(job, arrays=(replace(array, members=(*array.members, *new)),)), device)
        self._mark_running(job.id, members)

    def _start(self, starts: Iterable[tuple[Job, Device]]) -> None:
        starts = list(starts)
        if not starts:
            return
        with self._journal.transaction():
            for job, device in starts:
                self._journal.job_started(job, device.name)
        for job, device in starts:
            self._setting.backend.start(job, device)
            self._running[job.id] = (job, device)
            self._speeds.begin(job, device)
            if job.purpose is Purpose.TRAIN:
                self._mark_running(job.id, job.members)

    def _mark_running(self, job: str, members: Iterable[Member]) -> None:
        for member in members:
            standing = self._trials[member.trial.number]
            standing.job = job
            self._trials.move(standing, TrialState.RUNNING)

    def _check_alive(self) -> None:
        """Nothing runs although there are devices: what waits can never start, and says why."""
        if self._running or self._algorithm.finished:
            return
        if not self._trials.has_waiting():
            raise AlgorithmError(f"{self._algorithm!r} neither proposes trials nor has finished")
        reason, numbers = next(iter(self._journal.waiting().items()))
        raise DeviceError(
            f"{len(numbers)} trials can never start: {reason}. Everything is saved; choose devices that suffice, such "
            f"as fewer CPU slots: shoal resume {self._journal.directory} --devices ..."
        )

    def _hear(self, timeout: float) -> None:
        """What happened?"""
        self._events.extend(self._setting.backend.poll(timeout))
        while self._events:
            self._handle(self._events.popleft())

    def _handle(self, event: Event) -> None:
        match event:
            case Reported():
                self._observe(event.job, event.reports)
                self._speeds.epoch(event, self._trials.has_waiting)
            case Surveyed():
                self._keys.update(event.keys)
                if looks := self._looks.get(event.job):
                    self._unseen |= looks.pop(0) - event.keys.keys()
                self._give_up_measuring([event.keys[number] for number in event.alone])
            case Profiled():
                self._remember(event)
            case Ended():
                self._end(event)

    def _remember(self, measured: Profiled) -> None:
        job, device = self._running[measured.job]
        key, profile = job.arrays[0].key, measured.profile
        known = self._profile(key, device.kind)
        if known is not None and job.purpose is Purpose.TRAIN:  # another job may have found something meanwhile
            profile = replace(
                known,
                fused_gain={**known.fused_gain, **profile.fused_gain},
                compiled_gain={**known.compiled_gain, **profile.compiled_gain},
                compile_seconds=profile.compile_seconds or known.compile_seconds,
            )
        self._setting.history.put(key.structure, key.data, key.batch_size, device.kind, profile)

    def _missing(self, report: Report) -> str | None:
        """A metric of the study that a report should have and lacks."""
        has_failed = report.state is TrialState.FAILED
        return None if has_failed else missing(self._journal.objectives, report.metrics)

    def _checked(self, report: Report) -> Report:
        """A report with all metrics of the study, or one that its trial has failed since it lacks one.

        Raises:
            TaskError: no trial has reported it so far, so it is the task's fault or the study's.
        """
        metric = self._missing(report)
        if metric is None:
            return report
        if not any(x.epoch > x.trial.start for x in self._trials):
            check_reported(self._journal.objectives, report.metrics)
        reason = f"metric {metric!r} is missing at epoch {report.epoch}; the trial reports {named(report.metrics)}"
        return replace(report, state=TrialState.FAILED, reason=reason)

    def _observe(self, job: str, reports: Iterable[Report]) -> None:
        reports = [self._checked(report) for report in reports]
        news = self._journal.reported(job, reports)
        for report in news:
            standing = self._trials[report.trial]
            standing.epoch = max(standing.epoch, report.epoch)
            self._trials.move(standing, report.state)
            if report.state is TrialState.PAUSED:
                self._trials.alone.discard(standing.number)
        decisions = [decision for report in news for decision in self._algorithm.observe(report)]
        self._journal.decided(decisions)
        leaving: dict[str, set[int]] = {}
        for report in reports:
            if job and report.state is TrialState.FAILED and report.metrics:  # its worker may not know
                leaving.setdefault(job, set()).add(report.trial)
        for decision in decisions:
            standing = self._trials[decision.trial]
            if standing.state is TrialState.RUNNING:
                leaving.setdefault(standing.job, set()).add(decision.trial)
            if not standing.state.final:
                self._trials.move(standing, decision.state)
        for running, numbers in leaving.items():
            self._setting.backend.change(running, Change(leave=frozenset(numbers)))

    def _end(self, ended: Ended) -> None:
        """A job is over; its trials that have not reached their targets wait again, alone if it failed."""
        job, device = self._running.pop(ended.job)
        not_looked_at = set(chain(*self._looks.pop(ended.job, [])))
        self._speeds.end(job.id)
        fatal = self._fatal(job, ended)
        failed = ended.outcome not in (Outcome.FINISHED, Outcome.STOPPED) and fatal is None
        left = self._journal.job_ended(ended.job, ended.outcome, ended.message, failed=failed)
        for number, failures in left.items():
            standing = self._trials[number]
            standing.failures = failures
            self._trials.move(standing, TrialState.PENDING)
            if failed:
                self._trials.alone.add(number)
        if fatal is not None:
            raise fatal
        if failed:
            self._suspects |= not_looked_at
            self._bury(job, device, ended, left)

    def _fatal(self, job: Job, ended: Ended) -> ShoalError | None:
        """The error that ends the study, if every other job would end so too.

        A task that breaks its contract does so for all trials, unless one has got past it. A survey is rejected only
        where the task cannot be loaded at all.
        """
        if ended.outcome is Outcome.STORAGE_FULL:
            return StorageFullError(
                f"{ended.message}\nEverything recorded is intact; free some space, then: "
                f"shoal resume {self._journal.directory}"
            )
        for_all = job.purpose is Purpose.SURVEY or not any(x.epoch for x in self._trials)
        if ended.outcome is Outcome.REJECTED and for_all:
            first, *others = job.members
            company = f" and {len(others)} more" if others else ""
            config = dict(first.trial.config)
            return TaskError(f"{ended.message}\nIt was met with trial {first.trial.number}{company}: {config}")
        return None

    def _bury(self, job: Job, device: Device, ended: Ended, left: Iterable[int]) -> None:
        """Draw the consequences of a failure: no further tries, or a key that cannot be measured or looked at.

        Who is at fault in a job of several is unknown: each of them gets at least one try alone.
        """
        if job.purpose is Purpose.PROFILE:
            self._unmeasurable.add((job.arrays[0].key, device.kind))
        elif job.purpose is Purpose.SURVEY:
            self._look_again(job)
        if len(job.members) == 1:
            tries = 0 if ended.outcome is Outcome.REJECTED else self._setting.retries
            spent = [x for x in map(self._trials.__getitem__, left) if x.failures > tries]
            reasons = [f"{ended.outcome} after {x.failures - 1} retries: {ended.message}" for x in spent]
            self._observe("", map(self._failure, spent, reasons))

    def _look_again(self, survey: Job) -> None:
        """After a survey that crashed: at one trial after another, and not again at one that crashes alone."""
        numbers = {member.trial.number for member in survey.members}
        if len(numbers) > 1:
            self._suspects |= numbers
            return
        keys = {number: replace(_NO_KEY, structure=f"trial {number}") for number in numbers}
        self._keys.update(keys)
        self._give_up_measuring(keys.values())

    def _failure(self, standing: Standing, reason: str) -> Report:
        return Report(standing.number, standing.epoch, state=TrialState.FAILED, reason=reason)

    def _give_up_measuring(self, keys: Iterable[ArrayKey]) -> None:
        kinds = {device.kind for _, device in self._setting.cluster}
        self._unmeasurable.update((key, kind) for key in keys for kind in kinds)

    def _wind_up(self, *, record: bool = True) -> list[str]:
        """However the study ends, let all jobs save their trials and end, and record what they still say.

        Args:
            record: false where the journal has no room.

        Returns:
            What kept jobs from saving their trials.
        """
        unsaved: list[str] = []
        for job in self._running:
            self._setting.backend.stop(job)
        while self._running:
            if not self._events:
                self._events.extend(self._setting.backend.poll(TURN_SECONDS))
            while self._events:
                event = self._events.popleft()
                self._note(event, record=record)
                if isinstance(event, Ended) and event.outcome not in (Outcome.FINISHED, Outcome.STOPPED):
                    unsaved.append(f"{event.job} {event.outcome}")
        return unsaved

    def _note(self, event: Event, *, record: bool) -> None:
        """Record an event without acting on it."""
        match event:
            case Profiled():
                self._remember(event)
            case Reported() if record:
                self._journal.reported(event.job, [report for report in event.reports if self._missing(report) is None])
            case Ended():
                del self._running[event.job]
                if record:
                    self._journal.job_ended(event.job, event.outcome, event.message, failed=False)

    def _idle(self) -> list[Device]:
        held = {device.name for _, device in self._running.values()}
        return [device for _, device in self._setting.cluster if device.healthy and device.name not in held]

    def _profile(self, key: ArrayKey, kind: str) -> Profile | None:
        return self._setting.history.get(key.structure, key.data, key.batch_size, kind)

    def _new_id(self) -> str:
        self._jobs += 1
        return f"job-{self._jobs:05d}"
