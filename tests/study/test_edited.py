"""A task that was edited between two runs of its study: what cannot continue with it loses nothing."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tasks
from plain import check_equal, check_plain, jobs, plain_loop, table, tune
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.errors import AlgorithmError, TaskChangedError, UnusableTaskError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.train import run

SPACE = {"lr": shoal.grid([0.01]), "momentum": 0.9, "step_size": 2}
MODULE = "import tasks\n\n\nclass Edited(tasks.InterruptedAfter):\n    pass\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `edited` with a task of that name."""
    path = tmp_path / "code" / "edited.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "edited", raising=False)
    return path


class OpenEnded(shoal.Grid):
    """An algorithm that does not say beforehand how much it will try."""

    totals = None


def interrupted(task: shoal.Task, directory: Path, space: Any = SPACE, **arguments: Any) -> shoal.Study:
    with pytest.raises(shoal.StudyInterrupted):
        tune(task, space, directory, checkpoint_seconds=0.0, retries=0, **arguments)
    return shoal.Study(directory)


def runs(study: shoal.Study) -> int:
    with JournalView.read(study.directory) as journal:
        return len(journal.runs())


def edited(tmp_path: Path) -> Any:
    return importlib.import_module("edited").Edited(3, str(tmp_path / "count"))


def check_open(study: shoal.Study, before: list[tuple[Any, ...]]) -> None:
    """Nothing is lost and nothing is new."""
    assert table(study) == before
    assert {row.state for row in study.trials} == {TrialState.PENDING}
    assert {row.failures for row in study.trials} == {0}


