import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.worker.data import Batches, DataSets, epoch_order
from shoal.worker.reading import ReadConfig

CPU = torch.device("cpu")


class Plain(Dataset[Any]):
    """A TensorDataset that is not known to be one."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Drawing(Plain):
    """Draws from all generators that users draw from."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.random()], dtype=torch.float64)


@given(samples=st.integers(1, 40), size=st.integers(1, 50), first=st.integers(0, 3), shuffled=st.booleans())
def test_resident_and_other_data_give_the_same_batches(samples: int, size: int, first: int, shuffled: bool) -> None:
    dataset = TensorDataset(torch.arange(samples), torch.arange(samples) * 0.5)
    order = epoch_order(samples, 3, 1) if shuffled else None
    walks = [list(Batches(each, CPU, "training").walk(size, order, first)) for each in (dataset, Plain(dataset))]
    assert len(walks[0]) == len(walks[1]) == max(0, -(-samples // size) - first)
    for one, other in zip(*walks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    seen = [int(x) for batch in walks[0] for x in batch[0]]
    assert seen == (list(range(samples)) if order is None else order.tolist())[first * size :]


def test_the_order_is_that_of_the_seed_and_the_epoch() -> None:
    orders = [epoch_order(50, seed, epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]]
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert sorted(orders[1]) == list(range(50))


def test_what_is_drawn_for_a_batch_is_its_own() -> None:
    """Whatever was drawn before it, and though those before it were skipped."""
    batches = Batches(Drawing(TensorDataset(torch.zeros(10))), CPU, "training")
    wanted = list(batches.walk(3, seed=5))
    disturbed = []
    for batch in batches.walk(3, seed=5):
        disturbed.append(batch)
        torch.rand(7), random.random(), np.random.random()
    assert torch.equal(torch.cat(disturbed), torch.cat(wanted))
    assert torch.equal(torch.cat(list(batches.walk(3, first=2, seed=5))), torch.cat(wanted[2:]))
    assert torch.cat(wanted).unique().numel() == 30


class Loading(shoal.Task):
    """Notes how often data are loaded, and with which draws."""

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
    config = ReadConfig({"b": 2, "a": 1})
    walk(config)
    assert config.read() == {"a": 1, "b": 2}
