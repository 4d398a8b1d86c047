"""Mistakes of users raise clear errors before anything is lost."""

import importlib
import logging
import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from plain import curves, jobs, tune
from torch import nn

import shoal
from shoal.core.errors import (
    AlgorithmError,
    BackendError,
    DeviceError,
    JournalError,
    PackError,
    PolicyError,
    ShoalError,
    SpaceError,
    StudyExistsError,
    TaskError,
)
from shoal.core.space import Space

LR = {"lr": 0.01}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        pytest.param({"space": {"lr": lambda: shoal.choice([])}}, SpaceError, "choice", id="empty choice"),
        pytest.param({"space": {"lr": lambda: shoal.loguniform(0.0, 1.0)}}, SpaceError, "lr.*0.0", id="bound at zero"),
        pytest.param({"space": {"lr": lambda: shoal.loguniform(-1, 1)}}, SpaceError, "lr.*-1", id="bound below zero"),
        pytest.param({"algorithm": lambda: shoal.Random(0, 1)}, AlgorithmError, "`n`.*got 0", id="no trials"),
        pytest.param({"algorithm": lambda: shoal.Grid(0)}, AlgorithmError, "`epochs`.*got 0", id="no epochs"),
        pytest.param({"mode": "least"}, AlgorithmError, '"min" or "max", got \'least\'', id="mode"),
        pytest.param({"metric": ["loss"]}, AlgorithmError, "`mode` must be .*got 'max'", id="a list and a name"),
        pytest.param({"target": 10**400}, ShoalError, "`target` must be a number", id="target beyond floats"),
        pytest.param({"page": 3}, ShoalError, "`page` must be True or False, got 3", id="page"),
        pytest.param({"metric": 3}, ShoalError, "`metric` must be .*got 3", id="metric"),
        pytest.param({"metric": "loss\0"}, ShoalError, "without control .*, got 'loss.x00'", id="NUL in a metric"),
        pytest.param(
            {"metric": ["loss", "cost\n"], "mode": ["min", "min"]}, ShoalError, "without control .*cost", id="new line"
        ),
        pytest.param({"seed": 1.5}, ShoalError, "`seed` must be an integer, got 1.5", id="seed"),
        pytest.param({"data_seed": "trail"}, ShoalError, "`data_seed` must be .*got 'trail'", id="data seed"),
        pytest.param({"data_seed": 2**80}, ShoalError, "`data_seed` must be an integer of 64 bits.*got 12", id="huge"),
        pytest.param({"data_seed": -(2**63) - 1}, ShoalError, "`data_seed` must be", id="data seed below 64 bits"),
        pytest.param({"show_progress": "no"}, ShoalError, "`show_progress` must be True or False, got 'no'", id="no"),
        pytest.param(
            {"algorithm": lambda: shoal.Hyperband(10**18)}, AlgorithmError, "`max_epochs` must be at most", id="R"
        ),
        pytest.param(
            {"algorithm": lambda: shoal.Hyperband(10**9)}, AlgorithmError, "begins with .* trials", id="trials"
        ),
        pytest.param({"algorithm": lambda: shoal.Random(10**7, 1)}, AlgorithmError, "with 10000000 trials", id="n"),
        pytest.param({"algorithm": lambda: shoal.Grid(2**80)}, AlgorithmError, "`epochs` must be at most", id="epochs"),
        pytest.param({"algorithm": lambda: shoal.Random}, ShoalError, "`algorithm` must be an algorithm", id="class"),
        pytest.param({"algorithm": None}, ShoalError, "give `trials`, .* or an `algorithm`", id="no budget"),
        pytest.param({"algorithm": None, "trials": 0}, AlgorithmError, "`trials` must be .* got 0", id="no trials"),
        pytest.param(
            {"algorithm": None, "trials": 4, "epochs": 2.5}, AlgorithmError, "`epochs` must be .* got 2.5", id="half"
        ),
        pytest.param(
            {"trials": 8},
            ShoalError,
            r"`algorithm` and `trials` are both given, Grid\(epochs=4\) and 8; .*leave one of the two out",
            id="two budgets",
        ),
        pytest.param({"epochs": 8}, ShoalError, "`algorithm` and `epochs` are both given", id="two lengths"),
        pytest.param(
            {"algorithm": None, "trials": 8, "task": lambda config: None},
            ShoalError,
            "give `epochs`, the number of reports",
            id="a function without epochs",
        ),
        pytest.param({"devices": 3}, ShoalError, "`devices` must be .*got 3", id="devices"),
        pytest.param({"checkpoint_seconds": -1}, ShoalError, "`checkpoint_seconds` must be .*got -1", id="interval"),
        pytest.param({"devices": "cuda:99"}, DeviceError, "'cuda:99' is not there", id="device"),
        pytest.param({"devices": "tpu"}, DeviceError, "'tpu' is not understood", id="kind of device"),
        pytest.param({"policy": "fifi"}, PolicyError, "did you mean 'fifo'", id="policy"),
        pytest.param({"packing": "cots"}, PackError, "did you mean 'cost'", id="packing"),
        pytest.param({"fuse": 1}, ShoalError, "`fuse` must be True or False, got 1", id="fuse"),
        pytest.param({"backend": "locale"}, BackendError, "did you mean 'local'", id="back end"),
        pytest.param(
            {"ray_address": "10.0.0.1:6379"},
            BackendError,
            "`ray_address` is for backend='ray', got",
            id="Ray's address",
        ),
        pytest.param({"sharing": "mpss"}, BackendError, "did you mean 'mps'", id="sharing"),
        pytest.param(
            {"sharing": "mps", "backend": "local"}, BackendError, r"cpu:0 .* is not one", id="sharing of no GPU"
        ),
        pytest.param({"oversubscription": 0.5}, ShoalError, "`oversubscription` .*at least 1, got 0.5", id="ratio"),
        pytest.param({"oversubscription": 2}, PolicyError, "needs a process for each job", id="ratio in one process"),
        pytest.param({"retries": -1}, AlgorithmError, "`retries`.*got -1", id="retries"),
        pytest.param({"task": tasks.Blobs}, TaskError, "an instance of .*shoal.Task, got <class", id="class of a task"),
        pytest.param({"task": torch.nn.Linear(1, 1)}, TaskError, "got a model, Linear; return it from", id="model"),
        pytest.param({"task": threading.Lock()}, TaskError, "an instance of .*shoal.Task, got <unl", id="no task"),
    ],
)
def test_arguments_are_looked_at_before_there_is_a_directory(
    arguments: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        tune(
            arguments.pop("task", tasks.Blobs()),
            {name: make() for name, make in arguments.pop("space", {"lr": lambda: 0.01}).items()},
            tmp_path / "study",
            **{name: value() if callable(value) else value for name, value in arguments.items()},
        )
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("directory", [5, "", b"study", "a\0b", True, "odd/\ud800x"], ids=ascii)
def test_a_directory_that_is_not_a_path_is_refused(directory: Any) -> None:
    for use in (lambda: tune(tasks.Blobs(), LR, directory), lambda: shoal.resume(directory)):
        with pytest.raises(ShoalError, match="`directory` must be the path of a directory"):
            use()
    with pytest.raises(ShoalError, match="`directory` must be the path of a directory"):
        shoal.Study(directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            pytest.param(
                f"UPDATE study SET value = json_set(value, '$.{key}', {value}) WHERE key = 'spec'",
                f"of its study `{key}` must",
                id=key,
            )
            for key, value in {
                "devices": 5,
                "policy": 5,
                "paths": "json('[5]')",
                "checkpoint_seconds": "'zz'",
                "opaque": "'zz'",
                "totals": 5,
                "callbacks": "json('[5]')",
                "settings": "json('{\"a\": null}')",
                "oversubscription": 0.5,
                "retries": "'zz'",
                "hang_seconds": "'zz'",
                "fuse": "'zz'",
            }.items()
        ),
        *(
            pytest.param(
                f"INSERT OR REPLACE INTO study VALUES ('{key}', '{value}')", f"of its study `{key}` must", id=key
            )
            for key, value in {
                "sources": '"zz"',
                "stopped": "[]",
                "common_failure_trials": '"zz"',
                "fleet": "5",
                "edits": "5",
            }.items()
        ),
        pytest.param("DELETE FROM study WHERE key = 'spec'", "its study is not understood", id="gone"),
        pytest.param("DELETE FROM blobs WHERE name = 'task'", "its pickled task is missing", id="no task"),
        pytest.param("UPDATE trials SET epoch = -5", r"`epoch` is -5, below 0\)", id="epoch"),
        pytest.param("UPDATE trials SET target = 0", r"`target` is 0, below 1\)", id="target"),
        pytest.param(
            "UPDATE proposals SET proposed = '[5]'", "a proposal of its algorithm is not understood", id="proposals"
        ),
    ],
)
def test_a_journal_of_bad_values_is_not_gone_on_with_and_loses_nothing(
    change: str, words: str, finished: shoal.Study
) -> None:
    file = finished.directory / "journal.sqlite"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("DELETE FROM reports WHERE trial = 1")
        connection.execute("UPDATE trials SET state = 'pending', epoch = 0 WHERE number = 1")
        connection.execute("UPDATE study SET value = 'false' WHERE key = 'finished'")
        connection.commit()
        connection.execute(change)
        connection.commit()
        before = list(connection.iterdump())
    with pytest.raises(
        JournalError, match=f"{re.escape(str(file))} is damaged: .*{words}.*; restore an older copy of it"
    ):
        shoal.resume(finished.directory, show_progress=False)
    with closing(sqlite3.connect(file)) as connection:
        after = [line for line in connection.iterdump() if 'INSERT INTO "runs"' not in line]
    assert after == [line for line in before if 'INSERT INTO "runs"' not in line]


