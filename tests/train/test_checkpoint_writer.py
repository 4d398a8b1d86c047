"""Checkpoints are written by a thread while training continues, and nothing is told before they are on the disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SIZE, Planned, Small, runtimes, trial, work
from torch import nn

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Event, MembersLeft, Outcome, Proven, Reported
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Report, TrialState
from shoal.fuse.capture_decision import CaptureDecision
from shoal.train import array_members, array_trainer
from shoal.train.checkpoint import Checkpoint, CheckpointSnapshot, CheckpointWriter, load_newest, write
from shoal.train.checkpoint_paths import checkpoint_files, remove_later_checkpoints
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.failures import describe
from shoal.train.run import MAX_JOIN_WAIT_SECONDS, Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.stepper import StepRefusedError
from shoal.train.trial_runtime import TrialRuntime
from shoal.train.worker_state import TrialCache, WorkerState

EPOCHS = 3


def told(directory: Path, *arrays: list[Member], control: JobControl, seconds: float = 30.0) -> Iterator[Event]:
    """Yield the events of a job as the engine is told them."""
    task = Small()
    sets = DataSets(task, CPU)
    directory.mkdir(parents=True, exist_ok=True)
    state = WorkerState(task, sets, TrialCache(), CPU, directory)
    job = Job("job", tuple(Array(FusionKey(f"net {n}", "data", SIZE), tuple(each)) for n, each in enumerate(arrays)))
    context = WorkerContext(directory, b"", checkpoint_seconds=seconds)
    return Trainer(job, state, SignatureBuilder(task, sets), control, context).run()


def rows(event: Event) -> list[tuple[int, int, TrialState, str]]:
    reports = event.reports if isinstance(event, Reported) else ()
    return [(report.trial, report.epoch, report.state, report.checkpoint) for report in reports]


def checkpoint(epoch: int, model: Any) -> Checkpoint:
    return Checkpoint(0, epoch, 0, model, {}, None, ())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No checkpoint is written until it is set."""
    opened = threading.Event()

    def gated(directory: Path, taken: CheckpointSnapshot) -> Path:
        assert opened.wait(60)
        return write(directory, taken)

    monkeypatch.setattr("shoal.train.checkpoint.write", gated)
    return opened


