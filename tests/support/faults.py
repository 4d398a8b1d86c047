"""Faults of the simulation: their random times, a journal whose disk fills up, a back end whose jobs fail."""

import random
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, CheckpointError, StorageFullError
from shoal.core.job import Job, JobUpdate, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.host.monitor import Condition, DeviceProcess
from shoal.journal.writer import Journal
from shoal.run.base import Ended, Event, Outcome
from shoal.run.virtual import Virtual
from shoal.run.virtual_job import VirtualJob
from support.invariants import InvariantViolation
from support.random_studies import RandomStudy

__all__ = ["FAULTS", "Faults", "FaultyBackend", "FaultyInelasticBackend", "FaultyJournal", "Killed", "PersistedState"]

FAULTS = {
    "kill": 0.004,
    "disk full": 0.01,
    "disk full, of a job": 0.01,
    "interrupt": 0.005,
    "start refused": 0.05,
    "crash": 0.03,
    "helper crashes": 0.1,
    "out of memory": 0.03,
    "hang": 0.02,
    "array fails": 0.03,
    "device lost": 0.02,
    "device held": 0.02,
    "late": 0.05,
    "repeated": 0.05,
    "reordered": 0.2,
    "devices changed": 0.02,
    "devices unknown": 0.02,
    "retry": 0.05,
    "pause": 0.05,
    "stop": 0.02,
    "policy": 0.02,
    "add trial": 0.02,
    "clone": 0.02,
    "pause study": 0.01,
    "end study": 0.002,
    "keep": 0.02,
    "pin": 0.03,
    "extend": 0.01,
}
"""Faults and requests of users, with their probability at each opportunity."""

MAX_OCCURRENCES = 3
"""Most occurrences of each fault in a study, so that the study ends."""

MAX_TURNS = 20_000
"""Turns of one engine's loop after which a study counts as endless; some policies ask for one each 5 ms."""


class Killed(BaseException):
    """Raised when the engine's process and all its jobs are killed."""


class Faults:
    """Random times of the faults, from a seed.

    Args:
        seed: Seed of the study.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"faults {seed}")
        self.occurrences: Counter[str] = Counter()
        """Number of occurrences of each fault."""
        self._remaining = {kind: self.random.choice([0, 0, 1, MAX_OCCURRENCES]) for kind in FAULTS}

    def occurs(self, kind: str) -> bool:
        """Return whether the fault occurs at this opportunity."""
        if not self._remaining[kind] or self.random.random() >= FAULTS[kind]:
            return False
        self._remaining[kind] -= 1
        self.occurrences[kind] += 1
        return True

    def maybe_kill(self) -> None:
        """Kill the engine if the fault occurs at this opportunity.

        Raises:
            Killed: the engine is killed.
        """
        if self.occurs("kill"):
            raise Killed

    @contextmanager
    def kill_points(self) -> Iterator[None]:
        """Kill the engine before or after the body of this context if the fault occurs.

        Raises:
            Killed: the engine is killed.
        """
        self.maybe_kill()
        yield
        self.maybe_kill()


class FaultyJournal(Journal):
    """A journal whose disk is full at times, and whose process is killed before, in and after transactions."""

    faults: Faults | None = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a transaction with the faults of the class."""
        faults = self.faults
        if faults is None or self.tables.connection.in_transaction:
            with super().transaction():
                yield
            return
        faults.maybe_kill()
        with super().transaction():
            yield
            faults.maybe_kill()
            if faults.occurs("disk full"):
                raise StorageFullError("the disk is full because of a simulated fault")
        faults.maybe_kill()


@dataclass
class PersistedState:
    """State that outlives an engine and is passed to the next one.

    Args:
        now: Seconds of the virtual clock.
        checkpoints: Number of a trial -> epochs of its newest checkpoint.
        conditions: Name of a lost or held device -> end of its condition, and the condition.
        started: Ids of the started jobs.
        requests: Names of users' requests.
        deleted: Number of each trial of which checkpoints were deleted -> whether its weights were.
        without_copy: Numbers of the trials that could not begin as copies; a user may try them again.
    """

    now: float = 0.0
    checkpoints: dict[int, int] = field(default_factory=dict)
    conditions: dict[str, tuple[float, Condition]] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    deleted: dict[int, bool] = field(default_factory=dict)
    without_copy: set[int] = field(default_factory=set)