def test_a_task_that_cannot_be_pickled_is_refused_before_there_is_a_directory(tmp_path: Path) -> None:
    task = tasks.Blobs()
    task.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        TaskError, match=r"cannot be pickled.*lock.*create the objects that its attributes and methods hold"
    ):
        tune(task, LR, tmp_path / "study")
    assert not (tmp_path / "study").exists()


def bound(algorithm: shoal.OptunaSearch) -> shoal.OptunaSearch:
    algorithm.bind(Space({"lr": shoal.uniform(0, 1)}), metric="accuracy", mode="max", seed=0)
    return algorithm


def holding(lock: Any) -> shoal.OptunaSearch:
    return shoal.OptunaSearch(2, 1, lambda seed: lock)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda: bound(shoal.OptunaSearch(2, 1)),
            r"^OptunaSearch\(n=2.* serves another study already; make a new one for each study$",
            id="bound already",
        ),
        pytest.param(
            lambda: holding(threading.Lock()),
            r"^OptunaSearch\(n=2.* cannot be pickled for the journal \(.*lock.*\); create the objects",
            id="lock",
        ),
    ],
)
def test_an_algorithm_that_cannot_be_kept_is_refused_before_there_is_a_directory(
    make: Callable[[], shoal.OptunaSearch], words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlgorithmError, match=words):
        tune(tasks.Blobs(), LR, tmp_path / "study", algorithm=make())
    assert not (tmp_path / "study").exists()


