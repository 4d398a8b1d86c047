"""The rivals of Shoal's packs train as they should; what the benchmark of packs concludes follows from what it saw."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from packs.networks import NETWORKS
from packs.pictures import made, write
from packs.tasks import CASES, METRIC, SPACE, Case, Cifar
from packs.ways import MOST_ROUNDS, Chosen, Paper, Sequential, measured, speed_of
from rivals.plain_search import Asked, in_a_loop

import shoal
from shoal.core.space import Space
from shoal.core.trial import Report
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


def case(name: str, members: int = 2, **change: Any) -> Case:
    """The case of this name with tensors and 100 samples."""
    (found,) = (each for each in CASES if each.name == name and each.pipeline == "tensors")
    return replace(found, members=members, samples=100, **change)


def test_the_space_is_that_of_the_paper() -> None:
    configs = list(Space(SPACE).grid())
    assert len(configs) == 1056
    assert {config["batch_size"] for config in configs} == {20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_use_their_activation_and_no_other(name: str) -> None:
    network = Cifar(name, "tensors", 1, 1).model({"activation": "Tanh"})
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    kinds = {type(module) for module in network.modules()}
    assert torch.nn.Tanh in kinds
    assert torch.nn.ReLU not in kinds


def test_all_pipelines_give_the_same_pictures(folder: Path, noise: dict[str, Any]) -> None:
    sets = [made(pipeline, "test", range(5, TEST), folder=folder) for pipeline in pictures.PIPELINES]
    for index in (0, 3, TEST - 6):
        samples = [dataset[index] for dataset in sets]
        for x, y in samples:
            assert torch.equal(x, samples[0][0])
            assert int(y) == noise["y_test"][5 + index]
    red = noise["x_test"][5, :, :, 0] / 255
    assert np.allclose(sets[0][0][0][0], (red - 0.4914) / 0.2470, atol=1e-6)


def test_files_are_mirrored_and_shifted_by_torchs_default_generator(folder: Path) -> None:
    files, plain = made("png", "train", ALL, folder=folder), made("pictures", "train", ALL)
    torch.manual_seed(0)
    first = [files[index][0] for index in range(20)]
    torch.manual_seed(0)
    assert all(torch.equal(files[index][0], x) for index, x in enumerate(first))
    for index, x in enumerate(first):
        own = torch.nn.functional.pad(plain[index][0], [4] * 4)
        crops = [y[:, i : i + 32, j : j + 32] for y in (own, own.flip(2)) for i in range(9) for j in range(9)]
        assert sum(torch.equal(x, crop) for crop in crops) == 1
    assert any(not torch.equal(x, plain[index][0]) for index, x in enumerate(first))


def test_an_unknown_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of tensors, pictures, png, got 'jpeg'"):
        made("jpeg", "train", ALL)


def test_a_plain_loop_finds_the_same_tensors_in_pictures_as_in_a_tensor_dataset() -> None:
    order = torch.randperm(TRAIN)[:50]
    one, other = (made(kind, "train", ALL).tensors for kind in ("tensors", "pictures"))
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b)
        assert torch.equal(a[order], b[order])
        assert all(torch.equal(*parts) for parts in zip(a.split(50), b.split(50), strict=True))


def taken(way: Paper, samples: int) -> Iterator[list[tuple[int, list[int]]]]:
    """The steps of an epoch: whose they are, by batch size, and which samples each takes."""
    for portion in way.stream(way.learners, [torch.arange(samples)], torch.randperm(samples)):
        yield [(learner.batch_size, batch[0].tolist()) for learner, batch in portion]


def test_the_papers_example_of_misaligned_batch_sizes() -> None:
    way = Paper(case("none", 3, factors={"batch_size": (100, 50, 80)}))
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


@pytest.mark.parametrize("name", ["none", "model", "data", "optimizer", "batch size", "all"])
def test_in_every_case_every_member_of_the_papers_pack_sees_each_sample_once(name: str) -> None:
    way = Paper(case(name, 4))
    seen: dict[int, Counter[int]] = {id(learner): Counter() for learner in way.learners}
    for part in way.sets:
        for portion in way.stream(
            [learner for learner in way.learners if learner.part == part],
            [torch.arange(100)],
            torch.randperm(100),
        ):
            for learner, (samples,) in portion:
                seen[id(learner)].update(samples.tolist())
    assert all(counts == Counter(range(100)) for counts in seen.values())


@pytest.mark.parametrize("name", ["none", "model", "data", "optimizer"])
def test_with_equal_batch_sizes_the_papers_pack_learns_what_its_members_do_alone(name: str) -> None:
    ways = [Sequential(case(name, 4)), Paper(case(name, 4))]
    start = ways[0].learners[0].model[1].weight.clone()
    for way in ways:
        way.run()
        way.run()
    assert not torch.equal(ways[0].learners[0].model[1].weight, start)
    for alone, packed in zip(*(way.learners for way in ways), strict=True):
        for a, b in zip(alone.model.parameters(), packed.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_a_case_gives_members_its_factors_in_turn() -> None:
    configs = case("batch size", 8).configs
    assert [config["batch_size"] for config in configs] == [50, 20, 70, 40] * 2
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


def ways(*kinds: type[Told]) -> dict[str, Any]:
    return {kind.__name__: kind(case("none")) for kind in kinds}


def test_the_first_round_is_left_out_and_speeds_are_of_rounds() -> None:
    found = measured(ways(First, Second), rounds=4, limit=0.0)
    assert found == {"First": [8.0, 4.0, 6.0, 6.0], "Second": [9.0, 2.0, 18.0, 6.6]}
    assert speed_of(*found.values()) == pytest.approx((9 / 8 + 1.1) / 2)  # and not that of the medians


def test_a_step_is_one_of_the_largest_batch() -> None:
    assert case("batch size").per_step(6.0) == 6.0 * 50 / 100


def test_a_way_comes_as_often_after_one_as_after_another() -> None:
    Told.ran.clear()
    measured(ways(First, Second, Third), rounds=4, limit=0.0)
    _, _, *order = Told.ran
    assert Counter(pairwise(order)) == {
        ("Third", "First"): 3, ("First", "Second"): 2, ("Second", "Third"): 2, ("Second", "First"): 1,
        ("First", "Third"): 2, ("Third", "Second"): 2,
    }  # fmt: skip


def test_more_rounds_are_made_while_there_is_time() -> None:
    assert len(measured(ways(Third), rounds=3, limit=60.0)["Third"]) == MOST_ROUNDS


def test_shoal_trains_a_case_epoch_by_epoch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    way = Chosen(case("batch size", pipeline="png", folder=folder), settled=1, planned=100)
    assert way.run() > 0
    assert way.epochs == 2


@pytest.mark.thorough
@pytest.mark.slow
def test_the_original_is_what_shoal_does_with_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of 0.1 are left out: there rounding alone moves losses by 1e-2, in float64 too."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    task, algorithm = Cifar("MLP-3", "tensors", 120, TEST), shoal.Hyperband(max_epochs=3, eta=3)
    reports: list[Report] = []
    observe = algorithm.observe
    monkeypatch.setattr(algorithm, "observe", lambda report: (reports.append(report), observe(report)))
    torch.set_default_dtype(torch.float64)
    try:
        in_a_loop(Asked(task, SPACE, algorithm, METRIC, "min", seed=0))
        study = shoal.tune(
            task, SPACE, metric=METRIC, mode="min", algorithm=shoal.Hyperband(max_epochs=3, eta=3), devices="cpu:1",
            backend="inline", directory=tmp_path / "study", seed=0, show_progress=False,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    with JournalView.read(tmp_path / "study") as journal:
        ours = {(event.trial, event.epoch): event for event in journal.events() if isinstance(event, Report)}
    calm = {row.number for row in study.trials if row.config["lr"] < 0.1}
    assert len(calm) >= 3
    for report in reports:
        if report.trial in calm and (report.trial, report.epoch) in ours:
            assert ours[report.trial, report.epoch].metrics[METRIC] == pytest.approx(report.metrics[METRIC], rel=1e-9)
    assert len(ours.keys() & {(report.trial, report.epoch) for report in reports}) > 0.8 * len(reports)


@pytest.mark.parametrize(("loss", "named"), [(1.61, []), (1.8, ["ResNet: best loss 1.8000, of the original 1.6000"])])
def test_a_search_with_another_best_loss_is_named(loss: float, named: list[str]) -> None:
    assert packing.other_losses({"ResNet": {"best": {"original": 1.6, "cost": loss}}}) == named
