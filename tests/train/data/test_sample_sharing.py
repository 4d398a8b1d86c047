"""The batches of an iterator do not depend on other iterators, and shared samples are fetched once."""

import logging
import random
from collections import UserDict
from collections.abc import Callable
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import CPU, Counting, augmented, drawn, lockstep, named, picture
from torch import Tensor

from shoal.fuse.generators import seed_all
from shoal.train.data import batches as batches_module
from shoal.train.data import sample_window
from shoal.train.data.batches import PROBED_SAMPLES, Batches
from shoal.train.data.loader import epoch_order
from shoal.train.data.sample_window import Fetcher
from shoal.train.data.samples import samples_equal
from shoal.train.data.source import BLOCK

SIZES = (20, 50, 70)


def sometimes(index: int) -> Any:
    """Return a sample that draws random numbers only for every 29th index."""
    return torch.tensor([index, torch.rand(()).item() if index % 29 == 28 else 0.5])


def walk(batches: Batches, size: int, epoch: int = 0) -> Any:
    seed = 1000 * (epoch + 1)
    return batches.iterate(size, epoch_order(batches.samples, 7, epoch), seed=seed)


def test_a_sample_is_decoded_once_for_all_walks_and_epochs() -> None:
    dataset = Counting(picture)
    batches = Batches(dataset, CPU, "training")
    for epoch in range(3):
        lockstep([walk(batches, size, epoch) for size in SIZES], SIZES, 300)
    assert batches.sample_sharing == "kept"
    assert batches.fetched == 300
    assert batches.fetch_seconds > 0
    assert dataset.asked == {index: 3 if index < PROBED_SAMPLES else 1 for index in range(300)}, (
        "looked at twice before"
    )


def test_what_is_not_kept_is_decoded_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, limit in ((named, 1 << 30), (picture, 100)):
        monkeypatch.setattr(batches_module, "RESIDENT_BYTES", limit)
        batches = Batches(Counting(make), CPU, "training")
        for epoch in range(3):
            lockstep([walk(batches, size, epoch) for size in SIZES], SIZES, 300)
            assert batches.fetched == 300 * (epoch + 1)
        assert batches.sample_sharing == "window"


@pytest.mark.parametrize("sizes", [(20, 20, 20), (20, 20, 50)])
@pytest.mark.parametrize("make", [named, lambda index: UserDict(x=torch.tensor(index))], ids=["a dict", "no dict"])
def test_walks_of_one_size_have_samples_made_once(make: Callable[[int], Any], sizes: tuple[int, ...]) -> None:
    batches = Batches(Counting(make), CPU, "training")
    for epoch in range(3):
        lockstep([walk(batches, size, epoch) for size in sizes], sizes, 300)
        assert batches.fetched == 300 * (epoch + 1)
    assert batches.sample_sharing == "window"


def test_samples_are_made_once_for_walks_that_go_on_with_an_epoch() -> None:
    batches = Batches(Counting(augmented), CPU, "training", shared_augmentation=True)
    order = epoch_order(300, 7, 0)
    for first in (0, 5):
        fetched = batches.fetched
        walks = [batches.iterate(20, order, first, seed=1000) for _ in range(3)]
        assert all(len({str(batch) for batch in row}) == 1 for row in islice(zip(*walks, strict=True), 5))
        assert batches.fetched - batches.prefetched - fetched in (128, 132), "blocks of 32"
        del walks


def test_nothing_is_held_that_all_take_together() -> None:
    batches = Batches(Counting(augmented), CPU, "training", shared_augmentation=True)
    lanes = [walk(batches, 32) for _ in range(3)]
    for number, row in enumerate(zip(*lanes, strict=True)):
        assert all(map(torch.equal, row, row[::-1]))
        held = sum(map(len, batches._source._units.values()))  # type: ignore[union-attr]
        assert held - batches.prefetched == 32, number  # of the first batch


def test_a_lane_that_goes_on_alone_keeps_nothing_for_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_window, "MAX_PREFETCH_SECONDS", 0)
    batches = Batches(Counting(augmented), CPU, "training", shared_augmentation=True)
    stays, leaves = walk(batches, 32), walk(batches, 32)
    for lane in (stays, leaves, stays):
        next(lane)
    del lane
    leaves.close()
    before = set(batches._source._units)  # type: ignore[union-attr]
    for _ in range(2):
        next(stays)
    assert set(batches._source._units) == before  # type: ignore[union-attr]


def test_random_samples_are_made_once_for_walks_of_one_batch_size() -> None:
    batches = Batches(Counting(augmented), CPU, "training")
    sizes = (20, 50, 20, 50, 50)
    for epoch in range(2):
        lockstep([walk(batches, size, epoch) for size in sizes], sizes, 300)
        assert batches.fetched == 2 * 300 * (epoch + 1)
    assert batches.sample_sharing == "batch"