def overriding(**methods: Callable[..., Any]) -> shoal.Task:
    """`Blobs` with other methods."""
    return type("Wrong", (tasks.Blobs,), methods)()


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        pytest.param(
            {"loss": lambda self, model, batch: model(batch[0])},
            r"'loss' must be a real scalar tensor, got torch.float64 of shape \(16, 3\); take its mean",
            id="loss that is not a scalar",
        ),
        pytest.param(
            {"loss": lambda self, model, batch: 0.5},
            "'loss' must be a real scalar tensor, got 0.5",
            id="loss no tensor",
        ),
        pytest.param(
            {"loss": lambda self, model, batch: (model(batch[0]).mean(), batch[0])},
            "'loss' must be a real scalar tensor, got a tuple; take",
            id="loss with the outputs",
        ),
        pytest.param({"data": lambda self, config: 7}, "`data` must return .*, got int", id="data is a number"),
        pytest.param({"data": lambda self, config: ([], [1])}, "the training set is empty", id="data without samples"),
        pytest.param(
            {"data": lambda self, config: (iter("a"), [1])}, "anew at each call, got str_ascii_iterator", id="iterator"
        ),
        pytest.param({"batch_size": lambda self, config: 0}, "a positive integer, got 0", id="batch size 0"),
        pytest.param(
            {"batch_size": lambda self, config: 16.0},
            r"got 16.0 for {'lr': 0.01}; return an int",
            id="batch size a float",
        ),
        pytest.param({"batch_size": lambda self, config: True}, "a positive integer, got True", id="batch size true"),
        pytest.param({"model": lambda self, config: 7}, "`model` must return .*Module, got 7", id="model"),
        pytest.param(
            {"optimizer": lambda self, model, config: None}, "`optimizer` must return .*Optimizer, got None", id="none"
        ),
        pytest.param(
            {"metrics": lambda self, model, batch: {"accuracy": batch[0].mean(1)}},
            r"'accuracy' must be a real scalar tensor, got torch.float64 of shape \(16,\)",
            id="metric that is not a scalar",
        ),
    ],
)
def test_a_task_that_breaks_its_contract_ends_the_study(methods: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        tune(overriding(**methods), {"lr": shoal.grid([0.01, 0.02, 0.03])}, tmp_path / "study")


def test_workers_that_find_the_same_fault_at_once_end_the_study_once(tmp_path: Path) -> None:
    """Both trials are rejected within one poll."""
    task = overriding(batch_size=lambda self, config: 0)
    with pytest.raises(TaskError, match="a positive integer, got 0"):
        tune(task, {"lr": shoal.grid([0.01, 0.02])}, tmp_path / "study", backend="local", devices="cpu:2")
    assert {job.outcome for job in jobs(tmp_path / "study")} <= {"finished", "rejected", "stopped"}


def test_a_metric_that_is_not_reported_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"'acuracy' is not reported.*'accuracy', 'valid_loss'"):
        tune(tasks.Blobs(), {"lr": shoal.grid([0.01, 0.02])}, tmp_path / "study", metric="acuracy", mode="max")
    assert not curves(tmp_path / "study"), "what cannot be replayed is not recorded"
    with pytest.raises(TaskError, match="'acuracy' is not reported"):
        shoal.resume(tmp_path / "study", show_progress=False)


