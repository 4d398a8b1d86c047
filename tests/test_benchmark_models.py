"""The models of the fusion benchmark are those of the papers, and train; its judgement finds what is missed."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from fusion import faults, largest, table
from models import WORKLOADS
from models.mobilenet import mobilenet_v2
from rivals.arrays import Eager
from rivals.race import race
from rivals.rival import Cell
from rivals.serial import Serial
from rivals.vmap import VMap

CPU = torch.device("cpu")

PARAMETERS = {
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


def test_mobilenet_v2_has_as_many_parameters_as_published() -> None:
    with torch.device("meta"):
        model = mobilenet_v2(1.0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_504_872 - 990 * 1281


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


@pytest.mark.thorough  # fast, benchmarks/fusion.py --quick shows it
def test_a_race_measures_and_says_why_a_rival_fails() -> None:
    cell = Cell(WORKLOADS["lora-batches"](False), 2, CPU, None, torch.get_num_threads())
    findings = race(cell, {"serial": Serial, "vmap": VMap}, seconds=0.02, rounds=2)
    assert findings["serial"]["of_serial"] == 1.0
    (reason,) = findings["vmap"].values()
    assert "needs one batch size for all members" in reason


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


def test_blocks_of_other_classes_are_trained_member_by_member_with_equal_losses() -> None:
    cell = Cell(WORKLOADS["resnet18-half-fused"](False), 2, CPU, None, torch.get_num_threads())
    array = Eager(cell)
    assert len(array.array.state.unfused) == 4
    torch.testing.assert_close(array.step(), Serial(cell).step())


def test_a_failure_of_shoal_and_other_losses_are_missed_whatever_the_speed() -> None:
    judged = {name: {"samples_per_second": 100.0, "of_serial": 1.0} for name in ("serial", "Shoal")}
    assert faults(judged, "float32") == []
    judged["Shoal"]["off"] = 0.5
    judged["Shoal eager"] = {"fails": "ValueError: no"}
    judged["vmap"] = {"fails": "RuntimeError: never"}
    assert faults(judged, "float32") == [
        "losses of Shoal differ from the serial ones by 5.0e-01",
        "Shoal eager fails: ValueError: no",
    ]
    assert "vmap                  fails: RuntimeError: never" in table(16, judged)
