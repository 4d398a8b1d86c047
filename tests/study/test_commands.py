"""Studies of commands that print their reports, in real processes that are killed at the worst moments."""

import pickle
import sys
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from programs import curve, search

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import Trial, TrialState
from shoal.programs.opaque import Command
from shoal.programs.run import run
from shoal.train.control import JobControl

PROGRAM = """
import json, os, signal, sys, time
slope, directory, fault, marker, epochs = float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
path = directory + "/state"
done = json.load(open(path)) if os.path.exists(path) else 0
with open(marker + "-starts", "a") as starts:
    print(done, os.environ["SHOAL_STEP"], file=starts)

def say(step):
    print(json.dumps({"loss": slope * step} | ({} if fault == "no steps" else {"step": step})), flush=True)

def now(step, name, at):
    if (name, at) != (fault, step) or os.path.exists(marker):
        return False
    open(marker, "w").close()
    return True

if fault == "prints again" and done:
    say(done)
for step in range(done + 1, epochs + 1):
    if now(step, "unread", 1) or now(step, "overruns", 1):
        os.kill(os.getppid(), signal.SIGSTOP)
    json.dump(step, open(path + ".new", "w"))
    os.rename(path + ".new", path)
    if now(step, "saved", 3) or now(step, "prints again", 3) or now(step, "saved the last", 4):
        os.kill(os.getpid(), signal.SIGKILL)
    say(step)
    if fault == "unread" and step == 3 and done == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        while True:
            signal.pause()
    if fault == "overruns" and step == 6 and done == 0:
        os.kill(os.getppid(), signal.SIGCONT)
        while True:
            signal.pause()
    time.sleep(0.02)
"""


@pytest.fixture
def command(tmp_path: Path) -> Any:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def make(fault: str, epochs: int = 1000) -> Command:
        line = (sys.executable, str(program), "{slope}", "{directory}", fault, str(tmp_path / "marker"), str(epochs))
        return Command(line, ("loss",), tmp_path)

    return make


def starts(tmp_path: Path) -> list[tuple[int, ...]]:
    """Of each start of the program: the step that it continued after, and how many reports were known."""
    lines = (tmp_path / "marker-starts").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@pytest.mark.parametrize(
    ("fault", "epochs", "begins"),
    [
        pytest.param("none", 1000, [(0, 0)], id="left alone", marks=pytest.mark.thorough),
        pytest.param("no steps", 1000, [(0, 0)], id="without steps", marks=pytest.mark.thorough),
        pytest.param("unread", 1000, [(0, 0), (3, 3)], id="nobody had read what it printed"),
        pytest.param("prints again", 1000, [(0, 0), (3, 2)], id="it had saved, and prints its last report again"),
        pytest.param("saved", 1000, [(0, 0), (3, 2), (0, 0)], id="it had saved and not printed"),
        pytest.param(
            "saved the last",
            4,
            [(0, 0), (4, 3), (0, 0)],
            id="it had saved its last step and not printed",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_no_report_of_a_command_is_lost_or_taken_for_another(
    tmp_path: Path, command: Any, fault: str, epochs: int, begins: list[tuple[int, int]]
) -> None:
    study = search(command(fault, epochs), tmp_path, {"slope": 2})
    (row,) = study.trials
    assert (row.state, row.epoch) == (TrialState.COMPLETE, 4), row.reason
    assert [(report.epoch, report.metrics) for report in curve(study, 0)] == [
        (n, {"loss": 2.0 * n}) for n in range(1, 5)
    ]
    assert starts(tmp_path) == begins


def test_what_comes_after_a_budget_counts_for_the_next_one(tmp_path: Path, command: Any) -> None:
    algorithm = shoal.SuccessiveHalving(2, 8, eta=2, min_epochs=4)
    study = search(command("overruns"), tmp_path, {"slope": shoal.grid([1, 2])}, algorithm=algorithm, devices="cpu:1")
    for row in study.trials:
        reports = [(report.epoch, report.metrics["loss"]) for report in curve(study, row.number)]
        assert reports == [(n, row.config["slope"] * n) for n in range(1, row.epoch + 1)]
    assert sorted(row.epoch for row in study.trials) == [4, 8]


def test_a_command_that_ends_by_itself_is_not_begun_again(tmp_path: Path, command: Any) -> None:
    algorithm = shoal.SuccessiveHalving(2, 8, eta=2, min_epochs=4)
    study = search(command("none", 2), tmp_path, {"slope": shoal.grid([1, 2])}, algorithm=algorithm)
    assert sorted(row.epoch for row in study.trials) == [4, 8]
    assert all(row.metrics["loss"] == 2.0 * row.config["slope"] for row in study.trials)
    assert starts(tmp_path) == [(0, 0), (0, 0), (2, 2)]


@pytest.mark.thorough
def test_a_command_without_steps_goes_on_where_it_was(tmp_path: Path, command: Any) -> None:
    algorithm = shoal.SuccessiveHalving(2, 8, eta=2, min_epochs=4)
    study = search(command("no steps"), tmp_path, {"slope": shoal.grid([1, 2])}, algorithm=algorithm)
    (best,) = [row for row in study.trials if row.epoch == 8]
    assert [report.metrics["loss"] for report in curve(study, best.number)] == [float(n) for n in range(1, 9)]


THINKS = """
import json, os, sys, time
directory, step = sys.argv[1], 0
while True:
    step += 1
    open(directory + "/state", "w").write(str(step))
    while step == 2 and not os.path.exists(directory + "/go"):
        time.sleep(0.005)
    print(json.dumps({"loss": 1.0, "step": step}), flush=True)
    while step == 2:
        time.sleep(60)
"""


def test_a_command_that_is_to_stop_is_let_report_what_it_has_saved(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(THINKS)
    command = Command((sys.executable, str(tmp_path / "program.py"), "{directory}"), ("loss",), tmp_path)
    array = Array(FusionKey("thinks", "", 1, opaque=True), (Member(Trial(0, {}, 0, 0), 0, 9),))
    worker_context, control = WorkerContext(tmp_path, pickle.dumps(command)), JobControl()
    live, steps = tmp_path / "checkpoints" / "000000" / "live", []
    for event in run(
        Job("job", (array,), Purpose.TRAIN), Device("cpu:0", "cpu", memory=2**30), worker_context, control
    ):
        if isinstance(event, Reported):
            steps += [report.epoch for report in event.reports]
        if steps == [1] and not control.stop_noticed:
            while (live / "state").read_text() != "2":
                time.sleep(0.005)
            control.stop()
            Timer(0.2, (live / "go").touch).start()
    assert steps == [1, 2]
    assert (live / "state").read_text() == "2"


@pytest.mark.parametrize("epochs", [pytest.param(1000, id="it runs"), pytest.param(2, id="it has ended by itself")])
def test_once_a_command_has_reached_its_target_its_files_are_free_for_the_next_job(
    tmp_path: Path, command: Any, epochs: int
) -> None:
    """The engine may start the next job of the trial on another device as soon as it has the last report."""
    array = Array(FusionKey("program", "", 1, opaque=True), (Member(Trial(0, {"slope": 1}, 0, 0), 0, 4),))
    worker_context = WorkerContext(tmp_path, pickle.dumps(command("none", epochs)))
    job, device = Job("job", (array,), Purpose.TRAIN), Device("cpu:0", "cpu", memory=2**30)
    left: list[list[Path]] = []
    for event in run(job, device, worker_context, JobControl()):
        if isinstance(event, Reported) and event.reports[-1].state is TrialState.PAUSED:
            left.append(list((tmp_path / "checkpoints" / "000000").glob("output-*")))
    assert left == [[]]
