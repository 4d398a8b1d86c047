"""The models of the fusion benchmark are those of the papers, and train; its judgement finds what is missed."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from fusion import largest
from fusion_figures import gains, missed, table
from models import WORKLOADS
from rivals.memory import peak_of_step
from rivals.race import race
from rivals.rival import Cell
from rivals.serial import Serial
from rivals.vmap import VMap

CPU = torch.device("cpu")

PARAMETERS = {
    "bert-tiny": 4_386_178,
    "resnet18": 11_173_962,
    "dcgan": 3_576_704 + 2_765_568,
    "mobilenet": 5_483_032 - 990 * 1281,
}
"""As published, at full size; MobileNet's last layer has 10 classes here and 1000 there."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_full_model_has_as_many_parameters_as_published(name: str) -> None:
    with torch.device("meta"):
        model = WORKLOADS[name](True).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_trains(name: str) -> None:
    torch.manual_seed(0)
    workload = WORKLOADS[name](False)
    model, batch = workload.model(), workload.batch()
    assert len(batch[0]) == workload.samples
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for phase in workload.phases:
        optimizer = phase.optimizer(model, 1.0)
        for _ in range(2):  # a LoRA's first matrix gets no gradient while its second is zero
            optimizer.zero_grad()
            loss = phase.loss(model, batch)
            assert loss.shape == ()
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, before[path]) == (not parameter.requires_grad), path


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORKLOADS)
def test_draws_says_whether_training_is_random(name: str) -> None:
    workload = WORKLOADS[name](False)
    rates = [m.p for m in workload.model().modules() if isinstance(m, (nn.Dropout, nn.Dropout1d, nn.Dropout2d))]
    assert workload.draws == any(rate > 0 for rate in rates)


def test_peak_is_of_what_is_held_and_of_what_lives_at_once() -> None:
    held = torch.zeros(1000)

    def step() -> None:
        first = held + 1
        del first
        second = held + 1
        torch.cat([second, second])

    assert peak_of_step(step, [held, held[10:]], CPU) == 4 * (1000 + 1000 + 2000)


@pytest.mark.thorough  # fast, benchmarks/fusion.py --quick shows it
def test_a_race_measures_and_says_why_a_rival_fails() -> None:
    cell = Cell(WORKLOADS["lstm"](False), 2, CPU, None, torch.get_num_threads())
    findings = race(cell, {"serial": Serial, "vmap": VMap}, seconds=0.02, rounds=2)
    assert findings["serial"].of_serial == 1.0
    assert findings["serial"].peak_bytes > 0
    assert "aten::lstm" in findings["vmap"].fails
    assert findings["vmap"].seconds is None


def test_serial_and_vmap_have_equal_losses_before_their_rates_differ() -> None:
    cell = Cell(WORKLOADS["mlp"](False), 3, CPU, None, torch.get_num_threads())
    torch.testing.assert_close(Serial(cell).step(), VMap(cell).step())


@pytest.mark.parametrize(
    ("peak", "found"),
    [
        pytest.param(8e9, [64], id="a power of two below what fits"),
        pytest.param(64e9, [], id="no more than there were"),
        pytest.param(1.0, [1024], id="at most the largest of all"),
        pytest.param(0, [], id="they failed"),
    ],
)
def test_the_largest_array_is_what_memory_holds(peak: float, found: list[int]) -> None:
    assert largest(8, int(peak), int(100e9)) == found


def row(members: int = 16, **speeds: float) -> dict[str, Any]:
    rivals = {
        name.replace("_", " "): {"samples_per_second": 100 * gain, "of_serial": gain} for name, gain in speeds.items()
    }
    return {"workload": "mlp", "title": "MLP", "sizes": "tiny", "members": members, "rivals": rivals}


JUDGED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all reached": (row(serial=1, vmap=4, Shoal=6.5, Shoal_eager=4, Shoal_compiled=6.5), []),
    "eager too slow": (row(serial=1, Shoal_eager=3), ["mlp: Shoal eager 3.00 times serial, asked 3.5"]),
    "another B is not asked": (row(8, serial=1, Shoal_eager=3), []),
    "slower than serial": (row(serial=1, Shoal=0.9), ["mlp B=16: Shoal 0.90 times serial, asked 0.97"]),
    "slower than vmap": (row(serial=1, vmap=3, Shoal=2), ["mlp B=16: Shoal 2.00 times serial, vmap 3.00"]),
}


@pytest.mark.parametrize("case", JUDGED)
def test_what_is_missed(case: str) -> None:
    judged, expected = JUDGED[case]
    assert missed([judged], "cpu", "float32", judge_speed=True) == expected
    assert missed([judged], "cpu", "float32", judge_speed=False) == []


def test_a_failure_of_shoal_and_other_losses_are_missed_whatever_the_speed() -> None:
    judged = row(serial=1, Shoal=2)
    judged["rivals"]["Shoal"]["off"] = 0.5
    judged["rivals"]["Shoal eager"] = {"fails": "ValueError: no"}
    judged["rivals"]["vmap"] = {"fails": "RuntimeError: never"}
    assert missed([judged], "cpu", "float32", judge_speed=False) == [
        "mlp B=16: Shoal eager fails: ValueError: no",
        "mlp B=16: losses of Shoal differ from the serial ones by 5.0e-01",
    ]
    assert "vmap                  fails: RuntimeError: never" in table(judged, after=None)
    assert gains([judged]) == {"mlp": {16: {"serial": 1, "Shoal": 2}}}


def test_on_a_gpu_each_workload_is_asked_four_times_serial() -> None:
    rows = [row(members, serial=1, Shoal=gain) for members, gain in ((8, 3.0), (16, 3.9))]
    assert missed(rows, "cuda", "float32", judge_speed=True) == ["mlp: Shoal 3.90 times serial, asked 4.0"]
