"""Which checkpoints of ended trials go, when, and that a kill in between leaves none of them."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tasks
from machine import JOB, Machine
from plain import tune
from test_engine import Killed, Scripted, Stage, backend, failing, run_with_kills, well
from typer.testing import CliRunner

import shoal
from shoal.algorithms.base import Algorithm
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.cli.app import app
from shoal.core.command import DeleteCheckpoints
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.event import MembersLeft
from shoal.core.job import Job, Purpose
from shoal.core.request import Request
from shoal.core.rows import Deletion, TrialRow
from shoal.core.trial import Report, Trial, TrialState
from shoal.journal.requests import write_request
from shoal.journal.view import JournalView
from shoal.look.disk import DiskWatch
from shoal.spec import StudySpec
from shoal.study.retention import below_rank
from shoal.train.checkpoint_paths import checkpoint_directory, checkpoint_stem, make_checkpoint_directory

USAGE = type(shutil.disk_usage("."))
SPACE = {"lr": shoal.loguniform(0.01, 0.3)}


def row(number: int, *values: float, violation: float = 0.0) -> TrialRow:
    metrics = dict(zip(("loss", "size"), values, strict=False))
    trial = Trial(number, {"x": number}, 0, 0)
    first = next(iter(values), None)
    return TrialRow(
        trial, TrialState.COMPLETE, "", 1, 1, 0, "", "", 1.0, metrics, metrics, first, violation, ranked=metrics
    )


FOUR = [row(0, 3.0), row(1, 1.0), row(2, 2.0), row(3)]
BOUNDED = [row(0, 1.0, violation=0.5), row(1, 2.0)]
TWO_GOALS = [row(0, 1.0, 5.0), row(1, 5.0, 1.0), row(2, 6.0, 6.0)]


@pytest.mark.parametrize(
    ("rows", "keep", "settings", "gone"),
    [
        pytest.param(FOUR, "all", {}, set(), id="all"),
        pytest.param(FOUR, 1, {}, {0, 2, 3}, id="one"),
        pytest.param(FOUR, "best", {}, {0, 2, 3}, id="the best"),
        pytest.param(FOUR, 3, {}, {3}, id="a trial without a value comes last"),
        pytest.param(FOUR, 9, {}, set(), id="more than there are"),
        pytest.param([], "best", {}, set(), id="none has ended"),
        pytest.param(FOUR, 1, {"mode": "max"}, {1, 2, 3}, id="the greatest is the best"),
        pytest.param(BOUNDED, 1, {"constraints": {"size": "<= 2"}}, {0}, id="a feasible trial is better"),
        pytest.param(TWO_GOALS, "best", {"metric": ["loss", "size"], "mode": ["min", "min"]}, {2}, id="a front"),
        pytest.param(TWO_GOALS, 1, {"metric": ["loss", "size"], "mode": ["min", "min"]}, {1, 2}, id="one of a front"),
        pytest.param(FOUR, 1, {"repeats": 2}, {2, 3}, id="a configuration stays as a whole"),
        pytest.param(FOUR[:3], 1, {"repeats": 2}, set(), id="one with an open trial has no rank"),
    ],
)
def test_what_ranks_below(rows: list[TrialRow], keep: int | str, settings: dict[str, Any], gone: set[int]) -> None:
    assert below_rank(rows, StudySpec(**{"metric": "loss", "mode": "min", **settings}), keep) == gone


def saving(stage: Stage, script: Callable[[Job], Sequence[Any]] = well) -> Scripted:
    """A back end whose jobs leave the checkpoint of each trial's target, and that of its start if it began anew."""

    def save(job: Job) -> None:
        for member in job.members if job.purpose is Purpose.TRAIN else ():
            folder = make_checkpoint_directory(stage.directory, member.trial.number)
            for suffix in ("pt", "state"):
                (folder / f"{checkpoint_stem(member.target, 0)}-00000000.{suffix}").write_text("content")

    return backend(script, on_start=save)


def left(directory: Path) -> dict[int, set[str]]:
    """Number of each trial with checkpoints -> suffixes of its files."""
    folders = (directory / "checkpoints").iterdir()
    found = {int(folder.name): {path.suffix for path in folder.iterdir()} for folder in folders}
    return {number: suffixes for number, suffixes in sorted(found.items()) if suffixes}