class FaultyBackend(Virtual):
    """A virtual back end whose jobs crash, hang and run out of memory, whose devices come and go, and whose events are
    late, repeated and reordered.

    Args:
        study: Study of the jobs.
        faults: Times of the faults.
        persisted: State that earlier engines left.
        directory: Directory of the study.
    """

    def __init__(
        self,
        study: RandomStudy,
        faults: Faults,
        persisted: PersistedState,
        directory: Path,
    ) -> None:
        context = WorkerContext(directory, b"", checkpoint_seconds=study.checkpoint_seconds)
        super().__init__(context, study.workload, persisted.checkpoints, persisted.now, beat_seconds=1.0)
        self.open: set[str] = set()
        """Started jobs whose `Ended` the state machine has not received."""
        self._faults = faults
        self._study = study
        self._persisted = persisted
        self._conditions = persisted.conditions
        self._polls = 0
        self._late: dict[str, tuple[float, deque[Event]]] = {}

    def start(self, job: Job, device: Device) -> None:
        """Start a job, unless a fault prevents it."""
        self._faults.maybe_kill()
        if self._faults.occurs("start refused"):
            raise BackendError(f"{job.id} cannot be started because of a simulated fault")
        trained = {number: name for name, other in self.jobs.items() for number in other.trials}
        if shared := trained.keys() & {x.trial.number for x in job.members if job.purpose is Purpose.TRAIN}:
            raise InvariantViolation(
                f"trial {min(shared)} is trained by {trained[min(shared)]}, and {job.id} starts with it"
            )
        if job.purpose is Purpose.TRAIN:
            self._check_kept({x.trial.number for x in job.members}, job.id)
        if job.id in self._persisted.started:
            raise InvariantViolation(f"{job.id} starts, and an earlier engine had started another of that id")
        super().start(job, device)
        self.open.add(job.id)
        self._persisted.started.add(job.id)
        if not self._condition(device.name).healthy:
            self.fail(job.id, Outcome.CRASHED, "its device does not answer")
        self._faults.maybe_kill()

    def change(self, job: str, change: JobUpdate) -> None:
        """Change a job."""
        with self._faults.kill_points():
            joining = {member.trial.number for array in change.join for member in array.members}
            self._check_kept(joining, job)
            for name, other in self.jobs.items():
                if shared := joining & other.trials:
                    raise InvariantViolation(f"trial {min(shared)} is trained by {name}, and joins {job}")
            super().change(job, change)

    def stop(self, job: str) -> None:
        """Stop a job."""
        with self._faults.kill_points():
            super().stop(job)

    def kill(self, job: str) -> None:
        """Kill a job."""
        with self._faults.kill_points():
            super().kill(job)

    def release_device(self, device: str) -> None:
        """Free a device, on which no job may run."""
        with self._faults.kill_points():
            if busy := [name for name, job in self.jobs.items() if device == job.device.name]:
                raise InvariantViolation(f"{device} is freed, and {busy[0]} runs there")
            super().release_device(device)

    def copy_checkpoint(self, directory: Path, trial: Trial) -> None:
        """Copy a checkpoint, which was not deleted."""
        with self._faults.kill_points():
            origin, known = trial.origin, self._persisted.checkpoints.keys() | self._persisted.without_copy
            if origin and trial.number not in known and self._persisted.deleted.get(origin.trial):
                raise InvariantViolation(f"trial {trial.number} begins with the weights of {origin}, which are deleted")
            try:
                super().copy_checkpoint(directory, trial)
            except CheckpointError:
                self._persisted.without_copy.add(trial.number)
                raise

    def delete_checkpoints(self, directory: Path, trial: int, *, weights: bool) -> None:
        """Delete the checkpoints of a trial that no job trains."""
        with self._faults.kill_points():
            if training := [name for name, job in self.jobs.items() if trial in job.trials]:
                raise InvariantViolation(f"{training[0]} trains trial {trial}, whose checkpoints are deleted")
            super().delete_checkpoints(directory, trial, weights=weights)
            self._persisted.deleted[trial] = weights or self._persisted.deleted.get(trial, False)

    def _check_kept(self, trials: Collection[int], job: str) -> None:
        if gone := self._persisted.deleted.keys() & trials:
            raise InvariantViolation(f"{job} is to train trial {min(gone)}, whose checkpoints were deleted")

    def poll(self, timeout: float) -> list[Event]:
        """Return the next events, some of them late, repeated, or reordered among jobs; a fault may occur."""
        self._polls += 1
        if self._polls > MAX_TURNS:
            raise InvariantViolation(f"the study has not ended after {MAX_TURNS} turns")
        self._restore_devices()
        self._inject_fault()
        events = self._delay_and_repeat(super().poll(timeout))
        if self._faults.occurs("reordered"):
            events = self._shuffle_jobs(events)
        return events

    def watch(self, cluster: Cluster) -> None:
        """Do nothing: the back end is its own monitor."""

    def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
        """Return the conditions of the devices."""
        return {name: condition for name, (_, condition) in self._conditions.items()}

    def _condition(self, device: str) -> Condition:
        return self._conditions.get(device, (0.0, Condition()))[1]

    def _restore_devices(self) -> None:
        for name in [name for name, (until, _) in self._conditions.items() if until <= self.now]:
            del self._conditions[name]

    def _inject_fault(self) -> None:
        faults, rng = self._faults, self._faults.random
        working = [job for job in self.jobs.values() if not job.hangs]
        if working and faults.occurs("crash"):
            self.fail(self._random_job(working), Outcome.CRASHED, f"signal {len(faults.occurrences)}")
        elif (helpers := [job for job in working if job.job.assists]) and faults.occurs("helper crashes"):
            self.fail(self._random_job(helpers), Outcome.CRASHED, "signal 9")
        elif working and faults.occurs("disk full, of a job"):
            self.fail(self._random_job(working), Outcome.STORAGE_FULL, "the disk is full because of a simulated fault")
        elif working and faults.occurs("hang"):
            self.hang(self._random_job(working))
        elif working and faults.occurs("array fails"):
            self._fail_array(rng.choice(working), Outcome.RAISED)
        elif working and faults.occurs("out of memory"):
            self._fail_array(rng.choice(working), Outcome.OUT_OF_MEMORY)
        healthy = [device for _, device in self._study.cluster if device.name not in self._conditions]
        if healthy and faults.occurs("device lost"):
            self._lose_device(rng.choice(healthy).name)
        elif healthy and faults.occurs("device held"):
            device = rng.choice(healthy)
            held = Condition(processes=(DeviceProcess(1, "python", rng.randint(1, device.memory)),))
            self._conditions[device.name] = (self.now + rng.uniform(1, 8), held)

    def _random_job(self, working: list[VirtualJob]) -> str:
        return self._faults.random.choice(working).job.id

    def _fail_array(self, job: VirtualJob, outcome: Outcome) -> None:
        """Fail an array of a job; fail the whole job if it has no array."""
        message = f"failure {sum(self._faults.occurrences.values())}"
        lanes = [lane for lane in job.lanes if lane.members]
        if not lanes:
            self.fail(job.job.id, outcome, message)
            return
        self.fail_array(job.job.id, self._faults.random.choice(lanes).members.keys(), outcome, message)

    def _lose_device(self, device: str) -> None:
        """Lose a device for a while; its jobs crash or hang."""
        rng = self._faults.random
        lost = Condition(healthy=False, reason="has fallen off the bus")
        self._conditions[device] = (self.now + rng.uniform(1, 8), lost)
        for job in [job.job.id for job in self.jobs.values() if job.device.name == device]:
            if rng.random() < 0.5:
                self.hang(job)
            else:
                self.fail(job, Outcome.CRASHED, "its device does not answer")

    def _delay_and_repeat(self, events: list[Event]) -> list[Event]:
        """Return the events that are delivered now; those of one job keep their order, and its end comes once."""
        due = [event for until, events in self._late.values() if until <= self.now for event in events]
        self._late = {job: late for job, late in self._late.items() if late[0] > self.now}
        for event in events:
            if event.job not in self._late and self._faults.occurs("late"):
                self._late[event.job] = (self.now + self._faults.random.uniform(0.1, 2.0), deque())
            if event.job in self._late:
                self._late[event.job][1].append(event)
                continue
            due.append(event)
            if not isinstance(event, Ended) and self._faults.occurs("repeated"):
                due.append(event)
        return due

    def _shuffle_jobs(self, events: list[Event]) -> list[Event]:
        """Return the events of different jobs in a random order."""
        by_job: dict[str, deque[Event]] = {}
        for event in events:
            by_job.setdefault(event.job, deque()).append(event)
        order = [event.job for event in events]
        self._faults.random.shuffle(order)
        return [by_job[job].popleft() for job in order]


class FaultyInelasticBackend(FaultyBackend):
    """A `FaultyBackend` in which no trial can join a running job."""

    elastic = False

    def change(self, job: str, change: JobUpdate) -> None:
        """Let ended trials leave; none may join."""
        if change.join or change.find_signatures:
            raise InvariantViolation(f"{job} cannot be changed, and {change} was asked for")
        super().change(job, change)
