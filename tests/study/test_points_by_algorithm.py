"""Each point with each algorithm, in simulation and live: a study that is killed on its way ends as one that is not."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from points import ALGORITHMS, POINTS, SEED, Ended, Point, best_at, course, outcome, outcome_at_targets
from test_engine import Killed, cluster

import shoal
from shoal.algorithms.base import call_text
from shoal.api import resume
from shoal.arguments import load_algorithm, pickled_algorithm, with_stop_rules
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.epoch_order import LAST_EPOCHS
from shoal.core.errors import ShoalError
from shoal.core.job import WorkerContext
from shoal.core.rows import Row, TrialRow
from shoal.core.space import Space
from shoal.core.trial import Report, Trial, TrialState
from shoal.host.fleet import Fleet
from shoal.journal.earlier import earlier_trials
from shoal.journal.requests import write_request
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.look.snapshot import how_ended
from shoal.plan.cost.history import History
from shoal.plan.schedule.registry import make_policy
from shoal.run.virtual import Virtual, Workload
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine


class Courses(Workload):
    """Trials whose epochs take 0.2 s alone, and at most twice as long in an array."""

    def key(self, trial: Trial) -> FusionKey:
        return FusionKey(f"net {trial.config['width']}", f"fold {trial.config.get('fold', 0)}", 32)

    def profile(self, key: FusionKey, kind: str) -> Profile:
        return Profile({1: 0.02, 16: 0.04}, 10, 0, base_memory=1, member_memory=1, compute=0.5, cores=0.5, mixing=1.0)

    def report(self, trial: Trial, epoch: int) -> Report:
        x, noise = trial.config["x"], trial.seed / 2**63 + trial.config.get("fold", 0)
        return Report(trial.number, epoch, course(x, best_at(x), noise, float(epoch)))


class MortalJournal(Journal):
    """A journal whose process is killed around one of its steps."""

    writes = 0
    """Steps that it has written."""
    dies_at = 0
    """Number of the step, from 1, around which it is killed."""
    before = False
    """Whether it is killed before that step is written."""

    def write(self, rows: Sequence[Row]) -> None:
        self.writes += bool(rows)
        is_last = bool(rows) and self.writes == self.dies_at
        if is_last and self.before:
            raise Killed
        super().write(rows)
        if is_last:
            raise Killed


@dataclass
class Simulated:
    """A study in simulation: the engine, the state machine and the journal are real; jobs and the clock are virtual.

    Args:
        disturbed: Whether it has the `disturbing` arguments of the point, too.
    """

    directory: Path
    name: str
    point: Point
    disturbed: bool = False
    warm_start: Sequence[Path] = ()
    writes: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)
    now: float = 0.0
    at_once: int = 0
    before: list[TrialRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = {**self.point.arguments, **(self.point.disturbing if self.disturbed else {})}
        self.extends = given.pop("extend", None)
        given.pop("warm_start", None)
        stop = given.pop("stop", ())
        usual = {"metric": "loss", "mode": "min", "space": self.space.to_json(), "seed": SEED}
        spec = StudySpec(**{**usual, **given})
        algorithm = with_stop_rules(ALGORITHMS[self.name](), stop, None, spec.objectives)
        of_best = spec.of_best if algorithm.models_best_epochs else LAST_EPOCHS
        earlier, lines = earlier_trials(list(self.warm_start), spec, algorithm.modelled_budgets, of_best)
        spec = replace(spec, algorithm=call_text(algorithm), earlier=earlier, earlier_from=lines)
        pickled = pickled_algorithm(algorithm)
        search = load_algorithm(pickled, spec)  # refuses what does not fit before there is a directory
        if self.extends:
            search.extend(self.extends)
        Journal.create(self.directory, spec, task=b"", algorithm=pickled, clock=lambda: self.now).close()

    @property
    def space(self) -> Space:
        return self.point.space_of(self.name)

    def run(self, dies_at: int = 0, before: bool = False) -> Ended:
        """Run the study to its end, through a kill around that step of all its engines."""
        while not self._run_engine(dies_at - self.writes, before):
            pass
        study = shoal.Study(self.directory)
        weights = frozenset(self.checkpoints)
        return Ended(study, self.name, self.space, self.point.arguments, weights, self.before, self.at_once)

    def _run_engine(self, dies_at: int, before: bool) -> bool:
        """Run an engine; whether the study has ended."""
        context = WorkerContext(self.directory, b"", checkpoint_seconds=0.3)
        backend = Virtual(context, Courses(), self.checkpoints, self.now, beat_seconds=1.0)
        with closing(MortalJournal.open(self.directory, clock=backend.clock)) as journal, closing(backend):
            journal.dies_at, journal.before = dies_at, before
            if how_ended(journal) == "timeout":
                journal.put("time_left", journal.spec.timeout)
            journal.begin_run()
            algorithm = load_algorithm(journal.blob("algorithm"), journal.spec)
            history = History(self.directory / "history.sqlite")
            config = EngineConfig(Fleet(cluster(2)), make_policy("auto"), history, clock=backend.clock)
            engine = Engine(journal, algorithm, backend, config, lambda: self._count(engine))
            try:
                engine.begin()
                engine.run()
            except Killed:
                return False
            finally:
                self.now, self.writes = backend.now, self.writes + journal.writes
            if how_ended(journal) == "timeout":
                return False
            if self.extends and not self.before:
                self.before = journal.trials()
                write_request(self.directory, "extend", arguments={"trials": self.extends})
                return False
            return True

    def _count(self, engine: Engine) -> None:
        self.at_once = max(self.at_once, sum(x.state is TrialState.RUNNING for x in engine.state.trials))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an earlier study of eight trials."""
    study = Simulated(tmp_path_factory.mktemp("earlier") / "study", "random", POINTS["nothing else"])
    return study.run().study.directory