def best(stage: Stage) -> int:
    return shoal.Study(stage.directory).best_trial.number


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "make", [lambda: Hyperband(9, brackets=1), lambda: PBT(4, epochs=4)], ids=["halving", "population"]
)
def test_a_kill_at_a_deletion_changes_nothing(
    make: Callable[[], Algorithm], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stage = (Stage(tmp_path / name, make, settings={"keep": 1}) for name in ("whole", "study"))
    whole.run(saving(whole))
    assert left(whole.directory) == {best(whole): {".pt"}}
    assert run_with_kills(Deletion, when, lambda: stage.run(saving(stage)), monkeypatch) > 0
    assert stage.outcome() == whole.outcome()
    assert left(stage.directory) == left(whole.directory)


def test_a_deletion_that_a_kill_cut_short_is_repeated(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(4, 2), settings={"keep": 1})
    dying = saving(stage)

    def die(directory: Path, trial: int, *, weights: bool) -> None:
        raise Killed

    dying.delete_checkpoints = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        stage.run(dying)
    with JournalView.read(stage.directory) as journal:
        ((number,),) = journal.tables.rows("SELECT trial FROM deletions")
    assert left(stage.directory)[number] == {".pt", ".state"}, "it is recorded before it is done"
    stage.run(saving(stage))
    assert left(stage.directory) == {best(stage): {".pt"}}


@pytest.mark.parametrize("algorithm", [Random(4, 2), PBT(4, epochs=4)], ids=repr)
def test_all_weights_stay_and_no_state_by_default(algorithm: Algorithm, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: type(algorithm)(**vars(algorithm)))
    stage.run(saving(stage))
    found = left(stage.directory)
    assert set(found) == {each[0] for each in stage.outcome()}
    assert set(map(frozenset, found.values())) == {frozenset({".pt"})}


def test_a_failed_trial_keeps_all_until_its_retry_has_ended(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(4, 2), settings={"keep": 1, "retries": 0})
    stage.run(saving(stage, failing(2)), retries=0)
    assert left(stage.directory)[2] == {".pt", ".state"}
    shoal.Study(stage.directory).retry(2)
    stage.run(saving(stage))
    assert left(stage.directory) == {best(stage): {".pt"}}


def test_a_rule_is_changed_after_the_end_and_pins_are_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(4, 2))
    stage.run(saving(stage))
    study, runner = shoal.Study(stage.directory), CliRunner()
    pinned = next(each.number for each in study.trials if each.number != best(stage))
    assert runner.invoke(app, ["pin", str(stage.directory), str(pinned)]).exit_code == 0
    assert runner.invoke(app, ["keep", str(stage.directory), "1"]).exit_code == 0
    stage.run(saving(stage))
    assert left(stage.directory) == {number: {".pt"} for number in sorted((best(stage), pinned))}
    study.keep("all")
    stage.run(saving(stage))
    assert len(left(stage.directory)) == 2, "what is deleted does not come back"
    with JournalView.read(stage.directory) as journal:
        assert [(each.verb, each.text) for each in journal.interventions()] == [
            ("pin", ""), ("keep", "1"), ("keep", "all"),
        ]  # fmt: skip
    gone = next(each.number for each in study.trials if each.number not in left(stage.directory))
    with pytest.raises(ShoalError, match=f"the weights of trial {gone} .* were deleted; train it again"):
        study.pin(gone)


@pytest.mark.parametrize("keep", [0, -1, "most", 1.5, True])
def test_an_invalid_rule_is_refused(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="`keep` must be"):
        StudySpec(metric="loss", mode="min", keep=keep)


def test_the_source_of_a_pending_clone_stays_until_the_clone_has_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(4, 2))
    stage.run(saving(stage))
    source = next(each.number for each in shoal.Study(stage.directory).trials if each.number != best(stage))
    write_request(stage.directory, "keep", arguments={"keep": 1})
    shoal.Study(stage.directory).clone(source, {"x": 0.5}, epochs=4)
    stage.run(saving(stage))
    rows = {each.number: each for each in shoal.Study(stage.directory).trials}
    assert rows[1_000_000].state is TrialState.COMPLETE
    assert rows[1_000_000].epoch == 4
    assert left(stage.directory) == {best(stage): {".pt"}}


def test_a_pinned_trial_keeps_its_optimizer(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(3, 2), settings={"keep": "best"})
    asked: list[int] = []

    def script(job: Job) -> Sequence[Any]:
        if job.purpose is Purpose.TRAIN and not asked:
            asked.extend(shoal.Study(stage.directory).pin([0, 1, 2]))
        return well(job)

    stage.run(saving(stage, script))
    assert left(stage.directory) == {number: {".pt", ".state"} for number in range(3)}


@pytest.mark.parametrize("algorithm", [shoal.Random(3, epochs=2), shoal.PBT(3, epochs=3)], ids=repr)
def test_a_real_study_frees_the_disk_and_names_what_is_gone(
    algorithm: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.run_study.DiskWatch", partial(DiskWatch, find=lambda path: USAGE(100, 95, 5)))
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=algorithm, keep=1)
    kept = study.best_trial.number
    assert left(study.directory) == {kept: {".pt"}}
    assert caplog.text.count("the disk is nearly full") == 1
    assert study.best_model()(tasks.blobs(4, 0).tensors[0]).shape == (4, 3)
    other = next(each.number for each in study.trials if each.number != kept)
    rule = rf"the weights of trial {other}, which ranks \d of \d, were deleted by the rule .* keep=1.*shoal rerun"
    with pytest.raises(CheckpointError, match=rule):
        study.model(other)
    assert not any(checkpoint_directory(study.directory, other).iterdir())
    shoal.resume(study.directory, show_progress=False)
    assert left(study.directory) == {kept: {".pt"}}


