"""Faults of one trial do not change its neighbours, whose results equal those of plain loops."""

from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import array_sizes, check_equal, curves, jobs, plain_loop, table, tune

import shoal
from shoal.core.cause import Cause, log_of
from shoal.core.errors import StorageFullError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot


def disturbed(harm: str) -> dict[str, Any]:
    """Four trials, of which the last does harm at the fifth step of its second epoch."""
    return {"lr": 0.01, "harm": shoal.grid(["none", "nothing", "no harm", harm]), "after": 12}


def check_neighbours(study: shoal.Study, task: shoal.Task, *harmed: int) -> None:
    """All but the harmed trials are complete and equal plain loops."""
    well = [row for row in study.trials if row.number not in harmed]
    assert {row.state for row in well} == {TrialState.COMPLETE}
    found = curves(study.directory)
    check_equal({row.number: found[row.number] for row in well}, {r.number: plain_loop(task, r.trial, 4) for r in well})


@pytest.mark.parametrize(
    "task",
    [
        tasks.Blobs(),
        tasks.OwnStep(),
        *(pytest.param(task, marks=pytest.mark.thorough) for task in (tasks.Momentum(), tasks.RmsProp())),
    ],
    ids=repr,
)
def test_a_loss_that_is_not_a_number_fails_its_trial_alone(task: shoal.Task, tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.01, 1e300, 0.03]), "momentum": 0.5, "step_size": 2}
    study = tune(task, space, tmp_path / "study")
    check_neighbours(study, task, 1)
    failed = study.trials[1]
    assert failed.state is TrialState.FAILED
    assert failed.reason == "loss is not finite at step 2 of epoch 1"
    assert failed.failures == 0
    assert study.best_trial.number != 1


@pytest.mark.usefixtures("fusing_pays")
@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_trial_that_raises_fails_after_its_retries_with_its_traceback(backend: str, tmp_path: Path) -> None:
    well = {"lr": shoal.grid([0.01, 0.02]), "harm": "none"}
    tune(tasks.Disturbed(), well, tmp_path / "measured", algorithm=shoal.Grid(epochs=1))
    study = tune(tasks.Disturbed(), disturbed("raise"), tmp_path / "study", backend=backend, retries=1)
    check_neighbours(study, tasks.Disturbed(), 3)
    failed = study.trials[3]
    assert failed.state is TrialState.FAILED
    assert failed.reason.startswith("raised after 1 retry:\nTraceback")
    assert 'raise ZeroDivisionError("planted in the step of one trial")' in failed.reason
    assert "tasks.py" in failed.reason
    assert "logs" in failed.reason
    done = jobs(study.directory)
    first = next(number for number, job in enumerate(done) if job.outcome == "raised")
    assert len(done[first].trials) > 1
    assert {len(job.trials) for job in done[first + 1 :]} == {1}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("kill", "was killed by SIGKILL (out of memory?)"),
        pytest.param("exit", "exited with status 3", marks=pytest.mark.thorough),
    ],
)
def test_a_trial_that_ends_its_process_fails_alone(harm: str, words: str, tmp_path: Path) -> None:
    study = tune(tasks.Disturbed(), disturbed(harm), tmp_path / "study", backend="local", devices="cpu:2", retries=1)
    check_neighbours(study, tasks.Disturbed(), 3)
    assert study.trials[3].state is TrialState.FAILED
    assert words in study.trials[3].reason


@pytest.mark.thorough
def test_a_model_that_ends_the_process_that_looks_at_it_fails_alone(tmp_path: Path) -> None:
    study = tune(tasks.Fatal(), {"lr": shoal.grid([0.01, 0.02])}, tmp_path / "study", backend="local", retries=0)
    check_neighbours(study, tasks.Blobs(), 1)
    assert study.trials[1].state is TrialState.FAILED


def test_memory_that_is_short_once_costs_a_retry_and_no_number(tmp_path: Path) -> None:
    task = tasks.Disturbed(str(tmp_path / "happened"))
    study = tune(task, disturbed("memory once"), tmp_path / "study")
    assert (tmp_path / "happened").exists()
    check_neighbours(study, task)
    assert any(job.outcome == "out of memory" for job in jobs(study.directory))


