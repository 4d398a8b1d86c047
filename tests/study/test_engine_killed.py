"""An engine that is killed with signal 9 in the middle of training: its study is gone on with, and learns the same."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tasks
from plain import check_plain, jobs

from shoal.api import resume
from shoal.core.trial import TrialState
from shoal.results import Study

PROGRAM = """
import signal, sys
from pathlib import Path
sys.path[:] = {path!r}
import shoal, tasks
from plain import tune
space = {{"lr": shoal.grid([0.01, 0.03]), "width": shoal.grid([6, 8]), "momentum": 0.9, "step_size": 2}}
tune(tasks.Signals(signal.{name}, Path({marker!r})), space, Path({directory!r}), algorithm=shoal.Grid({epochs}),
     backend={backend!r}, devices="cpu:2", checkpoint_seconds=0.0)
print("complete")
"""


def test_a_study_whose_engine_is_killed_goes_on_as_if_it_had_not_been(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory, marker, program = tmp_path / "study", tmp_path / "sent", tmp_path / "program.py"
    values = {"path": sys.path, "name": "SIGKILL", "marker": str(marker), "directory": str(directory)}
    program.write_text(PROGRAM.format(backend="local", epochs=20, **values))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert TrialState.COMPLETE not in {row.state for row in Study(directory).trials}
    study = resume(directory, show_progress=False)
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 20)] * 4
    assert "orphaned" in {job.outcome for job in jobs(directory)}
    check_plain(study, tasks.Momentum())


CARRIES = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
sys.path[:] = {path!r}
import torch, shoal
from torch import nn
from torch.utils.data import TensorDataset

@dataclass
class State:
    count: int
    hidden: Any = None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.state = nn.LSTM(4, 3), nn.Linear(3, 1), None

    def forward(self, x):
        carried = self.state or State(0)
        hidden = carried.hidden and tuple(each.detach() for each in carried.hidden)
        out, hidden = self.cell(x, hidden)
        if self.training:
            self.state = State(carried.count + 1, hidden)
        return self.out(out) * (1 + 0.1 * carried.count)

class Fit(shoal.Task):
    def __init__(self, marker):
        self.engine, self.marker = os.getpid(), marker

    def data(self, config):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).double()
        return (both := TensorDataset(x, x.sum(1, keepdim=True))), both

    def batch_size(self, config): return 8
    def model(self, config): return Net().double()
    def optimizer(self, model, config): return torch.optim.SGD(model.parameters(), lr=config["lr"])
    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()

    def step(self, model, batch, optimizer):
        if model.state and model.state.count == 13 and not self.marker.exists():
            self.marker.touch()
            os.kill(self.engine, signal.SIGKILL)
            time.sleep(60)
        return super().step(model, batch, optimizer)

space = {{"lr": shoal.grid([0.01, 0.03])}}
shoal.tune(Fit(Path({marker!r})), space, metric="valid_loss", mode="min", algorithm=shoal.Grid(3), fuse=False,
           devices="cpu:1", checkpoint_seconds=0.0, directory={directory!r}, show_progress=False)
"""


def test_what_a_model_carries_outlives_a_kill(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory, marker, program = tmp_path / "study", tmp_path / "sent", tmp_path / "program.py"
    program.write_text(CARRIES.format(path=sys.path, marker=str(marker), directory=str(directory)))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    study = resume(directory, show_progress=False)
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 3)] * 2
    assert "orphaned" in {job.outcome for job in jobs(directory)}
    for number in range(2):
        again = study.rerun(number)
        assert again.found.keys() == {1, 2, 3}
        for epoch, values in again.found.items():
            assert again.recorded[epoch]["valid_loss"] == pytest.approx(values["valid_loss"], rel=1e-9)
        model = study.model(number, "last")
        assert (type(model.state).__name__, model.state.count) == ("State", 24)
