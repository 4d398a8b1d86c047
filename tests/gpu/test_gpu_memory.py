"""Memory of a GPU: measured, freed when a job is suspended, and run out of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pack_samples import Mixed, Shop, whole
from torch import nn
from torch.utils.data import TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import ArrayFailed, Event, Outcome, Reported
from shoal.core.trial import Trial
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.failures import outcome_of
from shoal.train.memory import MemoryTracker, release_cached_memory
from shoal.train.profile import measure
from shoal.train.worker_state import TrialCache, WorkerState

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
MIB = 2**20


class Wide(Mixed):
    """Models of 16 MiB each, in double precision."""

    def data(self, config: Any) -> tuple[Any, Any]:
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        sets = TensorDataset(x, torch.arange(64) % 3)
        return sets, sets

    def model(self, config: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 3)).double()
        model.counts = False  # type: ignore[assignment]
        return model


class After(JobControl):
    """Stops a job after a number of looks."""

    def __init__(self, looks: int) -> None:
        super().__init__(prompt=True)
        self.left = looks

    def stopping(self) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.stop()
        return super().stopping()


def allocated_after_use(place: Path) -> int:
    """Bytes that torch has allocated once its libraries have their workspaces, which stay."""
    Shop(Wide(), place / "first", DEVICE).run([whole(0), whole(3)])
    torch.cuda.synchronize()
    release_cached_memory(DEVICE)
    return torch.cuda.memory_allocated(DEVICE)


def test_a_suspended_job_leaves_the_device_and_goes_on_from_host_memory(tmp_path: Path) -> None:
    before = allocated_after_use(tmp_path)
    shop = Shop(Wide(), tmp_path / "study", DEVICE)
    events = shop.run([whole(0), whole(3)], After(6))
    assert sum(isinstance(event, Reported) for event in events) < 6, "it has stopped before its end"
    held = torch.cuda.memory_allocated(DEVICE) - before
    assert held < 4 * MIB, f"{held / MIB:.1f} MiB stay on the device; the samples are one MiB"
    assert torch.cuda.memory_reserved(DEVICE) - before < 64 * MIB, "other processes can have it"


def test_what_is_suspended_learns_what_it_would_have_learnt(tmp_path: Path) -> None:
    def metrics(events: list[Event]) -> dict[Any, Any]:
        reports = [report for event in events if isinstance(event, Reported) for report in event.reports]
        return {(report.trial, report.epoch): report.metrics for report in reports}

    expected = metrics(Shop(Wide(), tmp_path / "whole", DEVICE).run([whole(0), whole(3)]))
    for stays in (True, False):
        place = tmp_path / str(stays)
        shop = Shop(Wide(), place, DEVICE)
        found = metrics(shop.run([whole(0), whole(3)], After(9)))
        if not stays:
            shop = Shop(Wide(), place, DEVICE)
        found |= metrics(shop.run([whole(0), whole(3)]))
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert found[key] == pytest.approx(values, rel=1e-6)


def test_a_profile_says_what_the_device_has_to_give(tmp_path: Path) -> None:
    task = Wide()
    trials = [
        Trial(n, {"kind": "plain", "width": 4, "batch_size": 8, "optimizer": "Adam", "lr": 0.01}, n, 7)
        for n in range(8)
    ]
    array = Array(FusionKey("wide", "data", 8), tuple(Member(trial, 0, 2) for trial in trials), expected_epochs=1000)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    state = WorkerState(task, DataSets(task, DEVICE), TrialCache(), DEVICE, tmp_path)
    profile = measure(state, array, total, free_seconds=60.0)
    weights = 8 * (1024 * 2048 + 2048 + 2048 * 3 + 3)
    assert 1 in profile.step_seconds
    assert max(profile.step_seconds) > 1, "several sizes were measured"
    assert 4 * weights <= profile.member_memory < 40 * weights
    assert 0.01 <= profile.compute <= 1.0
    assert profile.cores > 0


def test_the_peak_of_a_job_is_what_torch_has_reserved() -> None:
    key = FusionKey("structure", "data", 8)
    release_cached_memory(DEVICE)
    tracker = MemoryTracker("job", DEVICE)
    held = torch.empty(300 * MIB, dtype=torch.uint8, device=DEVICE)
    tracker.sample([(key, 2)])
    peak = tracker.new_peak()
    assert peak is not None
    assert peak.memory >= 300 * MIB
    del held
    release_cached_memory(DEVICE)
    tracker.sample([(key, 2)])
    assert tracker.new_peak() is None, "the peak does not fall"


@pytest.mark.parametrize(
    "ask", [lambda: torch.empty(1 << 50, device=DEVICE), lambda: torch.ones(1 << 44, device=DEVICE)]
)
def test_an_error_of_torch_is_out_of_memory(ask: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ask()
    assert outcome_of(raised.value) is Outcome.OUT_OF_MEMORY


class TooWide(Wide):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and batch[0].is_cuda:
            torch.empty(1 << 50, device=batch[0].device)
        return super().loss(model, batch)


class SomeTooWide(Mixed):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and any(isinstance(part, nn.BatchNorm1d) for part in model):
            torch.empty(1 << 50, device=batch[0].device)
        return super().loss(model, batch)


def test_a_job_that_does_not_fit_raises_and_leaves_nothing(tmp_path: Path) -> None:
    before = allocated_after_use(tmp_path)
    try:
        Shop(TooWide(), tmp_path / "study", DEVICE).run([whole(0), whole(1)])
    except torch.OutOfMemoryError:  # not by `pytest.raises`, which keeps the frames, and these the tensors
        raised = True
    assert raised
    release_cached_memory(DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) - before < 4 * MIB


def test_an_array_that_does_not_fit_leaves_the_others_alone(tmp_path: Path) -> None:
    events = Shop(SomeTooWide(), tmp_path, DEVICE).run([whole(0), whole(1), whole(3)])
    (failed,) = [event for event in events if isinstance(event, ArrayFailed)]
    assert (failed.outcome, failed.trials) == (Outcome.OUT_OF_MEMORY, {3})
    reports = [report for event in events if isinstance(event, Reported) for report in event.reports]
    assert {report.trial for report in reports} == {0, 1}
