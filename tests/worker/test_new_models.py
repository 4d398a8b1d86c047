"""Models that a task has made before, as tasks return them that keep a network on `self`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import TaskError

NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "norm": lambda: nn.BatchNorm1d(4),
}


class Keeping(shoal.Task):
    """Makes models of a net that it keeps.

    Args:
        net: one of `NETS`.
        trains: whether its parameters do.
        make: makes a model of it.
    """

    def __init__(self, net: str, trains: bool, make: Callable[[nn.Module], nn.Module]) -> None:
        self.net = NETS[net]().double().requires_grad_(trains)
        self.make = make

    def data(self, config: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(16, 4, dtype=torch.float64, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x, x.sum(1, keepdim=True))

    def model(self, config: Any) -> nn.Module:
        return self.make(self.net)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()


def search(task: shoal.Task, directory: Path, **space: Any) -> shoal.Study:
    return shoal.tune(
        task,
        {"lr": [0.1, 0.01], **space},
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs=2),
        backend="inline",
        devices="cpu:1",
        directory=directory,
        show_progress=False,
    )


def headed(net: nn.Module) -> nn.Module:
    return nn.Sequential(net, nn.Linear(4, 1).double())


@pytest.mark.parametrize(
    ("net", "trains", "make", "named"),
    [
        pytest.param("linear", True, lambda net: net, "'weight'", id="the net itself"),
        pytest.param("linear", True, headed, "'0.weight'", id="a backbone that trains"),
        pytest.param("norm", False, headed, "'0.running_mean'", id="running statistics of a frozen backbone"),
    ],
)
def test_a_model_that_trials_would_share_is_refused(
    net: str, trains: bool, make: Callable[[nn.Module], nn.Module], named: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=f"returns {named} of a model that it returned before.*copy.deepcopy"):
        search(Keeping(net, trains, make), tmp_path / "study")


def test_a_copy_of_what_the_task_keeps_is_a_new_model(tmp_path: Path) -> None:
    task = Keeping("linear", True, lambda net: headed(copy.deepcopy(net)))
    before = copy.deepcopy(task.net.state_dict())
    study = search(task, tmp_path / "study")
    assert {row.state for row in study.trials} == {"complete"}
    assert all(torch.equal(value, before[name]) for name, value in task.net.state_dict().items())


def test_a_frozen_backbone_of_the_task_stays_as_it_is(tmp_path: Path) -> None:
    """It was moved to the meta device in the caller's process when a model was looked at: its weights were gone."""
    task = Keeping("linear", False, headed)
    before = copy.deepcopy(task.net.state_dict())
    study = search(task, tmp_path / "study")
    study.best_model()
    assert {row.state for row in study.trials} == {"complete"}
    assert all(torch.equal(value, before[name]) for name, value in task.net.state_dict().items())


def test_a_batch_size_that_no_computer_counts_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="`batch_size` must return a positive integer"):
        search(Keeping("linear", False, headed), tmp_path / "study", batch_size=10**20)
