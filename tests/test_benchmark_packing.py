"""The rivals of Shoal's packs train as they should; what the benchmark of packs concludes follows from what it saw."""

import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import packing
from packs import pictures
from packs.cases import BATCH_SIZES, CASES, Case, Cell
from packs.feeds import FEEDS, indexed, loaded
from packs.original import again, original
from packs.pictures import Files, made, write
from packs.search import METRIC, Rung, Search, hyperband, replayed
from packs.survivors import compared, cut_again
from packs.tasks import MLP3, SPACE, SmallCNN
from packs.ways import MOST_ROUNDS, Paper, Sequential, measured

import shoal
from shoal.core.space import Space
from shoal.core.trial import Report, TrialState
from shoal.journal.view import JournalView

TRAIN, TEST = 240, 40
ALL = range(TRAIN)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also of a job in this process: on small tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    yield
    monkeypatch.undo()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def noise(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pictures that look like nothing, in the place of CIFAR-10."""
    rng = np.random.default_rng(0)
    data = {}
    for name, samples in (("train", TRAIN), ("test", TEST)):
        data[f"x_{name}"] = rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8)
        data[f"y_{name}"] = rng.integers(0, 10, samples, dtype=np.uint8)
    monkeypatch.setattr(pictures, "arrays", lambda: data)
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


def cell(case: Case, members: int = 2, samples: int = 100, folder: Path = Path()) -> Cell:
    return Cell(case, members, samples, folder)


def test_the_space_is_that_of_the_paper() -> None:
    configs = list(Space(SPACE).grid())
    assert len(configs) == 1056
    assert {config["batch_size"] for config in configs} == {20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70}


@pytest.mark.parametrize(("task", "sizes"), [(MLP3, [3072, 64, 64, 10]), (SmallCNN, [144, 64, 10])])
def test_the_models_have_the_sizes_they_are_named_after(task: type[Any], sizes: list[int]) -> None:
    model = task().model({"activation": "Tanh"})
    linear = [module for module in model if isinstance(module, torch.nn.Linear)]
    assert [linear[0].in_features, *(module.out_features for module in linear)] == sizes
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_all_pipelines_give_the_same_pictures(folder: Path, noise: dict[str, Any]) -> None:
    sets = [made(pipeline, "test", range(5, TEST), folder=folder) for pipeline in pictures.PIPELINES]
    for index in (0, 3, TEST - 6):
        samples = [dataset[index] for dataset in sets]
        for x, y in samples:
            assert torch.equal(x, samples[0][0])
            assert int(y) == noise["y_test"][5 + index]
    red = noise["x_test"][5, :, :, 0] / 255
    assert np.allclose(sets[0][0][0][0], (red - 0.4914) / 0.2470, atol=1e-6)


def test_files_are_mirrored_and_shifted_by_torchs_default_generator_and_counted(folder: Path) -> None:
    files, plain = made("png", "train", ALL, folder=folder), made("pictures", "train", ALL)
    Files.decoded.clear()
    torch.manual_seed(0)
    first = [files[index][0] for index in range(20)]
    torch.manual_seed(0)
    assert all(torch.equal(files[index][0], x) for index, x in enumerate(first))
    assert Files.decoded == {"train": 40}
    for index, x in enumerate(first):
        own = torch.nn.functional.pad(plain[index][0], [4] * 4)
        crops = [y[:, i : i + 32, j : j + 32] for y in (own, own.flip(2)) for i in range(9) for j in range(9)]
        assert sum(torch.equal(x, crop) for crop in crops) == 1
    assert any(not torch.equal(x, plain[index][0]) for index, x in enumerate(first))


def test_a_pipeline_that_is_unknown_or_lacks_its_files_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of tensors, pictures, png, got 'jpeg'"):
        MLP3("jpeg")
    with pytest.raises(ValueError, match="pass the `folder`"):
        made("png", "train", ALL)


def test_both_feeds_give_the_same_batches() -> None:
    dataset, order = made("tensors", "train", ALL), torch.randperm(TRAIN)[:50]
    for one, other in zip(*(feed(dataset, 20, order) for feed in FEEDS.values()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(TypeError, match="use `loaded`"):
        next(indexed(made("pictures", "train", ALL), 20, order))


def taken(way: Paper, samples: int) -> Iterator[list[tuple[int, list[int]]]]:
    """The steps of an epoch: whose they are, by batch size, and which samples each takes."""
    numbers = torch.utils.data.TensorDataset(torch.arange(samples))
    for portion in way.stream(way.runtimes, numbers, torch.randperm(samples)):
        yield [(runtime.batch_size, batch[0].tolist()) for runtime, batch in portion]


def test_the_papers_example_of_misaligned_batch_sizes() -> None:
    way = Paper(cell(Case("batch size", batch_sizes=(100, 50, 80)), members=3))
    seen: dict[int, list[int]] = {100: [], 50: [], 80: []}
    progress = {}
    for step in taken(way, 1000):
        for size, samples in step:
            assert len(samples) <= size
            seen[size] += samples
        if len(seen[100]) == 1000 and not progress:
            progress = {size: len(samples) for size, samples in seen.items()}
    assert progress == {100: 1000, 50: 500, 80: 800}
    assert all(sorted(samples) == list(range(1000)) for samples in seen.values())


@pytest.mark.parametrize("case", [case for case in CASES if case.pipeline == "tensors"], ids=lambda case: case.name)
def test_in_every_case_every_member_of_the_papers_pack_sees_each_sample_once(case: Case) -> None:
    way = Paper(cell(case, members=4))
    seen: dict[int, Counter[int]] = {id(runtime): Counter() for runtime in way.runtimes}
    for part in way.sets:
        for portion in way.stream(
            [runtime for runtime in way.runtimes if runtime.part == part],
            torch.utils.data.TensorDataset(torch.arange(100)),
            torch.randperm(100),
        ):
            for runtime, (samples,) in portion:
                seen[id(runtime)].update(samples.tolist())
    assert all(counts == Counter(range(100)) for counts in seen.values())


@pytest.mark.parametrize("name", ["none", "model", "data", "optimizer"])
def test_with_equal_batch_sizes_the_papers_pack_learns_what_its_members_do_alone(name: str) -> None:
    (case,) = (case for case in CASES if case.pipeline == "tensors" and case.name == name)
    ways = [Sequential(cell(case, 4)), Paper(cell(case, 4))]
    start = ways[0].runtimes[0].model[1].weight.clone()
    for way in ways:
        way.run()
        way.run()
    assert not torch.equal(ways[0].runtimes[0].model[1].weight, start)
    for alone, packed in zip(*(way.runtimes for way in ways), strict=True):
        for a, b in zip(alone.model.parameters(), packed.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_a_case_gives_members_its_factors_in_turn() -> None:
    (case,) = (case for case in CASES if case.pipeline == "tensors" and case.name == "batch size")
    configs = case.configs(8)
    assert [config["batch_size"] for config in configs] == [*BATCH_SIZES, *BATCH_SIZES]
    assert len({config["lr"] for config in configs}) == 8
    assert {config["model"] for config in configs} == {"MLP-3"}


class Told(Sequential):
    """Takes the seconds that it is told, and notes when it ran."""

    taken: ClassVar[Sequence[float]]
    ran: ClassVar[list[str]] = []

    def run(self) -> float:
        self.epochs += 1
        self.ran.append(type(self).__name__)
        return self.taken[self.epochs - 1]


class First(Told):
    taken = (1000.0, 8.0, 4.0, 6.0, 6.0)


class Second(Told):
    taken = (9.0, 9.0, 2.0, 18.0, 6.6)


class Third(Told):
    taken = (1.0,) * 100


def test_the_first_round_is_left_out_and_a_step_is_one_of_the_largest_batch() -> None:
    case = Case("batch size", batch_sizes=(50, 20))
    found = measured(cell(case), {"first": First, "second": Second}, rounds=4, limit=0.0)
    assert found.seconds == {"first": [8.0, 4.0, 6.0, 6.0], "second": [9.0, 2.0, 18.0, 6.6]}
    assert found.rounds == 4
    assert found.per_step("first") == 6.0 * 50 / 100
    assert found.speed("first", "second") == pytest.approx((9 / 8 + 1.1) / 2)  # and not that of the medians


def test_a_way_comes_as_often_after_one_as_after_another() -> None:
    Told.ran.clear()
    measured(cell(Case("none")), {"1": First, "2": Second, "3": Third}, rounds=4, limit=0.0)
    _, _, *order = Told.ran
    assert Counter(pairwise(order)) == {
        ("Third", "First"): 3, ("First", "Second"): 2, ("Second", "Third"): 2, ("Second", "First"): 1,
        ("First", "Third"): 2, ("Third", "Second"): 2,
    }  # fmt: skip


def test_more_rounds_are_made_while_there_is_time() -> None:
    assert measured(cell(Case("none")), {"one": Third}, rounds=3, limit=60.0).rounds == MOST_ROUNDS


def test_the_paper_decodes_again_what_smaller_batches_have_left(folder: Path) -> None:
    options = Namespace(samples=100, folder=folder)
    counts = {
        name: (packing.decoded(case, Sequential, options), packing.decoded(case, Paper, options))
        for name, case in {"none": Case("none", "png"), "sizes": Case("sizes", "png", batch_sizes=(50, 20))}.items()
    }
    assert counts == {"none": (400, 100), "sizes": (400, 160)}


@pytest.mark.thorough
@pytest.mark.slow
def test_the_original_is_what_shoal_does_with_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of 0.1 are left out: there rounding alone moves losses by 1e-2, in float64 too."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    task = MLP3(train=120, test=TEST, dtype=torch.float64)
    _, reference = original(task, hyperband(3, 0), indexed)
    study = shoal.tune(
        task, SPACE, metric=METRIC, mode="min", algorithm=shoal.Hyperband(max_epochs=3, eta=3), devices="cpu:1",
        backend="inline", directory=tmp_path / "study", seed=0, show_progress=False,
    )  # fmt: skip
    with JournalView.read(tmp_path / "study") as journal:
        reports = [event for event in journal.events() if isinstance(event, Report)]
    ours = replayed(hyperband(3, 0), reports)
    calm = {row.number for row in study.trials if row.config["lr"] < 0.1}
    assert len(calm) >= 3
    for number, epoch in reference.reports:
        if number in calm and (number, epoch) in ours.reports:
            metrics = ours.reports[number, epoch].metrics
            wanted = reference.reports[number, epoch].metrics
            assert metrics == pytest.approx({name: wanted[name] for name in metrics}, rel=1e-9)
    comparison = compared(ours, reference, again(task, lambda: hyperband(3, 0), reference))
    assert comparison.rungs == len(reference.rungs)
    assert comparison.explained, str(comparison)


@pytest.mark.thorough
def test_another_order_within_batches_changes_nothing_but_rounding() -> None:
    task = MLP3("pictures", train=60, test=TEST, dtype=torch.float64)
    make = lambda: hyperband(3, 1)  # noqa: E731
    _, reference = original(task, make(), loaded)
    for other in again(task, make, reference):
        assert other.reports.keys() == reference.reports.keys()
        changed = [other.value(*key) / reference.value(*key) - 1 for key in reference.reports]
        assert any(changed)
        assert sorted(map(abs, changed))[len(changed) // 2] < 1e-9


def search(losses: dict[int, list[float]], *rungs: tuple[int, set[int]], failed: int | None = None) -> Search:
    """One bracket with the losses of its trials at the end of each rung, which take an epoch each."""
    reports = {}
    for number, values in losses.items():
        for epoch, value in enumerate(values, start=1):
            state = TrialState.FAILED if number == failed else TrialState.RUNNING
            reports[number, epoch] = Report(number, epoch, {METRIC: value}, state=state)
    return Search([Rung("bracket", epochs, frozenset(trials)) for epochs, trials in rungs], reports)


LOSSES = {0: [1.0, 0.9], 1: [1.01, 0.8], 2: [2.0], 3: [3.0]}


@pytest.mark.parametrize(
    ("rungs", "moved", "equal", "explained"),
    [
        pytest.param([{0, 1}, {0}], 0.0, 3, True, id="the same"),
        pytest.param([{0, 2}, {0}], 0.3, 2, True, id="within rounding"),
        pytest.param([{0, 2}, {0}], 0.01, 2, False, id="beyond rounding"),
        pytest.param([{0, 2}, {2}], 0.3, 1, True, id="what follows from a parting is not judged again"),
        pytest.param([{0}, {0}], 0.3, 2, False, id="one too few"),
    ],
)
def test_survivors_are_compared_up_to_where_a_bracket_parts(
    rungs: list[set[int]], moved: float, equal: int, explained: bool
) -> None:
    first = (1, {0, 1, 2, 3})
    reference = search(LOSSES, first, (2, {0, 1}), (3, {0}))
    ours = search({}, first, *((epoch, trials) for epoch, trials in enumerate(rungs, start=2)))
    other = search({number: [x * (1 + moved) for x in values] for number, values in LOSSES.items()}, *[])
    comparison = compared(ours, reference, [reference, other])
    assert (comparison.rungs, comparison.equal, comparison.explained) == (3, equal, explained)
    assert comparison.exact == (equal == 3)
    assert len(comparison.partings) == (equal < 3)
    assert ("MORE THAN ROUNDING" in str(comparison)) == (not explained)


def test_a_parting_says_by_how_much_and_who() -> None:
    first = (1, {0, 1, 2, 3})
    reference = search(LOSSES, first, (2, {0, 1}))
    (parting,) = compared(search({}, first, (2, {0, 2})), reference, [reference]).partings
    assert (parting.ours, parting.theirs, parting.epochs) == ({2}, {1}, 1)
    assert parting.margin == pytest.approx(2.0 / 1.01 - 1)
    assert parting.moved == 0.0


def test_a_trial_that_failed_alone_can_not_be_kept_by_rounding() -> None:
    first = (1, {0, 1, 2, 3})
    reference = search(LOSSES, first, (2, {0, 1}), failed=2)
    comparison = compared(search({}, first, (2, {0, 2})), reference, [reference])
    assert math.isinf(comparison.partings[0].margin)
    assert not comparison.explained


def test_searches_that_begin_with_other_trials_are_not_compared() -> None:
    with pytest.raises(ValueError, match="begins with other trials"):
        compared(search({}, (1, {0, 1})), search(LOSSES, (1, {0, 2})), [])


def test_how_many_cuts_another_rounding_makes_again() -> None:
    reference = search(LOSSES, (1, {0, 1, 2, 3}), (2, {0, 1}), (3, {1}))
    turned = search({**LOSSES, 0: [1.0, 0.7]}, *[])
    assert cut_again(reference, [reference]) == (2, 2)
    assert cut_again(reference, [reference, turned]) == (3, 4)


@pytest.mark.parametrize(
    ("title", "seconds", "complaints"),
    [
        pytest.param("MLP-3, tensors", {"original, indexed": 20.0, "knn": 9.0, "cost": 8.0}, 0, id="all as asked"),
        pytest.param("MLP-3, tensors", {"original, indexed": 20.0, "knn": 7.0, "cost": 8.0}, 1, id="knn is faster"),
        pytest.param("MLP-3, tensors", {"original, indexed": 15.0, "knn": 9.0, "cost": 8.0}, 1, id="too little gained"),
        pytest.param("MLP-3, tensors", {"original, indexed": 15.0}, 0, id="not measured"),
        pytest.param("MLP-3, png", {"original, DataLoader": 40.0, "cost": 8.0}, 1, id="files gain six times"),
        pytest.param("MLP-3, png", {"cost": 8.0, "cost, 2 workers": 4.0}, 0, id="loader processes gain enough"),
        pytest.param("MLP-3, png", {"cost": 8.0, "cost, 2 workers": 6.0}, 1, id="loader processes gain too little"),
    ],
)
def test_what_the_search_is_judged_by(title: str, seconds: dict[str, float], complaints: int) -> None:
    originals = [value for way, value in seconds.items() if way.startswith("original")]
    assert len(packing.judged(title, seconds, originals)) == complaints
