"""A study that runs in one process is shown in Optuna's words by another, which may die and be followed by a third."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import tasks
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as There
from plain import tune
from torch import Tensor, nn

import shoal
from shoal.core.errors import JournalError

SHOAL = [sys.executable, "-c", "from shoal.cli import main; main()"]


class Slow(tasks.Blobs):
    """Trains slowly until somebody has seen it."""

    seen: Path

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        time.sleep(0.02 if self.seen.exists() else 1)
        return super().metrics(model, batch)


def search(directory: Path) -> None:
    algorithm = shoal.ASHA(n=6, max_epochs=4, eta=2, concurrency=3, sampler="tpe")
    task = Slow()
    task.seen = directory.with_name("seen")
    tune(task, {"lr": shoal.loguniform(0.001, 0.3)}, directory, algorithm=algorithm)


def started(directory: Path) -> shoal.Study:
    end = time.monotonic() + 30
    while True:
        try:
            return shoal.Study(directory)
        except JournalError:
            assert time.monotonic() < end
            time.sleep(0.05)


def running(where: BaseStorage) -> list[optuna.trial.FrozenTrial]:
    """Trials there that train and have shown something."""
    if not any(each.study_name == "study" for each in where.get_all_studies()):
        return []
    trials = optuna.load_study(study_name="study", storage=where).trials
    return [trial for trial in trials if trial.state is There.RUNNING and trial.intermediate_values]


def shown(study: optuna.Study) -> dict[int, tuple[Any, ...]]:
    return {
        trial.user_attrs["number"]: (
            trial.state,
            trial.values,
            trial.params,
            trial.distributions,
            trial.intermediate_values,
            trial.user_attrs,
        )
        for trial in study.trials
    }


@pytest.mark.parametrize(("kind", "end"), [("sqlite", signal.SIGKILL), ("journal", signal.SIGINT)])
def test_a_study_is_mirrored_while_it_runs(kind: str, end: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "optuna.db"
    address = f"sqlite:///{path}" if kind == "sqlite" else str(path)
    where: BaseStorage = RDBStorage(address) if kind == "sqlite" else JournalStorage(JournalFileBackend(address))
    directory = tmp_path / "study"
    study = threading.Thread(target=search, args=[directory])
    study.start()
    try:
        started(directory)
        command = [*SHOAL, "mirror", str(directory), address, "--interval", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
            while not (seen := running(where)):
                assert first.poll() is None, first.stderr and first.stderr.read()
                time.sleep(0.05)
            assert study.is_alive(), "the study was over before it was seen to run"
            first.send_signal(end)
        (tmp_path / "seen").touch()
        assert all(set(trial.params) == {"lr"} for trial in seen)
        second = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    finally:
        study.join(60)
    assert not study.is_alive()
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout) == {"storage": address, "name": "study", "trials": 6, "open": 0}
    mirrored = optuna.load_study(study_name="study", storage=where)
    assert [trial.number for trial in mirrored.trials] == list(range(6))
    ours = shoal.Study(directory)
    assert shown(mirrored) == shown(ours.to_optuna())
    assert {trial.state for trial in mirrored.trials} == {There.COMPLETE, There.PRUNED}
