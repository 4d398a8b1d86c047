from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import CPU, Counting, augmented, drawn, lockstep, named, picture
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset, default_collate

from shoal.core.errors import TaskError
from shoal.fuse.generators import seed_all
from shoal.train.data import batches as batches_module
from shoal.train.data import sample_window
from shoal.train.data.batches import Batches
from shoal.train.data.loader import epoch_order
from shoal.train.data.samples import samples_equal

Point = namedtuple("Point", "x y")


class Plain(Dataset[Any]):
    """Subclass of TensorDataset, which is not recognized as one."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


@given(samples=st.integers(1, 40), size=st.integers(1, 50), first=st.integers(0, 3), shuffled=st.booleans())
def test_resident_and_other_data_give_the_same_batches(samples: int, size: int, first: int, shuffled: bool) -> None:
    dataset = TensorDataset(torch.arange(samples), torch.arange(samples) * 0.5)
    order = epoch_order(samples, 3, 1) if shuffled else None
    walks = [list(Batches(each, CPU, "training").iterate(size, order, first)) for each in (dataset, Plain(dataset))]
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


SAMPLES: dict[str, tuple[Callable[[int], Any], str]] = {
    "tensor": (lambda i: torch.arange(4.0) + i, "kept"),
    "number": (lambda i: i, "kept"),
    "float": (lambda i: i / 3, "kept"),
    "truth value": (lambda i: i % 3 == 0, "kept"),
    "pair": (picture, "kept"),
    "nested": (lambda i: {"x": (torch.full((2, 3), i), i / 7), "y": {"n": [i, -i]}}, "kept"),
    "named tuple": (lambda i: Point(i, torch.tensor(i, dtype=torch.bfloat16)), "kept"),
    "numpy": (lambda i: (np.full((2, 2), i, np.float32), np.float64(i), np.int16(i)), "kept"),
    "unusual dtypes": (lambda i: (np.full(3, i, np.uint16), torch.full((2,), i * 1j), torch.tensor(i % 2 > 0)), "kept"),
    "not contiguous": (lambda i: (torch.arange(24.0).reshape(2, 3, 4) + i).permute(2, 0, 1), "kept"),
    "no number": (lambda i: torch.tensor([float("nan"), -0.0, i]), "kept"),
    "text": (named, "window"),
    "a mapping of another kind": (lambda i: UserDict(x=torch.tensor(i)), "window"),
    "a whole number among floats": (lambda i: i if i % 20 == 3 else i / 7, "window"),
    "a key more": (lambda i: {"x": i, "extra": i} if i % 5 == 4 else {"x": i}, "window"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_batch_is_bitwise_what_collating_gives(name: str) -> None:
    make, sharing = SAMPLES[name]
    batches = Batches(Counting(make, 37), CPU, "training")
    order = torch.arange(36, -1, -1)
    for _ in range(2):
        for part, batch in zip(order.split(5), batches.iterate(5, order), strict=True):
            wanted = default_collate([make(i) for i in part.tolist()])
            assert samples_equal(batch, wanted)
            assert type(batch) is type(wanted)
            leaves = [pytree.tree_leaves(each) for each in (batch, wanted)]
            strides = [[x.stride() for x in each if type(x) is torch.Tensor] for each in leaves]
            assert strides[0] == strides[1]
    assert batches.sample_sharing == sharing


def test_samples_of_several_shapes_one_at_a_time() -> None:
    dataset = Counting(lambda i: torch.full((i % 4 + 1,), i), 20)
    batches = Batches(dataset, CPU, "training")
    assert [tuple(x.shape) for x in batches.iterate(1)] == [(1, i % 4 + 1) for i in range(20)]
    assert batches.sample_sharing == "window"
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(batches.iterate(3))


def test_what_the_user_does_to_a_batch_is_seen_by_nobody_else() -> None:
    for make, shared in ((picture, False), (named, False), (augmented, False), (augmented, True)):
        batches = Batches(Counting(make, 12), CPU, "training", shared)
        alone = Batches(Counting(make, 12), CPU, "training", shared)
        walks = [batches.iterate(4, seed=1) for _ in range(3)]
        for wanted in alone.iterate(4, seed=1):
            for walk in walks:
                batch = next(walk)
                assert samples_equal(batch, wanted)
                leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
                assert leaves
                for leaf in leaves:
                    leaf.fill_(-1)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("make", [picture, named, augmented])
def test_a_data_set_shorter_than_a_batch(make: Any, samples: int) -> None:
    batches = Batches(Counting(make, samples), CPU, "training")
    for _ in range(2):
        (batch,) = batches.iterate(20, seed=1)
        assert all(len(leaf) == samples for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def test_a_sample_may_come_several_times_in_an_order() -> None:
    order = torch.tensor([2, 2, 0, 2, 1, 0, 0, 1])
    for make in (picture, named, augmented):
        batches = Batches(Counting(make, 8), CPU, "training")
        for part, batch in zip(order.split(3), batches.iterate(3, order, seed=4), strict=True):
            assert len(pytree.tree_leaves(batch)[0]) == len(part)
        kept = Batches(Counting(picture, 8), CPU, "training")
        assert torch.cat([labels for _, labels in kept.iterate(3, order)]).tolist() == order.tolist()
        assert kept.fetched == 3


def test_no_data() -> None:
    with pytest.raises(TaskError, match="the training set is empty; check what `data` of the task reads"):
        Batches(Counting(picture, 0), CPU, "training")
    with pytest.raises(TaskError, match=r"must have a length and indices, or an `__iter__` .*, got list_iterator"):
        Batches(iter([1]), CPU, "training")


@pytest.mark.parametrize("make", [picture, named, augmented])
def test_what_a_data_set_raises_is_raised_and_nothing_is_left_of_it(make: Callable[[int], Any]) -> None:
    error = OSError("the disk is gone")
    broken = {3, 17}

    def fails(index: int) -> Any:
        if index in broken:
            raise error
        return make(index)

    batches = Batches(Counting(fails, 30), CPU, "training")
    for bad in (3, 17):
        with pytest.raises(OSError, match="the disk is gone") as raised:
            list(batches.iterate(10, seed=1))
        assert raised.value is error
        broken.remove(bad)
    wanted = Batches(Counting(make, 30), CPU, "training").iterate(10, seed=1)
    assert all(samples_equal(one, other) for one, other in zip(batches.iterate(10, seed=1), wanted, strict=True))


@pytest.mark.parametrize(
    ("dataset", "sharing"),
    [
        (TensorDataset(torch.zeros(9)), "resident"),
        (Counting(picture, 9), "kept"),
        (Counting(named, 9), "window"),
        (Counting(augmented, 9), "batch"),
    ],
)
def test_what_can_be_shared_is_known_before_the_first_batch(dataset: Any, sharing: str) -> None:
    batches = Batches(dataset, CPU, "training")
    seed_all(3, CPU)
    wanted = drawn()
    seed_all(3, CPU)
    assert batches.sample_sharing == sharing
    assert drawn() == wanted
    order = torch.arange(8, -1, -1)
    alone = Batches(dataset, CPU, "training").iterate(4, order, seed=2)
    assert all(samples_equal(one, other) for one, other in zip(batches.iterate(4, order, seed=2), alone, strict=True))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 100 * (6 * 4 + 8)  # bytes of 100 samples, each six floats and a number
    for limit, sharing in ((size, "kept"), (size - 1, "window")):
        monkeypatch.setattr(batches_module, "RESIDENT_BYTES", limit)
        batches = Batches(Counting(picture, 100), CPU, "training")
        assert batches.sample_sharing == sharing
        assert batches.pending_bytes == (size if sharing == "kept" else 0)
        list(batches.iterate(10))
        assert batches.pending_bytes == 0


@pytest.mark.parametrize(
    ("make", "early", "held"),
    [(named, 0, 2 + 2 * 2), (named, 64, 2 + 2 * 2 + 2), (augmented, 0, 2), (augmented, 64, 2 + 9 + 3)],
)
def test_what_is_held_is_bounded_and_let_go(make: Any, early: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_window, "MAX_PREFETCH_SECONDS", 1e9)
    monkeypatch.setattr(sample_window, "MAX_PREFETCH_BYTES", early * 1024)  # at least what a small sample counts as
    batches = Batches(Counting(make, 1000), CPU, "training")
    walks = [batches.iterate(size, seed=1) for size in (7, 20)]
    for _ in range(40):
        for walk in walks:
            next(walk)
    assert len(batches._source._units) == held  # type: ignore[union-attr]
    del walk, walks
    assert not batches._source._units  # type: ignore[union-attr]


def test_walks_of_several_epochs_at_once_share_with_those_of_the_same() -> None:
    dataset = Counting(named)
    batches = Batches(dataset, CPU, "training")
    walks = [batches.iterate(20, epoch_order(300, 0, epoch), seed=epoch) for epoch in (0, 1, 0, 1)]
    lockstep(walks, [20] * 4, 300)
    assert batches.fetched <= 2 * 300