@pytest.mark.parametrize(("size", "first"), [(1, 37), (20, 3), (50, 1), (BLOCK, 2)])
def test_a_walk_that_goes_on_in_the_middle_gets_the_samples_that_it_would_have_got(size: int, first: int) -> None:
    order = epoch_order(300, 7, 0)
    whole, rest = (Batches(Counting(augmented), CPU, "training", shared_augmentation=True) for _ in range(2))
    wanted = list(whole.iterate(size, order, seed=1000))[first:]
    found = list(rest.iterate(size, order, first, seed=1000))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert rest.fetched == 300 - first * size + first * size % BLOCK, "from the start of the block"


def test_random_samples_are_made_once_for_all_where_the_task_says_so() -> None:
    batches = Batches(Counting(augmented), CPU, "training", shared_augmentation=True)
    seen = []
    for epoch in range(2):
        made = lockstep([walk(batches, size, epoch) for size in SIZES], SIZES, 300)
        assert batches.fetched == 300 * (epoch + 1)
        rows = [torch.cat(lane) for lane in made]
        assert all(torch.equal(lane, rows[0]) for lane in rows)
        assert rows[0][:, 1:].unique().numel() == 900
        seen.append(rows[0][rows[0][:, 0].argsort()])
    assert batches.sample_sharing == "window"
    assert torch.equal(seen[0][:, 0], seen[1][:, 0])
    assert not torch.isin(seen[0][:, 1:], seen[1][:, 1:]).any()


@pytest.mark.parametrize(
    ("make", "shared"), [(picture, False), (named, True), (augmented, False), (augmented, True), (sometimes, True)]
)
def test_batches_are_those_of_a_lone_walk(make: Callable[[int], Any], shared: bool) -> None:
    """Whatever the others draw between them, and whoever fetched the samples."""

    def with_draws(batches: Batches, size: int) -> Any:
        for epoch in range(2):
            for batch in walk(batches, size, epoch):
                drawn()
                yield batch

    alone = [list(with_draws(Batches(Counting(make), CPU, "training", shared), size)) for size in (20, 20, 45, 70)]
    batches = Batches(Counting(make), CPU, "training", shared)
    together: list[list[Any]] = [[] for _ in alone]
    walks = [with_draws(batches, size) for size in (20, 20, 45, 70)]
    for row in zip_longest(*walks):
        for lane, made in zip(together, row, strict=True):
            lane += [] if made is None else [made]
    for one, other in zip(together, alone, strict=True):
        assert all(samples_equal(batch, wanted) for batch, wanted in zip(one, other, strict=True))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [named, augmented])
