"""Deterministic simulation testing: a seed gives a study and its faults, and all invariants are checked.

The engine, the state machine and the journal are the real ones; the back end, the clock and the faults are simulated.
The module imports the engine, and no other package imports it.
"""

import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import BackendError, DeviceError, ShoalError, StorageFullError, StudyInterrupted
from shoal.core.request import Verb
from shoal.core.trial import FIRST_ADDED
from shoal.host.fleet import Fleet
from shoal.journal.requests import pending_requests, write_request
from shoal.journal.statistics import StudyStatistics
from shoal.journal.writer import Journal
from shoal.look.snapshot import how_ended
from shoal.plan.cost.history import History
from shoal.plan.schedule.registry import make_policy
from shoal.run.base import Ended
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine
from shoal.study.event import Event
from support.faults import Faults, FaultyBackend, FaultyInelasticBackend, FaultyJournal, Killed, PersistedState
from support.invariants import InvariantViolation, check_end, check_step
from support.random_studies import KEEPS, POLICY_NAMES, RandomStudy, random_study

__all__ = ["SimulationOutcome", "simulate"]

HANG_SECONDS = 3.0

_REQUESTED_TRIALS = [*range(12), FIRST_ADDED, FIRST_ADDED + 1]
"""Numbers of trials in requests: some have ended by then, or are unknown."""


class WatchedEngine(Engine):
    """An engine that may be killed before each event, and that checks the invariants after each event."""

    faults: Faults
    backend: FaultyBackend
    steps = 0
    _depth = 0

    def _handle(self, event: Event) -> None:
        self.faults.maybe_kill()
        self._depth += 1
        if isinstance(event, Ended):
            self.backend.open.discard(event.job)
        try:
            super()._handle(event)
        finally:
            self._depth -= 1
        self.steps += 1
        if not self._depth:
            check_step(self._core.state, event, self.backend.jobs, self.backend.open)
            if self._core.state.lifecycle.shutdown is None and self.steps % 16 == 0:
                self._compare_journal()

    def _compare_journal(self) -> None:
        """Compare the trials and the running jobs in the journal with those of the state machine."""
        rows = {x.number: x for x in self._journal.trials()}
        expected = {x.number: x.row for x in self._core.state.trials}
        if (jobs := {x.id for x in self._journal.jobs(running=True)}) != self._core.state.running.keys():
            raise InvariantViolation(f"{sorted(self._core.state.running)} run, and {sorted(jobs)} in the journal")
        if rows != expected:
            different = {number for number in rows.keys() | expected.keys() if rows.get(number) != expected.get(number)}
            number = min(different)
            raise InvariantViolation(f"trial {number} is {expected.get(number)}, and {rows.get(number)} in the journal")


class _RandomInterventions:
    """Random requests of users while a study runs; the engine calls `update` in every turn."""

    def __init__(self, faults: Faults, journal: Journal, devices: Collection[str], requests: list[str]) -> None:
        self.engine: Engine | None = None
        self._faults = faults
        self._journal = journal
        self._devices = devices
        self._requests = requests

    def update(self) -> None:
        """Make random requests; removed devices and paused trials are given back after a while."""
        faults, rng = self._faults, self._faults.random
        if self.engine is None:
            return
        used = self.engine.fleet.used
        removed = [name for name in self._devices if name not in used]
        held = self._journal.paused_trials()
        if faults.occurs("interrupt"):
            self.engine.interrupt()
        if used and faults.occurs("devices changed"):
            self._request("remove devices", devices=rng.sample(used, rng.randint(1, len(used))))
        elif removed and rng.random() < 0.1:
            self._request("add devices", devices=removed[:1])
        if faults.occurs("devices unknown"):
            verb: Verb = rng.choice(["add devices", "remove devices"])
            self._request(verb, devices=rng.choice([["none such"], [], used[:1] * 2, removed[:1] * 2]))
        if faults.occurs("retry"):
            self._request("retry", trials=_REQUESTED_TRIALS)
        verbs: tuple[Verb, ...] = ("pause", "stop")
        for each in verbs:
            if faults.occurs(each):
                self._request(each, trials=rng.sample(_REQUESTED_TRIALS, 3))
        if held and rng.random() < 0.1:
            self._request("resume", trials=held)
        if faults.occurs("policy"):
            self._request("policy", arguments={"policy": rng.choice([*POLICY_NAMES, "none such"])})
        if faults.occurs("add trial"):
            x, outside = rng.choice([0.5, 2.0]), rng.random() < 0.5  # the space has no 2
            given = {"config": {"x": x, "width": 1}, "epochs": rng.randint(1, 3), "outside": outside}
            self._request("add trial", arguments=given)
        rows = [row for row in self._journal.trials() if row.epoch] if faults.occurs("clone") else []
        deleted = StudyStatistics(self._journal).deleted() if rows else {}
        if rows := [row for row in rows if not deleted.get(row.number)]:  # the client refuses the others
            row = rng.choice(rows)
            origin = {"trial": row.number, "epoch": row.epoch}
            given = {"config": dict(row.config), "epochs": row.epoch + rng.randint(1, 3), "outside": True}
            self._request("clone", arguments={**given, "source": row.number, "origin": origin})
        if faults.occurs("pause study"):
            self._request("pause study")
        elif self._journal.study.get("paused") and rng.random() < 0.1:
            self._request("resume study")
        if faults.occurs("end study"):
            self._request("end study")
        if faults.occurs("keep"):
            self._request("keep", arguments={"keep": rng.choice(KEEPS)})
        if faults.occurs("pin"):
            self._request("pin", trials=rng.sample(_REQUESTED_TRIALS, 3))
        if faults.occurs("extend"):
            self._request("extend", arguments={"trials": rng.randint(2, 16)})

    def _request(self, verb: Verb, **what: Any) -> None:
        self._requests.append(write_request(self._journal.directory, verb, **what))


