"""How a program is suspended: asked, given time, ended; or frozen by `cuda-checkpoint`, for which a fake stands."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from processes import alive, gone

from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Trial, TrialState
from shoal.opaque import Command
from shoal.worker.control import JobControl
from shoal.worker.failures import ProgramFailedError
from shoal.worker.opaque import cuda_checkpoint, program_session, run
from shoal.worker.opaque.program_process import ProgramProcess
from shoal.worker.opaque.usage_monitor import UsageMonitor

GPU = Device("cuda:0", "NVIDIA H200", memory=2**30, uuid="GPU-1")
SLOT = Device("cpu:0", "cpu", memory=2**30)
TARGET = 15

PROGRAM = """
import json, os, signal, sys, time
directory, kind = sys.argv[1], sys.argv[2]
path = directory + "/state"
done = int(open(path).read()) if os.path.exists(path) else 0
open(directory + "/../starts", "a").write(f"{os.getpid()} ")
asked = []

def ask(number, frame):
    asked.append(number)

if kind != "plain":
    signal.signal(signal.SIGUSR1, ask)
if kind == "ignores":
    signal.signal(signal.SIGTERM, ask)
if kind == "two processes" and os.fork() == 0:
    open(directory + "/../children", "a").write(f"{os.getpid()} ")
    while os.getppid() == int(open(directory + "/../starts").read().split()[-1]):
        time.sleep(0.01)
    os._exit(0)
for step in range(done or 1, 1000):
    time.sleep(0.04 if step > done else 0)
    if os.path.exists(directory + "/../breaks"):
        raise ValueError("the data are gone")
    open(path + ".new", "w").write(str(step))
    os.rename(path + ".new", path)
    print(json.dumps({"loss": 1 / step, "step": step}), flush=True)
    if asked and kind == "asked":
        time.sleep(0.1)
        open(directory + "/../clean", "w").write(str(step))
        sys.exit(3)
