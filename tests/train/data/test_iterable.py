"""Iterable data sets: shared passes, positions in a pass, random numbers, and data sets that are refused."""

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import CPU, drawn, lockstep
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.core.errors import TaskError
from shoal.core.trial import Trial
from shoal.fuse.generators import seed_all
from shoal.train.data import sample_window
from shoal.train.data.batches import Batches
from shoal.train.data.datasets import DataSets
from shoal.train.data.iterable import IterableReader
from shoal.train.data.loader import augmentation_seed

SEED = 7


class Numbers(IterableDataset[Any]):
    """Counts up, adds noise of all generators and the epoch, and counts the samples read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read = 0
        self.passes = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        offset = random.random()
        for place in range(self.samples):
            self.read += 1
            noise = torch.rand((), dtype=torch.float64).item() + np.random.random()
            yield torch.tensor([place, self.epoch, offset, noise], dtype=torch.float64)


class Sized(Numbers):
    def __len__(self) -> int:
        return self.samples


def walk(batches: Batches, size: int, epoch: int | None = 0, first: int = 0, seed: int = SEED) -> Iterator[Any]:
    return batches.iterate(size, batches.order(seed, epoch), first, augmentation_seed(seed, epoch))


def one_pass(dataset: Numbers, epoch: int | None = 0, seed: int = SEED) -> list[Any]:
    """Return all samples of a pass in a plain loop."""
    seed_all(augmentation_seed(seed, epoch), CPU)
    dataset.set_epoch(epoch or 0)
    return list(dataset)


def assert_same(found: list[Any], samples: list[Any], size: int) -> None:
    wanted = torch.stack(samples).split(size) if samples else ()
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.fixture
def nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable prefetching: only needed samples, and those of the same block, are read."""
    monkeypatch.setattr(sample_window, "MAX_PREFETCH_BYTES", 0)


@given(samples=st.integers(1, 90), size=st.integers(1, 50), first=st.integers(0, 3), epoch=st.integers(0, 2))
def test_a_walk_gives_the_samples_of_a_plain_loop_from_any_batch_on(
    samples: int, size: int, first: int, epoch: int
) -> None:
    found = list(walk(Batches(Sized(samples), CPU, "training"), size, epoch, first))
    assert_same(found, one_pass(Sized(samples), epoch)[first * size :], size)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 20, 5)])
def test_walks_abreast_read_a_pass_once(sizes: tuple[int, ...]) -> None:
    dataset = Sized(300)
    batches = Batches(dataset, CPU, "training")
    assert batches.lockstep
    found = lockstep([walk(batches, size) for size in sizes], sizes, 300)
    for made, size in zip(found, sizes, strict=True):
        assert_same(made, one_pass(Sized(300)), size)
    assert dataset.read == batches.fetched == 300


@pytest.mark.usefixtures("nothing_early")
def test_walks_at_different_places_and_passes_have_their_own_samples() -> None:
    dataset = Sized(200)
    batches = Batches(dataset, CPU, "training")
    whole = {epoch: torch.stack(one_pass(Sized(200), epoch)) for epoch in (0, 1)}
    other = torch.stack(one_pass(Sized(200), 0, seed=8))
    walks = [walk(batches, 4), walk(batches, 4, epoch=1), walk(batches, 4, first=30), walk(batches, 4, seed=8)]
    starts = [(whole[0], 0), (whole[1], 0), (whole[0], 120), (other, 0)]
    for step in range(20):
        for each, (samples, start) in zip(walks, starts, strict=True):
            assert torch.equal(next(each), samples[start + 4 * step : start + 4 * step + 4])
    assert dataset.passes == 4
    assert dataset.read < 4 * 200


