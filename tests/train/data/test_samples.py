from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from shoal.train.data.batches import Batches
from shoal.train.data.samples import compact, is_copyable, sample_kind, samples_equal

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(1, 1.0, id="a whole number among floats"),
        pytest.param(True, 1, id="a truth value among numbers"),
        pytest.param(torch.zeros(2), torch.zeros(2, dtype=torch.float64), id="another dtype"),
        pytest.param(torch.zeros(2), torch.zeros(3), id="another shape"),
        pytest.param(torch.zeros(2), torch.zeros(2, requires_grad=True), id="a gradient"),
        pytest.param(np.zeros(2), np.zeros(2, np.float32), id="another NumPy dtype"),
        pytest.param(np.float32(1), np.float64(1), id="another NumPy scalar"),
        pytest.param({"a": 1, "b": 2}, {"a": 1}, id="a key less"),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="another order of keys"),
        pytest.param((1, 2), [1, 2], id="another container"),
        pytest.param((1, 2), Point(1, 2), id="a named tuple"),
        pytest.param((1, (2,)), (1, (2, 3)), id="a longer part"),
        pytest.param("a", b"a", id="bytes"),
    ],
)
def test_samples_of_different_kinds(one: Any, other: Any) -> None:
    assert sample_kind(one) == sample_kind(one)
    assert sample_kind(one) != sample_kind(other)
    assert not samples_equal(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(1, 2, id="number"),
        pytest.param(0.0, -0.0, id="sign of zero"),
        pytest.param(torch.zeros(2), torch.tensor([0.0, -0.0]), id="sign of zero in a tensor"),
        pytest.param(np.zeros(2), np.array([0.0, 1.0]), id="array"),
        pytest.param(np.float32(1), np.float32(2), id="NumPy scalar"),
        pytest.param({"a": (1, "b")}, {"a": (1, "c")}, id="text within"),
        pytest.param(UserDict(a=torch.zeros(1)), UserDict(a=torch.ones(1)), id="mapping that is not a dict"),
        pytest.param(torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), id="sparse"),
    ],
)
def test_samples_of_one_kind_that_differ(one: Any, other: Any) -> None:
    assert sample_kind(one) == sample_kind(other)
    assert samples_equal(one, one)
    assert not samples_equal(one, other)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.tensor([float("nan"), 1.0]), id="no number in a tensor"),
        pytest.param(lambda: float("nan"), id="no number"),
        pytest.param(lambda: np.array([np.nan]), id="no number in an array"),
        pytest.param(lambda: torch.arange(6).reshape(2, 3).T, id="transposed"),
        pytest.param(lambda: torch.tensor(3), id="no axis"),
        pytest.param(lambda: torch.zeros(0), id="no element"),
        pytest.param(lambda: torch.tensor([True, False]), id="truth values"),
        pytest.param(lambda: torch.tensor([1j]), id="complex"),
        pytest.param(lambda: Point(1, "a"), id="named tuple"),
    ],
)
def test_a_sample_is_the_same_when_made_again(make: Any) -> None:
    assert samples_equal(make(), make())


def test_what_is_kept_does_not_hold_on_to_more() -> None:
    whole, array = torch.arange(1000.0), np.arange(1000)
    sample = {"view": whole[3:5], "array": array[3:5], "own": torch.ones(2), "name": "a"}
    kept = compact(sample)
    assert samples_equal(kept, sample)
    assert kept["own"] is sample["own"]
    assert kept["view"].untyped_storage().nbytes() == 8
    assert kept["array"].base is None


def test_which_batches_can_be_copied() -> None:
    assert is_copyable(default_collate([{"x": torch.zeros(2), "name": "a", "n": 1}] * 2))
    assert not is_copyable([torch.zeros(2, requires_grad=True)])
    assert not is_copyable(UserDict(x=torch.zeros(2)))
    assert isinstance(default_collate([UserDict(x=torch.zeros(2))])["x"], Tensor)


class OneBuffer(Dataset[Any]):
    """Makes every sample in the same memory."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(3)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.buffer.fill_(index)


class Mutates(OneBuffer):
    """Changes its own sample each time it is fetched."""

    def __init__(self) -> None:
        self.rows = torch.arange(36.0).view(12, 3)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].add_(1.0)


@pytest.mark.parametrize("of", [OneBuffer, Mutates])
def test_samples_that_do_not_last_are_not_kept(of: type[OneBuffer], caplog: pytest.LogCaptureFixture) -> None:
    batches = Batches(of(), torch.device("cpu"), "training")
    assert batches.sample_sharing == "batch"
    assert "returns different samples for the same index" in caplog.text