def sources(point: Point, source: Path, copy: Path) -> list[Path]:
    """The argument `warm_start` of a study of a point: a copy that can be deleted."""
    return [Path(shutil.copytree(source, copy))] if point.arguments.get("warm_start") else []


CASES = [(point, name) for point in POINTS for name in ALGORITHMS]


@pytest.mark.in_turns
@pytest.mark.parametrize(("row", "name"), [pytest.param(*case, id=", ".join(case)) for case in CASES])
def test_a_kill_of_the_simulated_study_changes_nothing(
    row: str, name: str, source: Path, turn: int, tmp_path: Path
) -> None:
    point = POINTS[row]
    if name in point.refused:
        with pytest.raises(ShoalError, match=point.refused[name]):
            Simulated(tmp_path / "study", name, point)
        assert not (tmp_path / "study").exists()
        return
    earlier = sources(point, source, tmp_path / "earlier")
    whole = Simulated(tmp_path / "whole", name, point, warm_start=earlier)
    killed = Simulated(tmp_path / "killed", name, point, disturbed=True, warm_start=earlier)
    for directory in earlier:
        shutil.rmtree(directory)
    expected = whole.run()
    random = Random(f"{turn} {row} {name}")
    found = killed.run(dies_at=random.randint(whole.writes // 4, 3 * whole.writes // 4), before=random.random() < 0.5)
    with JournalView.read(killed.directory) as journal:
        assert len(journal.runs()) > 1
    assert outcome(found) == outcome(expected)
    point.claims(found)


PROGRAM = """
import sys
from pathlib import Path
sys.path[:] = {path!r}
from course_task import begin
begin({row!r}, {name!r}, Path({directory!r}), warm_start={earlier!r}, dies_at={dies_at})
"""


def ended(study: shoal.Study, row: str, name: str) -> Ended:
    """A real study after its end, which is extended if its point says so."""
    point, before = POINTS[row], study.trials
    if extends := point.arguments.get("extend"):
        study = resume(study.directory, trials=extends, show_progress=False)
    folders = (study.directory / "checkpoints").iterdir()
    weights = frozenset(int(folder.name) for folder in folders if any(folder.glob("*.pt")))
    return Ended(study, name, point.space_of(name), point.arguments, weights, before if extends else (), live=True)


def live() -> Iterator[Any]:
    """The cells; a fast run has one of a diagonal, with another row for each of ten columns."""
    for place, name in enumerate(ALGORITHMS):
        rows = [row for row, point in POINTS.items() if point.live and name not in point.refused]
        for row in rows:
            marks = () if place < 10 and row == rows[2 * place % len(rows)] else pytest.mark.thorough
            yield pytest.param(row, name, id=f"{row}, {name}", marks=marks)


@pytest.mark.in_turns
@pytest.mark.parametrize(("row", "name"), list(live()))
def test_a_kill_of_the_real_study_changes_nothing(
    row: str,
    name: str,
    source: Path,
    turn: int,
    tmp_path: Path,
    shoal: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    from course_task import begin  # and torch, which the simulation need not import

    point, random = POINTS[row], Random(f"{turn} {row} {name}")
    earlier = sources(point, source, tmp_path / "earlier")
    whole = ended(begin(row, name, tmp_path / "whole", warm_start=earlier), row, name)
    directory, program = tmp_path / "study", tmp_path / "program.py"
    settings = {"row": row, "name": name, "directory": str(directory), "dies_at": random.randint(1, 6)}
    program.write_text(PROGRAM.format(path=sys.path, earlier=list(map(str, earlier)), **settings))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for each in earlier:
        shutil.rmtree(each)
    seconds = 0.2 if "timeout" in point.disturbing else None
    study = resume(directory, timeout=seconds, show_progress=False)
    while study.ended == "timeout":
        seconds = 2 * (seconds or 0.0)
        study = resume(directory, timeout=seconds, show_progress=False)
    found = ended(study, row, name)
    assert outcome_at_targets(found) == outcome_at_targets(whole)
    point.claims(found)
    for trial in found.rows:
        if trial.number in found.weights - found.cut_short:
            kept = (trial.epoch if trial.best_epoch is None else trial.best_epoch, trial.epoch)
            assert tuple(study.model(trial.number, which).epochs.item() for which in ("best", "last")) == kept
