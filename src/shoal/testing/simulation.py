"""Deterministic simulation testing: a seed gives a study and what disturbs it, and all that has to hold is looked at.

The engine, the state machine and the journal are those of every study; the back end, the clock and the faults are made
up. It stands here, above all rooms, as it needs the engine and nothing needs it.
"""

import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.backend.base import Ended, Event, Outcome
from shoal.backend.virtual import Virtual, VirtualJob
from shoal.cluster.monitor import Condition, Holder
from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, DeviceError, ShoalError, StorageFullError, StudyInterrupted
from shoal.core.job import Job, JobUpdate, Purpose, WorkerContext
from shoal.core.request import Verb
from shoal.core.trial import FIRST_ADDED
from shoal.cost.history import History
from shoal.journal.requests import leave, pending
from shoal.journal.writer import Journal
from shoal.report.progress import SilentProgress
from shoal.schedule.registry import make_policy
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine
from shoal.study.event import Event as StudyEvent
from shoal.study.fleet import Fleet
from shoal.testing.invariants import Violation, check_end, check_step
from shoal.testing.made_up import POLICY_NAMES, MadeUpStudy, make_up

__all__ = ["FAULTS", "Simulated", "simulate"]

FAULTS = {
    "kill": 0.004,
    "disk full": 0.01,
    "disk full, of a job": 0.01,
    "interrupt": 0.005,
    "start refused": 0.05,
    "crash": 0.03,
    "out of memory": 0.03,
    "hang": 0.02,
    "array fails": 0.03,
    "device lost": 0.02,
    "device held": 0.02,
    "late": 0.05,
    "repeated": 0.05,
    "reordered": 0.2,
    "devices changed": 0.02,
    "retry": 0.05,
    "pause": 0.05,
    "stop": 0.02,
    "policy": 0.02,
    "add trial": 0.02,
    "clone": 0.02,
    "pause study": 0.01,
    "end study": 0.002,
}
"""What may go wrong, or be asked for, and how likely it is wherever it could be."""

MOST = 3
"""Of each, in a study, at most; so it ends."""
HANG_SECONDS = 3.0
_TRIALS = [*range(12), FIRST_ADDED, FIRST_ADDED + 1]
"""Numbers of trials that are asked for: some are over then, or unknown."""
LONGEST = 20_000
"""Turns of one engine's loop, after which a study is taken not to end; some policies ask for one each 5 ms."""


class Killed(BaseException):
    """The process of the engine is gone at once, with all its jobs."""