@dataclass
class SimulationOutcome:
    """Result of a seed.

    Args:
        seed: Seed.
        violation: First broken invariant; "" if none is.
        faults: Number of occurrences of each fault.
        steps: Number of steps of the state machine.
        engines: Number of engines, one after the other.
        trials: End of each trial, by number; None after a violation.
    """

    seed: int
    violation: str
    faults: Counter[str]
    steps: int = 0
    engines: int = 0
    trials: Mapping[int, Any] | None = None


def simulate(seed: int, *, base: Path | None = None) -> SimulationOutcome:
    """Run the study of a seed, with its faults, to its end.

    Args:
        seed: Seed.
        base: Directory for the journal while it runs; by default in memory, if the machine has such a file system.
    """
    shared = Path("/dev/shm")
    base = base or (shared if shared.is_dir() else None)
    outcome = SimulationOutcome(seed, "", Counter())
    with tempfile.TemporaryDirectory(dir=base, prefix="shoal-simulation-") as folder:
        run = _StudyRun(random_study(seed), Faults(seed), Path(folder) / "study", outcome)
        try:
            run.run()
        except InvariantViolation as broken:
            outcome.violation = str(broken)
        except Exception as error:
            location = _location(error)
            outcome.violation = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({location})"
            )
    return outcome


class _StudyRun:
    """One study, through all its engines."""

    def __init__(self, study: RandomStudy, faults: Faults, directory: Path, outcome: SimulationOutcome) -> None:
        self._study, self._faults, self._directory, self._outcome = study, faults, directory, outcome
        self._persisted = PersistedState()
        outcome.faults = faults.occurrences

    def run(self) -> None:
        """Run one engine after the other until the study has ended, and check the end."""
        names = [device.name for _, device in self._study.cluster]
        study = self._study
        spec = StudySpec(
            **study.goals,
            devices=names,
            policy=study.policy,
            retries=study.retries,
            fuse=study.fuse,
            hang_seconds=HANG_SECONDS,
            timeout=study.timeout,
            max_concurrent=study.max_concurrent,
            keep=study.keep,
        )
        with closing(
            FaultyJournal.create(self._directory, spec, task=b"", algorithm=b"", clock=lambda: self._persisted.now)
        ):
            pass
        while not self._run_engine():
            self._outcome.engines += 1
        with closing(Journal.open(self._directory)) as journal:
            self._outcome.trials = check_end(journal, self._study, self._persisted.requests)

    def _run_engine(self) -> bool:
        """Run an engine; whether the study has ended."""
        backend: FaultyBackend | None = None
        engine: WatchedEngine | None = None
        try:
            with closing(
                FaultyJournal.open(
                    self._directory, clock=lambda: self._persisted.now if backend is None else backend.now
                )
            ) as journal:
                journal.faults = self._faults
                journal.begin_run()
                backend = (FaultyBackend if self._study.elastic else FaultyInelasticBackend)(
                    self._study, self._faults, self._persisted, self._directory
                )
                with closing(backend):
                    engine, interventions = self._engine(journal, backend)
                    interventions.update()  # while no process runs the study
                    engine.begin()
                    engine.run()
                if how_ended(journal) == "timeout":
                    journal.put("time_left", None)
                    return False
            return not pending_requests(self._directory)
        except (Killed, StudyInterrupted, StorageFullError):
            return False
        except (BackendError, DeviceError) as error:
            self._check_error(error)
            return False
        finally:
            if backend is not None:
                self._persisted.now = backend.now
            if engine is not None:
                self._outcome.steps += engine.steps

    def _engine(self, journal: Journal, backend: FaultyBackend) -> tuple[WatchedEngine, _RandomInterventions]:
        study = self._study
        record = {"devices": journal.spec.devices, "added": [], "removed": []} | journal.study.get("fleet", {})
        fleet = Fleet.from_record(record, study.find)
        interventions = _RandomInterventions(self._faults, journal, journal.spec.devices, self._persisted.requests)
        config = EngineConfig(
            fleet,
            make_policy(journal.policy),
            History(self._directory / "history.sqlite"),
            find=study.find,
            monitor=lambda cluster: backend,
            clock=backend.clock,
        )
        engine = WatchedEngine(journal, study.algorithm(), backend, config, interventions.update)
        engine.faults, engine.backend, interventions.engine = self._faults, backend, engine
        return engine, interventions

    def _check_error(self, error: ShoalError) -> None:
        """Accept an error that a fault explains; the study continues with all devices."""
        if isinstance(error, BackendError):
            if "a simulated fault" not in str(error):
                raise error
            return
        with closing(Journal.open(self._directory)) as journal:
            removed = journal.study.get("fleet", {}).get("removed", [])
        if not removed:
            raise error
        self._persisted.requests.append(write_request(self._directory, "add devices", devices=removed))


def _location(error: BaseException) -> str:
    """Return the innermost line of the library where an error was raised."""
    trace, location = error.__traceback__, ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if "shoal" in file.parts:
            location = f"{file.parent.name}/{file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return location
