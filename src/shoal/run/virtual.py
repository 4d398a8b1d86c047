"""The virtual back end: jobs take the seconds of a workload on a virtual clock, without a process or a wait."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Protocol

from shoal.core.activity import Activity
from shoal.core.array import FusionKey, remove_members
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.errors import BackendError, CheckpointError
from shoal.core.event import TurnStats
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import Report, Trial, TrialState
from shoal.plan.cost.cost import Cost
from shoal.run import base
from shoal.run.base import Backend, Event, Outcome, WorkerContext
from shoal.run.virtual_job import Timeline, VirtualArray, VirtualJob

__all__ = ["START_SECONDS", "SlowDown", "Virtual", "Workload", "proportional_speeds"]

START_SECONDS = 0.1
"""Time from the start of a process to its first action."""
SIGNATURE_SECONDS = 0.02
"""Time to find the signature of the model of one trial."""
PROFILE_SECONDS = 0.3
"""Time of the measurement of one array."""
STOP_SECONDS = 0.05
"""Time from the request to stop until a job has saved its trials."""
_MEASURES = {Purpose.SIGNATURE: Activity.SIGNATURE, Purpose.PROFILE: Activity.PROFILE}
"""Activities of the jobs that report them."""


class Workload(Protocol):
    """Keys, costs and reports of trials, as functions of the arguments alone.

    So a study measures the same numbers however often its jobs are killed and its trials are trained again.
    """

    def key(self, trial: Trial) -> FusionKey:
        """Return the fusion key of a trial."""

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """Return the cost of an array of a key on a kind of device."""

    def report(self, trial: Trial, epoch: int) -> Report:
        """Return the report of a trial after an epoch: RUNNING, or FAILED if the trial ends by itself."""

    def error(self, trial: Trial, epoch: int) -> str:
        """Return the exception of user code in an epoch of a trial, with which its array fails; "" without one."""
        return ""

    def losses(self, trial: Trial, epoch: int) -> Sequence[float]:
        """Return the training losses of the steps of an epoch; by default its first metric."""
        return [next(iter(self.report(trial, epoch).metrics.values()))]

    def start_seconds(self, job: Job) -> float:
        """Return the seconds from the start, or the resumption, of a training job to its first step."""
        return START_SECONDS


SlowDown = Callable[[Device, Sequence[VirtualJob]], Sequence[float]]
"""Returns the speeds of all jobs that train on a device, in their order, as fractions of their speeds alone on it."""


def proportional_speeds(device: Device, jobs: Sequence[VirtualJob]) -> Sequence[float]:
    """Return full speed while the demands of the jobs fit the device, else speeds in proportion to it."""
    compute_demand = sum(job.job.demand.compute for job in jobs if job.job.demand is not None)
    return [min(1.0, device.compute / compute_demand) if compute_demand else 1.0] * len(jobs)


class Virtual(Backend):
    """Runs jobs on devices that exist only on a virtual clock, which `poll` advances.

    There is no process, no wait and no randomness. Coming events are in a heap ordered by time, so a poll costs the
    logarithm of the number of jobs.

    The model of a worker covers what its study observes. A worker saves each trial when the trial reaches its target,
    every `checkpoint_seconds` at the end of an epoch, and when the job is stopped. A trial with an older checkpoint
    trains and reports its epochs again. Members leave at once and join at the end of an epoch. An error ends only its
    array.

    Args:
        worker_context: Only `checkpoint_seconds` is used.
        checkpoints: Epochs of the newest checkpoint by number of the trial, from earlier back ends of the study.
        beat_seconds: Longest time of work between two events of a job.
        slowdown: Speeds of jobs that share a device; called for each start and end of a job there.
        tick: Seconds after the first event in which `poll` collects further events.
    """

    def __init__(
        self,
        worker_context: WorkerContext,
        workload: Workload,
        checkpoints: dict[int, int] | None = None,
        now: float = 0.0,
        beat_seconds: float = 60.0,
        slowdown: SlowDown = proportional_speeds,
        tick: float = 0.0,
    ) -> None:
        super().__init__(worker_context)
        self.now = now
        self.jobs: dict[str, VirtualJob] = {}
        self._workload = workload
        self._beat_seconds, self._slowdown, self._tick = beat_seconds, slowdown, tick
        self._checkpoints = {} if checkpoints is None else checkpoints
        self._heap: list[tuple[float, int, VirtualJob]] = []
        self._entry_ids = count()
        self._pending: list[Event] = []
        self._started: set[str] = set()
        self._partial_epochs: dict[int, float] = {}  # number of a stopped trial -> finished part of its next epoch
        self._training: dict[str, dict[str, VirtualJob]] = {}  # training jobs by device
        self._closed = False

    def clock(self) -> float:
        """Return the seconds of the virtual clock."""
        return self.now

    def start(self, job: Job, device: Device) -> None:
        """Start a job."""
        if self._closed:
            raise BackendError(f"job {job.id!r} cannot start: the back end is closed")
        if job.id in self._started:
            raise BackendError(f"job {job.id!r} cannot start: a job of that id was started before")
        self._started.add(job.id)
        virtual_job = self.jobs[job.id] = VirtualJob(job, device, last_checkpoint=self.now)
        if job.purpose is Purpose.TRAIN:
            virtual_job.joining += job.arrays
            self._training.setdefault(device.name, {})[job.id] = virtual_job
            self._update_speeds(device)
        virtual_job.timeline = self._job_timeline(virtual_job)
        self._next_step(virtual_job)

    def stop(self, job: str) -> None:
        """Let a job save its trials and end after `STOP_SECONDS`."""
        virtual_job = self.jobs.get(job)
        if virtual_job is not None and not virtual_job.hangs:
            self._partial_epochs.update(virtual_job.progress(self.now))
            virtual_job.timeline = self._stop_timeline(virtual_job)
            self._next_step(virtual_job)

    def kill(self, job: str) -> None:
        """End a job at once."""
        self.fail(job, Outcome.CRASHED, "was killed")

    def change(self, job: str, change: JobUpdate) -> None:
        """Save and remove members now, add others at the end of the epoch, and find the keys of trials now."""
        virtual_job = self.jobs.get(job)
        if virtual_job is None or virtual_job.hangs:
            return
        if leaving := change.leave & virtual_job.trials:
            self._checkpoints.update(virtual_job.epochs(leaving))
            for lane in virtual_job.lanes:
                lane.members = {number: each for number, each in lane.members.items() if number not in leaving}
            virtual_job.joining = list(remove_members(virtual_job.joining, leaving))
            self._pending.append(base.MembersLeft(job, frozenset(leaving)))
        if change.team is not None:
            virtual_job.team = change.team
            self._update_speeds(virtual_job.device)
        virtual_job.joining += change.join
        if change.find_signatures:
            self._pending.append(
                base.SignaturesFound(job, {x.number: self._workload.key(x) for x in change.find_signatures})
            )

    def copy_checkpoint(self, directory: Path, trial: Trial) -> None:
        """Copy the origin's checkpoint to a trial that begins there; CheckpointError if the origin has trained on."""
        origin = trial.origin
        if origin is None or trial.number in self._checkpoints:
            return
        if self._checkpoints.get(origin.trial) != origin.epoch:
            raise CheckpointError(
                f"trial {trial.number} was to continue from trial {origin.trial} at epoch {origin.epoch}, whose newest "
                f"checkpoint is of epoch {self._checkpoints.get(origin.trial)}"
            )
        self._checkpoints[trial.number] = origin.epoch

    def delete_checkpoints(self, directory: Path, trial: int, *, weights: bool) -> None:
        """Forget the checkpoint of an ended trial with its weights."""
        if weights:
            self._checkpoints.pop(trial, None)

    def poll(self, timeout: float) -> list[Event]:
        """Return pending events, or else advance the clock by at most the timeout to the next events.

        Without coming events, an infinite timeout leaves the clock as it is.
        """
        until = self.now + (min(self._tick, timeout) if self._pending else timeout)
        while self._heap and self._heap[0][0] <= until:
            at, entry, job = heapq.heappop(self._heap)
            if job.entry != entry or job.hangs:
                continue
            self.now = at
            job.remaining = 0.0
            self._next_step(job)
            if self._pending:
                until = min(until, self.now + self._tick)
        if not self._pending and until < inf:
            self.now = until
        events, self._pending = self._pending, []
        return events

    @property
    def idle(self) -> bool:
        """Whether no event is pending or coming."""
        return not self._pending and not any(job.entry == entry for _, entry, job in self._heap)

    def close(self) -> None:
        """End all jobs at once, without events."""
        self._closed = True
        while self.jobs:
            self._end(next(iter(self.jobs.values())))
        self._pending.clear()
        self._heap.clear()

    def fail(self, job: str, outcome: Outcome, message: str) -> None:
        """Let a job fail at once; after the end of the job, do nothing."""
        if (virtual_job := self.jobs.get(job)) is not None:
            self._end(virtual_job)
            self._pending.append(base.Ended(job, outcome, message))

    def fail_array(self, job: str, trials: Collection[int], outcome: Outcome, message: str) -> None:
        """Let the array with these trials fail; the job continues if it has other arrays, else it fails."""
        virtual_job = self.jobs[job]
        failed = [lane for lane in virtual_job.lanes if lane.members.keys() & set(trials)]
        if any(lane.members for lane in virtual_job.lanes if lane not in failed):
            trials = {number for lane in failed for number in lane.members}
            for lane in failed:
                lane.members.clear()
            self._pending.append(base.ArrayFailed(job, frozenset(trials), outcome, message))
        else:
            self.fail(job, outcome, message)

    def hang(self, job: str) -> None:
        """Let a job make no progress from now on, until it is killed."""
        if (virtual_job := self.jobs.get(job)) is not None:
            virtual_job.hangs = True

    def _next_step(self, job: VirtualJob) -> None:
        job.remaining, job.uses_compute = next(job.timeline, (inf, False))
        job.updated = self.now
        self._push_step(job)

    def _push_step(self, job: VirtualJob) -> None:
        job.entry = next(self._entry_ids)
        speed = job.speed if job.uses_compute else 1.0
        if speed > 0 and job.remaining < inf:
            heapq.heappush(self._heap, (self.now + job.remaining / speed, job.entry, job))

    def _update_speeds(self, device: Device) -> None:
        if not (jobs := list(self._training.get(device.name, {}).values())):
            return
        speeds = [
            speed * job.team_gain(self._devices(job))
            for job, speed in zip(jobs, self._slowdown(device, jobs), strict=True)
        ]
        for job, speed in zip(jobs, speeds, strict=True):
            if speed == job.speed:
                continue
            old_speed, job.speed = job.speed, speed
            if job.uses_compute:
                job.remaining, job.updated = max(0.0, job.remaining - (self.now - job.updated) * old_speed), self.now
                self._push_step(job)

    def _devices(self, job: VirtualJob) -> int:
        """Number of devices that a training job trains on: its own and those of its team."""
        return 1 + sum(name in self.jobs and self.jobs[name].is_ready for name in job.team)

    def _set_ready(self, helper: VirtualJob, is_ready: bool) -> None:
        """Let a helper take part in the steps of its leader from now on, or not any more."""
        helper.is_ready = is_ready
        leader = self.jobs.get(helper.job.assists)
        if leader is not None:
            self._update_speeds(leader.device)

    def _end(self, job: VirtualJob) -> None:
        job.entry = -1
        del self.jobs[job.job.id]
        if self._training.get(job.device.name, {}).pop(job.job.id, None) is not None:
            self._update_speeds(job.device)
            helpers = [helper for name in sorted(job.team) if (helper := self.jobs.get(name)) and not helper.hangs]
            for helper in helpers:
                self._end(helper)
                self._pending.append(base.Ended(helper.job.id, Outcome.FINISHED))
        elif job.job.assists:
            self._set_ready(job, False)

    def _job_timeline(self, job: VirtualJob) -> Timeline:
        name = job.job.id
        starts = self._workload.start_seconds(job.job) if job.job.purpose is Purpose.TRAIN else START_SECONDS
        yield starts, False
        begun = self.now
        match job.job.purpose:
            case Purpose.SIGNATURE:
                yield from self._work(job, SIGNATURE_SECONDS * len(job.job.members), settled=False)
                keys = {member.trial.number: self._workload.key(member.trial) for member in job.job.members}
                self._pending.append(base.SignaturesFound(name, keys))
            case Purpose.PROFILE:
                for array in job.job.arrays:
                    yield PROFILE_SECONDS, False
                    profile = replace(self._workload.profile(array.key, job.device.kind), spreading={})
                    self._pending.append(base.Profiled(name, array.key, profile))
            case Purpose.TRAIN:
                yield from self._train(job)
            case Purpose.ASSIST:
                self._set_ready(job, True)
                while job.job.assists in self.jobs:
                    self._pending.append(base.Heartbeat(name, settled=True))
                    yield self._beat_seconds, False
        if name in self.jobs:
            self._end(job)
            measured = _MEASURES.get(job.job.purpose)
            spent = {Activity.START: starts, measured: self.now - begun} if measured else {}
            self._pending.append(base.Ended(name, Outcome.FINISHED, activities=spent))

    def _stop_timeline(self, job: VirtualJob) -> Timeline:
        yield STOP_SECONDS, False
        self._checkpoints.update(job.epochs(job.trials))
        self._end(job)
        self._pending.append(base.Ended(job.job.id, Outcome.STOPPED))

    def _train(self, job: VirtualJob) -> Timeline:
        """Yield the steps of a training job: epochs of its arrays in turn, until no member is left."""
        self._admit_joining(job)
        self._pending.append(base.Heartbeat(job.job.id, settled=True))
        measured = False
        while job.lanes:
            lane = job.lanes[0]
            job.lanes.rotate(-1)
            start, finished = self.now, min(self._partial_epochs.pop(number, 0.0) for number in lane.members)
            duration = Cost(lane.profile).seconds([1] * len(lane.members)) * (1 - finished)
            yield from self._work(job, duration, settled=True)
            if times := job.new_team_times(lane, self._devices(job)):
                self._pending.append(base.TeamMeasured(job.job.id, lane.key, len(lane.members), times))
            self._end_epoch(job, lane, self.now - start)
            if job.job.id not in self.jobs:
                return
            if not measured:
                measured = True
                members = Counter(lane.key for lane in job.lanes for _ in lane.members)
                if members:
                    self._pending.append(base.MemoryMeasured(job.job.id, members, job.memory))
                if len(members) > 1:
                    self._pending.append(base.RelativeTimeMeasured(job.job.id, tuple(members), 1.0))
            self._admit_joining(job)

    def _work(self, job: VirtualJob, duration: float, *, settled: bool) -> Timeline:
        """Yield the steps of work of `duration` seconds, with heartbeats."""
        while duration > self._beat_seconds:
            duration -= self._beat_seconds
            job.epoch_rest = duration
            yield self._beat_seconds, True
            self._pending.append(base.Heartbeat(job.job.id, settled))
        job.epoch_rest = 0.0
        yield duration, True

    def _end_epoch(self, job: VirtualJob, lane: VirtualArray, elapsed: float) -> None:
        """Report an epoch of the members of an array, or let the array fail."""
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
            reports.append(Report(number, epoch, report.metrics, elapsed / len(members), state, report.reason))
            if state is TrialState.PAUSED:
                self._checkpoints[number] = epoch
            if state is not TrialState.RUNNING:
                del lane.members[number]
        if reports:
            best = min(reports, key=lambda report: next(iter(report.metrics.values()), inf))
            losses = self._workload.losses(trials[best.trial], best.epoch)
            turn = TurnStats(max(losses), min(losses), losses[-1], len(losses), elapsed)
            self._pending.append(base.Reported(job.job.id, tuple(reports), turn))
        if self.now - job.last_checkpoint >= self.worker_context.checkpoint_seconds:
            self._checkpoints.update(job.epochs(job.trials))
            job.last_checkpoint = self.now

    def _admit_joining(self, job: VirtualJob) -> None:
        """Add joining members at the epochs of their checkpoints; repeat reports that the study does not have."""
        joining, job.joining = job.joining, []
        for array in joining:
            lane = next((lane for lane in job.lanes if lane.key == array.key and not array.separate), None)
            if lane is None:
                key = self._workload.key(array.members[0].trial)  # the array of the study may have no key
                lane = VirtualArray(array.key, self._workload.profile(key, job.device.kind))
                job.lanes.append(lane)
            for member in array.members:
                number, trial = member.trial.number, member.trial
                epoch = self._checkpoints.get(number, trial.start)
                repeated = range(member.start + 1, min(epoch, member.target) + 1)
                if reports := [self._workload.report(trial, x) for x in repeated]:
                    state = TrialState.PAUSED if epoch >= member.target else TrialState.RUNNING
                    seconds = Cost(lane.profile).seconds([1])  # those of the array that trained it are not kept
                    reports = [replace(x, seconds=seconds, state=TrialState.RUNNING, reason="") for x in reports]
                    reports[-1] = replace(reports[-1], state=state)
                    self._pending.append(base.Reported(job.job.id, tuple(reports)))
                if epoch < member.target:
                    lane.members[number], lane.epochs[number] = member, epoch
        job.lanes = deque(lane for lane in job.lanes if lane.members)
        if job.team:
            self._update_speeds(job.device)
