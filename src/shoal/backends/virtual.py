"""A back end under a virtual clock: jobs take the seconds that a workload says, and nobody waits for them."""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from typing import Protocol

from shoal.backends import base
from shoal.backends.base import Backend, Event, Outcome, WorkerContext
from shoal.core.array import Array, FusionKey, Member, remove_members
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.errors import BackendError, CheckpointError
from shoal.core.event import TurnStats
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import Report, Trial, TrialState
from shoal.cost.estimate import compute, seconds

__all__ = ["START_SECONDS", "SlowDown", "Virtual", "VirtualJob", "Workload", "fair"]

_Life = Iterator[tuple[float, bool]]
"""What a job does: seconds until it says something, alone on its device, and whether others slow it down meanwhile."""

START_SECONDS = 0.1
"""From when a process is started until it does anything."""
SURVEY_SECONDS = 0.02
"""For which the model of one trial is looked at."""
PROFILE_SECONDS = 0.3
"""For which one array is measured."""
STOP_SECONDS = 0.05
"""From when a job is asked to stop until it has saved its trials."""


class Workload(Protocol):
    """What trials are and cost, and what they report: functions of their arguments alone.

    Thus a study measures the same numbers however often its jobs are killed and its trials trained again.
    """

    def key(self, trial: Trial) -> FusionKey:
        """What trials agree on that can share an array."""

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """What an array of a key costs on a kind of device."""

    def report(self, trial: Trial, epoch: int) -> Report:
        """What a trial reports after an epoch: RUNNING, or FAILED where it ends by itself."""

    def error(self, trial: Trial, epoch: int) -> str:
        """What user code raises in that epoch of a trial, which takes its array along; "" where nothing is wrong."""
        return ""

    def losses(self, trial: Trial, epoch: int) -> Sequence[float]:
        """The training losses of that epoch's steps; by default its first metric."""
        return [next(iter(self.report(trial, epoch).metrics.values()))]

    def start_seconds(self, job: Job) -> float:
        """From when a job that trains is started, or goes on after it was suspended, to its first step."""
        return START_SECONDS


@dataclass(eq=False)
class _VirtualArray:
    """An array in a job.

    Args:
        key: of its members.
        profile: of the key where it runs.
        members: by number of the trial.
        epochs: that each has behind it.
    """

    key: FusionKey
    profile: Profile
    members: dict[int, Member] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class VirtualJob:
    """A job on a device; for reading.

    Args:
        job: as it was started.
        device: that it is on; its helpers are named by the job.
        lanes: its arrays; they take turns, the first one is next.
        joining: who comes in at the end of the epoch.
        saved: when its trials were saved last, in seconds of the virtual clock.
        hangs: it does nothing any more, and does not end.
        over: it has ended.
        life: what it does, as what it takes between what it says.
        stage: how often that was scheduled; what the heap has of earlier times is void.
        left: seconds, alone on its device, until it says something again.
        since: when that was true.
        works: whether others on its device slow it down meanwhile.
        ahead: seconds of its epoch after that.
        speed: in company, as a fraction of that alone on one device.
    """

    job: Job
    device: Device
    lanes: deque[_VirtualArray] = field(default_factory=deque)
    joining: list[Array] = field(default_factory=list)
    saved: float = 0.0
    hangs: bool = False
    over: bool = False
    life: _Life = field(default_factory=lambda: iter(()))
    stage: int = 0
    left: float = inf
    since: float = 0.0
    works: bool = False
    ahead: float = 0.0
    speed: float = 1.0

    @property
    def trials(self) -> set[int]:
        """Numbers of those that it trains or is about to."""
        joining = (member.trial.number for array in self.joining for member in array.members)
        return {number for lane in self.lanes for number in lane.members}.union(joining)

    @property
    def memory(self) -> int:
        """Bytes that its arrays take of the device, in one process."""
        trained = [lane for lane in self.lanes if lane.members]
        base = max((lane.profile.base_memory for lane in trained), default=0)
        return base + sum(len(lane.members) * lane.profile.member_memory for lane in trained)

    @property
    def asked(self) -> float:
        """Compute that it asks for: that of the array that takes most, as they take turns."""
        return max((compute(array.profile) for array in self.job.arrays if array.profile is not None), default=1.0)

    @property
    def share(self) -> float | None:
        """Compute that a policy has given to it, where that is not what it asks for (see `JobView.share`)."""
        promised = self.job.demand
        return None if promised is None or abs(promised.compute - self.asked) < _ROUNDING else promised.compute


