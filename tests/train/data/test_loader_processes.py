"""Loader processes give the same samples, random numbers and errors as the training process."""

import os
import random
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from data_sets import CPU, Counting, augmented, drawn, lockstep, named, picture
from torch import Tensor

from shoal.fuse.generators import seed_all
from shoal.train.data import batches as batches_module
from shoal.train.data.batches import Batches
from shoal.train.data.loader import LoaderSettings, epoch_order
from shoal.train.data.loader_processes import deserialize, serialize
from shoal.train.data.samples import samples_equal

WORKERS = LoaderSettings(num_workers=2)
SAMPLES = 150


class Pair(NamedTuple):
    x: Tensor
    y: int


def ragged(index: int) -> dict[str, Any]:
    return {"words": torch.arange(index % 5 + 1), "array": np.arange(4.0) + index, "name": f"sample {index}"}


def late(index: int) -> Any:
    """Return a sample that draws random numbers only for every 29th index."""
    return torch.tensor([index, torch.rand(()).item() if index % 29 == 28 else 0.5])


def uneven(index: int) -> Any:
    return torch.tensor([index] if index % 29 == 28 else index)


def lists(samples: list[Any]) -> Any:
    return {"x": torch.stack([sample["x"] for sample in samples]) + torch.rand(()), "n": len(samples)}


def walk(batches: Batches, size: int, epoch: int = 0, first: int = 0) -> Any:
    return batches.iterate(size, epoch_order(batches.samples, 7, epoch), first, seed=1000 * (epoch + 1))


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("make", [picture, named, augmented, late, lambda i: Pair(torch.ones(2) * i, i)])
def test_batches_are_those_without_processes(make: Callable[[int], Any], shared: bool) -> None:
    plain = Batches(Counting(make, SAMPLES), CPU, "training", shared)
    loaded = Batches(Counting(make, SAMPLES), CPU, "training", shared, settings=WORKERS)
    for epoch, first in ((0, 0), (1, 3)):
        wanted = list(walk(plain, 20, epoch, first))
        assert samples_equal(list(walk(loaded, 20, epoch, first)), wanted)
    assert loaded.sample_sharing == plain.sample_sharing


def test_samples_too_many_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "RESIDENT_BYTES", 100)
    plain, loaded = (
        Batches(Counting(picture, SAMPLES), CPU, "training", settings=s) for s in (LoaderSettings(), WORKERS)
    )
    assert samples_equal(list(walk(loaded, 20)), list(walk(plain, 20)))
    assert loaded.sample_sharing == "window"


def test_samples_of_another_kind_than_those_before() -> None:
    loaded = Batches(Counting(uneven, 29), CPU, "training", settings=WORKERS)
    epoch = loaded.iterate(4, seed=1)
    assert [next(epoch).tolist() for _ in range(7)] == [list(range(start, start + 4)) for start in range(0, 28, 4)]
    assert next(epoch).tolist() == [[28]]


@pytest.mark.parametrize("make", [picture, augmented], ids=["kept", "drawn"])
def test_each_sample_is_fetched_once_for_all_walks(make: Callable[[int], Any]) -> None:
    plain, loaded = (
        Batches(Counting(make, SAMPLES), CPU, "training", True, settings=s) for s in (LoaderSettings(), WORKERS)
    )
    sizes = (10, 10, 25)
    assert samples_equal(*(lockstep([walk(b, size) for size in sizes], sizes, SAMPLES) for b in (loaded, plain)))
    assert loaded.fetched == SAMPLES


def test_walks_of_several_orders_and_sizes() -> None:
    lanes = ((10, 0), (25, 1), (10, 2))
    plain, loaded = (
        Batches(Counting(augmented, SAMPLES), CPU, "training", settings=s) for s in (LoaderSettings(), WORKERS)
    )
    sizes = [size for size, _ in lanes]
    assert samples_equal(*(lockstep([walk(b, *lane) for lane in lanes], sizes, SAMPLES) for b in (loaded, plain)))


