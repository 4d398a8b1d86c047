"""Tasks that return a model a second time, as a task does that keeps a network on `self`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import Small, search
from torch import nn

import shoal
from shoal.core.errors import TaskError

NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "norm": lambda: nn.BatchNorm1d(3),
}


class Keeping(Small):
    """Makes models of a net that it keeps.

    Args:
        net: one of `NETS`.
        trains: whether its parameters do.
        make: makes a model of it.
    """

    def __init__(self, net: str, trains: bool, make: Callable[[nn.Module], nn.Module]) -> None:
        self.net = NETS[net]().double().requires_grad_(trains)
        self.make = make

    def model(self, config: Any) -> nn.Module:
        return self.make(self.net)


class Sized(Small):
    batch_size = shoal.Task.batch_size


SEARCH: dict[str, Any] = {"algorithm": shoal.Grid(epochs=2), "devices": "cpu:1"}
RATES = {"lr": [0.1, 0.01]}


def headed(net: nn.Module) -> nn.Module:
    return nn.Sequential(net, nn.Linear(3, 2).double())


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
        search(Keeping(net, trains, make), RATES, tmp_path / "study", **SEARCH)


def test_a_copy_of_what_the_task_keeps_is_a_new_model(tmp_path: Path) -> None:
    task = Keeping("linear", True, lambda net: headed(copy.deepcopy(net)))
    before = copy.deepcopy(task.net.state_dict())
    study = search(task, RATES, tmp_path / "study", **SEARCH)
    assert {row.state for row in study.trials} == {"complete"}
    assert all(torch.equal(value, before[name]) for name, value in task.net.state_dict().items())


def test_a_frozen_backbone_of_the_task_stays_as_it_is(tmp_path: Path) -> None:
    """A regression test: finding a signature moved the backbone to the meta device in the caller's process."""
    task = Keeping("linear", False, headed)
    before = copy.deepcopy(task.net.state_dict())
    study = search(task, RATES, tmp_path / "study", **SEARCH)
    study.best_model()
    assert {row.state for row in study.trials} == {"complete"}
    assert all(torch.equal(value, before[name]) for name, value in task.net.state_dict().items())


def test_a_batch_size_that_no_computer_counts_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="`batch_size` must return a positive integer"):
        search(Sized(), {**RATES, "batch_size": 10**20}, tmp_path / "study", **SEARCH)