SlowDown = Callable[[Device, Sequence[VirtualJob]], Sequence[float]]
"""Speed of each job as a fraction of its speed alone on the whole device, of all that train there, in their order."""

_ROUNDING = 1e-6


def fair(device: Device, jobs: Sequence[VirtualJob]) -> Sequence[float]:
    """Jobs run at full speed while what they are promised is there, and in proportion beyond."""
    asked = sum(job.job.demand.compute for job in jobs if job.job.demand is not None)
    return [min(1.0, device.compute / asked) if asked else 1.0] * len(jobs)


class Virtual(Backend):
    """Runs jobs on devices that exist only in a virtual clock, which `poll` moves.

    There is no process, no waiting and no randomness. What is to come is a heap in time, so that a poll costs the
    logarithm of the number of jobs, whatever that is.

    A worker is modelled as far as its study can see it: a checkpoint of each trial at the end of its stretch, every
    `checkpoint_seconds` at the end of an epoch, and where a job stands when it is stopped; epochs that are trained anew
    from an older one, and reports again; members that leave at once and join at the end of an epoch; arrays whose
    errors leave the others alone.

    Args:
        worker_context: of which only `checkpoint_seconds` counts.
        workload: what trials are and cost.
        checkpoints: number of a trial -> epochs of its newest checkpoint; what earlier back ends of the study left.
        now: seconds, where the clock begins.
        beat_seconds: in which a job says at least once that it makes progress.
        slowdown: how fast jobs are that share a device; asked whenever one comes or goes.
        tick: seconds from the first thing said in which `poll` gathers what else is.
    """

    def __init__(
        self,
        worker_context: WorkerContext,
        workload: Workload,
        checkpoints: dict[int, int] | None = None,
        now: float = 0.0,
        beat_seconds: float = 60.0,
        slowdown: SlowDown = fair,
        tick: float = 0.0,
    ) -> None:
        super().__init__(worker_context)
        self.now = now
        """Seconds of the virtual clock."""
        self.jobs: dict[str, VirtualJob] = {}
        """Those that have not ended, by id; for reading."""
        self._workload = workload
        self._beat_seconds, self._slowdown, self._tick = beat_seconds, slowdown, tick
        self._checkpoints = {} if checkpoints is None else checkpoints
        self._heap: list[tuple[float, int, VirtualJob, int]] = []
        self._order = count()
        self._said: list[Event] = []
        self._started: set[str] = set()
        self._begun: dict[int, float] = {}  # number of a trial that was stopped -> part of its next epoch that is done
        self._on: dict[str, dict[str, VirtualJob]] = {}  # those that train, by device
        self._closed = False

    def clock(self) -> float:
        """Seconds of the virtual clock."""
        return self.now

    def start(self, job: Job, device: Device) -> None:
        """Take a job in."""
        if self._closed:
            raise BackendError(f"job {job.id!r} cannot start: the back end is closed")
        if job.id in self._started:
            raise BackendError(f"job {job.id!r} cannot start: a job of that id was started before")
        self._started.add(job.id)
        mine = self.jobs[job.id] = VirtualJob(job, device, saved=self.now)
        if job.purpose is Purpose.TRAIN:
            mine.joining += job.arrays
            self._on.setdefault(device.name, {})[job.id] = mine
            self._settle(device)
        self._go_on(mine, self._life(mine))

    def stop(self, job: str) -> None:
        """Let a job save its trials and end, shortly."""
        mine = self.jobs.get(job)
        if mine is not None and not mine.hangs:
            self._keep(mine)
            self._go_on(mine, self._stopping(mine))

    def kill(self, job: str) -> None:
        """End a job where it stands."""
        self.fail(job, Outcome.CRASHED, "was killed")

    def change(self, job: str, change: JobUpdate) -> None:
        """Let members leave now, saved, others join at the end of the epoch, and trials be looked at now."""
        mine = self.jobs.get(job)
        if mine is None or mine.hangs:
            return
        if gone := change.leave & mine.trials:
            self._save(mine, gone)
            for lane in mine.lanes:
                lane.members = {number: each for number, each in lane.members.items() if number not in gone}
            mine.joining = list(remove_members(mine.joining, gone))
            self._said.append(base.MembersLeft(job, frozenset(gone)))
        mine.joining += change.join
        if change.look:
            self._said.append(base.SignaturesFound(job, {x.number: self._workload.key(x) for x in change.look}))

    def inherit(self, directory: Path, trial: Trial) -> None:
        """Give a trial that begins as a copy the checkpoint of its origin.

        Raises:
            CheckpointError: the origin has trained on, or has none.
        """
        origin = trial.origin
        if origin is None or trial.number in self._checkpoints:
            return
        if self._checkpoints.get(origin.trial) != origin.epoch:
            raise CheckpointError(
                f"trial {trial.number} was to go on from trial {origin.trial} at epoch {origin.epoch}, whose newest "
                f"checkpoint is of epoch {self._checkpoints.get(origin.trial)}"
            )
        self._checkpoints[trial.number] = origin.epoch

    def poll(self, timeout: float) -> list[Event]:
        """What was said; if that is nothing, what is said next, within the timeout on the virtual clock.

        With nothing to come and no end to the timeout, the clock stays.
        """
        until = self.now + (min(self._tick, timeout) if self._said else timeout)
        while self._heap and self._heap[0][0] <= until:
            at, _, job, stage = heapq.heappop(self._heap)
            if job.over or job.hangs or job.stage != stage:
                continue
            self.now = at
            job.left = 0.0
            self._advance(job)
            if self._said:
                until = min(until, self.now + self._tick)
        if not self._said and until < inf:
            self.now = until
        said, self._said = self._said, []
        return said

    @property
    def idle(self) -> bool:
        """Whether nothing is to come."""
        return not self._said and all(job.over or job.stage != stage for _, _, job, stage in self._heap)

    def close(self) -> None:
        """End all jobs where they stand; nothing more is said of them."""
        self._closed = True
        for job in list(self.jobs.values()):
            self._end(job)
        self._said.clear()
        self._heap.clear()

    def fail(self, job: str, outcome: Outcome, message: str) -> None:
        """A job ends badly, at once; one that has ended is left alone."""
        if (mine := self.jobs.get(job)) is not None:
            self._end(mine)
            self._said.append(base.Ended(job, outcome, message))

    def fail_array(self, job: str, trials: Collection[int], outcome: Outcome, message: str) -> None:
        """An array of a job, that with these trials, fails; the job goes on if it has others, else it ends so."""
        mine = self.jobs[job]
        failed = [lane for lane in mine.lanes if lane.members.keys() & set(trials)]
        if any(lane.members for lane in mine.lanes if lane not in failed):
            trials = {number for lane in failed for number in lane.members}
            for lane in failed:
                lane.members.clear()
            self._said.append(base.ArrayFailed(job, frozenset(trials), outcome, message))
        else:
            self.fail(job, outcome, message)

    def hang(self, job: str) -> None:
        """A job does nothing more, and has to be killed."""
        if (mine := self.jobs.get(job)) is not None:
            mine.hangs = True

    def _go_on(self, job: VirtualJob, life: _Life) -> None:
        """From now on a job does this, and nothing of what it would have done."""
        job.life = life
        self._advance(job)

    def _advance(self, job: VirtualJob) -> None:
        """Let a job come to where it next takes time."""
        job.left, job.works = next(job.life, (inf, False))
        job.since = self.now
        self._schedule(job)

    def _schedule(self, job: VirtualJob) -> None:
        """Say when a job has done what is left, at the speed that it has."""
        job.stage += 1
        speed = job.speed if job.works else 1.0
        if speed > 0 and job.left < inf:
            heapq.heappush(self._heap, (self.now + job.left / speed, next(self._order), job, job.stage))

    def _settle(self, device: Device) -> None:
        """Give all jobs on a device the speed that they have from now on."""
        if not (here := list(self._on.get(device.name, {}).values())):
            return
        wide = len(here) == 1 and here[0].job.helpers
        speeds = [_spread(here[0])] if wide else self._slowdown(device, here)
        for job, speed in zip(here, speeds, strict=True):
            if speed == job.speed:
                continue
            before, job.speed = job.speed, speed
            if job.works:
                job.left, job.since = max(0.0, job.left - (self.now - job.since) * before), self.now
                self._schedule(job)

    def _end(self, job: VirtualJob) -> None:
        job.over = True
        del self.jobs[job.job.id]
        if self._on.get(job.device.name, {}).pop(job.job.id, None) is not None:
            self._settle(job.device)

    def _life(self, job: VirtualJob) -> _Life:
        """All that a job does, as what it takes between what it says."""
        name = job.job.id
        starts = self._workload.start_seconds(job.job) if job.job.purpose is Purpose.TRAIN else START_SECONDS
        yield starts, False
        match job.job.purpose:
            case Purpose.SURVEY:
                yield from self._works(job, SURVEY_SECONDS * len(job.job.members), settled=False)
                self._said.append(base.SignaturesFound(name, {x.trial.number: self._key(x) for x in job.job.members}))
            case Purpose.PROFILE:
                for array in job.job.arrays:
                    yield PROFILE_SECONDS, False
                    profile = self._workload.profile(array.key, job.device.kind)
                    self._said.append(base.Profiled(name, array.key, profile))
            case Purpose.TRAIN:
                yield from self._train(job)
        if not job.over:
            self._end(job)
            self._said.append(base.Ended(name, Outcome.FINISHED))

    def _stopping(self, job: VirtualJob) -> _Life:
        yield STOP_SECONDS, False
        self._save(job, job.trials)
        self._end(job)
        self._said.append(base.Ended(job.job.id, Outcome.STOPPED))

    def _train(self, job: VirtualJob) -> _Life:
        """An epoch of one array after the other, until nobody is left."""
        self._take_in(job)
        self._said.append(base.Heartbeat(job.job.id, settled=True))
        measured = False
        while job.lanes and not job.over:
            lane = job.lanes[0]
            job.lanes.rotate(-1)
            began, done = self.now, min(self._begun.pop(number, 0.0) for number in lane.members)
            takes = seconds(lane.profile, [1] * len(lane.members)) * (1 - done)
            yield from self._works(job, takes, settled=True)
            self._end_epoch(job, lane, self.now - began)
            if job.over:
                return
            if not measured:
                measured = True
                self._measure(job)
            self._take_in(job)

    def _works(self, job: VirtualJob, takes: float, *, settled: bool) -> _Life:
        """Work in which a job only says that it makes progress."""
        while takes > self._beat_seconds:
            takes -= self._beat_seconds
            job.ahead = takes
            yield self._beat_seconds, True
            self._said.append(base.Heartbeat(job.job.id, settled))
        job.ahead = 0.0
        yield takes, True

    def _end_epoch(self, job: VirtualJob, lane: _VirtualArray, took: float) -> None:
        """Members of an array report an epoch, or it fails."""
        members = list(lane.members.items())
        trials = {number: member.trial for number, member in members}
        for number, member in members:
            if message := self._workload.error(member.trial, lane.epochs[number] + 1):
                self.fail_array(job.job.id, lane.members.keys(), Outcome.RAISED, message)
                return
        reports = []
        for number, member in members:
            lane.epochs[number] = epoch = lane.epochs[number] + 1
            report = self._workload.report(member.trial, epoch)
            state = report.state if epoch < member.target or report.state is TrialState.FAILED else TrialState.PAUSED
            reports.append(Report(number, epoch, report.metrics, took / len(members), state, report.reason))
            if state is TrialState.PAUSED:
                self._checkpoints[number] = epoch
            if state is not TrialState.RUNNING:
                del lane.members[number]
        if reports:
            best = min(reports, key=lambda report: next(iter(report.metrics.values()), inf))
            losses = self._workload.losses(trials[best.trial], best.epoch)
            turn = TurnStats(max(losses), min(losses), losses[-1], len(losses), took)
            self._said.append(base.Reported(job.job.id, tuple(reports), turn))
        if self.now - job.saved >= self.worker_context.checkpoint_seconds:
            self._save(job, job.trials)
            job.saved = self.now

    def _take_in(self, job: VirtualJob) -> None:
        """Let members in, from where their checkpoints are; who is further than its study knows reports that again."""
        joining, job.joining = job.joining, []
        for array in joining:
            lane = next((lane for lane in job.lanes if lane.key == array.key and not array.apart), None)
            if lane is None:
                key = self._key(array.members[0])  # its study may know none
                lane = _VirtualArray(array.key, self._workload.profile(key, job.device.kind))
                job.lanes.append(lane)
            for member in array.members:
                number, trial = member.trial.number, member.trial
                epoch = self._checkpoints.get(number, trial.start)
                again = range(member.start + 1, min(epoch, member.target) + 1)
                if reports := [self._workload.report(trial, x) for x in again]:
                    self._said.append(base.Reported(job.job.id, tuple(_as_of(x, member.target) for x in reports)))
                if epoch < member.target:
                    lane.members[number], lane.epochs[number] = member, epoch
        job.lanes = deque(lane for lane in job.lanes if lane.members)

    def _measure(self, job: VirtualJob) -> None:
        """What a job finds out of itself when it has trained for a while."""
        members = {lane.key: len(lane.members) for lane in job.lanes if lane.members}
        if members:
            self._said.append(base.MemoryMeasured(job.job.id, members, job.memory))
        if len(members) > 1:
            self._said.append(base.PackSpeedMeasured(job.job.id, tuple(members), 1.0))

    def _save(self, job: VirtualJob, trials: Collection[int]) -> None:
        for lane in job.lanes:
            self._checkpoints.update((number, lane.epochs[number]) for number in lane.members.keys() & trials)

    def _keep(self, job: VirtualJob) -> None:
        """A job that is stopped saves its array in the middle of an epoch."""
        if not (job.works and job.lanes):
            return
        lane = job.lanes[-1]
        whole = seconds(lane.profile, [1] * len(lane.members)) if lane.members else 0.0
        if whole > 0:
            left = job.left - (self.now - job.since) * job.speed + job.ahead
            self._begun.update(dict.fromkeys(lane.members, max(0.0, 1 - left / whole)))

    def _key(self, member: Member) -> FusionKey:
        return self._workload.key(member.trial)


def _spread(job: VirtualJob) -> float:
    """Speed of a job on several devices, as a multiple of that on one; its profiles say how many it may have."""
    devices = 1 + len(job.job.helpers)
    return min(1 / array.profile.spreading[devices] for array in job.job.arrays if array.profile is not None)


def _as_of(report: Report, target: int) -> Report:
    """A report that is made again, for a stretch that ends there."""
    state = TrialState.PAUSED if report.epoch >= target else TrialState.RUNNING
    return Report(report.trial, report.epoch, report.metrics, report.seconds, state)