"""

# In $FAKE: a file for each process with its state; `fails`: the state on the way to which it fails, in the way that
# `how` says, once as many processes as `after` says are there.
CUDA_CHECKPOINT = """#!/bin/sh
state="$FAKE/$3"
now=running
[ -f "$state" ] && now=$(cat "$state")
case "$1" in
    --get-state) echo "$now" ;;
    --toggle)
        next=checkpointed
        [ "$now" = checkpointed ] && next=running
        if [ "$(cat "$FAKE/fails" 2>/dev/null)" = "$next" ]; then
            there=$(grep -lx "$next" "$FAKE"/[0-9]* 2>/dev/null | wc -l)
            [ "$there" -ge "$(cat "$FAKE/after")" ] && eval "$(cat "$FAKE/how")"
        fi
        echo $next > "$state" ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "fake"
    folder.mkdir()
    program = folder / "cuda-checkpoint"
    program.write_text(CUDA_CHECKPOINT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    yield folder
    for session in program_session._kept.values():
        session.close()
    program_session._kept.clear()


def stretch(tmp_path: Path, kind: str, device: Device, start: int, *, until: int = TARGET) -> list[int]:
    """The steps that one job reports; it is suspended after its report `until`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = Command((sys.executable, str(tmp_path / "program.py"), "{directory}", kind), ("loss",), tmp_path)
    array = Array(FusionKey("program", "", 1, opaque=True), (Member(Trial(0, {}, 0, 0), start, TARGET),))
    control, steps = JobControl(), []
    job = Job(f"job-{start}", (array,))
    for event in run.run(job, device, WorkerContext(tmp_path, pickle.dumps(command)), control):
        if isinstance(event, Reported):
            assert all(report.state is not TrialState.FAILED for report in event.reports)
            steps += [report.epoch for report in event.reports]
            if steps[-1] == until and until < TARGET:
                control.change(JobUpdate(keep_process=True))
                control.stop()
    return steps


def starts(tmp_path: Path) -> list[int]:
    """The process of each start of the program."""
    return list(map(int, (tmp_path / "checkpoints/000000/starts").read_text().split()))


def wait_until_stopped(pid: int) -> None:
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # the signal was sent, and is about to be delivered
        time.sleep(0.01)


def test_a_program_that_handles_the_request_ends_as_it_likes(tmp_path: Path) -> None:
    steps = stretch(tmp_path, "asked", SLOT, 0, until=2)
    assert (tmp_path / "checkpoints/000000/clean").read_text() == str(steps[-1])
    more = stretch(tmp_path, "asked", SLOT, steps[-1])
    assert [*steps, *more] == [*range(1, TARGET + 1)]


def test_a_program_that_does_not_know_the_request_is_not_killed_by_it(tmp_path: Path) -> None:
    """It is ended after its next report, when its state is that of this report."""
    steps = stretch(tmp_path, "plain", SLOT, 0, until=2)
    assert 3 <= len(steps) < TARGET
    assert (tmp_path / "checkpoints/000000/live/state").read_text() == str(steps[-1])
    assert [*steps, *stretch(tmp_path, "plain", SLOT, steps[-1])] == [*range(1, TARGET + 1)]


ASKED_PROGRAM = """
import os, signal, subprocess, sys, time
kind, folder = sys.argv[1:]
note = lambda name, text: (open(folder + "/.new", "w").write(text), os.rename(folder + "/.new", folder + "/" + name))
if kind != "no handler":
    signal.signal(signal.SIGUSR1, lambda number, frame: note(f"got {os.getpid()}", ""))
if kind == "wraps a program without a handler":
    subprocess.Popen(["sleep", "60"])
if kind != "forks" or os.fork() == 0:
    note("ready", "")
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("kind", "slurm", "asked"),
    [
        ("handles it", False, True),
        ("forks", False, True),
        ("no handler", False, False),
        ("wraps a program without a handler", False, False),
        ("handles it", True, False),
    ],
)
def test_only_the_first_process_is_asked_and_only_where_all_handle_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, slurm: bool, asked: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "program.py").write_text(ASKED_PROGRAM)
    command = Command((sys.executable, str(tmp_path / "program.py"), kind, str(tmp_path)), ("loss",), tmp_path)
    with (tmp_path / "log").open("wb") as log:
        program = ProgramProcess(command, Trial(0, {}, 0, 0), os.environ, log, log, tmp_path)
    try:
        while not (tmp_path / "ready").exists():
            assert program.status() is None
            time.sleep(0.01)
        assert len(program.tree()) == 1 + (kind in ("forks", "wraps a program without a handler"))
        assert program.request_end() is asked
        while asked and not list(tmp_path.glob("got *")):
            time.sleep(0.01)
        time.sleep(0.1)  # for those that nobody was to ask
        assert [path.name for path in tmp_path.glob("got *")] == [f"got {program.pid}"] * asked
        assert all(alive(process.pid) for process in program.tree())
    finally:
        program.kill_all()


def test_a_program_that_ignores_all_requests_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.1)
    steps = stretch(tmp_path, "ignores", SLOT, 0, until=1)
    assert gone(starts(tmp_path)[0])
    assert [*steps, *stretch(tmp_path, "ignores", SLOT, steps[-1])] == [*range(1, TARGET + 1)]


def test_a_frozen_program_goes_on_in_its_process(tmp_path: Path, fake: Path) -> None:
    steps = stretch(tmp_path, "plain", GPU, 0, until=2)
    (pid,) = starts(tmp_path)
    wait_until_stopped(pid)
    assert (fake / str(pid)).read_text() == "checkpointed\n"
    steps += stretch(tmp_path, "plain", GPU, steps[-1])
    assert steps == [*range(1, TARGET + 1)]
    assert starts(tmp_path) == [pid]
    assert (fake / str(pid)).read_text() == "running\n"
    assert gone(pid)


