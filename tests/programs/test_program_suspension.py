"""How a program is suspended: asked, given time, ended."""

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
from processes import alive, gone, wait_for

from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial, TrialState
from shoal.programs import run
from shoal.programs.opaque import Command
from shoal.programs.process import ProgramProcess
from shoal.train.control import JobControl

SLOT = Device("cpu:0", "cpu", memory=2**30)
TARGET = 15

PROGRAM = """
import json, os, signal, sys, time
directory, kind = sys.argv[1], sys.argv[2]
path = directory + "/state"
done = int(open(path).read()) if os.path.exists(path) else 0
open(directory + "/../starts", "a").write(f"{os.getpid()} ")
asked, gate = [], os.open(sys.argv[3], os.O_RDONLY)

def ask(number, frame):
    asked.append(number)

if kind != "plain":
    signal.signal(signal.SIGUSR1, ask)
if kind == "ignores":
    signal.signal(signal.SIGTERM, ask)
for step in range(done or 1, 1000):
    step > done and os.read(gate, 1)
    open(path + ".new", "w").write(str(step))
    os.rename(path + ".new", path)
    print(json.dumps({"loss": 1 / step, "step": step}), flush=True)
    if asked and kind == "asked":
        time.sleep(0.1)  # its last work takes a while
        open(directory + "/../clean", "w").write(str(step))
        sys.exit(3)
"""


def stretch(tmp_path: Path, kind: str, start: int, *, until: int = TARGET) -> list[int]:
    """The steps that one job reports; it is suspended after its report `until`. A step waits for the report before."""
    (tmp_path / "program.py").write_text(PROGRAM)
    gate = tmp_path / f"gate-{start}"
    os.mkfifo(gate)
    line = (sys.executable, str(tmp_path / "program.py"), "{directory}", kind, str(gate))
    command = Command(line, ("loss",), tmp_path)
    array = Array(FusionKey("program", "", 1, opaque=True), (Member(Trial(0, {}, 0, 0), start, TARGET),))
    control, steps = JobControl(), []
    job = Job(f"job-{start}", (array,))
    with gate.open("r+b", buffering=0) as steps_to_take:
        steps_to_take.write(b".")
        for event in run.run(job, SLOT, WorkerContext(tmp_path, pickle.dumps(command)), control):
            if isinstance(event, Reported):
                assert all(report.state is not TrialState.FAILED for report in event.reports)
                steps += [report.epoch for report in event.reports]
                if steps[-1] == until and until < TARGET:
                    control.stop()
                if steps[-1] <= until or kind == "asked":  # which continues until it knows that it was asked
                    steps_to_take.write(b"." * len(event.reports))
    return steps


def starts(tmp_path: Path) -> list[int]:
    """The process of each start of the program."""
    return list(map(int, (tmp_path / "checkpoints/000000/starts").read_text().split()))


def test_a_program_that_handles_the_request_ends_as_it_likes(tmp_path: Path) -> None:
    steps = stretch(tmp_path, "asked", 0, until=2)
    assert (tmp_path / "checkpoints/000000/clean").read_text() == str(steps[-1])
    more = stretch(tmp_path, "asked", steps[-1])
    assert [*steps, *more] == [*range(1, TARGET + 1)]


def test_a_program_that_does_not_know_the_request_is_not_killed_by_it(tmp_path: Path) -> None:
    """It is ended after its next report, when its state is that of this report."""
    steps = stretch(tmp_path, "plain", 0, until=2)
    assert 3 <= len(steps) < TARGET
    assert (tmp_path / "checkpoints/000000/live/state").read_text() == str(steps[-1])
    assert [*steps, *stretch(tmp_path, "plain", steps[-1])] == [*range(1, TARGET + 1)]


ASKED_PROGRAM = """
import os, signal, subprocess, sys, time
kind, folder = sys.argv[1:]
note = lambda name: os.close(os.open(folder + "/" + name, os.O_CREAT))
if kind != "no handler":
    signal.signal(signal.SIGUSR1, lambda number, frame: note(f"got {os.getpid()}"))
signal.signal(signal.SIGUSR2, lambda number, frame: note(f"later {os.getpid()}"))
if kind == "wraps a program without a handler":
    subprocess.Popen(["sleep", "60"])
if kind != "forks" or os.fork() == 0:
    note("ready")
while True:
    time.sleep(0.05)  # a signal that comes just before `signal.pause` would be handled with the next one
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
        wait_for((tmp_path / "ready").exists)
        assert program.status() is None
        assert len(program.tree()) == 1 + (kind in ("forks", "wraps a program without a handler"))
        assert program.request_end() is asked
        handlers = [process for process in program.tree() if process.name() != "sleep"]
        for process in handlers:
            process.send_signal(signal.SIGUSR2)  # which comes after what anyone was asked
        wait_for(lambda: all((tmp_path / f"later {process.pid}").exists() for process in handlers))
        assert [path.name for path in tmp_path.glob("got *")] == [f"got {program.pid}"] * asked
        assert all(alive(process.pid) for process in program.tree())
    finally:
        program.kill_all()


def test_a_program_that_ignores_all_requests_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.1)
    steps = stretch(tmp_path, "ignores", 0, until=1)
    assert gone(starts(tmp_path)[0])
    assert [*steps, *stretch(tmp_path, "ignores", steps[-1])] == [*range(1, TARGET + 1)]