def test_a_collate_function_that_draws() -> None:
    plain, loaded = (
        Batches(Counting(named, 30), CPU, "training", False, lists, s) for s in (LoaderSettings(), WORKERS)
    )
    assert samples_equal(list(walk(loaded, 8)), list(walk(plain, 8)))


def test_a_batch_may_be_changed_in_place_while_another_tensor_is_in_a_graph() -> None:
    def make(index: int) -> Any:
        return {"x": torch.ones(2) * index, "y": torch.rand(2)}

    loaded = Batches(Counting(make, 20), CPU, "training", settings=WORKERS)
    one, other = walk(loaded, 5), walk(loaded, 5)
    for batch, twin in zip(one, other, strict=True):
        weight = torch.ones(2, requires_grad=True)
        loss = (weight * batch["x"]).sum()
        before = twin["y"].clone()
        batch["y"].zero_()
        loss.backward()
        assert torch.equal(twin["y"], before)


def test_the_generators_of_the_training_process_stay_as_they_are() -> None:
    seed_all(1, CPU)
    wanted = drawn()
    loaded = Batches(Counting(augmented, 40), CPU, "training", settings=WORKERS)
    seed_all(1, CPU)
    list(walk(loaded, 10))
    assert drawn() == wanted


def failing(index: int) -> Any:
    if index == 100:
        raise OSError("the disk is gone")
    return torch.tensor([index, random.random()])


def test_an_error_names_its_sample_and_is_raised_when_the_sample_is_needed() -> None:
    loaded = Batches(Counting(failing, SAMPLES), CPU, "training", settings=WORKERS)
    epoch = loaded.iterate(10, seed=1)
    assert [int(next(epoch)[0, 0]) for _ in range(10)] == list(range(0, 100, 10))
    with pytest.raises(OSError, match="sample 100 of the training set") as raised:
        next(epoch)
    assert "the disk is gone" in str(raised.value)
    assert len(list(loaded.iterate(10, first=11, seed=1))) == 4


def test_samples_that_cannot_be_sent_are_named() -> None:
    loaded = Batches(Counting(lambda i: {"x": torch.rand(2), "f": lambda: i}, 10), CPU, "training", settings=WORKERS)
    with pytest.raises(Exception, match=r"when it (sent|made a batch of) samples \[0, 1\] of the training set"):
        next(loaded.iterate(2, seed=1))


def test_a_killed_process_is_an_error_and_others_go_on(request: pytest.FixtureRequest) -> None:
    def make(index: int) -> Any:
        return torch.tensor([os.getpid(), index, torch.rand(()).item()], dtype=torch.float64)

    loaded = Batches(Counting(make, SAMPLES), CPU, "training", settings=WORKERS)
    epoch = loaded.iterate(10, seed=1)
    process = int(next(epoch)[0, 0])
    assert process != os.getpid()
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # which raises in whatever runs when the signal comes
    request.addfinalizer(lambda: signal.signal(signal.SIGCHLD, of_torch))
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(epoch)
    rest = list(loaded.iterate(10, first=5, seed=1))
    assert [int(batch[0, 1]) for batch in rest] == list(range(50, SAMPLES, 10))


@pytest.mark.parametrize(
    "value",
    [
        [ragged(index) for index in range(7)],
        (1, 2.5, "text", None, b"bytes", [True]),
        [torch.zeros(0), torch.ones(2, 3).t(), torch.tensor(1 + 2j)],
        [np.float32(2), np.arange(6)[::2], np.array("text"), np.zeros((0, 3)), np.arange(99, dtype=np.uint32)],
        Pair(torch.rand(3), 1),
    ],
    ids=["ragged", "plain", "tensors", "arrays", "named tuple"],
)
def test_what_is_packed_is_what_is_unpacked(value: Any) -> None:
    assert samples_equal(deserialize(serialize(value)), value)