def test_the_error_of_a_program_that_was_frozen_is_told(tmp_path: Path, fake: Path) -> None:
    """It is in the log of the job that started the program."""
    steps = stretch(tmp_path, "plain", GPU, 0, until=2)
    (tmp_path / "checkpoints/000000/breaks").touch()
    with pytest.raises(ProgramFailedError, match="exited with status 1: ValueError: the data are gone"):
        stretch(tmp_path, "plain", GPU, steps[-1])
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(
    ("kind", "after", "how", "fails"),
    [
        pytest.param("plain", 0, "exit 1", "checkpointed", id="refuses on the way out"),
        pytest.param("plain", 0, "exit 1", "running", id="refuses on the way back"),
        pytest.param("two processes", 1, "exit 1", "checkpointed", id="refuses the second process on the way out"),
        pytest.param("two processes", 1, "exit 1", "running", id="refuses the second process on the way back"),
        pytest.param("plain", 0, "exit 0", "checkpointed", id="does nothing on the way out"),
        pytest.param("plain", 0, "exit 0", "running", id="does nothing on the way back"),
        pytest.param("plain", 0, "exec sleep 60", "checkpointed", id="hangs"),
    ],
)
def test_where_cuda_checkpoint_fails_the_program_begins_again_from_its_state(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: int, how: str, fails: str
) -> None:
    if "sleep" in how:
        monkeypatch.setattr(cuda_checkpoint, "_TOGGLE_SECONDS", 0.2)
    for name, text in (("fails", fails), ("after", str(after)), ("how", how)):
        (fake / name).write_text(text)
    steps = stretch(tmp_path, kind, GPU, 0, until=2)
    if kind == "two processes":
        there = [path.name for path in fake.glob("[0-9]*") if path.read_text().strip() == "checkpointed"]
        assert len(there) == (1 if fails == "checkpointed" else 2)
    steps += stretch(tmp_path, kind, GPU, steps[-1])
    assert steps == [*range(1, TARGET + 1)]
    first, second = starts(tmp_path)
    assert first != second
    children = tmp_path / "checkpoints/000000/children"
    assert all(map(gone, (first, *map(int, children.read_text().split()[:1] if children.exists() else ()))))


@pytest.mark.parametrize("where", ["another device", "another process"])
def test_a_frozen_program_is_killed_where_its_trial_goes_on_elsewhere(tmp_path: Path, fake: Path, where: str) -> None:
    steps = stretch(tmp_path, "plain", GPU, 0, until=2)
    (pid,) = starts(tmp_path)
    left: Any = program_session._kept.pop if where == "another process" else program_session._kept.get
    session = left((tmp_path, 0))
    steps += stretch(tmp_path, "plain", SLOT, steps[-1])
    session.close()
    assert steps == [*range(1, TARGET + 1)]
    assert gone(pid)


def test_a_frozen_program_ends_with_the_process_that_keeps_it(tmp_path: Path, fake: Path) -> None:
    stretch(tmp_path, "plain", GPU, 0, until=2)
    (pid,) = starts(tmp_path)
    wait_until_stopped(pid)
    (session,) = program_session._kept.values()
    session._guard.stdin.close()  # as when this process is killed
    session._guard.wait()
    assert gone(pid)


def test_a_process_that_is_not_stopped_is_not_killed_with_the_process_that_keeps_frozen_programs() -> None:
    """Its id may have been that of a frozen program."""
    with subprocess.Popen(["sleep", "60"]) as other, subprocess.Popen(["sleep", "60"]) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        wait_until_stopped(frozen.pid)
        program_session._guard([psutil.Process(other.pid), psutil.Process(frozen.pid)]).communicate()
        assert frozen.wait() == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    ("used", "available", "frozen"),
    [(0, 1.2, True), (0, 1.05, False), (0.5, 0.7, True), (0.5, 0.55, False)],
)
def test_a_program_is_frozen_only_where_the_host_has_memory_for_it(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, used: float, available: float, frozen: bool
) -> None:
    """A tenth of the host's memory, here as large as the GPU's, is left free; 0: the use of the GPU is unknown."""
    host = SimpleNamespace(total=GPU.memory, available=int(available * GPU.memory))
    monkeypatch.setattr(program_session.psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(UsageMonitor, "memory_used", int(used * GPU.memory))
    stretch(tmp_path, "plain", GPU, 0, until=2)
    assert bool(program_session._kept) is frozen
    assert (alive if frozen else gone)(starts(tmp_path)[0])


def test_a_program_without_a_gpu_is_not_frozen(tmp_path: Path, fake: Path) -> None:
    stretch(tmp_path, "plain", SLOT, 0, until=2)
    assert gone(starts(tmp_path)[0])
    assert program_session._kept == {}