@pytest.mark.usefixtures("nothing_early")
def test_a_walk_goes_on_where_the_last_one_stopped_without_reading_again(caplog: pytest.LogCaptureFixture) -> None:
    for collate in (None, torch.stack):
        dataset = Numbers(1000)
        batches = Batches(dataset, CPU, "training", collate=collate)
        found = [batch for epoch in range(9) for batch in itertools.islice(walk(batches, 7, first=11 * epoch), 11)]
        assert_same(found, one_pass(Numbers(1000))[: 9 * 77], 7)
        assert dataset.passes == 1
    assert not caplog.records


def test_without_a_length_pass_follows_pass() -> None:
    whole = [sample for number in range(4) for sample in one_pass(Numbers(30), number)]
    batches = Batches(Numbers(30), CPU, "training")
    assert batches.endless
    assert_same(list(itertools.islice(walk(batches, 8), 15)), whole, 8)
    later = Batches(Numbers(30), CPU, "training")
    assert_same(list(itertools.islice(walk(later, 8, first=9), 3)), whole[72:96], 8)


def test_samples_between_others_are_dropped() -> None:
    reader, wanted = IterableReader(Sized(60), "training"), one_pass(Sized(60))
    indices = reader.order(SEED, 0)[:60].tolist()
    for some in ([0, 1, 5], [6, 40, 59], [3]):
        found = reader.read([indices[place] for place in some])
        assert all(map(torch.equal, found, [wanted[place] for place in some]))


def test_samples_with_an_autograd_graph_are_read_for_each_walk() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    dataset = Iterated(lambda: (weight * place for place in range(40)), 40)
    batches = Batches(dataset, CPU, "training")
    wanted = torch.arange(40, dtype=torch.float64).split(8)
    for number, pair in enumerate(zip(walk(batches, 8), walk(batches, 8), strict=True)):
        for batch in pair:
            assert torch.equal(batch.detach(), wanted[number])
            batch.sum().backward()


def test_what_is_drawn_elsewhere_changes_no_sample_and_no_sample_changes_what_is_drawn_elsewhere() -> None:
    batches = Batches(Sized(100), CPU, "training", collate=torch.stack)
    found = []
    for batch in walk(batches, 10):
        found.append(batch)
        drawn()
    assert_same(found, one_pass(Sized(100)), 10)
    reader = IterableReader(Sized(100), "training")
    seed_all(3, CPU)
    wanted = drawn()
    seed_all(3, CPU)
    reader.read(reader.order(SEED, 0)[:20].tolist())
    assert drawn() == wanted


def test_what_a_collate_function_draws_depends_on_the_batch_alone() -> None:
    def noisy(samples: list[Any]) -> Any:
        return torch.stack(samples) + torch.rand(len(samples), 1, dtype=torch.float64)

    def made(first: int) -> list[Any]:
        return list(walk(Batches(Sized(40), CPU, "training", collate=noisy), 8, first=first))

    trial, samples = Trial(0, {}, seed=1, data_seed=SEED), one_pass(Sized(40))
    for number, batch in enumerate(made(0)):
        with shoal.sample_randomness(trial, 0, number):
            assert torch.equal(batch, noisy(samples[8 * number : 8 * number + 8]))
    assert all(map(torch.equal, made(3), made(0)[3:]))


def test_a_validation_draws_the_same_each_time() -> None:
    batches = Batches(Sized(100), CPU, "validation")
    for _ in range(2):
        assert_same(list(walk(batches, 16, epoch=None)), one_pass(Sized(100), None), 16)


def test_that_samples_are_dropped_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    batches = Batches(Numbers(1000), CPU, "training")
    with caplog.at_level(logging.WARNING, "shoal.pack"):
        for first in (20, 5, 10):
            next(walk(batches, 16, first=first))
    (record,) = caplog.records
    assert "the training set (Numbers) is iterable: 320 samples are read and dropped" in record.getMessage()


class Broken(Sized):
    """Raises once, at one sample."""

    broken = True

    def __iter__(self) -> Iterator[Any]:
        for place, sample in enumerate(super().__iter__()):
            if place == 50 and self.broken:
                self.broken = False
                raise OSError("the disk is gone")
            yield sample


