"""The loop of a study: ask the algorithm, place what waits, hear what came of it, until all is decided."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

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
from shoal.planner.event import Dropped, Ended, Event, Outcome, Paced, Profiled, Reported, Surveyed
from shoal.planner.grouping import Grouping
from shoal.planner.job import Array, ArrayKey, Change, Job, Member, Purpose, without
from shoal.planner.planner import Planner
from shoal.planner.speeds import Speeds
from shoal.planner.standings import Standing, Standings
from shoal.planner.surveys import Surveys
from shoal.report.progress import Progress
from shoal.schedule.base import Policy
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.trial import Decision, Report, TrialGroup, TrialState
from shoal.worker.files import inherit

__all__ = ["Engine", "Setting"]

TURN_SECONDS = 0.25
"""Longest wait for an event, after which the display and an interrupt are looked at."""

REPLAN_SECONDS = 1.0
"""Where nothing has changed but how far trials are, the planner is asked again after these seconds."""


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
        grouping: decides which arrays share a process.
        fuse: whether trials may share an array.
    """

    cluster: Cluster
    policy: Policy
    backend: Backend
    history: History
    retries: int = 2
    tuner: OversubscriptionTuner = field(default_factory=lambda: OversubscriptionTuner(kinds=()))
    grouping: Grouping = field(default_factory=Grouping)
    fuse: bool = True


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
        self._planner = Planner(
            setting.policy, self._profile, self._new_id, setting.backend.elastic, setting.grouping, setting.fuse
        )
        self._speeds = Speeds(setting.tuner)
        self._jobs = len(journal.jobs())
        self._running: dict[str, tuple[Job, Device]] = {}
        self._events: deque[Event] = deque()  # polled, not yet handled
        self._trials = Standings()
        self._surveys = Surveys({device.kind for _, device in setting.cluster})
        self._findings = 0  # what was measured so far
        self._placed: object = None
        self._placed_at = 0.0
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
        known = self._surveys.keys
        unknown = [x.member for x in self._trials.waiting() if x.number not in known and x.number not in asked]
        if idle := self._idle():
            shares = self._surveys.shares(unknown, len(idle))
            self._start(
                (Job(self._new_id(), (share,), Purpose.SURVEY), device)
                for share, device in zip(shares, idle, strict=False)
            )
        elif self._setting.backend.elastic:
            training = [job.id for job, _ in self._running.values() if job.purpose is Purpose.TRAIN]
            for job, trials in self._surveys.looks([member.trial for member in unknown], training).items():
                self._setting.backend.change(job, Change(look=trials))

    def _surveyed(self) -> set[int]:
        """The trials that surveys are looking at."""
        surveys = [job for job, _ in self._running.values() if job.purpose is Purpose.SURVEY]
        return {member.trial.number for job in surveys for member in job.members}

    def _place(self) -> None:
        """Fuse and place what waits, once surveys have looked at all of it; note why the rest does."""
        surveyed = self._surveyed()
        everyone = self._trials.waiting()
        keys = self._surveys.keys
        waiting = [x for x in everyone if x.number in keys]
        unknown = [x for x in everyone if x.number not in keys]
        reasons = {x.number: "its model has to be looked at first" for x in unknown}
        if any(x.number in surveyed for x in unknown):
            reasons |= {x.number: "waits for those whose models are looked at" for x in waiting}
            self._journal.waiting_reasons(reasons)
            self._placed = None
            return
        cluster = self._speeds.cluster(self._setting.cluster)
        devices = {device.name: device for _, device in cluster}
        now = time.monotonic()
        situation = self._situation(everyone, cluster)
        if situation == self._placed and now < self._placed_at + REPLAN_SECONDS:
            return
        placement = self._planner.plan(
            [(x.member, keys[x.number]) for x in waiting],
            [(self._trials.present(job), devices[device.name]) for job, device in self._running.values()],
            cluster,
            now,
            alone=self._trials.alone,
            unmeasurable=self._surveys.unmeasurable,
        )
        self._journal.waiting_reasons({**reasons, **placement.refusals})
        self._placed, self._placed_at = None if placement.starts or placement.joins else situation, now
        self._start(placement.starts)
        for job, arrays in placement.joins.items():
            self._let_join(job, arrays)

    def _situation(self, waiting: Sequence[Standing], cluster: Cluster) -> object:
        """What a plan depends on, but for the time and how far running trials are."""
        running = {
            number: frozenset(member.trial.number for member in self._trials.present(job).members)
            for number, (job, _) in self._running.items()
        }
        mine = [(x.number, x.epoch, x.target, x.number in self._surveys.keys) for x in waiting]
        return mine, running, cluster, len(self._trials.alone), len(self._surveys.unmeasurable), self._findings

    def _let_join(self, number: str, arrays: Sequence[Array]) -> None:
        """Let trials join a running job."""
        job, device = self._running[number]
        members = [member for array in arrays for member in array.members]
        self._journal.joined(job.id, device.name, members)
        self._setting.backend.change(job.id, Change(join=tuple(arrays)))
        held = list(without(job.arrays, {member.trial.number for member in members}))
        for array in arrays:
            place = next((place for place, mine in enumerate(held) if mine.key == array.key), None)
            if place is None:
                held.append(array)
                self._speeds.end(job.id)  # of what takes turns no speed is known
            else:
                held[place] = replace(held[place], members=(*held[place].members, *array.members))
        self._running[number] = (replace(job, arrays=tuple(held)), device)
        self._trials.begin(job.id, members)

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
                self._trials.begin(job.id, job.members)

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
                self._surveys.note(event)
            case Profiled():
                self._remember(event)
            case Paced():
                self._remember_pace(event)
            case Dropped():
                self._drop(event)
            case Ended():
                self._end(event)

    def _remember(self, measured: Profiled) -> None:
        job, device = self._running[measured.job]
        key, profile = measured.key, measured.profile
        known = self._profile(key, device.kind)
        if job.purpose is Purpose.PROFILE:
            still_to_come = tuple(array for array in job.arrays if array.key != key)
            self._running[job.id] = (replace(job, arrays=still_to_come), device)
        elif known is not None:  # another job may have found something meanwhile
            profile = replace(
                known,
                fused_gain={**known.fused_gain, **profile.fused_gain},
                compiled_gain={**known.compiled_gain, **profile.compiled_gain},
                compile_seconds=profile.compile_seconds or known.compile_seconds,
            )
        self._setting.history.put(key.structure, key.data, key.batch_size, device.kind, profile)
        self._findings += 1

    def _remember_pace(self, measured: Paced) -> None:
        _, device = self._running[measured.job]
        self._setting.history.put_pace([key.steps for key in measured.keys], device.kind, measured.pace)
        self._findings += 1

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
        self._speeds.end(job.id)
        fatal = self._fatal(job.purpose, job.members, ended)
        failed = ended.outcome not in (Outcome.FINISHED, Outcome.STOPPED) and fatal is None
        self._surveys.end(job.id, failed=failed)
        left = self._journal.job_ended(ended.job, ended.outcome, ended.message, failed=failed)
        self._trials.wait_again(left, alone=failed)
        if fatal is not None:
            raise fatal
        if failed:
            if job.purpose is Purpose.PROFILE:
                self._surveys.unmeasurable.update((array.key, device.kind) for array in job.arrays[:1])
            elif job.purpose is Purpose.SURVEY:
                self._surveys.crashed(job)
            self._bury(job.members, ended, left)

    def _drop(self, dropped: Dropped) -> None:
        """An array of a job has failed; its trials wait again, alone."""
        job, device = self._running[dropped.job]
        members = [member for member in job.members if member.trial.number in dropped.trials]
        others = without(job.arrays, dropped.trials)
        fatal = self._fatal(job.purpose, members, dropped)
        left = self._journal.dropped(job.id, dropped.trials, failed=fatal is None)
        self._trials.wait_again(left, alone=fatal is None)
        if fatal is not None:
            raise fatal
        self._running[job.id] = (replace(job, arrays=others), device)
        self._speeds.end(job.id)
        self._bury(members, dropped, left)

    def _fatal(self, purpose: Purpose, members: Sequence[Member], ended: Ended | Dropped) -> ShoalError | None:
        """The error that ends the study, if every other job would end so too.

        A task that breaks its contract does so for all trials, unless one has got past it. A survey is rejected only
        where the task cannot be loaded at all.
        """
        if ended.outcome is Outcome.STORAGE_FULL:
            return StorageFullError(
                f"{ended.message}\nEverything recorded is intact; free some space, then: "
                f"shoal resume {self._journal.directory}"
            )
        for_all = purpose is Purpose.SURVEY or not any(x.epoch for x in self._trials)
        if ended.outcome is Outcome.REJECTED and for_all and members:
            first, *others = members
            company = f" and {len(others)} more" if others else ""
            config = dict(first.trial.config)
            return TaskError(f"{ended.message}\nIt was met with trial {first.trial.number}{company}: {config}")
        return None

    def _bury(self, members: Sequence[Member], ended: Ended | Dropped, left: Iterable[int]) -> None:
        """No further tries for a trial that has failed by itself often enough.

        Who is at fault among several is unknown: each of them gets at least one try alone.
        """
        if len(members) == 1:
            tries = 0 if ended.outcome is Outcome.REJECTED else self._setting.retries
            spent = [x for x in map(self._trials.__getitem__, left) if x.failures > tries]
            reasons = [f"{ended.outcome} after {x.failures - 1} retries: {ended.message}" for x in spent]
            self._observe("", map(self._failure, spent, reasons))

    def _failure(self, standing: Standing, reason: str) -> Report:
        return Report(standing.number, standing.epoch, state=TrialState.FAILED, reason=reason)

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
            case Paced():
                self._remember_pace(event)
            case Dropped() if record:
                self._journal.dropped(event.job, event.trials, failed=False)
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