def test_what_is_fetched_early_is_what_would_be_fetched_later(
    make: Callable[[int], Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for early in (0, 100, 1000):
        monkeypatch.setattr(sample_window, "MAX_PREFETCH_SECONDS", 1e9)
        monkeypatch.setattr(sample_window, "MAX_PREFETCH_BYTES", early * 1024)  # at least what a small sample counts as
        batches = Batches(Counting(make), CPU, "training", shared)
        epoch = walk(batches, 20)
        found.append([next(epoch), next(epoch)])
        assert (batches.prefetched > 0) == (early > 0)
        found[-1] += epoch
        assert batches.fetched == 300
        assert batches.prefetched == 0
    assert all(samples_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [named, augmented])
def test_an_error_is_raised_when_the_sample_is_needed(
    make: Callable[[int], Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(index: int) -> Any:
        if index == 200:
            raise OSError("the disk is gone")
        return make(index)

    given = []
    for early in (0, 1000):
        monkeypatch.setattr(sample_window, "MAX_PREFETCH_SECONDS", 1e9)
        monkeypatch.setattr(sample_window, "MAX_PREFETCH_BYTES", early * 1024)
        batches = Batches(Counting(fails), CPU, "training", shared)
        epoch = batches.iterate(10, seed=1)
        given.append([next(epoch) for _ in range(19)])
        with pytest.raises(OSError, match="the disk is gone"):
            list(epoch)
    assert samples_equal(*given)


@pytest.mark.parametrize(("size", "walks"), [(4, 4), (2, 8)])
def test_walks_of_several_orders_fetch_each_sample_once(size: int, walks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_window, "MAX_PREFETCH_SECONDS", 0)
    batches = Batches(Counting(named, 320), CPU, "training")
    lockstep([walk(batches, size, epoch) for epoch in range(walks)], [size] * walks, 320)
    assert batches.fetched == walks * 320


@pytest.mark.parametrize("size", [4, 20])
def test_samples_that_a_graph_hangs_on_are_not_fetched_by_blocks(size: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    batches = Batches(Counting(lambda i: {"x": weight * i, "name": "a"}), CPU, "training")
    for batch in walk(batches, size):
        batch["x"].sum().backward()
    assert batches.fetched - 300 <= 2 * BLOCK


EARLY = {
    "of small pictures that take 0.25 ms": ("cpu", 0.25e-3, 12 << 10, 200),
    "of large pictures that take 5 ms": ("cpu", 5e-3, 600 << 10, 10),
    "where one takes too long": ("cpu", 0.1, 1 << 10, 0),
    "where one is too large": ("cpu", 1e-4, 32 << 20, 0),
    "of numbers": ("cpu", 1e-9, 8, 16384),
    "for a GPU": ("cuda", 0.25e-3, 12 << 10, 0),
}


@pytest.mark.parametrize(("device", "seconds", "size", "wanted"), EARLY.values(), ids=EARLY.keys())
def test_how_many_samples_are_fetched_early(device: str, seconds: float, size: int, wanted: int) -> None:
    fetcher = Fetcher(Counting(picture), torch.device(device))
    fetcher.fetched, fetcher.seconds = 100, 100 * seconds
    sample = (torch.zeros(size, dtype=torch.uint8), 3, "name")
    assert fetcher.prefetch_count(sample) == pytest.approx(wanted, abs=1)


def test_what_user_code_draws_is_not_what_was_drawn_for_the_samples() -> None:
    for batch in walk(Batches(Counting(augmented), CPU, "training"), 20):
        assert not torch.isin(batch[:, 1:], torch.tensor(drawn(), dtype=torch.float64)).any()


def test_what_is_drawn_for_a_batch_is_its_own() -> None:
    """Whatever was drawn before it, and though those before it were skipped."""
    batches = Batches(Counting(augmented, 10), CPU, "training")
    wanted = list(batches.iterate(3, seed=5))
    disturbed = []
    for batch in batches.iterate(3, seed=5):
        disturbed.append(batch)
        drawn()
    assert torch.equal(torch.cat(disturbed), torch.cat(wanted))
    assert torch.equal(torch.cat(list(batches.iterate(3, first=2, seed=5))), torch.cat(wanted[2:]))
    assert torch.cat(wanted)[:, 1:].unique().numel() == 30


def test_without_a_seed_nothing_is_seeded_nor_shared() -> None:
    batches = Batches(Counting(augmented, 40), CPU, "training")
    one, other = (list(batches.iterate(10)) for _ in range(2))
    assert not torch.isin(torch.cat(one)[:, 1:], torch.cat(other)[:, 1:]).any()
    seed_all(1, CPU)
    wanted = drawn()
    kept = Batches(Counting(picture, 40), CPU, "training")
    seed_all(1, CPU)
    list(kept.iterate(10))
    assert drawn() == wanted


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()).item(), random.random, np.random.random],
    ids=["torch", "Python", "NumPy"],
)
def test_whichever_generator_is_drawn_from_is_noticed(
    draw: Callable[[], float], caplog: pytest.LogCaptureFixture
) -> None:
    for make in (lambda i: draw(), lambda i: draw() if i > 20 else 0.5):
        batches = Batches(Counting(make, 40), CPU, "training")
        one, other = (torch.cat(list(walk(batches, 10, epoch))) for epoch in range(2))
        assert batches.sample_sharing == "batch"
        assert not torch.isin(one[one != 0.5], other[other != 0.5]).any()
    assert not caplog.records  # that it draws from one of its own


def test_samples_that_draw_from_another_generator_later_on_are_those_that_a_lone_walk_gets() -> None:
    """What NumPy draws for one is drawn by the sample's own seed, whoever else had been fetched by then."""

    def late(index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), np.random.random() if index % 29 == 28 else 0.5])

    def numbers(size: int) -> Tensor:
        batches = Batches(Counting(late), CPU, "training", shared_augmentation=True)
        rows = torch.cat(list(walk(batches, size)))
        assert batches.sample_sharing == "window"
        assert 300 <= batches.fetched <= 300 + size + 2 * (BLOCK - 1)  # the blocks of one batch were fetched again
        return rows[rows[:, 0].argsort()]

    one, other = numbers(20), numbers(70)
    assert torch.equal(one, other)
    assert one[:, 1].unique().numel() == 300
    assert (one[:, 2] != 0.5).sum() == 10
    assert one[:, 2].unique().numel() == 11


def test_samples_that_draw_later_on_are_not_kept_any_longer() -> None:
    batches = Batches(Counting(sometimes), CPU, "training")
    (first, *_), order = batches.iterate(20, seed=1), torch.arange(300)
    assert first[:, 1].tolist() == [0.5] * 20
    assert batches.sample_sharing == "batch"
    rows = torch.cat(list(batches.iterate(20, order, seed=1)))
    assert (rows[:, 1] != 0.5).sum() == 10


def test_a_generator_of_the_data_sets_own_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    generator = np.random.default_rng(0)
    batches = Batches(Counting(lambda i: torch.tensor([i, generator.random()])), CPU, "training")
    with caplog.at_level(logging.WARNING, "shoal.pack"):
        rows = [torch.cat(list(walk(batches, 50, epoch)))[:, 1] for epoch in range(2)]
    assert batches.sample_sharing == "batch"
    assert not torch.isin(rows[0], rows[1]).any()
    (record,) = caplog.records
    assert "draw from torch's default generator instead" in record.getMessage()
    assert "the training set" in record.getMessage()


def test_a_batch_that_a_graph_hangs_on_is_not_shared() -> None:
    weight = torch.ones(3, requires_grad=True)
    batches = Batches(Counting(lambda i: weight * i, 20), CPU, "training")
    for batch, other in zip(walk(batches, 5), walk(batches, 5), strict=True):
        assert torch.equal(batch, other)
        batch.sum().backward()
        other.sum().backward()
