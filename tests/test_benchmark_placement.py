"""The placement benchmark has HyperSack's jobs, its rival trains them, and its judgement finds what is missed."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from packs import pictures
from placed import mixes, plain
from placed.figures import Figures, middle
from placed.jobs import FULL, MODELS, SMALL, Pictures, Sizes
from placed.languages import LANGUAGE_MODELS
from placed.mixes import MIXES, Mixed
from placed.ours import BY_TRIAL, FUSION_AND_PACKING, ONE_JOB, ROWS
from placed.plain import PLAIN
from placed.spaces import jobs
from placement import LEAST, judged

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


@pytest.mark.parametrize("name", LANGUAGE_MODELS[False])
def test_a_language_model_learns_in_every_parameter(name: str) -> None:
    for full in (False, True):
        model = LANGUAGE_MODELS[full][name](8)
        scores = model(torch.randint(0, 100, (4, 8)))
        assert scores.shape == (4, 2)
        scores.logsumexp(1).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "gpu", "count"),
    [("sp1", False, 24), ("sp1", True, 24), ("sp2", False, 24), ("sp3", False, 24), ("sp4", False, 48)],
)
def test_a_space_has_the_paper_s_learning_rates(name: str, gpu: bool, count: int) -> None:
    chosen = jobs(name, gpu=gpu, quick=False)
    rates = {config["lr"] for config in chosen.configs}
    assert len(chosen.configs) == count
    assert (min(rates), max(rates)) == pytest.approx((5e-5, 5e-1) if name == "sp2" else (1e-5, 1e-1))
    assert set(chosen.rows) <= {PLAIN, *ROWS}


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_has_as_many_jobs_of_each_demand(name: str) -> None:
    bounds = [config["bound"] for config in jobs(name, gpu=False, quick=False).configs]
    assert len(bounds) == 12
    assert {bounds.count(bound) for bound in MIXES[name]} == {12 // len(MIXES[name])}
    assert set(bounds[: len(MIXES[name])]) == set(MIXES[name])


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("bound", mixes.BATCHES)
def test_a_model_of_a_mix_takes_pictures(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "SECONDS", 0.0)
    config = {"bound": bound, "lr": 0.1}
    task = Mixed(0.1)
    train, _ = task.data(config)
    x, _ = train[0]
    assert len(train) == max(8, mixes.SAMPLES[bound] // 10)
    assert task.model(config).eval()(x[None]).shape == (1, 10)


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
    plain.begin(Pictures(Sizes(False, ("ViT",), samples=40, valid=8)), places)
    config = {"model": "ViT", "batch_size": 8}
    losses = {}
    for rate in (0.0, 1e-2, math.inf):
        seconds, losses[rate] = plain.train((0, {**config, "lr": rate}, 1))
        assert seconds > 0
    learning, _ = plain._here["sets"]
    assert [tensor.shape for tensor in learning.tensors] == [(40, 3, 16, 16), (40,)]
    assert losses[0.0] == pytest.approx(math.log(10), rel=0.3)
    assert losses[1e-2] != losses[0.0]
    assert math.isnan(losses[math.inf])


def test_rows_are_the_policies_of_the_paper() -> None:
    policies = ["ff", "ffd", "wf", "wfd"]
    assert [ROWS[name].policy for name in policies] == policies
    assert [ROWS[f"mps + {name}"] for name in policies] == [replace(ROWS[name], sharing="mps") for name in policies]
    assert [name for name, row in ROWS.items() if row.fuse] == ["fusion", FUSION_AND_PACKING]


def test_figures_are_medians() -> None:
    runs = [Figures(1, 0.5, 0.3, 96, 1, 5, 0), Figures(9, 0.1, 0.2, 96, 1, 7, 0), Figures(2, 0.9, 0.7, 90, 3, 9, 1)]
    assert middle(runs) == Figures(2, 0.5, 0.3, 96, 1, 7, 0)


ON_GPU = {"mps + ffd": 2.8, FUSION_AND_PACKING: 6.0}


@pytest.mark.parametrize(
    ("makespans", "asked", "found"),
    [
        pytest.param({ONE_JOB: 100.0, PLAIN: 500.0, "ff": 100.0 / LEAST}, {}, [], id="just enough"),
        pytest.param({ONE_JOB: 100.0, "ff": 125.0}, {}, ["sp1: ff 0.80x of one job per device, asked 0.97x"]),
        pytest.param({"ff": 125.0}, {}, [], id="nothing to compare with"),
        pytest.param({ONE_JOB: 100.0, "mps + ffd": 30.0, FUSION_AND_PACKING: 10.0}, ON_GPU, [], id="gpu"),
        pytest.param(
            {ONE_JOB: 100.0, "mps + ffd": 50.0, "fusion": 5.0, FUSION_AND_PACKING: 20.0},
            ON_GPU,
            [
                "sp1: mps + ffd 2.00x of one job per device, asked 2.8x",
                "sp1: fusion + packing 5.00x of one job per device, asked 6.0x",
            ],
            id="gpu, too little",
        ),
        pytest.param(
            {ONE_JOB: 20.0, BY_TRIAL: 20.0},
            jobs("input", gpu=False, quick=False).asked,
            ["sp1: by trial 1.00x of one job per device, asked 1.3x"],
            id="all jobs wait for input",
        ),
    ],
)
def test_what_is_missed_is_said(makespans: dict[str, float], asked: dict[str, float], found: list[str]) -> None:
    assert judged("sp1", makespans, asked) == found
