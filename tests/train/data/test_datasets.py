import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils.data import TensorDataset

import shoal
from shoal.train.data.datasets import DataSets
from shoal.train.data.tracked_config import values_read

CPU = torch.device("cpu")


class Loading(shoal.Task):
    """Counts how often data are loaded, and records the draws of each load."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.loaded: list[Any] = []

    def data(self, config: Any) -> Any:
        self.read(config)
        self.loaded.append((torch.rand(()).item(), random.random(), np.random.random()))
        return TensorDataset(torch.zeros(3)), TensorDataset(torch.zeros(2))

    def model(self, config: Any) -> Any:
        raise NotImplementedError

    optimizer = loss = model


@pytest.mark.parametrize(
    ("read", "copies"),
    [
        pytest.param(lambda config: None, 1, id="nothing"),
        pytest.param(lambda config: config["size"], 2, id="a key"),
        pytest.param(lambda config: config.get("absent", 3), 1, id="a key that is not there"),
        pytest.param(lambda config: "lr" in config, 2, id="whether a key is there"),
        pytest.param(lambda config: dict(config), 4, id="all"),
        pytest.param(lambda config: {**config}, 4, id="all, unpacked"),
        pytest.param(lambda config: config.pop("size"), 2, id="a key, taken out"),
        pytest.param(lambda config: config.setdefault("size", 1), 2, id="a key, with a default"),
    ],
)
def test_configs_share_the_data_that_do_not_tell_them_apart(read: Callable[[Any], Any], copies: int) -> None:
    task = Loading(read)
    sets = DataSets(task, CPU)
    configs = [{"lr": lr, "size": size} for lr in (0.1, 0.2) for size in (3, 4)]
    found = [sets.of(config) for config in configs]
    assert len(task.loaded) == len({id(train) for train, _ in found}) == copies
    assert len({str(sets.key(config)) for config in configs}) == copies
    assert configs == [{"lr": lr, "size": size} for lr in (0.1, 0.2) for size in (3, 4)]


def test_what_is_drawn_while_loading_is_the_same_in_every_process() -> None:
    tasks = [Loading(lambda config: None) for _ in range(2)]
    for task in tasks:
        DataSets(task, CPU).of({})
        torch.rand(3), random.random(), np.random.random()
    assert tasks[0].loaded == tasks[1].loaded


@pytest.mark.parametrize(
    "walk",
    [
        pytest.param(list, id="iter"),
        pytest.param(lambda config: config.keys(), id="keys"),
        pytest.param(lambda config: config.values(), id="values"),
        pytest.param(lambda config: config.items(), id="items"),
        pytest.param(lambda config: config.copy(), id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(json.dumps, id="json"),
        pytest.param(lambda config: config | {"c": 3}, id="or"),
        pytest.param(lambda config: (lambda **named: None)(**config), id="as arguments"),
    ],
)
def test_all_is_read_once_a_config_is_walked_through(walk: Callable[[Any], Any]) -> None:
    _, read = values_read(lambda config: bool(walk(config)), {"b": 2, "a": 1})
    assert read == {"a": 1, "b": 2}


def test_what_a_config_that_is_kept_holds_counts_as_read() -> None:
    kept: list[Any] = []
    assert values_read(kept.append, {"b": 2, "a": 1}) == (None, {"a": 1, "b": 2})


def test_a_config_is_not_taken_to_be_kept_while_torch_compiles() -> None:
    """A hook on the evaluation of frames, as of torch.compile or a debugger, adds references of its own."""
    before = set_eval_frame(False)
    try:
        found = values_read(lambda config: config["a"], {"b": 2, "a": 1})
    finally:
        set_eval_frame(before)
    assert found == (1, {"a": 1})