@pytest.mark.usefixtures("nothing_early")
def test_an_error_of_the_data_set_is_raised_and_the_next_read_begins_anew() -> None:
    batches = Batches(Broken(90), CPU, "training")
    each = walk(batches, 10)
    found = [next(each) for _ in range(3)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(each)
    assert_same([*found, *walk(batches, 10, first=3)], one_pass(Sized(90)), 10)


class Iterated:
    """Iterable without a base class, as in other libraries."""

    def __init__(self, make: Callable[[], Iterator[Any]], length: Any = None) -> None:
        self.make, self.length = make, length

    def __iter__(self) -> Iterator[Any]:
        return self.make()

    def __len__(self) -> Any:
        return self.length


class Itself(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return torch.zeros(1)


def two_passes(dataset: Any) -> None:
    batches = Batches(dataset, CPU, "training")
    for epoch in range(2):
        list(itertools.islice(walk(batches, 8, epoch), 100))


ONCE = iter(range(40))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Iterated(lambda: iter(range(30)), 40),
         r"the training set \(Iterated\) ended after 30 samples in pass 0, and its `__len__` returns 40; each call of "
         "its `__iter__` must begin anew and yield that many"),
        (Iterated(lambda: iter(range(50)), 40), "yields more than 40 samples in pass 0, and its `__len__` returns 40"),
        (Iterated(lambda: ONCE, 40), "ended after 0 samples in pass 1"),
        (Iterated(lambda: iter(())), "yields nothing in pass 1; each call of its `__iter__` must begin anew"),
        (Iterated(lambda: iter(()), 0), "the training set is empty; check what `data` of the task reads"),
        (Itself(), r"`__iter__` of the training set \(Itself\) returns the data set itself.* write `__iter__` with"),
        (iter([1]), "must have a length and indices, or an `__iter__` that begins anew at each call, got list_iter"),
    ],
)  # fmt: skip
def test_a_pass_that_is_not_what_it_says_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        two_passes(dataset)


def test_an_error_in_a_validation_says_so() -> None:
    with pytest.raises(TaskError, match=r"the validation set \(Iterated\) ended after 3 samples in a validation"):
        list(walk(Batches(Iterated(lambda: iter(range(3)), 4), CPU, "validation"), 2, epoch=None))


class Returned(shoal.Task):
    """Task of which only `data` matters."""

    def __init__(self, train: Any, valid: Any, workers: int = 0) -> None:
        self.sets = train, valid
        self.loader_workers = workers

    def data(self, config: Any) -> Any:
        return self.sets

    def model(self, config: Any) -> Any:
        raise NotImplementedError

    optimizer = loss = model  # type: ignore[assignment]


POINTS = TensorDataset(torch.zeros(4))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Returned(DataLoader(Sized(9), 3, num_workers=2), POINTS),
         r"the training set is iterable \(Sized\), and 2 loader processes .* set `num_workers` of its DataLoader"),
        (Returned(Sized(9), POINTS, workers=1), "1 loader processes .* or `loader_workers` of the task, to 0"),
        (Returned(POINTS, Numbers(9)), "the validation set is iterable and has no length, .* give it a `__len__`"),
        (Returned(DataLoader(Sized(9), None), POINTS), "the training loader has no batch size"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_in_order_is_refused(task: shoal.Task, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        DataSets(task, CPU).of({})


def test_a_loader_over_an_iterable_data_set_keeps_its_settings() -> None:
    train, _ = DataSets(Returned(DataLoader(Sized(21), 8, drop_last=True), POINTS), CPU).of({})
    assert train.batch_size == 8
    assert_same(list(walk(train, 8)), one_pass(Sized(21))[:16], 8)


def test_an_iterable_data_set_has_no_order_of_indices() -> None:
    trial = Trial(0, {}, seed=1, data_seed=SEED)
    with pytest.raises(shoal.ShoalError, match=r"iterable data set \(Sized\), whose order is its own; iterate over"):
        shoal.sample_order(trial, 0, DataLoader(Sized(9), 3))
