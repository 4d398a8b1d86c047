"""The loop of a study: ask the algorithm, place what waits, hear what came of it, until all is decided."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from shoal.algorithms.base import Algorithm
from shoal.core.array import Array, Member, add_members, remove_members
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.errors import (
    AlgorithmError,
    CheckpointError,
    DeviceError,
    ShoalError,
    StorageFullError,
    StudyInterrupted,
)
from shoal.core.event import (
    BLAMELESS,
    ArrayFailed,
    Ended,
    Event,
    MemoryMeasured,
    Outcome,
    PackSpeedMeasured,
    Profiled,
    Reported,
    SignaturesFound,
)
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import Decision, Report, TrialGroup, TrialState
from shoal.journal.replay import replay
from shoal.journal.requests import Request, carried_out, pending
from shoal.journal.writer import Journal
from shoal.planner.aftermath import Aftermath, Scene
from shoal.planner.checked import checked, whole
from shoal.planner.fatal import fatal
from shoal.planner.fleet import Fleet
from shoal.planner.lessons import Lessons
from shoal.planner.planner import Placement, Planner
from shoal.planner.silence import Silence
from shoal.planner.speeds import Speeds
from shoal.planner.standings import Standing, Standings, retried_through
from shoal.planner.surveys import Surveys, surveyed
from shoal.remedy import command
from shoal.report.progress import Progress
from shoal.report.verdict import first_failed
from shoal.schedule.ledger import no_device
from shoal.setting import Setting
from shoal.upkeep import Upkeep
from shoal.worker.files import inherit

__all__ = ["Engine"]

TURN_SECONDS = 0.25
"""Longest wait for an event, after which the display and an interrupt are looked at."""

REPLAN_SECONDS = 1.0
"""Where nothing has changed but how far trials are, the planner is asked again after these seconds."""


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
        self._lessons = Lessons(setting.history, journal.study.get("task", ""))
        self._planner = self._make_planner(self._new_id)
        self._speeds = Speeds(setting.tuner)
        self._jobs = len(journal.jobs())
        self._running: dict[str, tuple[Job, Device]] = {}
        self._events: deque[Event] = deque()  # polled, not yet handled
        self._trials = Standings()
        self._surveys = Surveys({device.kind for _, device in setting.cluster})
        self._aftermath = Aftermath(self._trials, setting.retries)
        self.fleet = setting.fleet or Fleet(setting.cluster)
        """The devices."""
        silence = Silence(setting.hang_seconds)
        self._upkeep = Upkeep(
            self.fleet, setting.backend, journal, setting.find, setting.monitor, silence, setting.clock
        )
        self._placed: object = None
        self._placed_at = 0.0
        self._interrupted = False

    def run(self) -> None:
        """Go on until the algorithm has finished.

        Raises:
            StudyInterrupted: `interrupt` was called; everything is saved.
            StudyFailedError: the first trials all fail of one cause; see `FirstFailures`.
            TaskError: the task breaks its contract.
            StorageFullError: there is no room for the journal or a checkpoint.
        """
        self._journal.devices_are(self.fleet.whole)
        self._journal.put("stopped", None)
        self._journal.put("finished", False)
        with self._progress:
            try:
                self._loop()
            except ShoalError as error:
                unsaved = self._wind_up(record=not isinstance(error, StorageFullError))
                if unsaved:
                    error.add_note(f"while stopping: {'; '.join(unsaved)}; these trials go on from older checkpoints")
                raise
            self._wind_up()
        self._journal.put("finished", True)

    def interrupt(self) -> None:
        """Let `run` save everything and stop at its next turn. Safe to call from a signal handler."""
        self._interrupted = True

    def replay(self) -> None:
        """Bring the algorithm and this engine to where the journal is; nothing may have run yet.

        Raises:
            JournalError: the algorithm does not do again what it did.
        """
        self._journal.requeue_running()
        decisions = replay(self._journal, self._algorithm, self._planner.courses.enlist)
        retried = self._trials.retried = set(self._journal.retried)
        paused = {row.number for row in self._journal.trials() if row.state is TrialState.PAUSED}
        decisions = [decision for decision in decisions if decision.trial not in retried]
        self._journal.decided([*decisions, *map(retried_through, retried & paused)])
        self._trials.tried = set(self._journal.study.get("tried", ()))
        for row in self._journal.trials():
            if row.metrics:
                self._aftermath.first.reported()
            self._trials.restore(Standing(row.trial, row.target, row.epoch, failures=row.failures), row.state)
        for standing in self._trials.waiting():
            self._inherit(standing)

    def _loop(self) -> None:
        self._heed()
        while not self._finished:
            self._upkeep.watch(self._running)
            self._ask()
            self._survey()
            self._place()
            self._check_alive()
            self._hear(self._planner.patience(self._setting.clock(), TURN_SECONDS))
            self._heed()
            self._progress.update()
            if self._interrupted:
                raise StudyInterrupted(
                    f"stopped; everything is saved. Go on with: {command('resume', self._journal.directory)}"
                )

    @property
    def _finished(self) -> bool:
        return self._algorithm.finished and not self._trials.retrying()

    def _heed(self) -> None:
        """Do what users ask for."""
        for request in pending(self._journal.directory):
            match request.verb:
                case "add" | "remove":
                    self._upkeep.change(request)
                case "retry":
                    self._retry(request)

    def _retry(self, request: Request) -> None:
        """Let trials that failed be tried again; what was recorded before a kill is not done twice."""
        if request.name != self._journal.study.get("retried", {}).get("request"):
            for number, epoch in self._journal.retry(request.trials, request.name).items():
                self._trials.try_again(self._trials[number], epoch)
                self._inherit(self._trials[number])
        carried_out(self._journal.directory, request)

    def _ask(self) -> None:
        """What does the algorithm want next?"""
        if self._algorithm.finished:
            return
        idle = len(self._idle())
        groups = self._algorithm.next_groups(idle)
        self._journal.asked(idle, groups)
        self._planner.courses.enlist(groups)
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
            self._observe("", [standing.failed(str(error))])

    def _survey(self) -> None:
        """Have the models of new trials looked at, so that the planner knows which are one structure.

        Workers do it, as many as there are idle devices: none of them starts later than it must, and user code that
        crashes does not take the engine along. Where none is idle, those that train do it between two steps.
        """
        asked = surveyed(job for job, _ in self._running.values())
        known = self._surveys.keys
        unknown = [x.member for x in self._trials.waiting() if x.number not in known and x.number not in asked]
        if self._setting.structure:
            self._surveys.know(self._setting.structure, unknown)
        elif idle := self._idle():
            shares = zip(self._surveys.shares(unknown, len(idle)), idle, strict=False)
            self._start((Job(self._new_id(), (share,), Purpose.SURVEY), device) for share, device in shares)
        elif self._setting.backend.elastic:
            training = [job.id for job, _ in self._running.values() if job.purpose is Purpose.TRAIN]
            for job, trials in self._surveys.looks([member.trial for member in unknown], training).items():
                self._setting.backend.change(job, JobUpdate(look=trials))

    def _place(self) -> None:
        """Fuse and place what waits, once surveys have looked at all of it; note why the rest does."""
        asked = surveyed(job for job, _ in self._running.values())
        everyone = self._trials.waiting()
        keys = self._surveys.keys
        waiting = [x for x in everyone if x.number in keys]
        unknown = [x for x in everyone if x.number not in keys]
        cluster = self._speeds.cluster(self.fleet.cluster)
        looked_at = any(device.healthy for _, device in cluster)
        why = "its model has to be looked at first" if looked_at else no_device(cluster)
        reasons = {x.number: why for x in unknown}
        if any(x.number in asked for x in unknown):
            reasons |= {x.number: "waits for those whose models are looked at" for x in waiting}
            self._journal.waiting_reasons(self._trials.told(reasons))
            self._placed = None
            return
        now = self._setting.clock()
        situation = self._situation(everyone, cluster)
        if situation == self._placed and now < min(self._placed_at + REPLAN_SECONDS, self._planner.wake):
            return
        placement = self._plan(self._planner, cluster, now)
        self._journal.waiting_reasons(self._trials.told({**reasons, **placement.refusals}))
        self._placed, self._placed_at = None if placement.starts or placement.joins else situation, now
        for job, leave in placement.leaves.items():
            self._journal.leaving(job, leave.reason)
            self._setting.backend.stop(job)
        self._promise(placement.promises)
        self._start(placement.starts)
        for job, arrays in placement.joins.items():
            self._let_join(job, arrays)

    def _plan(self, planner: Planner, cluster: Cluster, now: float) -> Placement:
        """What a planner says of all that waits and was looked at."""
        keys, devices = self._surveys.keys, {device.name: device for _, device in cluster}
        return planner.plan(
            [(x.member, keys[x.number]) for x in self._trials.waiting() if x.number in keys],
            [(self._trials.present(job), devices[device.name]) for job, device in self._running.values()],
            cluster,
            now,
            alone=self._trials.alone,
            unmeasurable=self._surveys.unmeasurable,
            limits=self._trials.limits,
        )

    def _make_planner(self, new_id: Callable[[], str]) -> Planner:
        mine = self._setting
        know, elastic = self._lessons, mine.backend.elastic
        return Planner(mine.policy, know.profile, new_id, elastic, mine.grouping, mine.fuse, know.done)

    def _situation(self, waiting: Sequence[Standing], cluster: Cluster) -> object:
        """What a plan depends on, but for the time and how far running trials are."""
        running = {
            number: frozenset(member.trial.number for member in self._trials.present(job).members)
            for number, (job, _) in self._running.items()
        }
        mine = [(x.number, x.epoch, x.target, x.failures, x.number in self._surveys.keys) for x in waiting]
        known = self._lessons.learnt, len(self._trials.alone), len(self._surveys.unmeasurable)
        return mine, running, self._planner.courses.away, cluster, known

    def _promise(self, promises: Mapping[str, Demand]) -> None:
        """Note what running jobs are promised from now on, before others are promised what they give back."""
        self._journal.promised(promises)
        for number, demand in promises.items():
            self._running[number] = (replace(self._running[number][0], demand=demand), self._running[number][1])

    def _let_join(self, number: str, arrays: Sequence[Array]) -> None:
        """Let trials join a running job."""
        job, device = self._running[number]
        members = [member for array in arrays for member in array.members]
        self._journal.joined(job.id, device.name, arrays)
        self._setting.backend.change(job.id, JobUpdate(join=tuple(arrays)))
        held = remove_members(self._trials.present(job).arrays, {member.trial.number for member in members})
        job = replace(job, arrays=add_members(held, arrays))  # who has left is of no account
        self._running[number] = (job, device)
        self._speeds.change(job)
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
            self._upkeep.begin(job)
            if job.purpose is Purpose.TRAIN:
                self._trials.begin(job.id, job.members)

    def _check_alive(self) -> None:
        """Nothing runs although there are devices: what waits can never start, and says why.

        It only waits where it could start if lost devices came back and programs of others went.
        """
        if self._running or self._finished or self._planner.sleeps:
            return
        if not self._trials.has_waiting():
            raise AlgorithmError(f"{self._algorithm!r} neither proposes trials nor has finished")
        reason, numbers = next(iter(self._journal.waiting().items()))
        if self.fleet.emptied:
            return
        if self.fleet.diminished:
            hopeful = self.fleet.hopeful
            ids = map("hoped-for-{}".format, count())
            at_best = self._plan(self._make_planner(ids.__next__), hopeful, self._setting.clock())
            unknown = any(x.number not in self._surveys.keys for x in self._trials.waiting())
            if at_best.starts or (unknown and any(device.healthy for _, device in hopeful)):
                return
            reason = next(iter(at_best.refusals.values()), reason)
        raise DeviceError(
            f"{len(numbers)} trials can never start: {reason}. Everything is saved; choose devices that suffice, such "
            f"as fewer CPU slots: {command('resume', self._journal.directory, '--devices ...')}"
        )

    def _hear(self, timeout: float) -> None:
        """What happened?"""
        self._events.extend(self._setting.backend.poll(timeout))
        while self._events:
            self._handle(self._events.popleft())

    def _handle(self, event: Event) -> None:
        event = self._upkeep.hear(event, self._running)
        match event:
            case Reported():
                self._planner.courses.heard(event, self._setting.clock())
                self._observe(event.job, event.reports)
                job, device = self._running[event.job]
                if (crowd := self._speeds.epoch(event, self._trials.has_waiting)) is not None:
                    self._lessons.crowded(job.arrays[0].key, device.kind, *crowd)
                alone = sum(where.name == device.name for _, where in self._running.values()) == 1
                if event.reports:
                    self._lessons.epoch(event, job.arrays, device.kind, alone=alone)
            case SignaturesFound():
                self._surveys.note(event)
                if event.note and "note" not in self._journal.study:  # every worker finds it
                    self._journal.put("note", event.note)
            case Profiled() | PackSpeedMeasured() | MemoryMeasured():
                self._learn(event)
            case ArrayFailed():
                self._drop(event)
            case Ended():
                self._end(event)

    def _learn(self, found: Profiled | PackSpeedMeasured | MemoryMeasured) -> None:
        job, device = self._running[found.job]
        self._lessons.learn(found, job, device)
        if isinstance(found, Profiled) and job.purpose is Purpose.PROFILE:
            still_to_come = tuple(array for array in job.arrays if array.key != found.key)
            self._running[job.id] = (replace(job, arrays=still_to_come), device)

    def _observe(self, job: str, reports: Iterable[Report]) -> None:
        reports = [checked(report, self._journal.objectives, self._trials) for report in reports]
        news = self._journal.reported(job, reports)
        if any(report.metrics for report in reports):
            self._aftermath.first.reported()
        for report in news:
            standing = self._trials[report.trial]
            standing.epoch = max(standing.epoch, report.epoch)
            self._trials.move(standing, report.state)
            if report.state is TrialState.PAUSED:
                self._trials.was_well(standing)
        decisions = [decision for report in news for decision in self._decide(report)]
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
            self._setting.backend.change(running, JobUpdate(leave=frozenset(numbers)))

    def _decide(self, report: Report) -> list[Decision]:
        """The algorithm's decisions after a report; reports of retried trials are kept from it."""
        if report.trial in self._trials.retried:
            return [retried_through(report.trial)] if report.state is TrialState.PAUSED else []
        return [x for x in self._algorithm.observe(report) if x.trial not in self._trials.retried]

    def _end(self, ended: Ended) -> None:
        """A job is over; its trials that have not reached their targets wait again."""
        job, device = self._running.pop(ended.job)
        self._speeds.end(job.id)
        error = self._fatal(ended, job.purpose, job.members)
        failed = ended.outcome not in BLAMELESS and error is None
        self._surveys.end(job, device.kind, failed=failed)
        arrays = self._trials.present(job).arrays if job.purpose is Purpose.TRAIN else job.arrays
        outcome = self._planner.courses.outcome(ended)
        left = self._journal.job_ended(ended.job, outcome, ended.message, failed=failed)
        self._planner.courses.end(job, outcome, left, self._setting.clock())
        self._trials.wait_again(left)
        if error is not None:
            raise error
        if failed:
            if job.purpose is Purpose.PROFILE and ended.outcome is Outcome.RAISED:
                for member in job.members[:1]:  # the code would raise in its training, too
                    self._aftermath.first.note(member.trial.number, ended.message)
            self._judge(ended, Scene(arrays, device, company=len(job.members) > 1), left)
        self._lessons.end(job.id)

    def _drop(self, dropped: ArrayFailed) -> None:
        """An array of a job has failed; its trials wait again."""
        job, device = self._running[dropped.job]
        present = self._trials.present(job).arrays
        members = [member for member in job.members if member.trial.number in dropped.trials]
        others = remove_members(job.arrays, dropped.trials)
        error = self._fatal(dropped, job.purpose, members)
        message = f"{dropped.outcome}: {dropped.message}"
        left = self._journal.dropped(job.id, dropped.trials, message, failed=error is None)
        self._trials.wait_again(left)
        if error is not None:
            raise error
        job = replace(job, arrays=others)
        self._running[job.id] = (job, device)
        self._speeds.change(job)
        gone = remove_members(present, {member.trial.number for array in others for member in array.members})
        self._judge(dropped, Scene(gone, device, company=len(members) > 1), left)

    def _judge(self, failed: Ended | ArrayFailed, scene: Scene, left: Collection[int]) -> None:
        """Decide how trials that failed go on, and correct what was believed of the memory that they take."""
        device = self.fleet.cluster.device(scene.device.name)
        if failed.outcome is Outcome.OUT_OF_MEMORY:
            self._lessons.ran_out(failed.job, scene.arrays, device.kind, device.memory)
        shared = any(where.name == device.name for _, where in self._running.values())
        largest = max((other.memory for _, other in self.fleet.cluster if other.healthy), default=0)
        scene = replace(scene, device=device, shared=shared, largest=largest)
        spent = self._aftermath.judge(failed, scene, frozenset(left))
        self._observe("", [self._trials[number].failed(why) for number, why in spent.items()])
        self._check_first()

    def _check_first(self) -> None:
        """End a study whose first trials fail alike."""
        if (cause := self._aftermath.first.alike()) is not None:
            self._journal.stopped(cause)
            raise first_failed(cause, self._journal)

    def _fatal(self, failed: Ended | ArrayFailed, purpose: Purpose, members: Sequence[Member]) -> ShoalError | None:
        kept = self._journal.study.get("kept", False)
        return fatal(failed, purpose, members, self._trials, self._journal.directory, kept=kept)

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
            self._upkeep.watch(self._running, record=record)
            if not self._events:
                self._events.extend(self._setting.backend.poll(TURN_SECONDS))
            while self._events:
                event = self._upkeep.hear(self._events.popleft(), self._running)
                self._note(event, record=record)
                if isinstance(event, Ended) and event.outcome not in (Outcome.FINISHED, Outcome.STOPPED):
                    unsaved.append(f"{event.job} {event.outcome}")
        return unsaved

    def _note(self, event: Event, *, record: bool) -> None:
        """Record an event without acting on it."""
        match event:
            case Profiled() | PackSpeedMeasured():
                self._learn(event)
            case ArrayFailed() if record:
                self._journal.dropped(event.job, event.trials, event.message, failed=False)
            case Reported() if record:
                self._journal.reported(event.job, whole(event.reports, self._journal.objectives))
            case Ended():
                del self._running[event.job]
                if record:
                    self._journal.job_ended(event.job, event.outcome, event.message, failed=False)

    def _idle(self) -> list[Device]:
        held = {device.name for _, device in self._running.values()}
        return [device for _, device in self.fleet.cluster if device.healthy and device.name not in held]

    def _new_id(self) -> str:
        self._jobs += 1
        return f"job-{self._jobs:05d}"
