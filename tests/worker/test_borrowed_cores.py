"""A job that borrows cores in the middle of its training, and gives them back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, Small, trial
from planner_samples import LINEAR, A
from torch import nn
from torch.utils.data import TensorDataset

from shoal.core.array import Array, Member
from shoal.core.event import Event, Profiled, Reported
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.data.datasets import DataSets
from shoal.worker import thread_choice
from shoal.worker.control import JobControl
from shoal.worker.fused_stepper import FusedStepper
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.train import Trainer
from shoal.worker.worker_state import TrialCache, WorkerState

EPOCHS = 60
X = torch.randn(80, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Wide(Small):
    """Two steps an epoch, wide enough for two threads."""

    def data(self, config: Any) -> Any:
        return TensorDataset(X, X[:, :2].sin()), TensorDataset(X[:16], X[:16, :2].sin())

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 2)).double()

    def batch_size(self, config: Any) -> int:
        return 40


def trained(directory: Path, changes: dict[int, JobUpdate]) -> list[Event]:
    """The events of two trials in one array; a number of reports -> the change that follows."""
    task, control = Wide(), JobControl(prompt=True)
    sets = DataSets(task, CPU)
    state = WorkerState(task, sets, TrialCache(), CPU, directory)
    job = Job("job", (Array(A, tuple(Member(trial(number), 0, EPOCHS) for number in (0, 1)), LINEAR),))
    context = WorkerContext(directory, b"", checkpoint_seconds=60.0)
    events: list[Event] = []
    for event in Trainer(job, state, SignatureBuilder(task, sets), control, context).run():
        events.append(event)
        if isinstance(event, Reported) and event.reports and event.reports[0].epoch in changes:
            control.change(changes.pop(event.reports[0].epoch))
    return events


def curves(events: list[Event]) -> dict[tuple[int, int], float]:
    reports = [report for event in events if isinstance(event, Reported) for report in event.reports]
    return {(report.trial, report.epoch): report.metrics["error"] for report in reports}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of threads that torch was told, and had."""
    told: list[int] = []
    real: Callable[[int], None] = torch._C.set_num_threads

    def set_num_threads(count: int) -> None:
        told.append(count)
        real(count)

    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(thread_choice, "MAX_DELAY", 1.0)  # also where this machine is busy
    yield told
    real(1)


def test_a_job_with_borrowed_cores_learns_the_same(tmp_path: Path, threads: list[int]) -> None:
    alone = trained(tmp_path / "alone", {})
    assert threads == []
    lent = trained(tmp_path / "lent", {12: JobUpdate(cores=2), 56: JobUpdate(cores=1)})
    assert curves(lent) == {place: pytest.approx(value, rel=1e-9) for place, value in curves(alone).items()}
    assert set(threads) == {1, 2}
    assert torch.get_num_threads() == 1, "they were given back"
    gains = [x.profile.thread_gain for x in lent if isinstance(x, Profiled) and x.profile.thread_gain]
    assert {(threads, members) for gain in gains for threads in gain for members in gain[threads]} == {(2, 2)}
    assert not any(x.profile.thread_gain for x in alone if isinstance(x, Profiled))


def test_no_more_threads_than_the_user_allows(
    tmp_path: Path, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trained(tmp_path, {1: JobUpdate(cores=8)})
    assert threads == []


def test_steps_that_are_compiled_keep_their_threads(
    tmp_path: Path, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedStepper, "needs_own_threads", True)  # as long as plain steps are not faster
    trained(tmp_path, {1: JobUpdate(cores=2)})
    assert threads == []
