"""A model that changes its frozen parameters while it trains does not affect other trials that share them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SIZE, Small, trial
from torch import Tensor, nn

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.fuse.frozen import record_shared
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.stepper import PlainStepper
from shoal.train.trial_runtime import build
from shoal.train.worker_state import TrialCache, WorkerState

EPOCHS = 3
STEP = (torch.ones(SIZE, 3, dtype=torch.float64), torch.ones(SIZE, 2, dtype=torch.float64))


class Cooling(nn.Module):
    """Divides by a temperature, a frozen parameter that each training pass lowers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, width), nn.Linear(width, 2)
        self.temperature = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature.data.mul_(0.9)
        return self.outer((self.inner(x) / self.temperature).tanh())


class Cooled(Small):
    def model(self, config: Any) -> nn.Module:
        return Cooling(config["width"]).double()


def member(number: int, start: int = 0, target: int = EPOCHS) -> Member:
    return Member(trial(number, width=4 + number // 2), start, target)


def run(directory: Path, trial_cache: TrialCache, *arrays: Sequence[Member]) -> dict[tuple[int, int], dict[str, float]]:
    """Return the metrics of each trial and epoch of a job."""
    task = Cooled()
    sets = DataSets(task, CPU)
    directory.mkdir(parents=True, exist_ok=True)
    worker_state = WorkerState(task, sets, trial_cache, CPU, directory)
    job = Job("job", tuple(Array(FusionKey(f"net {i}", "data", SIZE), tuple(each)) for i, each in enumerate(arrays)))
    control, context = JobControl(prompt=True), WorkerContext(directory, b"")
    trainer = Trainer(job, worker_state, SignatureBuilder(task, sets), control, context)
    reports = [report for event in trainer.run() if isinstance(event, Reported) for report in event.reports]
    return {(report.trial, report.epoch): dict(report.metrics) for report in reports}


def check(
    found: dict[tuple[int, int], dict[str, float]], directory: Path, number: int, trial_cache: TrialCache
) -> None:
    alone = run(directory / f"alone {number}", trial_cache, [member(number)])
    assert len(alone) == EPOCHS
    assert {key: metrics for key, metrics in found.items() if key[0] == number} == {
        key: pytest.approx(metrics, rel=1e-9) for key, metrics in alone.items()
    }


def test_in_arrays_side_by_side(tmp_path: Path) -> None:
    found = run(tmp_path, TrialCache(), [member(0)], [member(2)], [member(4)])
    for number in (0, 2, 4):
        check(found, tmp_path, number, TrialCache())


def test_in_a_trial_that_pauses_while_others_go_on(tmp_path: Path) -> None:
    trial_cache = TrialCache()
    found = run(tmp_path, trial_cache, [member(0, target=1), member(1)])
    found |= run(tmp_path, trial_cache, [member(0, start=1)])
    for number in (0, 1):
        check(found, tmp_path, number, TrialCache())


def test_in_plain_steps_after_those_of_an_array() -> None:
    task = Cooled()
    together, alone = ([build(task, member(number), CPU) for number in (0, 1)] for _ in range(2))
    for runtime in together[1:]:
        runtime.model.temperature.data = together[0].model.temperature.data  # type: ignore[union-attr]
    record_shared(runtime.model.temperature for runtime in together)  # type: ignore[misc]
    stepper = PlainStepper(task, together, keep_shared=True)
    steppers = [PlainStepper(task, [runtime]) for runtime in alone]
    for tick in range(3):
        stepper.train_step([STEP, STEP], [tick, tick])
        for one in steppers:
            one.train_step([STEP], [tick])
    for mine, other in zip(together, alone, strict=True):
        torch.testing.assert_close(mine.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
