"""The placement benchmark has HyperSack's jobs, and its judgement finds what is missed."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from packs import pictures
from placed import spaces
from placed.jobs import MODELS, PIXELS
from placed.spaces import EVERYTHING, LANGUAGE_MODELS, MIXES, ONE_JOB, PLAIN, Mixed, Words, jobs
from placement import ROWS, judged

from shoal.core.space import Space

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


@pytest.mark.parametrize("name", MODELS[True])
def test_a_full_model_has_as_many_parameters_as_published(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[True][name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS[False])
def test_a_small_model_learns_in_every_parameter(name: str) -> None:
    model = MODELS[False][name]()
    scores = model(torch.randn(4, 3, PIXELS[False], PIXELS[False]))
    assert scores.shape == (4, 10)
    scores.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", LANGUAGE_MODELS[False])
def test_a_language_model_learns_in_every_parameter(name: str) -> None:
    for full in (False, True):
        model = Words(*LANGUAGE_MODELS[full][name], 8)
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
    configs = Space(chosen.space).grid()
    rates = {config["lr"] for config in configs}
    assert len(configs) == count
    assert (min(rates), max(rates)) == pytest.approx((5e-5, 5e-1) if name == "sp2" else (1e-5, 1e-1))
    assert set(chosen.rows) <= {PLAIN, *ROWS}


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_has_as_many_jobs_of_each_demand(name: str) -> None:
    bounds = [config["bound"] for config in Space(jobs(name, gpu=False, quick=False).space).grid()]
    assert len(bounds) == 12
    assert {bounds.count(bound) for bound in MIXES[name]} == {12 // len(MIXES[name])}
    assert set(bounds[: len(MIXES[name])]) == set(MIXES[name])


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("bound", spaces.BOUNDS)
def test_a_model_of_a_mix_takes_pictures(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "WAIT", 0.0)
    config = {"bound": bound, "lr": 0.1}
    task = Mixed(0.1)
    train, _ = task.data(config)
    x, _ = train[0]
    assert len(train) == max(8, spaces.BOUNDS[bound][1] // 10)
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


def test_rows_are_the_policies_of_the_paper() -> None:
    policies = ["ff", "ffd", "wf", "wfd"]
    assert [ROWS[name] for name in policies] == [{"policy": name} for name in policies]
    assert [ROWS[f"mps + {name}"] for name in policies] == [{"policy": name, "sharing": "mps"} for name in policies]
    assert [name for name, row in ROWS.items() if row.get("fuse")] == ["fusion", EVERYTHING]


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        pytest.param({EVERYTHING: None}, [], id="nothing to compare with"),
        pytest.param({ONE_JOB: 1.0, PLAIN: 0.2, "mps + ffd": 3.3, EVERYTHING: 10.0}, [], id="enough"),
        pytest.param(
            {ONE_JOB: 1.0, "mps + ffd": 2.0, "fusion": 20.0, EVERYTHING: 5.0},
            [
                "sp1: mps + ffd 2.00x of one job per device, asked 2.8x",
                "sp1: fusion + packing 5.00x of one job per device, asked 6.0x",
            ],
            id="too little",
        ),
    ],
)
def test_what_is_missed_on_a_gpu_is_said(speeds: dict[str, float | None], found: list[str]) -> None:
    rows = {name: {} if speed is None else {"speed_up": speed} for name, speed in speeds.items()}
    assert judged("sp1", rows, jobs("sp1", gpu=True, quick=False).asked) == found