def test_a_directory_that_holds_a_study_is_left_alone(finished: shoal.Study) -> None:
    before = finished.trials
    with pytest.raises(StudyExistsError, match=r"Resume it .shoal resume .*, begin a new study in another"):
        tune(tasks.Blobs(), LR, finished.directory)
    assert finished.trials == before


def test_a_directory_without_a_study_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no study in"):
        shoal.resume(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_task_whose_module_is_gone_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "code" / "fleeting.py"
    module.parent.mkdir()
    module.write_text("import tasks\n\nclass Fleeting(tasks.Blobs):\n    pass\n")
    monkeypatch.syspath_prepend(module.parent)
    task = importlib.import_module("fleeting").Fleeting()
    module.unlink()
    monkeypatch.setattr("shoal.run.launcher.prepare_fork", lambda: "the test asks for a new process")
    with pytest.raises(TaskError, match=r"cannot be loaded in a worker: .*'fleeting'"):
        tune(task, LR, tmp_path / "study", backend="local")


def test_what_cannot_be_looked_at_is_logged_and_trained_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def data(self: shoal.Task, config: Any) -> Any:
        if config["lr"] == 0.02:
            raise FileNotFoundError("no such table")
        return tasks.blobs(100, 0), tasks.blobs(40, 1)

    with caplog.at_level(logging.WARNING, "shoal.train"):
        study = tune(overriding(data=data), {"lr": shoal.grid([0.01, 0.02])}, tmp_path / "study", retries=0)
    assert "trial 1 has no signature" in caplog.text
    assert [str(row.state) for row in study.trials] == ["complete", "failed"]
    assert "FileNotFoundError: no such table" in study.trials[1].reason


def test_a_model_that_lives_on_the_meta_device_alone_is_not_needed(tmp_path: Path) -> None:
    """A model whose making needs real numbers is looked at on the CPU."""

    def model(self: shoal.Task, config: Any) -> nn.Module:
        made = tasks.mlp(6, 8, 3)
        with torch.no_grad():
            made[0].weight /= float(made[0].weight.abs().max())
        return made

    study = tune(overriding(model=model), {"lr": shoal.grid([0.01, 0.02])}, tmp_path / "study", retries=0)
    assert [str(row.state) for row in study.trials] == ["complete", "complete"]


def test_an_error_that_no_text_file_can_hold_is_told_escaped(tmp_path: Path) -> None:
    def loss(self: shoal.Task, model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("half a character: \udc80")

    with pytest.raises(ShoalError, match=r"ValueError: half a character: "):
        tune(overriding(loss=loss), LR, tmp_path / "study", retries=0)
    logs = [file.read_text() for file in (tmp_path / "study" / "logs").iterdir()]
    assert any(r"half a character: \udc80" in log for log in logs)