class Faults:
    """What goes wrong when, from a seed.

    Args:
        seed: of the study.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"faults {seed}")
        self.counted: Counter[str] = Counter()
        """How often what has gone wrong."""
        self._left = {kind: self.random.choice([0, 0, 1, MOST]) for kind in FAULTS}

    def strikes(self, kind: str) -> bool:
        """Whether it happens here and now."""
        if not self._left[kind] or self.random.random() >= FAULTS[kind]:
            return False
        self._left[kind] -= 1
        self.counted[kind] += 1
        return True

    def moment(self) -> None:
        """The engine may be killed here.

        Raises:
            Killed: it is.
        """
        if self.strikes("kill"):
            raise Killed


class FaultyJournal(Journal):
    """A journal whose disk is full now and then, and whose process is killed before, in and after transactions."""

    faults: Faults | None = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """As it is; see the class."""
        faults = self.faults
        if faults is None or self._connection.in_transaction:
            with super().transaction():
                yield
            return
        faults.moment()
        with super().transaction():
            yield
            faults.moment()
            if faults.strikes("disk full"):
                raise StorageFullError("the disk is full, as the simulation has it")
        faults.moment()


@dataclass
class Remains:
    """What is left when an engine has ended.

    Args:
        now: seconds of the virtual clock.
        checkpoints: number of a trial -> epochs of its newest one.
        conditions: name of a device that is lost, or held by others -> until when, and how it is.
        started: ids of jobs.
    """

    now: float = 0.0
    checkpoints: dict[int, int] = field(default_factory=dict)
    conditions: dict[str, tuple[float, Condition]] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)


class Disturbed(Virtual):
    """Jobs that crash, hang and run out of memory, devices that come and go, and events that come late and in disorder.

    Args:
        study: whose jobs they are.
        faults: what goes wrong.
        remains: of earlier engines.
        directory: of the study.
    """

    def __init__(
        self,
        study: MadeUpStudy,
        faults: Faults,
        remains: Remains,
        directory: Path,
    ) -> None:
        context = WorkerContext(directory, b"", checkpoint_seconds=study.checkpoint_seconds)
        super().__init__(context, study.workload, remains.checkpoints, remains.now, beat_seconds=1.0)
        self.open: set[str] = set()
        """Jobs that were started, and of whose end the state machine has not been told."""
        self._faults = faults
        self._study = study
        self._remains = remains
        self._conditions = remains.conditions
        self._polls = 0
        self._late: dict[str, tuple[float, deque[Event]]] = {}

    def start(self, job: Job, device: Device) -> None:
        """Start it, if it can be."""
        self._faults.moment()
        if self._faults.strikes("start refused"):
            raise BackendError(f"{job.id} cannot be started, as the simulation has it")
        taught = {number: name for name, other in self.jobs.items() for number in other.trials}
        if twice := taught.keys() & {x.trial.number for x in job.members if job.purpose is Purpose.TRAIN}:
            raise Violation(f"trial {min(twice)} is trained by {taught[min(twice)]}, and {job.id} starts with it")
        if job.id in self._remains.started:
            raise Violation(f"{job.id} starts, and an earlier engine had started another of that id")
        super().start(job, device)
        self.open.add(job.id)
        self._remains.started.add(job.id)
        if not self._condition(device.name).healthy:
            self.fail(job.id, Outcome.CRASHED, "its device does not answer")
        self._faults.moment()

    def change(self, job: str, change: JobUpdate) -> None:
        """Change it."""
        self._faults.moment()
        joining = {member.trial.number for array in change.join for member in array.members}
        for name, other in self.jobs.items():
            if twice := joining & other.trials:
                raise Violation(f"trial {min(twice)} is trained by {name}, and joins {job}")
        super().change(job, change)
        self._faults.moment()

    def stop(self, job: str) -> None:
        """Stop it."""
        self._faults.moment()
        super().stop(job)
        self._faults.moment()

    def kill(self, job: str) -> None:
        """Kill it."""
        self._faults.moment()
        super().kill(job)
        self._faults.moment()

    def poll(self, timeout: float) -> list[Event]:
        """What was said, some of it late, twice, or in another order among jobs; and something may go wrong."""
        self._polls += 1
        if self._polls > LONGEST:
            raise Violation(f"the study has not ended after {LONGEST} turns")
        self._return_devices()
        self._disturb()
        said = self._in_time(super().poll(timeout))
        if self._faults.strikes("reordered"):
            said = self._reordered(said)
        return said

    def watch(self, cluster: Cluster) -> None:
        """It is its own monitor."""

    def look(self, own: Collection[int]) -> Mapping[str, Condition]:
        """The conditions of the devices."""
        return {name: condition for name, (_, condition) in self._conditions.items()}

    def _condition(self, device: str) -> Condition:
        return self._conditions.get(device, (0.0, Condition()))[1]

    def _return_devices(self) -> None:
        for name in [name for name, (until, _) in self._conditions.items() if until <= self.now]:
            del self._conditions[name]

    def _disturb(self) -> None:
        faults, rng = self._faults, self._faults.random
        working = [job for job in self.jobs.values() if not job.hangs]
        if working and faults.strikes("crash"):
            self.fail(self._one(working), Outcome.CRASHED, f"signal {len(faults.counted)}")
        elif working and faults.strikes("disk full, of a job"):
            self.fail(self._one(working), Outcome.STORAGE_FULL, "the disk is full, as the simulation has it")
        elif working and faults.strikes("hang"):
            self.hang(self._one(working))
        elif working and faults.strikes("array fails"):
            self._fail_array(rng.choice(working), Outcome.RAISED)
        elif working and faults.strikes("out of memory"):
            self._fail_array(rng.choice(working), Outcome.OUT_OF_MEMORY)
        healthy = [device for _, device in self._study.cluster if device.name not in self._conditions]
        if healthy and faults.strikes("device lost"):
            self._lose(rng.choice(healthy).name)
        elif healthy and faults.strikes("device held"):
            device = rng.choice(healthy)
            held = Condition(holders=(Holder(1, "python", rng.randint(1, device.memory)),))
            self._conditions[device.name] = (self.now + rng.uniform(1, 8), held)

    def _one(self, working: list[VirtualJob]) -> str:
        return self._faults.random.choice(working).job.id

    def _fail_array(self, job: VirtualJob, outcome: Outcome) -> None:
        """An array of a job fails, by no fault of its own; or the job does."""
        message = f"failure {sum(self._faults.counted.values())}"
        lanes = [lane for lane in job.lanes if lane.members]
        if not lanes:
            self.fail(job.job.id, outcome, message)
            return
        self.fail_array(job.job.id, self._faults.random.choice(lanes).members.keys(), outcome, message)

    def _lose(self, device: str) -> None:
        """A device is lost for a while; its jobs die, or never come back."""
        rng = self._faults.random
        lost = Condition(healthy=False, reason="has fallen off the bus")
        self._conditions[device] = (self.now + rng.uniform(1, 8), lost)
        for job in [job.job.id for job in self.jobs.values() if job.device.name == device]:
            if rng.random() < 0.5:
                self.hang(job)
            else:
                self.fail(job, Outcome.CRASHED, "its device does not answer")

    def _in_time(self, said: list[Event]) -> list[Event]:
        """Those events that are delivered now; what a job says is not reordered, and its end is said once."""
        now = [event for until, events in self._late.values() if until <= self.now for event in events]
        self._late = {job: late for job, late in self._late.items() if late[0] > self.now}
        for event in said:
            if event.job not in self._late and self._faults.strikes("late"):
                self._late[event.job] = (self.now + self._faults.random.uniform(0.1, 2.0), deque())
            if event.job in self._late:
                self._late[event.job][1].append(event)
                continue
            now.append(event)
            if not isinstance(event, Ended) and self._faults.strikes("repeated"):
                now.append(event)
        return now

    def _reordered(self, said: list[Event]) -> list[Event]:
        """The events of one job after those of another, at random."""
        by_job: dict[str, deque[Event]] = {}
        for event in said:
            by_job.setdefault(event.job, deque()).append(event)
        order = [event.job for event in said]
        self._faults.random.shuffle(order)
        return [by_job[job].popleft() for job in order]


class Rigid(Disturbed):
    """The same, where the members of a job cannot change."""

    elastic = False

    def change(self, job: str, change: JobUpdate) -> None:
        """Those that are over may leave; nobody may join."""
        if change.join or change.look:
            raise Violation(f"{job} cannot be changed, and {change} was asked for")
        super().change(job, change)


class Visitor(SilentProgress):
    """Who asks for things while a study runs; the engine lets it look in every turn.

    Args:
        faults: says when.
        journal: of the study.
        devices: all that there are.
    """

    def __init__(self, faults: Faults, journal: Journal, devices: Collection[str]) -> None:
        self.engine: Engine | None = None
        self._faults = faults
        self._journal = journal
        self._devices = devices

    def update(self) -> None:
        """Ask for something; what was taken away is given back after a while."""
        faults, rng = self._faults, self._faults.random
        if self.engine is None:
            return
        used = self.engine.fleet.used
        removed = [name for name in self._devices if name not in used]
        held = self._journal.study.get("held", [])
        if faults.strikes("interrupt"):
            self.engine.interrupt()
        if len(used) > 1 and faults.strikes("devices changed"):
            self._ask("remove", devices=[rng.choice(used)])
        elif removed and rng.random() < 0.1:
            self._ask("add", devices=removed[:1])
        if faults.strikes("retry"):
            self._ask("retry", trials=_TRIALS)
        verbs: tuple[Verb, ...] = ("pause", "stop")
        for verb in verbs:
            if faults.strikes(verb):
                self._ask(verb, trials=rng.sample(_TRIALS, 3))
        if held and rng.random() < 0.1:
            self._ask("resume", trials=held)
        if faults.strikes("policy"):
            self._ask("policy", given={"policy": rng.choice([*POLICY_NAMES, "none such"])})
        if faults.strikes("add trial"):
            x, outside = rng.choice([0.5, 2.0]), rng.random() < 0.5  # the space has no 2
            given = {"config": {"x": x, "width": 1}, "epochs": rng.randint(1, 3), "outside": outside}
            self._ask("add trial", given=given)
        rows = [row for row in self._journal.trials() if row.epoch] if faults.strikes("clone") else []
        if rows:
            row = rng.choice(rows)
            origin = {"trial": row.number, "epoch": row.epoch}
            given = {"config": dict(row.config), "epochs": row.epoch + rng.randint(1, 3), "outside": True}
            self._ask("clone", given={**given, "source": row.number, "origin": origin})
        if faults.strikes("pause study"):
            self._ask("pause study")
        elif self._journal.study.get("paused") and rng.random() < 0.1:
            self._ask("resume study")
        if faults.strikes("end study"):
            self._ask("end study")

    def _ask(self, verb: Verb, **what: Any) -> None:
        leave(self._journal.directory, verb, **what)


class WatchedEngine(Engine):
    """An engine that may be killed before each event, and after each of which what has to hold is looked at."""

    faults: Faults
    world: Disturbed
    steps = 0
    _depth = 0

    def _happen(self, event: StudyEvent) -> None:
        self.faults.moment()
        self._depth += 1
        if isinstance(event, Ended):
            self.world.open.discard(event.job)
        try:
            super()._happen(event)
        finally:
            self._depth -= 1
        self.steps += 1
        if not self._depth:
            check_step(self._core.state, event, self.world.jobs, self.world.open)
            if self._core.state.ending is None and self.steps % 16 == 0:
                self._compare()

    def _compare(self) -> None:
        """What the journal says of trials is what the state machine says."""
        rows = {row.number: (row.state, row.epoch, row.target, row.failures) for row in self._journal.trials()}
        mine = {x.number: (x.state, x.epoch, x.target, x.failures) for x in self._core.state.trials}
        if rows != mine:
            other = {number for number in rows.keys() | mine.keys() if rows.get(number) != mine.get(number)}
            number = min(other)
            raise Violation(f"trial {number} is {mine.get(number)}, and {rows.get(number)} in the journal")


@dataclass
class Simulated:
    """What came of a seed.

    Args:
        seed: which.
        violation: the first thing that did not hold; "" if all did.
        faults: how often what went wrong.
        steps: of the state machine.
        lives: engines, one after the other.
        trials: what became of them, by number; not where something did not hold.
    """

    seed: int
    violation: str
    faults: Counter[str]
    steps: int = 0
    lives: int = 0
    trials: Mapping[int, Any] | None = None


def simulate(seed: int, *, base: Path | None = None, make: Callable[[int], MadeUpStudy] = make_up) -> Simulated:
    """Run the disturbed study of a seed to its end.

    Args:
        seed: which.
        base: directory for the journal while it runs; by default in memory, where the machine has that.
        make: makes the study.
    """
    shared = Path("/dev/shm")
    base = base or (shared if shared.is_dir() else None)
    found = Simulated(seed, "", Counter())
    with tempfile.TemporaryDirectory(dir=base, prefix="shoal-simulation-") as folder:
        run = _Run(make(seed), Faults(seed), Path(folder) / "study", found)
        try:
            run.to_the_end()
        except Violation as broken:
            found.violation = str(broken)
        except Exception as error:
            place = _place(error)
            found.violation = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({place})"
    return found


class _Run:
    """One study, through all its engines."""

    def __init__(self, study: MadeUpStudy, faults: Faults, directory: Path, found: Simulated) -> None:
        self._study, self._faults, self._directory, self._found = study, faults, directory, found
        self._remains = Remains()
        found.faults = faults.counted

    def to_the_end(self) -> None:
        """One engine after the other, until the study has ended; then look at what came of it."""
        names = [device.name for _, device in self._study.cluster]
        spec = {"metric": "loss", "mode": "min", "devices": names, "policy": self._study.policy}
        with closing(
            FaultyJournal.create(self._directory, spec, task=b"", algorithm=b"", clock=lambda: self._remains.now)
        ):
            pass
        while not self._ended():
            self._found.lives += 1
        with closing(Journal.open(self._directory)) as journal:
            self._found.trials = check_end(journal, self._study)

    def _ended(self) -> bool:
        """Let an engine run; whether the study has ended."""
        world: Disturbed | None = None
        engine: WatchedEngine | None = None
        try:
            with closing(
                FaultyJournal.open(self._directory, clock=lambda: self._remains.now if world is None else world.now)
            ) as journal:
                journal.faults = self._faults
                journal.begin_run()
                world = (Disturbed if self._study.elastic else Rigid)(
                    self._study, self._faults, self._remains, self._directory
                )
                with closing(world):
                    engine = self._engine(journal, world)
                    engine.replay()
                    engine.run()
            return not pending(self._directory)
        except (Killed, StudyInterrupted, StorageFullError):
            return False
        except (BackendError, DeviceError) as error:
            self._judge(error)
            return False
        finally:
            if world is not None:
                self._remains.now = world.now
            if engine is not None:
                self._found.steps += engine.steps

    def _engine(self, journal: Journal, world: Disturbed) -> WatchedEngine:
        study = self._study
        record = {"devices": journal.study["devices"], "added": [], "removed": []} | journal.study.get("fleet", {})
        fleet = Fleet.again(record, study.find)
        visitor = Visitor(self._faults, journal, journal.study["devices"])
        setting = EngineConfig(
            fleet.given,
            make_policy(journal.study["policy"]),
            world,
            History(self._directory / "history.sqlite"),
            study.retries,
            fuse=study.fuse,
            hang_seconds=HANG_SECONDS,
            fleet=fleet,
            find=study.find,
            monitor=lambda cluster: world,
            clock=world.clock,
        )
        engine = WatchedEngine(journal, study.algorithm(), setting, visitor)
        engine.faults, engine.world, visitor.engine = self._faults, world, engine
        return engine

    def _judge(self, error: ShoalError) -> None:
        """An end that a fault explains is none of the engine's; the study goes on with all devices."""
        if isinstance(error, BackendError):
            if "as the simulation has it" not in str(error):
                raise error
            return
        with closing(Journal.open(self._directory)) as journal:
            removed = journal.study.get("fleet", {}).get("removed", [])
        if not removed:
            raise error
        leave(self._directory, "add", devices=removed)


def _place(error: BaseException) -> str:
    """Where an error was raised: the innermost line of the library."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if "shoal" in file.parts:
            place = f"{file.parent.name}/{file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