def test_nothing_is_told_before_its_checkpoint_is_on_the_disk_and_training_goes_on_meanwhile(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [Member(trial(0), 0, 1), Member(trial(1), 0, EPOCHS)]
    ended: list[tuple[int, int]] = []
    end_epoch = TrialRuntime.end_epoch

    def noted(runtime: TrialRuntime, *arguments: Any) -> Report:
        ended.append((runtime.trial.number, runtime.epoch + 1))
        if ended[-1] == (1, EPOCHS):
            gate.set()
        return end_epoch(runtime, *arguments)

    monkeypatch.setattr(TrialRuntime, "end_epoch", noted)
    reports = []
    for event in told(tmp_path, members, control=JobControl()):
        for number, epoch, state, name in rows(event):
            assert (1, EPOCHS) in ended, "two more epochs have been trained before the first report"
            assert not name or checkpoint_files(tmp_path, number)[0].name >= name
            reports.append((number, epoch, state, name))
    assert reports == [
        (0, 1, TrialState.PAUSED, "000001-000000"),
        (1, 1, TrialState.RUNNING, ""),
        (1, 2, TrialState.RUNNING, ""),
        (1, 3, TrialState.PAUSED, "000003-000000"),
    ]


def test_who_has_left_on_request_is_told_after_the_checkpoint(tmp_path: Path, gate: threading.Event) -> None:
    members = [Member(trial(0), 0, EPOCHS), Member(trial(1), 0, EPOCHS)]
    control = Planned({2: JobUpdate(leave=frozenset({0}))})
    control.prompt = False
    events = told(tmp_path, members, control=control)
    threading.Timer(0, gate.set).start()
    left = next(event for event in events if isinstance(event, MembersLeft))
    assert left.trials == {0}
    assert [path.name[:13] for path in checkpoint_files(tmp_path, 0)] == ["000000-000001"]
    assert [row[:2] for event in events for row in rows(event)] == [(1, 1), (1, 2), (1, 3)]


def test_training_does_not_stand_still_for_a_writer_that_is_slow(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    def wait(writer: CheckpointWriter, seconds: float | None = None) -> None:
        waits.append(seconds)

    class Control(JobControl):
        def wait(self, seconds: float) -> bool:
            assert not seconds, "nobody joins in place of a trial whose report is not sent"
            return False

    wait_for_all = CheckpointWriter.wait
    monkeypatch.setattr(array_trainer, "JOIN_WAIT_SHARE", 1e9)
    monkeypatch.setattr(CheckpointWriter, "wait", wait)
    events = told(tmp_path, [Member(trial(0), 0, 1), Member(trial(1), 0, EPOCHS)], control=Control())
    monkeypatch.setattr(CheckpointWriter, "flush", lambda writer: (gate.set(), wait_for_all(writer)))
    assert [row[:2] for event in events for row in rows(event)] == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert waits == [MAX_JOIN_WAIT_SECONDS]


def test_saves_do_not_queue_up_behind_a_slow_disk(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    submit, flush = CheckpointWriter.submit, CheckpointWriter.flush

    def noted(writer: CheckpointWriter, taken: Checkpoint) -> None:
        submit(writer, taken)
        waiting.append(writer.submitted - writer.written)

    def opened(writer: CheckpointWriter) -> None:
        gate.set()
        flush(writer)

    monkeypatch.setattr(CheckpointWriter, "submit", noted)
    monkeypatch.setattr(CheckpointWriter, "flush", opened)
    members = [Member(trial(number), 0, EPOCHS) for number in range(2)]
    reports = [row[:2] for event in told(tmp_path, members, control=JobControl(), seconds=0.0) for row in rows(event)]
    assert sorted(reports) == [(number, epoch) for number in range(2) for epoch in range(1, EPOCHS + 1)]
    assert waiting == [1, 2, 3, 4], "both trials once meanwhile, and at their end"


@pytest.mark.parametrize("prompt", [True, False])
def test_the_thread_that_trains_syncs_no_file(prompt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: names.append(threading.current_thread().name))
    members = [Member(trial(number), 0, 2) for number in range(3)]
    list(told(tmp_path, members, control=JobControl(prompt), seconds=0.0))
    least = 48 if prompt else 6  # at most, three trials are saved after each of three steps, and at the end of an epoch
    assert least <= len(names) <= 48
    assert {name[:17] for name in names} == {"shoal-checkpoints"}


def test_no_thread_outlives_its_job(tmp_path: Path) -> None:
    before = threading.enumerate()
    list(told(tmp_path, [Member(trial(0), 0, 1)], control=JobControl()))
    assert threading.enumerate() == before


def test_a_snapshot_does_not_change_with_the_trial(tmp_path: Path, gate: threading.Event) -> None:
    model = {"weight": torch.ones(2, 3), "row": torch.zeros(4, 3)[1], "seen": Counter({"a": 1}), "sizes": [1]}
    model["tied"] = model["weight"]
    writer = CheckpointWriter(tmp_path)
    writer.submit(checkpoint(1, model))
    model["weight"].add_(1)
    model["row"].add_(1)
    model["seen"]["a"] += 1
    model["sizes"].append(2)
    assert (writer.submitted, writer.written) == (1, 0)
    gate.set()
    writer.flush()
    assert writer.written == 1
    found = load_newest(tmp_path, 0)
    assert found is not None
    assert torch.equal(found.model["weight"], torch.ones(2, 3))
    assert torch.equal(found.model["row"], torch.zeros(3))
    assert found.model["row"].untyped_storage().nbytes() == 12
    assert found.model["weight"].data_ptr() == found.model["tied"].data_ptr(), "one memory is stored once"
    assert (found.model["seen"], found.model["sizes"]) == ({"a": 1}, [1])
    writer.close()


def test_what_cannot_be_pickled_is_an_error_of_its_own_trial(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    with pytest.raises((AttributeError, TypeError), match="lambda"):
        writer.submit(checkpoint(1, {"weight": torch.ones(2), "function": lambda: None}))
    writer.submit(checkpoint(1, {"weight": torch.ones(2)}))
    writer.flush()
    assert len(checkpoint_files(tmp_path, 0)) == 1
    writer.close()


def test_snapshots_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.train.checkpoint.HELD_BYTES", 2 * 400)
    writer = CheckpointWriter(tmp_path)
    for epoch in range(1, 9):
        writer.submit(checkpoint(epoch, {"weight": torch.ones(100)}))
        assert writer.submitted - writer.written <= 2
    writer.flush()
    assert [path.name[:6] for path in checkpoint_files(tmp_path, 0)] == ["000008", "000007"]
    writer.close()


def test_a_checkpoint_that_cannot_be_written_is_no_error_of_the_next_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(directory: Path, taken: CheckpointSnapshot) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("shoal.train.checkpoint.write", fails)
    monkeypatch.setattr("shoal.train.checkpoint.HELD_BYTES", 400)
    writer = CheckpointWriter(tmp_path)
    for epoch in range(1, 5):
        writer.submit(checkpoint(epoch, {"weight": torch.ones(100)}))
    assert (writer.submitted, writer.written) == (4, 0)
    with pytest.raises(OSError, match="Input/output"):
        writer.flush()
    with pytest.raises(OSError, match="Input/output"):
        writer.check()
    writer.close()


@pytest.mark.parametrize(("number", "outcome"), [(errno.ENOSPC, Outcome.STORAGE_FULL), (errno.EIO, Outcome.RAISED)])
def test_a_checkpoint_that_cannot_be_written_ends_the_job_and_is_named(
    number: int, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def fsync(file: int) -> None:
        if "/000001/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    first, second = [Member(trial(0), 0, 1), Member(trial(1), 0, 2)], [Member(trial(2), 0, 200)]
    reports: list[Any] = []
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        reports.extend(row for event in told(tmp_path, first, second, control=JobControl()) for row in rows(event))
    found, text = describe(raised.value)
    assert found is outcome
    assert str(tmp_path / "checkpoints" / "000001") in text
    assert not any(row[:2] == (1, 2) for row in reports)
    assert [path.name[:6] for path in checkpoint_files(tmp_path, 0)] == ["000001"]
    assert not list((tmp_path / "checkpoints" / "000001").iterdir())


def test_events_before_a_checkpoint_that_fails_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(directory: Path, taken: CheckpointSnapshot) -> Path:
        if taken.stem.startswith("000002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, taken)

    monkeypatch.setattr("shoal.train.checkpoint.write", fails)
    reports: list[Any] = []
    members = [Member(trial(0), 0, 1), Member(trial(1), 0, 2)]
    with pytest.raises(OSError, match="No space left"):
        reports.extend(row for event in told(tmp_path, members, control=JobControl()) for row in rows(event))
    assert [row[:2] for row in reports] == [(0, 1), (1, 1)]


def test_trials_go_back_once_their_later_checkpoints_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint of steps that were refused could come after those were removed."""
    writers: list[CheckpointWriter] = []
    removed: list[tuple[int, int]] = []
    submit = CheckpointWriter.submit

    def noted(writer: CheckpointWriter, taken: Checkpoint) -> None:
        writers.append(writer)
        submit(writer, taken)

    def remove(directory: Path, number: int, epoch: int, step: int) -> None:
        removed.append((writers[-1].written, writers[-1].submitted))
        remove_later_checkpoints(directory, number, epoch, step)

    refusals = [StepRefusedError("for this test", since_check=True)]

    def hook(task: Any, group: Any, *arguments: Any) -> bool:
        if group[0].epoch == 1 and refusals:
            raise refusals.pop()
        return False

    monkeypatch.setattr(CheckpointWriter, "submit", noted)
    monkeypatch.setattr(array_members, "remove_later_checkpoints", remove)
    monkeypatch.setattr("shoal.train.array_trainer.call_end_epoch", hook)
    members = [Member(trial(number), 0, 2) for number in range(2)]
    reports = [row for event in told(tmp_path, members, control=JobControl(), seconds=0.0) for row in rows(event)]
    assert removed
    assert all(written == submitted > 0 for written, submitted in removed)
    assert [row[:2] for row in reports][-2:] == [(0, 2), (1, 2)]


def test_a_trial_that_was_never_an_array_goes_back_to_the_start_of_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[tuple[int, ...]] = []
    refusals = [StepRefusedError("for this test", since_check=True)]

    def hook(task: Any, group: Any, *arguments: Any) -> bool:
        if group[0].epoch == 1 and refusals:
            raise refusals.pop()
        return False

    monkeypatch.setattr(array_members, "remove_later_checkpoints", lambda directory, *rest: removed.append(rest))
    monkeypatch.setattr("shoal.train.array_trainer.call_end_epoch", hook)
    monkeypatch.setattr(CaptureDecision, "can_pay", lambda decision, records, batches: False)
    events = list(told(tmp_path, [Member(trial(0), 0, 2)], control=JobControl(), seconds=0.0))
    assert removed == [(0, 1, 0)]
    assert [(each.refusal, each.step) for each in events if isinstance(each, Proven)] == [("for this test", 0)]
    assert [row[:2] for event in events for row in rows(event)][-1] == (0, 2)


def killed_job(directory: Path, syncs: int) -> None:
    """Train a trial that is saved after each step, and kill this process when a checkpoint is to be synced."""
    sync, left = os.fsync, iter(range(syncs - 1))

    def fsync(file: int) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(file)

    os.fsync = fsync
    for event in told(directory, [Member(trial(0), 0, EPOCHS)], control=JobControl(prompt=True), seconds=0.0):
        if isinstance(event, Reported):
            print(json.dumps([(r.epoch, r.checkpoint, dict(r.metrics)) for r in event.reports]), flush=True)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("syncs", [1, 7, 8, 17])
def test_a_kill_between_snapshot_and_sync_loses_nothing_that_was_told(syncs: int, tmp_path: Path) -> None:
    code = f"import test_checkpoint_writer as t; t.killed_job(t.Path({str(tmp_path)!r}), {syncs})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = [path.name[:13] for path in checkpoint_files(tmp_path, 0)]
    places = [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)][: (syncs - 1) // 2]
    assert names == [f"{epoch:06d}-{step:06d}" for epoch, step in places[::-1][:2]], (
        "the checkpoint in work is not there, the one before is"
    )
    reports = [report for line in done.stdout.splitlines() for report in json.loads(line)]
    assert all(name <= names[0] for _, name, _ in reports if name)
    start = max((epoch for epoch, _, _ in reports), default=0)
    first = min(start, places[-1][0] if places else 0)
    assert start - first <= 1, "not more than one interval between checkpoints is repeated"
    later = work(Small(), tmp_path, [Member(trial(0), start, EPOCHS)])
    whole = work(Small(), tmp_path / "whole", [Member(trial(0), 0, EPOCHS)])
    assert [(epoch, metrics) for epoch, _, metrics in reports] == [(r.epoch, r.metrics) for r in whole[:start]]
    assert [(r.epoch, r.metrics) for r in later] == [(r.epoch, r.metrics) for r in whole[first:]]


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_waits_for_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to("cuda:0", memory_format=torch.channels_last)
    values = {name: value.cpu() for name, value in model.state_dict().items()}
    writer = CheckpointWriter(tmp_path)
    writer.submit(checkpoint(1, model.state_dict()))  # allocates pinned memory
    writer.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        writer.submit(checkpoint(2, model.state_dict()))
        for each in model.parameters():
            each.data.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    writer.flush()
    writer.close()
    found = load_newest(tmp_path, 0)
    assert found is not None
    assert found.epoch == 2
    for name, value in values.items():
        assert torch.equal(found.model[name], value)
        assert found.model[name].stride() == value.stride()


def test_a_paused_trial_is_kept_in_memory_as_its_checkpoint_is(tmp_path: Path) -> None:
    (one,) = runtimes(Small(), [trial(0)])
    writer, cache = CheckpointWriter(tmp_path), TrialCache()
    one.step = 1
    one.save(writer)
    cache.put(one)
    writer.flush()
    writer.close()
    assert cache.take(one.member, tmp_path) is not None
    cache.put(one)
    for path in checkpoint_files(tmp_path, 0):
        path.unlink()
    assert cache.take(one.member, tmp_path) is None, "a checkpoint that was not written is not gone on from"