def test_status_says_what_checkpoints_take_and_warns_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, runner = Stage(tmp_path / "study", lambda: PBT(4, epochs=4)), CliRunner()
    stage.run(saving(stage))
    sizes = {path.stat().st_ino: path.stat().st_size for path in (stage.directory / "checkpoints").rglob("*.pt")}
    shown = json.loads(runner.invoke(app, ["status", str(stage.directory), "--json"]).stdout)["disk"]
    assert shown["checkpoints"] == sum(sizes.values()) > 0
    for free, warns in ((9 * 10**9, True), (11 * 10**9, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: USAGE(100 * 10**9, 100 * 10**9 - free, free))
        said = runner.invoke(app, ["status", str(stage.directory)])
        assert f"checkpoints  0 MB; {free / 1e9:.1f} GB free of 100.0 GB" in said.stdout
        assert ("the disk is nearly full" in said.stderr) is warns


def deleted(commands: Sequence[object]) -> list[tuple[int, bool]]:
    return [(each.trial, each.weights) for each in commands if isinstance(each, DeleteCheckpoints)]


def test_the_files_of_a_stopped_trial_stay_until_its_job_has_let_it_go() -> None:
    machine = Machine()
    _, commands = machine.step(Request("1", "stop", trials=(machine.first,)), 1.0)
    assert deleted(commands) == []
    rows, commands = machine.step(MembersLeft(JOB, frozenset({machine.first})), 2.0)
    assert deleted(commands) == [(machine.first, False)]
    assert [(each.trial, each.weights, each.time) for each in rows if isinstance(each, Deletion)] == [
        (machine.first, False, 2.0)
    ]


def test_an_origin_stays_until_its_copy_has_reported() -> None:
    machine = Machine()
    for number, value in ((machine.first, 2.0), (machine.second, 0.5)):
        machine.report(2.0, *(Report(number, epoch, {"loss": value}) for epoch in range(2, 5)))
        machine.report(2.0, Report(number, 5, {"loss": value}, state=TrialState.PAUSED))
    origin = {"trial": machine.first, "epoch": 5}
    given = {"config": {"x": 1.0}, "epochs": 9, "origin": origin, "source": machine.first}
    machine.step(Request("1", "clone", arguments=given), 3.0)
    _, commands = machine.step(Request("2", "keep", arguments={"keep": 1}), 4.0)
    assert deleted(commands) == []
    state = machine.core.state
    state.trials.begin("job", "gpu", [state.trials[1_000_000].member])
    state.trials.reported(Report(1_000_000, 6, {"loss": 3.0}))
    assert deleted(machine.plan(5.0)) == [(machine.first, True)]


def test_a_trial_that_the_algorithm_may_copy_keeps_its_files_until_the_search_ends() -> None:
    machine = Machine()
    algorithm = machine.core.state.config.algorithm
    algorithm.copies_trials = True
    algorithm.may_return = {machine.first}.__contains__  # type: ignore[method-assign]
    for number in (machine.first, machine.second):
        machine.report(2.0, *(Report(number, epoch, {"loss": 1.0}) for epoch in range(2, 5)))
        ends = machine.reported(Report(number, 5, {"loss": 1.0}, state=TrialState.PAUSED))
        assert deleted(machine.step(ends, 2.0)[1]) == ([] if number == machine.first else [(number, False)])
    _, commands = machine.step(Request("1", "stop", trials=(machine.third,)), 3.0)
    assert deleted(commands) == [(machine.first, False), (machine.third, False)]


def test_a_program_keeps_its_files_or_loses_all_of_them(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Random(3, 2), settings={"keep": 1, "opaque": "opaque f 0123456789abcdef"})

    def save(job: Job) -> None:
        for member in job.members if job.purpose is Purpose.TRAIN else ():
            folder = make_checkpoint_directory(stage.directory, member.trial.number)
            for name in ("live", f"{checkpoint_stem(member.target, 0)}-files/files"):
                (folder / name).mkdir(parents=True)
                (folder / name / "net").write_text("content")

    stage.run(backend(on_start=save))
    found = {path.relative_to(stage.directory / "checkpoints") for path in stage.directory.rglob("net")}
    kept = f"{best(stage):06d}"
    assert found == {Path(kept, "live", "net"), Path(kept, "000002-000000-files", "files", "net")}
