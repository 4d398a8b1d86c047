"""More trials for a study: one that is open, one that has ended, and with kills between."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import check_equal, curves, tune
from test_engine import MAKERS, Stage, backend, run_with_kills, well
from test_engine import four as grid_of_four
from typer.testing import CliRunner

import shoal
from shoal.algorithms.base import Algorithm
from shoal.algorithms.bohb import SyncBOHB
from shoal.algorithms.random import Random
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.cli.app import app
from shoal.core.errors import AlgorithmError
from shoal.core.rows import Intervention, Proposal, ReportRow, Row
from shoal.core.trial import TrialState
from shoal.journal.requests import write_request
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot

ROUNDS: dict[str, Callable[[], Algorithm]] = {
    **MAKERS,
    "random": lambda: Random(4, 2),
    "halving": lambda: SuccessiveHalving(6, 4, eta=2),
    "sync_bohb": lambda: SyncBOHB(4, eta=2),
}


def extend(stage: Stage, trials: int) -> None:
    write_request(stage.directory, "extend", arguments={"trials": trials})


def requested(stage: Stage) -> list[tuple[str, tuple[str, ...]]]:
    with JournalView.read(stage.directory) as journal:
        return [(each.text, each.refused) for each in journal.interventions()]


@pytest.mark.parametrize("make", ROUNDS.values(), ids=ROUNDS)
def test_a_study_that_has_ended_goes_on_with_more_trials(make: Callable[[], Algorithm], tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", make)
    stage.run(backend())
    before = stage.outcome()
    extend(stage, len(before) + 2)
    stage.run(backend())
    after = stage.outcome()
    assert len(after) >= len(before) + 2
    assert after[: len(before)] == before
    assert all(row[2].final for row in after)  # type: ignore[attr-defined]
    stage.run(backend())  # the replay repeats it at its place
    assert stage.outcome() == after
    assert requested(stage) == [(f"from {len(before)} to {len(after)} trials", ())]
    with JournalView.read(stage.directory) as journal:
        seen = snapshot(journal, 0.0)
    assert (seen.trials, seen.unproposed, seen.epochs_done) == (len(after), 0, seen.epochs_total)


@pytest.mark.parametrize("kind", [Proposal, ReportRow, Intervention])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_between_changes_nothing(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stage = Stage(tmp_path / "whole", lambda: Random(6, 2)), Stage(tmp_path / "study", lambda: Random(3, 2))
    whole.run(backend())
    asked: list[int] = []

    def run() -> None:
        if not asked:
            stage.open().close()
            extend(stage, 6)
            asked.append(6)
        stage.run(backend())

    assert run_with_kills(kind, when, run, monkeypatch) > 0
    assert stage.outcome() == whole.outcome()
    assert requested(stage) == [("from 3 to 6 trials", ())]


def test_an_open_study_gets_more_trials_while_it_runs(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: SuccessiveHalving(4, 4, eta=2))
    asked: list[str] = []

    def script(job: Any) -> Any:
        if job.purpose == "train" and not asked:
            asked.append(job.id)
            extend(stage, 6)
        return well(job)

    stage.run(backend(script))
    states = [row[2] for row in stage.outcome()]
    assert (len(states), states.count(TrialState.COMPLETE)) == (6, 2), "each bracket has its own best"
    assert states[4:].count(TrialState.COMPLETE) == 1, "the later trials are compared with each other"


@pytest.mark.parametrize(
    ("stage", "trials", "why"),
    [
        pytest.param(grid_of_four, 9, "Grid(epochs=2) tries every point of its space; begin a new study", id="grid"),
        pytest.param(Stage, 9, "tries 9 trials, so `trials` must be more, got 9", id="no more than there are"),
    ],
)
def test_what_cannot_be_extended_is_refused_and_stays(
    stage: Callable[[Path], Stage], trials: int, why: str, tmp_path: Path
) -> None:
    study = stage(tmp_path / "study")
    study.run(backend())
    before = study.outcome()
    extend(study, trials)
    study.run(backend())
    ((_, (refused,)),) = requested(study)
    assert why in refused
    assert study.outcome() == before


def test_a_study_that_a_user_has_ended_gets_no_more(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(3, 2))
    stage.open().close()
    write_request(stage.directory, "end study")
    stage.run(backend())
    extend(stage, 6)
    stage.run(backend())
    assert requested(stage)[1] == ("", ("the study is over: the study was ended by a user",))


def test_resume_extends_a_search_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(1e-3, 1e-1)}
    whole = tune(tasks.Blobs(), space, tmp_path / "whole", algorithm=shoal.Random(3, epochs=2))
    study = tune(tasks.Blobs(), space, tmp_path / "study", algorithm=shoal.Random(2, epochs=2))
    with pytest.raises(
        AlgorithmError, match=r"Random\(n=2, epochs=2\) tries 2 trials, so `trials` must be more, got 2"
    ):
        shoal.resume(study.directory, trials=2, show_progress=False)
    with pytest.raises(AlgorithmError, match="`trials` must be an integer of at least 1, got '3'"):
        shoal.resume(study.directory, trials="3", show_progress=False)  # type: ignore[arg-type]
    assert not (study.directory / "requests").exists()
    done = CliRunner().invoke(app, ["resume", str(study.directory), "--trials", "3", "--json"])
    assert done.exit_code == 0, done.output
    assert shoal.resume(study.directory, trials=3, show_progress=False).ended == "finished"
    assert [row.trial for row in study.trials] == [row.trial for row in whole.trials]
    check_equal(curves(study.directory), curves(whole.directory))


def test_repeats_extend_by_configurations(tmp_path: Path) -> None:
    study = tune(
        tasks.Blobs(), {"lr": shoal.grid([0.01, 0.03])}, tmp_path / "grid", algorithm=shoal.Grid(epochs=1), repeats=2
    )
    with pytest.raises(AlgorithmError, match="begin a new study with a larger space"):
        shoal.resume(study.directory, trials=4, show_progress=False)
    space = {"lr": shoal.loguniform(1e-3, 1e-1)}
    study = tune(tasks.Blobs(), space, tmp_path / "random", algorithm=shoal.Random(1, epochs=1), repeats=2)
    shoal.resume(study.directory, trials=2, show_progress=False)
    assert [row.number for row in study.trials] == [0, 1, 2, 3]
    assert [len(row.repeats) for row in study.configurations] == [2, 2]  # type: ignore[attr-defined]