def test_an_edit_is_told_and_has_to_be_accepted(tmp_path: Path, module: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = interrupted(edited(tmp_path), tmp_path / "study")
    before = table(study)
    helper = module.with_name("helper.py")
    helper.touch()
    module.write_text(MODULE.replace("    pass", "    factor = 2\n    import helper"))
    words = r"edited\.py.*\n(.|\n)*-    pass\n\+    factor = 2\n(.|\n)*--accept-changes"
    with pytest.raises(TaskChangedError, match=words):
        shoal.resume(study.directory, show_progress=False)
    done = CliRunner().invoke(app, ["resume", str(study.directory)])
    assert isinstance(done.exception, TaskChangedError), "not on a terminal"
    check_open(study, before)
    assert runs(study) == 1, "what is refused is not a run"
    shoal.resume(study.directory, accept_changes=True, show_progress=False)
    with JournalView.read(study.directory) as journal:
        assert list(map(Path, journal.study["sources"])) == [module, helper]
    status = CliRunner().invoke(app, ["status", str(study.directory)]).output
    words = r"edited\.py edited when it continued at .*: trials 0 had not ended, those from 1 on had not begun"
    assert re.search(f"task +{words}", status)
    told = json.loads(CliRunner().invoke(app, ["status", str(study.directory), "--json"]).output)["edits"]
    assert [(list(map(Path, edit["files"])), edit["open"], edit["next"]) for edit in told] == [([module], [0], 1)]
    module.write_text(f"# edited again\n{MODULE}")
    done = CliRunner().invoke(app, ["rerun", str(study.directory), "0"])
    assert re.search(rf"{words}; what trial 0 had reported by then is of the task before\n", done.stderr)
    assert f"edited since the study last ran, so that this may be another task: {module}\n" in done.stderr
    shown = json.loads(CliRunner().invoke(app, ["rerun", str(study.directory), "0", "--json"]).stdout)
    assert (shown["changed"], [edit["open"] for edit in shown["edits"]]) == ([str(module)], [[0]])
    caplog.clear()
    with caplog.at_level("WARNING", "shoal.study"):
        study.best_model()
    assert caplog.messages == [
        f"the model may not be what was trained, as the task was edited since: {module}",
    ]


def test_a_study_that_has_ended_is_not_asked_about(tmp_path: Path, module: Path) -> None:
    (tmp_path / "count").touch()
    study = tune(edited(tmp_path), SPACE, tmp_path / "study", algorithm=OpenEnded(epochs=1))
    module.write_text("1 / 0\n")
    shoal.resume(study.directory, show_progress=False)


def test_an_edit_is_asked_about_on_a_terminal(tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = interrupted(edited(tmp_path), tmp_path / "study")
    module.write_text(f"# edited\n{MODULE}")
    monkeypatch.setattr("shoal.cli.run.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), stderr=None))
    refused = CliRunner().invoke(app, ["resume", str(study.directory)], input="n\n")
    assert refused.exit_code == 1
    assert "+# edited" in refused.output
    assert shoal.Study(study.directory).trials[0].state is TrialState.PENDING
    assert CliRunner().invoke(app, ["resume", str(study.directory)], input="y\n").exit_code == 0
    assert shoal.Study(study.directory).trials[0].state is TrialState.COMPLETE


@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{MODULE}    def\n", r'SyntaxError: .*correct its module(.|\n)*edited\.py", line 6'),
        (f"{MODULE}\nimport sys\nsys.exit('no guard')\n", r"SystemExit: no guard; correct its module"),
    ],
    ids=["syntax", "exit"],
)
def test_a_task_that_cannot_be_loaded_any_more_ends_the_run_with_its_traceback(
    content: str, words: str, tmp_path: Path, module: Path
) -> None:
    study = interrupted(edited(tmp_path), tmp_path / "study")
    before = table(study)
    module.write_text(content)
    with pytest.raises(UnusableTaskError, match=words) as caught:
        shoal.resume(study.directory, backend="local", accept_changes=True, show_progress=False)
    assert f"resume with: shoal resume {study.directory} --accept-changes" in str(caught.value)
    check_open(study, before)
    module.write_text(MODULE)
    check_plain(shoal.resume(study.directory, accept_changes=True, show_progress=False), tasks.Momentum())


def other_model(task: Any, config: Any) -> Any:
    return tasks.mlp(6, 9, 3)


def deeper_model(task: Any, config: Any) -> Any:
    return tasks.mlp(6, 8, 8, 3)


def two_groups(task: Any, model: Any, config: Any) -> Any:
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    return tasks.torch.optim.SGD(groups, lr=config["lr"], momentum=config["momentum"], nesterov=True)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("method", "edit", "words"),
    [
        ("model", other_model, "model .* does not fit the checkpoint of trial 0(.|\n)*size mismatch"),
        ("model", deeper_model, "model .* does not fit the checkpoint of trial 0(.|\n)*Missing key"),
        ("optimizer", two_groups, "optimizer .* does not fit the checkpoint of trial 0(.|\n)*parameter group"),
    ],
    ids=["wider", "deeper", "groups"],
)
def test_what_a_task_makes_that_fits_no_checkpoint_ends_the_run(
    method: str, edit: Callable[..., Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = interrupted(tasks.InterruptedAfter(3, str(tmp_path / "count")), tmp_path / "study")
    before = table(study)
    with monkeypatch.context() as patch:
        patch.setattr(tasks.InterruptedAfter, method, edit)
        run._cached_state.cache_clear()  # else this process has the trials at hand
        with pytest.raises(UnusableTaskError, match=words) as caught:
            shoal.resume(study.directory, show_progress=False)
        assert "Undo that, or start a new study" in str(caught.value)
        check_open(study, before)
        run._cached_state.cache_clear()
        if method == "model":
            with pytest.raises(UnusableTaskError, match=words):
                study.best_model()
    check_plain(shoal.resume(study.directory, show_progress=False), tasks.Momentum())


@pytest.mark.usefixtures("fusing_pays")
def test_one_trial_that_fits_no_checkpoint_ends_the_run_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.InterruptedAfter(3, str(tmp_path / "count"))
    study = interrupted(task, tmp_path / "study", {**SPACE, "lr": shoal.grid([0.01, 0.02])})
    before = table(study)
    monkeypatch.setattr(
        tasks.InterruptedAfter, "model", lambda task, config: tasks.mlp(6, 8 if config["lr"] == 0.01 else 9, 3)
    )
    run._cached_state.cache_clear()
    with pytest.raises(UnusableTaskError, match=r"model .* does not fit the checkpoint of trial 1"):
        shoal.resume(study.directory, show_progress=False)
    after = shoal.Study(study.directory)
    assert all(row.failures == 0 and row.state is not TrialState.FAILED for row in after.trials)
    assert table(after)[1][:4] == before[1][:4], "the other trial fits, and may have gone on meanwhile"


def test_an_algorithm_that_cannot_be_loaded_any_more_is_said_to_be(tmp_path: Path, module: Path) -> None:
    module.write_text("import shoal\n\n\nclass Edited(shoal.Grid):\n    pass\n")
    algorithm = importlib.import_module("edited").Edited(epochs=4)
    study = interrupted(tasks.InterruptedAfter(3, str(tmp_path / "count")), tmp_path / "study", algorithm=algorithm)
    module.write_text("1 / 0\n")
    del sys.modules["edited"]
    with pytest.raises(AlgorithmError, match=r"algorithm .* cannot be loaded: ZeroDivisionError(.|\n)*edited\.py"):
        shoal.resume(study.directory, show_progress=False)


def test_a_trial_that_failed_goes_on_from_its_checkpoint_once_its_task_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"lr": 0.01, "harm": shoal.grid(["none", "raise"]), "after": 12}
    study = tune(tasks.Disturbed(), space, tmp_path / "study", checkpoint_seconds=0.0, retries=0)
    assert [row.state for row in study.trials] == [TrialState.COMPLETE, TrialState.FAILED]
    monkeypatch.setattr(tasks.Harmful, "do_harm", lambda optimizer: None)
    done = CliRunner().invoke(app, ["trial", "retry", str(study.directory), "--failed"])
    assert (done.exit_code, done.output) == (
        0,
        f"shoal: trial 1 will be retried when the study is resumed: shoal resume {study.directory}\n",
    )
    assert [row.state for row in study.trials] == [TrialState.COMPLETE, TrialState.FAILED], "nothing runs it yet"
    said = "shoal: to be retried: trials 1; resume it with: shoal resume"
    assert said in CliRunner().invoke(app, ["status", str(study.directory)]).output
    assert json.loads(CliRunner().invoke(app, ["status", str(study.directory), "--json"]).output)["retry"] == [1]
    shoal.resume(study.directory, show_progress=False)
    assert [row.state for row in study.trials] == [TrialState.COMPLETE] * 2
    assert said not in CliRunner().invoke(app, ["status", str(study.directory)]).output
    with JournalView.read(study.directory) as journal:
        found = {report.epoch: dict(report.metrics) for report in journal.curve(1) if report.metrics}
    check_equal({1: found}, {1: plain_loop(tasks.Disturbed(), study.trials[1].trial, 4)})
    (row,) = [row for row in study.trials if row.number == 1]
    assert "was retried" in row.reason
    assert study.rerun(1).largest < 1e-9, "how it failed is not a part of what is compared"
    last = [job for job in jobs(study.directory) if job.purpose is Purpose.TRAIN][-1]
    assert last.trials == (1,)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "Name the trials, or all that failed with --failed"),
        (["1", "--failed"], 2, "Name the trials, or all that failed with --failed"),
        (["7"], 1, "has no trial 7; its trials are 0-1"),
        (["0"], 1, "trial 0 .* has not failed, it is complete"),
        (["--failed"], 1, "no trial .* has failed, so none can be tried again"),
    ],
)
def test_a_retry_of_nothing_says_what_to_name(
    arguments: list[str], status: int, words: str, finished: shoal.Study
) -> None:
    done = CliRunner().invoke(app, ["trial", "retry", str(finished.directory), *arguments])
    assert done.exit_code == status
    assert re.search(words, done.output or str(done.exception))