def test_a_disk_that_is_full_stops_the_study_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"lr": shoal.loguniform(0.003, 0.3), "momentum": 0.9, "step_size": 2}
    algorithm = shoal.Hyperband(max_epochs=9, eta=3, brackets=1)
    undisturbed = tune(tasks.Momentum(), space, tmp_path / "undisturbed", algorithm=algorithm)
    opened = Path.open
    left = 60

    def until_full(path: Path, *arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= path.suffix == ".partial"
        if left < 0 and path.suffix == ".partial":
            path.touch()
            raise OSError(28, "No space left on device")
        return opened(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", until_full)
        with pytest.raises(StorageFullError, match="No space left"):
            tune(tasks.Momentum(), space, tmp_path / "study", algorithm=algorithm, checkpoint_seconds=0.0)
    assert not list((tmp_path / "study").rglob("*.partial"))
    study = shoal.resume(tmp_path / "study", show_progress=False)
    assert any(job.outcome == "storage full" for job in jobs(study.directory))
    assert [row[:5] for row in table(study)] == [row[:5] for row in table(undisturbed)]
    check_equal(curves(study.directory), curves(undisturbed.directory))


@pytest.mark.in_turns
@pytest.mark.parametrize("damaged", ["newest", "all"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_checkpoints_are_known_and_cost_only_time(damage: str, damaged: str, tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.01, 0.03]), "momentum": 0.9, "step_size": 2}
    interrupted = tasks.InterruptedAfter(20, str(tmp_path / "count"))
    arguments: dict[str, Any] = {"checkpoint_seconds": 0.0, "algorithm": shoal.Grid(epochs=5), "retries": 0}
    with pytest.raises(shoal.StudyInterrupted):
        tune(interrupted, space, tmp_path / "study", **arguments)
    folders = sorted((tmp_path / "study" / "checkpoints").iterdir())
    assert folders
    for folder in folders:
        files = sorted(folder.glob("*.state"), reverse=True)
        assert len(files) == 2
        for file in files if damaged == "all" else files[:1]:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes({"cut": data[:-50], "flipped": data, "empty": b""}[damage])
    study = shoal.resume(tmp_path / "study", show_progress=False)
    task = tasks.Momentum()
    check_equal(curves(study.directory), {row.number: plain_loop(task, row.trial, 5) for row in study.trials})


def test_profiles_that_fail_cost_fusion_and_nothing_else(tmp_path: Path) -> None:
    """The harm comes within the few steps of a profile."""
    space = {"lr": 0.01, "harm": shoal.grid(["raise", "none", "nothing"]), "after": 2}
    study = tune(tasks.Disturbed(), space, tmp_path / "study", retries=0)
    check_neighbours(study, tasks.Disturbed(), 0)
    assert [job.outcome for job in jobs(study.directory) if job.purpose is Purpose.PROFILE] == ["raised"]
    assert array_sizes(study.directory) == [1, 1, 1]


RATES = {"lr": shoal.loguniform(0.003, 0.3)}


def stopped_for(directory: Path) -> Cause | None:
    with JournalView.read(directory) as journal:
        return snapshot(journal, 0.0).stopped


def test_a_task_that_fails_in_all_trials_ends_the_study_soon_and_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    task = tasks.Broken(str(tmp_path / "mended"))
    with pytest.raises(shoal.StudyFailedError) as error:
        tune(task, RATES, tmp_path / "study", algorithm=shoal.Random(32, epochs=2))
    text = str(error.value)
    assert 'raise ValueError(f"planted in the loss: {fault}")' in text
    assert "tasks.py" in text
    assert text.startswith(
        "5 trials failed alike, and no trial has reported anything:\n  ValueError: planted in the loss"
    )
    assert text.count("Log: ") == 1
    assert text.endswith(f"resume with: shoal resume {tmp_path / 'study'} --accept-changes")
    tried = array_sizes(tmp_path / "study")
    assert tried[-5:] == [1] * 5
    assert len(tried) <= 6
    stopped = shoal.Study(tmp_path / "study")
    assert {row.state for row in stopped.trials} == {TrialState.PENDING}
    assert {row.failures for row in stopped.trials} == {0}
    assert stopped_for(tmp_path / "study") == Cause(
        "ValueError: planted in the loss: all", (0, 1, 2, 3, 4), log_of(text)
    )
    (tmp_path / "mended").touch()
    study = shoal.resume(tmp_path / "study", show_progress=False)
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    assert stopped_for(study.directory) is None


def test_options_of_which_the_first_fail_do_not_end_the_study(tmp_path: Path) -> None:
    space = {"fault": shoal.grid(["here", ""]), "lr": shoal.grid([0.003 * 2**k for k in range(6)])}
    study = tune(tasks.Broken(), space, tmp_path / "study", retries=0)
    assert [row.state for row in study.trials] == [TrialState.FAILED] * 6 + [TrialState.COMPLETE] * 6


def test_a_study_in_which_all_trials_failed_says_of_what(tmp_path: Path) -> None:
    space = {"lr": 0.01, "fault": shoal.grid(["one", "two"]), "again": shoal.grid([0, 1])}
    with pytest.raises(shoal.StudyFailedError) as error:
        tune(tasks.Broken(), space, tmp_path / "study", retries=1)
    lines = str(error.value).splitlines()
    assert lines[0] == "all 4 trials failed:"
    assert lines[1].startswith("  2 failed: ValueError: planted in the loss: one (trials 0-1; log: ")
    assert lines[2].startswith("  2 failed: ValueError: planted in the loss: two (trials 2-3; log: ")
    assert "tasks.py" in str(error.value)
    assert error.value.directory is not None
    assert len(shoal.Study(error.value.directory).trials) == 4
    with pytest.raises(shoal.StudyFailedError, match="all 4 trials failed"):
        shoal.resume(tmp_path / "study", show_progress=False)
