"""Trackers: in the real library where it is installed, and against small fakes of the clients' interface."""

import importlib.util
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fakes
import pytest
from told import Absent, train

import shoal
from shoal.callbacks.base import Callback, StudyInfo
from shoal.callbacks.follower import callbacks_text
from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.integrations import optional
from shoal.integrations.mlflow import MLflowCallback
from shoal.integrations.registry import TRACKERS
from shoal.integrations.tensorboard import TensorBoardCallback
from shoal.integrations.wandb import WandbCallback
from shoal.testing import check_callback


def tune(directory: Path, *callbacks: Callback, xs: tuple[float, ...] = (1.0, 2.0)) -> shoal.Study:
    return shoal.tune(
        train,
        {"x": shoal.grid(xs), "optimizer": {"name": "sgd"}},
        metric="loss",
        mode="min",
        algorithm=shoal.Grid(epochs=3),
        directory=directory,
        devices="cpu:1",
        backend="inline",
        callbacks=callbacks,
        show_progress=False,
    )


def calls(file: Path, name: str) -> list[Any]:
    return [call[1:] for call in map(json.loads, file.read_text().splitlines()) if call[0] == name]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fakes in place of both libraries, in this process and in the follower."""
    place = tmp_path / "fakes"
    (place / "mlflow").mkdir(parents=True)
    (place / "mlflow" / "__init__.py").touch()
    (place / "mlflow" / "entities.py").write_text("from fakes import Metric, Param\n")
    (place / "mlflow" / "tracking.py").write_text("from fakes import MlflowClient\n")
    (place / "wandb.py").write_text("from types import SimpleNamespace as Settings\nfrom fakes import init\n")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mlflow", "wandb")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(place))
    file = tmp_path / "calls"
    file.touch()
    monkeypatch.setenv("FAKE_TRACKER", str(file))
    monkeypatch.setattr(fakes, "FILE", file)
    yield file
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mlflow", "wandb")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_trackers_keep_the_contract_of_callbacks(name: str, fake: Path, tmp_path: Path) -> None:
    check_callback(TRACKERS[name], tmp_path / "study")
    assert fake.stat().st_size > 0


def test_tensorboard_keeps_the_contract_of_callbacks(tmp_path: Path) -> None:
    check_callback(TensorBoardCallback, tmp_path / "study")
    assert {path.name for path in (tmp_path / "study" / "tensorboard").iterdir()} == {
        *("trial-000000", "trial-000001", "trial-000002", "trial-1000000")
    }


def test_mlflow_has_a_run_of_the_study_and_nested_ones_of_trials(fake: Path, tmp_path: Path) -> None:
    study = tune(tmp_path / "study", MLflowCallback("sqlite:///here.db", "search"))
    ((parent, name, tags), *nested) = calls(fake, "run")
    assert (name, tags["shoal.trial"], len(nested)) == ("study", "none", 2)
    assert calls(fake, "client") == [["sqlite:///here.db"]]
    assert calls(fake, "experiment") == [["search"]]
    assert {tags["mlflow.parentRunId"] for _, _, tags in nested} == {parent}
    for row, (run, name, _) in zip(study.trials, nested, strict=True):
        assert name == f"trial-{row.number:06d}"
        batches = [batch for batch in calls(fake, "batch") if batch[0] == run]
        assert [params for *_, params in batches if params] == [
            [["x", str(row.config["x"])], ["optimizer.name", "sgd"]]
        ]
        metrics = [metric for _, metrics, _ in batches for metric in metrics]
        assert [(key, value, step) for key, value, _, step in metrics] == [
            ("loss", row.config["x"] / step, step) for step in (1, 2, 3)
        ]
        assert calls(fake, "end").count([run, "FINISHED"]) == 1
    assert calls(fake, "end")[-1] == [parent, "FINISHED"]
    shoal.resume(tmp_path / "study", show_progress=False)
    assert len(calls(fake, "run")) == 3, "a resumed study finds its runs"


def test_wandb_has_a_run_for_each_trial_in_the_group_of_the_study(fake: Path, tmp_path: Path) -> None:
    study = tune(tmp_path / "study", WandbCallback("search", mode="offline"))
    begun = [given for (given,) in calls(fake, "init")]
    assert {given["group"] for given in begun} == {"study"}
    assert all((given["mode"], given["project"], given["resume"]) == ("offline", "search", "allow") for given in begun)
    assert [given["config"] for given in begun] == [row.config for row in study.trials]
    for row, given in zip(study.trials, begun, strict=True):
        logged = [(values, step) for run, values, step in calls(fake, "log") if run == given["id"]]
        assert logged == [({"loss": row.config["x"] / step}, step) for step in (1, 2, 3)]
        assert [given["id"]] in calls(fake, "finish")


def events(run: Path) -> list[Any]:
    """The events of a run of TensorBoard, read as its format says: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(run.iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            size = int.from_bytes(content[place : place + 8], "little")
            found.append(Event.FromString(content[place + 12 : place + 12 + size]))
            place += 16 + size
    return found


def test_tensorboard_has_metrics_and_config_in_one_run_and_keeps_the_best_trials(tmp_path: Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    best = TensorBoardCallback(tmp_path / "runs", top_k=2)
    study = tune(tmp_path / "study", TensorBoardCallback(), best, xs=(4.0, 1.0, 3.0, 2.0))
    for row in study.trials:
        found = events(tmp_path / "study" / "tensorboard" / f"trial-{row.number:06d}")
        values = [(event.step, event.wall_time, value) for event in found for value in event.summary.value]
        points = [(step, value.simple_value) for step, _, value in values if value.tag == "loss"]
        assert points == [(step, pytest.approx(row.config["x"] / step)) for step in (1, 2, 3)]
        (start,) = [value for _, _, value in values if value.tag == "_hparams_/session_start_info"]
        told = HParamsPluginData.FromString(start.metadata.plugin_data.content).session_start_info.hparams
        assert told["x"].number_value == row.config["x"]
        assert told["optimizer.name"].string_value == "sgd"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["trial-000001", "trial-000003"]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_top_k_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(ShoalError, match="`top_k` must be a whole number of at least 1"):
        TensorBoardCallback(top_k=wrong)


def test_the_mode_of_wandb_is_known() -> None:
    with pytest.raises(ShoalError, match=r'`mode` must be "online", "offline" or None, got "?\'onlin'):
        WandbCallback(mode="onlin")


def test_a_tracker_that_is_not_installed_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = tune(tmp_path / "study", Absent())
    assert [row.epoch for row in study.trials] == [3, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "shoal.callbacks"]
    assert warning == (
        "callback Absent is left out until the study is resumed, and the study continues: Absent needs "
        "no_such_library, "
        "which is not installed. Install it with: pip install no_such_library"
    )


@pytest.mark.parametrize("name", TRACKERS)
def test_each_tracker_names_the_package_that_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda package: None)
    study = StudyInfo("id", "study", tmp_path, (Objective("loss", "min"),), resumed=False, finished=False)
    with pytest.raises(ShoalError, match=rf"Callback needs {name}X?, .* pip install {name}"):
        TRACKERS[name]().on_study_begin(study)


def test_a_tracker_of_the_command_line_is_added_once() -> None:
    given = [WandbCallback("one"), WandbCallback("another")]
    more = [WandbCallback(), TensorBoardCallback(), TensorBoardCallback()]
    names = [each["name"] for each in callbacks_text(given, more)]
    assert names == ["WandbCallback", "WandbCallback", "TensorBoardCallback"]


def test_a_tracker_that_cannot_be_reached_is_said_once(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fakes" / "mlflow" / "tracking.py").write_text(
        "def MlflowClient(uri):\n    raise ConnectionError('http://nowhere: connection refused')\n"
    )
    study = tune(tmp_path / "study", MLflowCallback("http://nowhere"))
    assert [row.epoch for row in study.trials] == [3, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "shoal.callbacks"]
    assert warning.startswith("callback MLflowCallback is left out until the study is resumed")
    assert "connection refused" in warning
    (tmp_path / "fakes" / "mlflow" / "tracking.py").write_text("from fakes import MlflowClient\n")
    shoal.resume(tmp_path / "study", show_progress=False)
    assert sum(len(metrics) for _, metrics, _ in calls(fake, "batch")) == 6, "all is delivered after the resume"


SCRIPT = """
import shoal

def train(config):
    shoal.report({"loss": config["x"]}, step=1)

shoal.tune(train, {"x": shoal.uniform(0, 1)}, metric="loss", mode="min", algorithm=shoal.Random(2, epochs=1),
           devices="cpu:1", backend="inline")
"""


def test_the_command_line_adds_trackers(shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(SCRIPT)
    twice = ("--tracker", "tensorboard", "--tracker", "tensorboard")
    done = shoal("run", "search.py", "--directory", "study", *twice, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = list((tmp_path / "study" / "tensorboard").iterdir())
    assert [len(list(run.iterdir())) for run in runs] == [1, 1]
    wrong = shoal("run", "search.py", "--tracker", "mlfow", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'mlfow' is not one of" in wrong.stderr


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")
def test_mlflow_itself_keeps_all_that_is_told(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    study = tune(tmp_path / "study", MLflowCallback(store))
    shoal.resume(tmp_path / "study", show_progress=False)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:  # its own client warns of its database library
        rows = dict(database.execute("SELECT name, run_uuid FROM runs").fetchall())
        assert rows.keys() == {"study", *(f"trial-{row.number:06d}" for row in study.trials)}
        for row in study.trials:
            run = (rows[f"trial-{row.number:06d}"],)
            params = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", run).fetchall()
            assert dict(params) == {"x": str(row.config["x"]), "optimizer.name": "sgd"}
            metrics = database.execute("SELECT step, value FROM metrics WHERE run_uuid = ? ORDER BY step", run)
            assert metrics.fetchall() == [(step, row.config["x"] / step) for step in (1, 2, 3)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_itself_writes_runs_offline(tmp_path: Path) -> None:
    tune(tmp_path / "study", WandbCallback("search", mode="offline"))
    runs = list((tmp_path / "study" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert all(any(path.suffix == ".wandb" for path in run.iterdir()) for run in runs)


def test_the_registry_makes_trackers_without_arguments() -> None:
    assert {name: type(make()).__name__ for name, make in TRACKERS.items()} == {
        "mlflow": "MLflowCallback",
        "tensorboard": "TensorBoardCallback",
        "wandb": "WandbCallback",
    }
