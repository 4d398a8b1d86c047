"""Callbacks of four frameworks report, keep checkpoints, stop, and continue after a kill as if there had been none."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import callback_programs
import pytest
import torch

import shoal
from shoal.core.errors import ShoalError, TaskError
from shoal.core.trial import TrialState
from shoal.integrations import optional
from shoal.integrations.optional import check_installed, numbers
from shoal.integrations.transformers import ReportCheckpointCallback
from shoal.journal.view import JournalView
from shoal.programs import trainable
from shoal.programs.trainable import TrainingStopped

CASES = {
    "lightning": (callback_programs.with_lightning, "loss"),
    "transformers": (callback_programs.with_transformers, "eval_loss"),
    "keras": (callback_programs.with_keras, "val_loss"),
    "skorch": (callback_programs.with_skorch, "valid_loss"),
}


def search(function: Callable[[Any], None], metric: str, folder: Path, **config: Any) -> Any:
    space = {"kill": shoal.grid([False, True]), "marker": str(folder / "killed"), **config}
    return shoal.tune(
        function,
        space,
        metric=metric,
        mode="min",
        algorithm=shoal.Grid(4),
        devices="cpu:1",
        directory=folder / "study",
        show_progress=False,
    )


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The reports of programs in this process; the fourth one of each program is its last."""
    heard: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_REPORT", "report")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("report")
    listener.listen()

    def serve() -> None:
        while True:
            caller, _ = listener.accept()
            with caller, caller.makefile("rwb") as stream:
                if not (line := stream.readline()):
                    return
                heard.append(json.loads(line))
                stream.write(json.dumps({"go_on": heard[-1]["step"] < 4, "reached": True}).encode() + b"\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield heard
    with socket.socket(socket.AF_UNIX) as last:
        last.connect(str(tmp_path / "report"))
    thread.join()
    listener.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", CASES)
def test_a_training_goes_on_from_its_checkpoint(
    framework: str, reports: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    function, metric = CASES[framework]
    monkeypatch.setenv("KERAS_BACKEND", "torch")

    def begin(directory: str, step: int, **config: Any) -> None:
        monkeypatch.setattr(trainable, "_report_count", None)
        monkeypatch.setenv("SHOAL_STEP", str(step))
        monkeypatch.setenv("SHOAL_CHECKPOINT", str(tmp_path / directory))
        function({"marker": str(tmp_path / "marker"), **config})

    with pytest.raises(TrainingStopped):
        begin("whole", 0, kill=False)
    with pytest.raises(callback_programs.KilledError):
        begin("killed", 0, kill="raise")
    with pytest.raises(TrainingStopped):
        begin("killed", 2, kill="raise")
    assert [report["step"] for report in reports] == [1, 2, 3, 4, 1, 2, 3, 4]
    values = [report["metrics"][metric] for report in reports]
    assert len(set(values[:4])) == 4, "every epoch changes the model"
    assert values[4:] == pytest.approx(values[:4], rel=1e-5)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("framework", CASES)
def test_a_killed_training_goes_on_as_one_that_was_not(framework: str, tmp_path: Path) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    function, metric = CASES[framework]
    study = search(function, metric, tmp_path)
    assert [(row.state, row.epoch, row.failures) for row in study.trials] == [
        (TrialState.COMPLETE, 4, 0),
        (TrialState.COMPLETE, 4, 1),
    ]
    with JournalView.read(study.directory) as journal:
        whole, killed = ([report.metrics[metric] for report in journal.curve(trial)] for trial in (0, 1))
    assert len(set(whole)) == 4, "every epoch changes the model"
    assert killed == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"output_dir": "elsewhere"}, r"output_dir=shoal\.checkpoint\(\)"),
        ({"save_strategy": "best"}, "save_strategy='no'"),
        ({"eval_strategy": "no"}, "eval_strategy='epoch'"),
    ],
)
def test_arguments_of_a_trainer_that_would_lose_reports_or_checkpoints_are_refused(
    arguments: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("SHOAL_CHECKPOINT", str(tmp_path))
    asked = {"output_dir": str(tmp_path), "eval_strategy": "epoch", "save_strategy": "no"}
    callback = ReportCheckpointCallback()
    callback.on_train_begin(SimpleNamespace(**asked), None, None)
    with pytest.raises(TaskError, match=words):
        callback.on_train_begin(SimpleNamespace(**asked | arguments), None, None)


def test_numbers_are_picked_from_what_was_logged() -> None:
    logged = {"loss": torch.tensor(0.5), "best": True, "rows": [1, 2], "pair": torch.ones(2), "rate": 1}
    assert numbers(logged) == {"loss": 0.5, "rate": 1.0}
    with pytest.raises(TaskError, match="no number to report among the logged values, which are 'best'"):
        numbers({"best": True})


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    with pytest.raises(ShoalError, match=r"ReportCheckpointCallback needs keras, .*pip install keras"):
        check_installed("keras", "ReportCheckpointCallback")
