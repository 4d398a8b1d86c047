"""The placement benchmark has HyperSack's jobs, its rival trains them, and its judgement finds what is missed."""

import math
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from packs import pictures
from placed import plain
from placed.figures import Figures, middle
from placed.jobs import FULL, MODELS, QUICK, SMALL, Pictures, configs
from placed.ours import FUSION, FUSION_AND_PACKING, ONE_JOB, PACKED, SECOND, rows
from placement import LEAST, PLAIN, judged

CLASSES = 990
"""Fewer than ImageNet's."""

PARAMETERS = {
    "ShuffleNet": 2_278_604 - CLASSES * 1025,
    "MobileNet": 5_483_032 - CLASSES * 1281,
    "ViT": 5_717_416 - 720 * 192 - 132 * 192 - CLASSES * 193,
    "DeiT": 5_910_800 - 720 * 192 - 132 * 192 - 2 * CLASSES * 193,
    "ResNet-18": 11_689_512 - 40 * 192 - CLASSES * 513,
    "ResNet-34": 21_797_672 - 40 * 192 - CLASSES * 513,
}
"""As published, but for classes, first convolutions (3 x 3 for 7 x 7), patches (4 x 4 for 16 x 16) and their number
(64 for 196)."""


@pytest.mark.parametrize("name", FULL.models)
def test_a_full_model_has_as_many_parameters_as_published(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[True][name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", SMALL.models)
def test_a_small_model_learns_in_every_parameter(name: str) -> None:
    model = MODELS[False][name]()
    scores = model(torch.randn(4, 3, SMALL.pixels, SMALL.pixels))
    assert scores.shape == (4, 10)
    scores.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_there_are_as_many_jobs_as_the_paper_has() -> None:
    for sizes in (SMALL, FULL):
        jobs = configs(sizes)
        assert sizes.jobs == len(jobs) == 96
        assert sorted({job["lr"] for job in jobs}) == pytest.approx([1e-5, 10 ** (-11 / 3), 10 ** (-7 / 3), 1e-1])
    assert SMALL.with_jobs(48).rates == 2
    with pytest.raises(ValueError, match=r"multiple of 24 \(6 models x 4 batch sizes\), got 50"):
        SMALL.with_jobs(50)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that look like nothing, in the place of CIFAR-10."""
    rng = np.random.default_rng(0)
    data = {}
    for name, samples in (("train", 40), ("test", 10)):
        data[f"x_{name}"] = rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8)
        data[f"y_{name}"] = rng.integers(0, 10, samples, dtype=np.uint8)
    monkeypatch.setattr(pictures, "arrays", lambda: data)


@pytest.mark.usefixtures("noise")
def test_the_rival_without_shoal_trains_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    places: Any = SimpleQueue()
    places.put(("cpu", 1))
    plain.begin(Pictures(QUICK.changed(samples=40, epochs=1)), places)
    config = {"model": "ViT", "batch_size": 8}
    losses = {}
    for rate in (0.0, 1e-2, math.inf):
        seconds, losses[rate] = plain.train((0, {**config, "lr": rate}))
        assert seconds > 0
    learning, _ = plain._here["sets"]
    assert [tensor.shape for tensor in learning.tensors] == [(40, 3, 16, 16), (40,)]
    assert losses[0.0] == pytest.approx(math.log(10), rel=0.3)
    assert losses[1e-2] != losses[0.0]
    assert math.isnan(losses[math.inf])


def test_rows_are_the_baselines_of_the_documentation() -> None:
    on_gpu, on_slots = rows(gpu=True), rows(gpu=False)
    assert [on_gpu[name].policy for name in PACKED] == ["ff", "ffd", "wf", "wfd"]
    assert {on_gpu[name].sharing for name in PACKED} == {"mps"}
    assert list(on_slots) == [ONE_JOB, "ff", "ffd", "wf", "wfd", FUSION, FUSION_AND_PACKING, SECOND]
    assert {row.sharing for name, row in on_slots.items() if "mps" in name} == set()
    assert [name for name, row in on_slots.items() if row.fuse] == [FUSION, FUSION_AND_PACKING, SECOND]


def test_figures_are_medians() -> None:
    runs = [Figures(1, 0.5, 3, 0, 0, 96, 0), Figures(9, 0.1, 2, 1, 0, 96, 0), Figures(2, 0.9, 7, 5, 0, 90, 1)]
    assert middle(runs) == Figures(2, 0.5, 3, 1, 0, 96, 0)


@pytest.mark.parametrize(
    ("makespans", "gpu", "found"),
    [
        pytest.param({ONE_JOB: 100.0, PLAIN: 50.0, "ff": 100.0 / LEAST}, False, [], id="just enough"),
        pytest.param(
            {ONE_JOB: 100.0, FUSION: 125.0}, False, ["fusion: 0.80x of one job per device, asked 0.97x"], id="slower"
        ),
        pytest.param({FUSION: 125.0}, False, [], id="nothing to compare with"),
        pytest.param({ONE_JOB: 100.0, PACKED[0]: 90.0, PACKED[3]: 30.0, FUSION_AND_PACKING: 10.0}, True, [], id="gpu"),
        pytest.param(
            {ONE_JOB: 100.0, PACKED[0]: 50.0, FUSION: 5.0, FUSION_AND_PACKING: 20.0},
            True,
            [
                "packing: 2.00x over one job per device, asked 2.8x",
                "fusion and packing: 5.00x over one job per device, asked 6.0x",
            ],
            id="gpu, too little",
        ),
    ],
)
def test_what_is_missed_is_said(makespans: dict[str, float], gpu: bool, found: list[str]) -> None:
    assert judged(makespans, gpu) == found
