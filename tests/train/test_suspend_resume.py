"""A job is suspended within an epoch, and another job resumes its trials in the same or another process."""

import gc
import weakref
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from contract_samples import StopsAfter, save
from pack_samples import CONFIGS, CPU, Mixed

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported, TurnStats
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial
from shoal.train import array_members, worker_state
from shoal.train import run as run_module
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.trial_runtime import build
from shoal.train.worker_state import TrialCache, WorkerState

EPOCHS = 3


def job(*numbers: int, start: dict[int, int]) -> Job:
    arrays = [
        Array(
            FusionKey(str(CONFIGS[n]["kind"]), "data", CONFIGS[n]["batch_size"]),
            (Member(Trial(n, CONFIGS[n], seed=n, data_seed=5), start.get(n, 0), EPOCHS),),
        )
        for n in numbers
    ]
    return Job("job", tuple(arrays))


def train(directory: Path, trial_cache: TrialCache, control: JobControl, *numbers: int) -> list[Reported]:
    task = Mixed()
    sets = DataSets(task, CPU)
    directory.mkdir(parents=True, exist_ok=True)
    state = WorkerState(task, sets, trial_cache, CPU, directory)
    context = WorkerContext(directory, b"", checkpoint_seconds=60.0)
    trainer = Trainer(job(*numbers, start={}), state, SignatureBuilder(task, sets), control, context)
    return [event for event in trainer.run() if isinstance(event, Reported)]


def metrics(events: list[Reported]) -> dict[tuple[int, int], Any]:
    return {(report.trial, report.epoch): dict(report.metrics) for event in events for report in event.reports}


@cache
def whole() -> dict[tuple[int, int], Any]:
    """Metrics of two trials that are not suspended."""
    with TemporaryDirectory() as directory:
        return metrics(train(Path(directory), TrialCache(), JobControl(prompt=True), 0, 3))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("stays", [True, False], ids=["in this process", "in another"])
@pytest.mark.parametrize("looks", [3, 5, 12])
def test_who_goes_on_learns_what_it_would_have_learnt(
    looks: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_cache, control = TrialCache(), StopsAfter(looks - 1)
    told = train(tmp_path / "parts", trial_cache, control, 0, 3)
    assert control.stop_noticed
    built: list[int] = []

    def noted(task: Any, member: Member, device: torch.device) -> Any:
        built.append(member.trial.number)
        return build(task, member, device)

    monkeypatch.setattr(worker_state, "build", noted)
    told += train(tmp_path / "parts", trial_cache if stays else TrialCache(), JobControl(prompt=True), 0, 3)
    assert sorted(built) == ([] if stays else [0, 3])
    assert metrics(told) == whole()


def test_the_losses_are_told_of_the_best_member_with_each_epoch_and_when_it_stops(tmp_path: Path) -> None:
    events = train(tmp_path / "whole", TrialCache(), JobControl(prompt=True), 0)
    assert [len(event.reports) for event in events] == [1, 1, 1]
    losses = [event.losses for event in events if event.losses is not None]
    assert [quantum.steps for quantum in losses] == [7, 7, 7], "14 samples in batches of 2"
    assert all(quantum.lowest <= quantum.last <= quantum.highest for quantum in losses)
    assert all(quantum.seconds > 0 for quantum in losses)
    stopped = train(tmp_path / "stopped", TrialCache(), StopsAfter(4), 0)
    assert [event.losses.steps for event in stopped if event.losses] == [stopped[-1].losses.steps]
    assert stopped[-1].reports == ()


def test_losses_are_told_in_the_middle_of_long_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_members, "READ_SECONDS", 0.0)
    events = train(tmp_path / "study", TrialCache(), JobControl(prompt=True), 0)
    assert sum(event.losses.steps for event in events if event.losses) == 7 * EPOCHS
    assert sum(not event.reports for event in events) == 7 * EPOCHS
    told = [event.progress for event in events if event.progress is not None]
    assert [(each.epoch, each.step) for each in told] == [(e, s) for e in range(1, EPOCHS + 1) for s in range(1, 8)]
    assert {(each.trials, each.steps) for each in told} == {((0,), 7)}
    assert [each.loss for each in told] == [event.losses.last for event in events if not event.reports]


def test_quanta_add_up() -> None:
    one, other = TurnStats(3.0, 1.0, 2.0, 4, 0.5), TurnStats(5.0, 2.0, 2.5, 2, 0.25)
    assert one.followed_by(other) == TurnStats(5.0, 1.0, 2.5, 6, 0.75)
    none = TurnStats(inf, inf, inf, 1, 0.5)
    assert one.followed_by(none) == none.followed_by(one) == replace(one, seconds=1.0)
    assert none.followed_by(none) == TurnStats(inf, inf, inf, 2, 1.0)
    assert one.followed_by(None) is one


def test_what_is_kept_holds_no_gradients_and_no_rows_of_an_array(tmp_path: Path) -> None:
    trial_cache = TrialCache()
    train(tmp_path, trial_cache, StopsAfter(3), 0, 1)
    member = job(0, start={}).members[0]
    runtime = trial_cache.take(member, tmp_path)
    assert runtime is not None
    assert all(parameter.grad is None for parameter in runtime.model.parameters())
    for parameter in runtime.model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert trial_cache.take(member, tmp_path) is None, "it is handed out once"


def test_no_lane_is_alive_when_a_suspended_job_frees_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[weakref.ref[ArrayTrainer]] = []
    alive: list[ArrayTrainer | None] = []
    suspend = ArrayTrainer.suspend

    def suspended(lane: ArrayTrainer) -> None:
        lanes.append(weakref.ref(lane))
        suspend(lane)

    def release(device: torch.device) -> None:
        gc.collect()
        alive.extend(lane() for lane in lanes)

    monkeypatch.setattr(ArrayTrainer, "suspend", suspended)
    monkeypatch.setattr(run_module, "release_cached_memory", release)
    train(tmp_path, TrialCache(), StopsAfter(3), 0, 3)
    assert alive == [None, None]


@pytest.mark.gpu
def test_of_a_gpu_nothing_is_held_meanwhile(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    runtime = build(Mixed(), job(0, start={}).members[0], device)
    x, y = torch.randn(4, 5, dtype=torch.float64, device=device), torch.arange(4, device=device) % 3
    for _ in range(2):
        runtime.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(runtime.model(x), y).backward()
        runtime.optimizer.step()
    runtime.epoch = 1
    save(runtime, tmp_path)
    before = [parameter.detach().cpu() for parameter in runtime.model.parameters()]
    trial_cache = TrialCache()
    trial_cache.put(runtime)
    assert {parameter.device.type for parameter in runtime.model.parameters()} == {"cpu"}
    again = trial_cache.take(runtime.member, tmp_path)
    assert again is not None
    assert {parameter.device for parameter in again.model.parameters()} == {device}
    for parameter, value in zip(again.model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().cpu(), value)
    again.optimizer.zero_grad()
    torch.nn.functional.cross_entropy(again.model(x), y).backward()
    again.optimizer.step()
