"""Tables are read as a person does: rendered at a width of 100."""

import io
import json
import math
from dataclasses import replace

import pytest
from report_samples import device, failed_job, row, snapshot
from rich.console import Console

from shoal.algorithms.base import Totals
from shoal.core.cause import Cause, causes
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.job import Purpose
from shoal.core.objective import objectives
from shoal.core.ranking import ranked
from shoal.core.trial import Trial, TrialState
from shoal.look.failures import cause_lines, failing_json, failing_text
from shoal.look.savings import Savings, Speedup
from shoal.look.snapshot import Best, DeviceUse, Failing, JobUse, TaskEdit
from shoal.look.table import best_table, snapshot_json, status_table, trial_json, trials_table
from shoal.look.text import (
    best_texts,
    config_text,
    duration_text,
    number_text,
    printable,
    rate_text,
    rounded,
    states_text,
    task_edit_text,
    trial_state_text,
)


def rendered(table, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1e-7, "1e-07"),
        (128, "128"),
        (123456, "123456"),
        (float("nan"), "nan"),
        ("relu", "relu"),
        (True, "True"),
        (None, "–"),
    ],
)
def test_number(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.123456, 4, "0.1235"),
        (0.0, 4, "0"),
        (-0.0321, 2, "-0.032"),
        (0.00032, 2, "3.2e-4"),
        (9.9996e-5, 4, "1e-4"),
        (170.2, 2, "170"),
        (99999.0, 5, "99999"),
        (123456.0, 3, "1.23e5"),
        (float("inf"), 3, "inf"),
        (float("nan"), 3, "nan"),
    ],
)
def test_rounded(value, digits, text):
    assert rounded(value, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.0, "0:00:00"), (59.6, "0:01:00"), (3661.0, "1:01:01"), (90000.0, "25:00:00")]
)
def test_duration(seconds, text):
    assert duration_text(seconds) == text


def test_config_text():
    config = {"lr": 0.000123456, "optimizer": {"name": "sgd", "momentum": None}, "sizes": [1, 2]}
    assert config_text(config) == "lr=0.0001235 optimizer.name=sgd optimizer.momentum=None sizes=[1, 2]"


@pytest.mark.parametrize(("mode", "order"), [("max", [3, 1, 4, 0, 2, 5]), ("min", [1, 4, 3, 0, 2, 5])])
def test_ranked(mode, order):
    rows = [
        row(0, accuracy=None),
        row(1, accuracy=0.25),
        row(2, TrialState.FAILED, accuracy=0.0),
        row(3, accuracy=0.75),
        row(4, accuracy=0.25),
        row(5, TrialState.FAILED, accuracy=1.0),
    ]
    assert [each.number for each in ranked(rows, objectives("accuracy", mode))] == order


def test_trials_best_first():
    rows = [
        row(0, TrialState.PENDING, None, reason="needs 9.1 GB, cuda:0 has 4.2 GB free", epoch=0, seconds=0.0),
        row(1, TrialState.STOPPED, 0.25, reason="rank 7 of 9 at 3 epochs; the best 3 continue"),
        row(2, TrialState.COMPLETE, 0.75, seconds=12345.678),
    ]
    assert rendered(trials_table(rows, objectives("accuracy", "max"), of_best=LAST_EPOCHS)) == [
        "trial  state     accuracy   best  epochs  seconds  config",
        "    2  complete      0.75  0.875     3/9  12345.7  lr=0.003704 optimizer.name=sgd",
        "    1  stopped       0.25  0.375     3/9      1.2  lr=0.002469 optimizer.name=sgd",
        "                                                   rank 7 of 9 at 3 epochs; the best 3 continue",
        "    0  waiting          –      –     0/9      0.0  lr=0.001235 optimizer.name=sgd",
        "                                                   needs 9.1 GB, cuda:0 has 4.2 GB free",
        "ranked by accuracy, the last value (higher is better)",
        "best: of all epochs; seconds: of training, a trial's share of its array's",
    ]


def test_values_of_the_best_epochs_have_the_last_ones_beside_them():
    rows = [
        row(0, accuracy=0.25, best_epoch=1),
        row(1, accuracy=0.75, metrics={"accuracy": 0.5}, ranked={"accuracy": 0.75}),
    ]
    lines = rendered(trials_table(rows, objectives("accuracy", "max")))
    assert [line.split()[:6] for line in lines[:3]] == [
        ["trial", "state", "accuracy", "last", "at", "epochs"],
        ["1", "complete", "0.75", "0.5", "2", "3/9"],
        ["0", "complete", "0.25", "0.25", "1", "3/9"],
    ]
    assert lines[-2] == "ranked by accuracy, its value at the best epoch of each trial (higher is better)"
    goals = objectives("accuracy", "max")
    by_loss = EpochOrder.of(goals, [], "best", {"loss": "min"})
    said = " ".join(rendered(trials_table(rows, goals, of_best=by_loss))[-2:])
    assert "at: the best epoch, that of the best loss; last: of the newest epoch; " in said


@pytest.mark.parametrize("width", [100, 80, 60, 40])
def test_a_trial_of_several_metrics_is_whole_at_any_width(width):
    goals = objectives(["valid_accuracy", "inference_seconds"], ["max", "min"])
    shown = row(1, TrialState.STOPPED, 0.25, reason="rank 7 of 9\tat 3 epochs; the best 3 continue")
    values = {goal.metric: 0.25 for goal in goals}
    shown = replace(shown, metrics=values, best=values, ranked=values)
    lines = rendered(trials_table([shown], goals), width)
    assert all(lines), "no line is empty"
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in (
        "stopped",
        "3/9",
        "1.2",
        "lr=0.002469",
        "optimizer.name=sgd",
        "rank 7 of 9 at 3 epochs; the best 3 continue",
    ):
        assert part in text


def test_what_ran_when_the_engine_was_killed_is_interrupted_everywhere():
    killed, goals = row(0, TrialState.RUNNING), objectives("accuracy", "max")
    seen = snapshot(pid=None, states={TrialState.RUNNING: 1})
    failing = Failing(row(0, TrialState.RUNNING, failures=1), None, 2, runs=False)
    shown = {
        "trials": rendered(trials_table([killed], goals, runs=False))[1],
        "best": rendered(best_table(killed, goals, runs=False))[0],
        "status": rendered(status_table(seen))[1],
    }
    assert {name: ("interrupted" in line, "running" in line) for name, line in shown.items()} == dict.fromkeys(
        shown, (True, False)
    )
    assert trial_json(killed, runs=False)["state"] == "interrupted"
    assert snapshot_json(seen)["trials"] == {"interrupted": 1}
    assert failing_json(failing)["state"] == "interrupted"
    assert "was being tried again" in failing_text(failing)


def test_names_from_the_user_are_not_markup():
    shown = row(0, TrialState.FAILED, 0.5, reason="[red]broken[/red] in [/]")
    lines = rendered(trials_table([shown], objectives("acc[bold]", "max")))
    assert "acc[bold]" in lines[0]
    assert "[red]broken[/red]" in lines[2]


def test_best_shows_everything_in_full():
    assert rendered(best_table(row(7, accuracy=0.5), objectives("accuracy", "max"))) == [
        "trial                  7, complete, 3 epochs",
        "best epoch             2",
        "accuracy               0.5 (last 0.5)",
        "valid_loss             0.25 (last 0.25)",
        "config.lr              0.009876",
        "config.optimizer.name  sgd",
    ]


def test_status():
    assert rendered(status_table(snapshot())) == [
        "epochs   ━━━━━━━╸                        25 of 100  0:01:01 elapsed, 0:03:04 left",
        "trials   15 waiting, 8 running",
        "waiting  12 trials (3, 4, 5, …): its model is being measured",
        "         3 trials (0, 1, 2): needs 9.1 GB, cuda:0 has 4.2 GB free",
        "best     accuracy 0.9812 (trial 7) with lr=0.003123 width=128",
        "cpu:0    cpu/1, 95% of it and 120 MB of 8.0 GB reserved: job-00012 trains 8 trials",
        "cpu:1    cpu/1, idle",
    ]


@pytest.mark.parametrize(
    ("found", "line"),
    [
        pytest.param(
            Savings(640, 95.0, 412.0, 0.0, 8.0),
            "fusing   faster by 0:05:17, less 0:00:08 of measuring: 0:05:09 of device time saved; "
            "640 epochs took 0:01:35, one trial at a time 0:06:52",
            id="fused",
        ),
        pytest.param(
            Savings(640, 95.0, 412.0, 12.0, 8.0),
            "fusing   faster by 0:05:17 (0:00:12 of it by packing), less 0:00:08 of measuring: 0:05:09 of device time "
            "saved; 640 epochs took 0:01:35, one trial at a time 0:06:52",
            id="packed",
        ),
        pytest.param(
            Savings(8, 27.8, 32.2, 0.0, 5.5),
            "fusing   faster by 4.4 s, less 5.5 s of measuring: no net gain; 8 epochs took 27.8 s, one trial at a time "
            "32.2 s",
            id="measuring cost more",
        ),
        pytest.param(
            Savings(640, 95.3, 362.7, 0.0, 0.6),
            "fusing   faster by 0:04:28, less 0:00:01 of measuring: 0:04:27 of device time saved; "
            "640 epochs took 0:01:35, one trial at a time 0:06:03",
            id="the rounded times add up",
        ),
        pytest.param(
            Savings(64, 95.0, 90.0, 0.0, 8.0),
            "fusing   no gain: 64 epochs took 0:01:35, one trial at a time 0:01:30; measuring took 0:00:08",
            id="slower",
        ),
    ],
)
def test_status_says_what_fusing_and_packing_saved(found, line):
    shown = snapshot(savings=found, speedup=Speedup(3.0, 3.0, 3, ""))  # which is of training steps alone
    assert line in rendered(status_table(shown), width=250)
    assert not any(text.startswith("speed") for text in rendered(status_table(shown), width=250))
    assert snapshot_json(shown)["speedup"]["most"] == 3.0
    assert snapshot_json(snapshot(savings=found))["savings"]["saved"] == found.saved


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_progress_is_one_line_at_any_width(width):
    many = snapshot(epochs_done=60_000, totals=Totals(1000, 123_456, 234_567), elapsed=12_345.6, seconds_left=123_456.7)
    first, second, *_ = rendered(status_table(many), width)
    assert first.startswith("epochs   ━")
    assert first.endswith(" 60000 of 123456 to 234567  3:25:46 elapsed, at least 34:17:37 left")
    assert second.startswith("trials")
    assert len(first) <= min(width, 9 + 30 + 2 + 67)


def test_no_time_is_cut_on_a_narrow_terminal():
    first, second, *_ = rendered(status_table(snapshot(seconds_left=123.0)), 40)
    assert first.endswith(" 25 of 100")
    assert second.strip() == "0:01:01 elapsed, 0:02:03 left"


def test_jobs_that_share_a_device_stand_below_its_name():
    jobs = (
        JobUse("job-00003", Purpose.TRAIN, 8, 0.5, 10**9, 1.0),
        JobUse("job-00004", Purpose.TRAIN, 1, 0.25, 10**8),
    )
    use = DeviceUse(device("cuda:0", kind="NVIDIA H200", memory=140 * 10**9), jobs)
    assert rendered(status_table(snapshot(devices=(use,))))[-3:] == [
        "cuda:0   NVIDIA H200, 75% of it and 1.1 GB of 140.0 GB reserved",
        "         job-00003 trains 8 trials",
        "         job-00004 trains 1 trial",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param(
            {"earlier_from": ("8 of 9 trials of runs/a",)}, "warm start  8 of 9 trials of runs/a", id="earlier studies"
        ),
        pytest.param({"best": None}, "best     –", id="nothing measured"),
        pytest.param({"states": {}}, "trials   none yet", id="no trial"),
        pytest.param({"pid": None}, "trials   15 waiting, 8 interrupted", id="nobody runs it"),
        pytest.param(
            {"pid": None}, "waiting  15 trials (0, 1, 2, …): waits until the study is resumed", id="why, then"
        ),
        pytest.param({"paused": True, "seconds_left": None}, "25 of 100  0:01:01 elapsed\n", id="it is paused"),
        pytest.param({"states": {TrialState.COMPLETE: 3}}, "25 of 100  0:01:01 elapsed\n", id="all have ended"),
        pytest.param(
            {"waiting": {"": [7]}}, "waiting  1 trial (7): waits for a place in a job", id="not yet considered"
        ),
        pytest.param(
            {"waiting": {f"reason {number}": [*range(9 - number)] for number in range(6)}},
            "         9 trials: 2 other reasons, see shoal trials",
            id="many reasons",
        ),
        pytest.param(
            {"devices": (DeviceUse(device("cpu:0"), (JobUse("job-00003", Purpose.PROFILE, 1),)),)},
            "cpu:0    cpu/1, 100% of it reserved: job-00003 measures 1 trial",
            id="profile",
        ),
        pytest.param(
            {"devices": (DeviceUse(device("cpu:0"), (JobUse("job-00003", Purpose.TRAIN, 9, 0.5, rate=12.34),)),)},
            "job-00003 trains 9 trials, 12 epochs/s",
            id="rate",
        ),
        pytest.param(
            {"devices": (DeviceUse(device("cpu:0"), (JobUse("job-00001", Purpose.SIGNATURE, 9),)),)},
            "cpu:0    cpu/1, 100% of it reserved: job-00001 compares the models of 9 trials",
            id="signature",
        ),
        pytest.param(
            {"devices": (DeviceUse(device("cuda:1", healthy=False, reason="has fallen off the bus")),)},
            "cuda:1   cpu/1, not in use (has fallen off the bus)",
            id="lost device",
        ),
        pytest.param({"epochs_asked": 0, "epochs_done": 0, "seconds_left": None}, "0 of 0", id="nothing asked"),
        pytest.param({"totals": Totals(30, 300, 300)}, "25 of 300  0:01:01 elapsed, 0:03:04 left", id="all rungs"),
        pytest.param(
            {"totals": Totals(30, 300, 300)}, "trials   15 waiting, 8 running, 7 to come", id="trials to come"
        ),
        pytest.param(
            {"totals": Totals(30, 300, 900)}, "25 of 300 to 900  0:01:01 elapsed, at least 0:03:04 left", id="bounds"
        ),
        pytest.param({"totals": Totals(30, 300, 300), "epochs_lost": 12}, "25 of 288", id="failed trials do no more"),
        pytest.param(
            {"totals": Totals(30, 300, 900), "states": {TrialState.COMPLETE: 3}, "epochs_asked": 25},
            "25 of 25  0:01:01 elapsed\n",
            id="ended with less",
        ),
        pytest.param({"seconds_left": None}, "0:01:01 elapsed, – left", id="pace unknown"),
        pytest.param({"seconds_left": None, "pid": None}, "25 of 100  0:01:01 elapsed\n", id="no pace, nobody runs it"),
    ],
)
def test_status_lines(changes, line):
    assert any(line in f"{shown}\n" for shown in rendered(status_table(snapshot(**changes))))


@pytest.mark.parametrize(
    ("changes", "job", "retries", "line"),
    [
        pytest.param(
            {"failures": 2},
            failed_job("out of memory", "too much\nLog: logs/job-00003.log", trials=(7,)),
            2,
            "trial 7 failed twice (out of memory), waits to be tried again alone (try 3 of 3); log: logs/job-00003.log",
            id="alone",
        ),
        pytest.param(
            {"failures": 1},
            failed_job("out of memory"),
            2,
            "trial 7 failed once (out of memory), waits to be tried again in a smaller array or alone (try 2 of 3)",
            id="in company",
        ),
        pytest.param(
            {"failures": 3, "state": TrialState.RUNNING, "job": "job-00009"},
            failed_job("raised", f"Traceback\n  here\nValueError: {'x' * 90}\nLog: a.log"),
            2,
            f"trial 7 failed 3 times (raised: ValueError: {'x' * 67}…), is tried again in job-00009 on cpu:0 "
            "(try 4 of 4); log: a.log",
            id="runs",
        ),
        pytest.param(
            {"failures": 1},
            None,
            2,
            "trial 7 failed once (the array that it was in), waits to be tried again alone (try 2 of 3)",
            id="its array",
        ),
    ],
)
def test_what_becomes_of_a_trial_that_failed(changes, job, retries, line):
    failing = Failing(row(7, **({"state": TrialState.PENDING} | changes)), job, retries)
    shown = " ".join(" ".join(rendered(status_table(snapshot(failing=(failing,))))).split())
    assert f"failed {line} best" in shown
    told = snapshot_json(snapshot(failing=(failing,)))["failing"]
    assert [(each["trial"], each["next"], each["log"]) for each in told] == [(7, line, (job and job.log) or None)]


def reason(text, log=""):
    return f"raised after 2 retries:\nTraceback\n  here\n{text}" + (f"\nLog: {log}" if log else "")


def test_causes_are_named_once_with_all_trials_that_failed_of_them():
    failed = [(0, "loss is not finite at step 2"), *((n, reason("ValueError: x", f"logs/{n}.log")) for n in (1, 4, 7))]
    found = causes([*failed, (9, "rejected after 0 retries:\nno metrics\nLog: a.log"), (8, "")])
    assert cause_lines(found) == [
        "3 failed: ValueError: x (trials 1, 4, 7; log: logs/1.log)",
        "1 failed: loss is not finite at step 2 (trial 0)",
        "1 failed: no reason was given (trial 8)",
        "1 failed: no metrics (trial 9; log: a.log)",
    ]
    shown = rendered(status_table(snapshot(causes=found)))
    assert "failed   3 failed: ValueError: x (trials 1, 4, 7; log: logs/1.log)" in shown
    assert snapshot_json(snapshot(causes=found))["causes"][0] == {
        "cause": "ValueError: x",
        "count": 3,
        "trials": [1, 4, 7],
        "log": "logs/1.log",
    }


def test_a_study_that_was_stopped_since_its_first_trials_failed_says_so():
    stopped = snapshot(stopped=Cause("ValueError: x", (0, 1, 2), "0.log"), pid=None)
    line = "stopped, as trials failed alike before any had reported: ValueError: x (trials 0-2; log: 0.log)"
    assert f"failed {line}" in " ".join(" ".join(rendered(status_table(stopped))).split())
    found = causes([(0, reason("ValueError: x")), (7, reason("ValueError: y"))])
    again = replace(stopped, causes=found, unmeasured=found)
    shown = " ".join(" ".join(rendered(status_table(again))).split())
    assert f"failed {line} 1 failed: ValueError: y (trial 7)" in shown
    assert shown.count("ValueError: x") == 1
    shown = {"cause": "ValueError: x", "count": 3, "trials": [0, 1, 2], "log": "0.log"}
    assert snapshot_json(stopped)["stopped"] == shown


def test_what_profiles_failed_of_is_said():
    seen = snapshot(unmeasured=causes([(0, "ValueError: x\nLog: a.log"), (3, "ValueError: x")]))
    assert "failed   measuring failed: ValueError: x (trials 0, 3; log: a.log)" in rendered(status_table(seen))


def test_the_epochs_of_programs_are_reports():
    use = DeviceUse(device("cpu:0"), (JobUse("job-00001", Purpose.TRAIN, 1, rate=2.0),))
    shown = rendered(status_table(snapshot(unit="reports", devices=(use,))))
    assert shown[0].startswith("reports")
    assert any("job-00001 trains 1 trial, 2 reports/s" in line for line in shown)
    assert not any("epochs" in line for line in shown)


def test_many_jobs_of_a_device_leave_room_for_what_else_there_is_to_say():
    jobs = tuple(JobUse(f"job-{number:05d}", Purpose.TRAIN, 2) for number in range(30))
    shown = rendered(status_table(snapshot(devices=(DeviceUse(device("cpu:0"), jobs),))))
    assert shown[-2:] == ["         job-00007 trains 2 trials", "         22 more jobs, with 44 trials"]
    few = rendered(status_table(snapshot(devices=(DeviceUse(device("cpu:0"), jobs[:8]),))))
    assert not any("more jobs" in line for line in few)


def test_no_line_of_the_status_controls_a_terminal():
    evil = "\x1b[31mx"
    failing = Failing(
        row(7, TrialState.PENDING, failures=1), failed_job("raised", f"ValueError: {evil}\nLog: {evil}"), 2
    )
    seen = snapshot(
        failing=(failing,),
        edits=(TaskEdit(0.0, {evil: ""}, (), 0),),
        causes=causes([(1, evil)]),
        unmeasured=causes([(1, f"another {evil}")]),
    )
    assert "\x1b" not in "".join(rendered(status_table(seen)))


def test_of_many_causes_and_trials_the_first_are_named():
    found = causes([(number, reason(f"ValueError: {number % 6}")) for number in range(600)])
    lines = cause_lines(found)
    assert lines[0] == "100 failed: ValueError: 0 (trials 0, 6, 12, 18, 24, 30, 36, 42, 48, 54, 60, 66, …)"
    assert lines[4:] == ["200 failed of 2 other causes, see shoal trials"]


def test_many_trials_that_failed_are_counted():
    failing = tuple(Failing(row(number, TrialState.PENDING, failures=1), None, 2) for number in range(7))
    assert any("3 trials more, see shoal report" in line for line in rendered(status_table(snapshot(failing=failing))))


def test_an_edit_of_the_task_says_which_trials_were_not_through():
    edits = (TaskEdit(0.0, {"/mine/task.py": "-a\n+b", "/mine/nets.py": "cannot be read any more"}, (0, 1, 2, 5), 7),)
    line = task_edit_text(*edits)
    assert line.startswith("task.py, nets.py edited when it continued at ")
    assert line.endswith(": trials 0-2, 5 had not ended, those from 7 on had not begun")
    shown = rendered(status_table(snapshot(edits=edits)))
    assert any(each.startswith("task     task.py, nets.py edited") for each in shown)
    (told,) = snapshot_json(snapshot(edits=edits))["edits"]
    assert told == {"time": 0.0, "files": dict(edits[0].files), "open": [0, 1, 2, 5], "next": 7}


def test_long_texts_stay_within_the_width():
    long = {"waiting": {"word " * 60: [1]}, "best": None}
    assert max(map(len, rendered(status_table(snapshot(**long))))) <= 100
    rows = [row(100_000 + number, reason="x" * 150) for number in range(3)]
    lines = rendered(trials_table(rows, objectives("accuracy", "max")))
    assert max(map(len, lines)) <= 100
    assert sum(line.count("x") for line in lines) == 3 * 150


@pytest.mark.parametrize(
    ("state", "changes", "status", "actions"),
    [
        pytest.param(TrialState.PENDING, {}, "waiting", ("pause", "stop"), id="waits for a device"),
        pytest.param(TrialState.PENDING, {"paused_by": "ada"}, "paused", ("resume", "stop"), id="paused by a person"),
        pytest.param(TrialState.RUNNING, {}, "running", ("pause", "stop"), id="runs"),
        pytest.param(TrialState.RUNNING, {"paused_by": "ada"}, "running", ("resume", "stop"), id="is about to pause"),
        pytest.param(TrialState.PAUSED, {}, "waiting for others", ("stop",), id="held by its algorithm"),
        pytest.param(
            TrialState.PAUSED, {"paused_by": "ada"}, "waiting for others", ("resume", "stop"), id="held, paused"
        ),
        pytest.param(TrialState.COMPLETE, {}, "complete", (), id="complete"),
        pytest.param(TrialState.STOPPED, {"paused_by": "ada"}, "stopped", (), id="stopped"),
    ],
)
def test_a_pause_of_a_person_is_told_from_a_wait_for_the_algorithm(state, changes, status, actions):
    shown = row(3, state, **changes)
    assert (trial_state_text(shown, runs=True), shown.actions) == (status, actions)


def test_a_held_trial_has_no_reason_that_repeats_its_state():
    reason = "waiting for others at epoch 3"
    rows = [
        row(0, TrialState.PAUSED, reason=reason),
        row(1, TrialState.PAUSED, reason=f"{reason}, then paused by ada", paused_by="ada"),
    ]
    lines = rendered(trials_table(rows, objectives("accuracy", "max")), width=200)
    assert [line.strip() for line in lines if reason in line] == [f"{reason}, then paused by ada"]


def test_counts_tell_paused_trials_from_waiting_ones():
    states = {TrialState.PENDING: 4, TrialState.PAUSED: 5, TrialState.RUNNING: 2}
    waiting = {"paused by ada": [2, 7], "waits for a free device: cpu:0 is busy": [8, 9]}
    held = {"waiting for others at epoch 9": [10, 11, 12, 13], "waiting for others at epoch 3, then paused by ada": [1]}
    shown = snapshot(states=states, waiting=waiting, waiting_for_others=held, held=(1, 2, 7))
    assert states_text(shown) == "2 waiting, 5 waiting for others, 2 running, 2 paused"
    lines = rendered(status_table(shown))
    assert "waiting  2 trials (2, 7): paused by ada" in lines
    assert "         4 trials (10, 11, 12, …): waiting for others at epoch 9" in lines
    stopped = "\n".join(rendered(status_table(replace(shown, pid=None))))
    assert "2 trials (8, 9): waits until the study is resumed" in stopped
    assert "2 trials (2, 7): paused by ada" in stopped, "a person's pause lasts beyond the run"
    assert "4 trials (10, 11, 12, …): waiting for others at epoch 9" in stopped


@pytest.mark.parametrize(
    ("changes", "constants", "text"),
    [
        pytest.param(
            {"epoch": 8}, {}, "accuracy 0.9725 (trial 2, epoch 8) with lr=0.1 width=64", id="last is the best"
        ),
        pytest.param(
            {"epoch": 8, "last": 0.966},
            {"width": 64},
            "accuracy 0.9725 (trial 2, epoch 8; last 0.966) with lr=0.1",
            id="got worse, and a constant",
        ),
        pytest.param(
            {"epoch": 8}, {"width": 32}, "accuracy 0.9725 (trial 2, epoch 8) with lr=0.1 width=64", id="cloned"
        ),
        pytest.param({"epoch": 8}, {"width": 64, "lr": 0.1}, "accuracy 0.9725 (trial 2, epoch 8)", id="all constant"),
        pytest.param(
            {"repeats": 3, "spreads": {"accuracy": 0.01}, "last": 0.95},
            {"width": 64},
            "accuracy 0.9725 ± 0.01 (n=3) (median trial 2; last 0.95) with lr=0.1",
            id="repeats",
        ),
    ],
)
def test_the_best_trial_with_the_epoch_of_its_value_and_its_last_one(changes, constants, text):
    best = Best(2, {"lr": 0.1, "width": 64}, 0.9725, **changes)
    assert best_texts(snapshot(best=best, constants=constants)) == [text]


def test_json_is_strict_and_complete():
    shown = row(3, TrialState.FAILED, math.nan, reason="its loss is NaN at step 7")
    assert json.loads(json.dumps(trial_json(shown), allow_nan=False)) == {
        "trial": 3,
        "state": "failed",
        "status": "failed",
        "paused_by": None,
        "actions": ["retry"],
        "config": {"lr": 0.00123456 * 4, "optimizer": {"name": "sgd"}},
        "origin": None,
        "metrics": {"accuracy": None, "valid_loss": 0.25},
        "best": {"accuracy": None, "valid_loss": 0.125},
        "feasible": True,
        "violation": 0.0,
        "ranked": {"accuracy": None, "valid_loss": 0.25},
        "best_epoch": 2,
        "errors": {},
        "epochs": 3,
        "target": 9,
        "seconds": 1.25,
        "failures": 0,
        "device": "cpu:0",
        "job": "12",
        "reason": "its loss is NaN at step 7",
    }


def test_snapshot_json_is_strict_and_complete():
    assert json.loads(json.dumps(snapshot_json(snapshot()), allow_nan=False)) == {
        "metric": "accuracy",
        "mode": "max",
        "pid": 4321,
        "host": None,
        "finished": False,
        "interventions": [],
        "paused": {"study": False, "trials": []},
        "trials": {"pending": 15, "running": 8, "paused": 0, "complete": 0, "stopped": 0, "failed": 0},
        "status": {"waiting": 15, "running": 8},
        "waiting_for_others": {},
        "waiting": {
            "its model is being measured": {"count": 12, "first": [3, 4, 5]},
            "needs 9.1 GB, cuda:0 has 4.2 GB free": {"count": 3, "first": [0, 1, 2]},
        },
        "best": {
            "trial": 7,
            "config": {"lr": 0.0031234, "width": 128},
            "value": 0.98125,
            "epoch": None,
            "last": 0.98125,
        },
        "constraints": [],
        "epochs_done": 25,
        "epochs_asked": 100,
        "epochs_total": 100,
        "epochs_most": 100,
        "totals": None,
        "elapsed": 61.2,
        "span": 0.0,
        "runs": 1,
        "seconds_left": 183.6,
        "time_left": None,
        "end": "",
        "devices": [
            {
                "device": "cpu:0",
                "kind": "cpu/1",
                "node": "one",
                "healthy": True,
                "reason": "",
                "memory": 8 * 10**9,
                "reserved": 120_000_000,
                "occupancy": 0.95,
                "jobs": [
                    {
                        "job": "job-00012",
                        "purpose": "train",
                        "members": 8,
                        "compute": 0.95,
                        "memory": 120_000_000,
                        "cores": 1.0,
                        "epochs_per_second": None,
                        "assists": None,
                        "progress": [],
                    }
                ],
            },
            {
                "device": "cpu:1",
                "kind": "cpu/1",
                "node": "one",
                "healthy": True,
                "reason": "",
                "memory": 8 * 10**9,
                "reserved": 0,
                "occupancy": 0.0,
                "jobs": [],
            },
        ],
        "stopped": None,
        "causes": [],
        "arrays": [],
        "note": "",
        "warm_start": [],
        "speedup": None,
        "savings": None,
        "edits": [],
        "failing": [],
        "unmeasured": [],
    }


def several(**changes):
    best = tuple(Best(trial, {"lr": 0.1}, (0.9 - trial / 10, 2.0 - trial / 10)) for trial in range(6))
    return snapshot(
        metric=("accuracy", "latency"), mode=("max", "min"), best=None, front=best[: changes.pop("size")], **changes
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, ["–"]),
        (1, ["accuracy 0.9 latency 2 (trial 0) with lr=0.1"]),
        (
            6,
            [
                *(f"accuracy 0.{9 - k} latency {2 - k / 10:.4g} (trial {k}) with lr=0.1" for k in range(4)),
                "and 2 more",
            ],
        ),
    ],
)
def test_the_front_of_several_metrics(size, expected):
    found = best_texts(several(size=size))
    assert [line.split(", see")[0] for line in found] == expected
    shown = snapshot_json(several(size=size))
    assert (shown["metric"], shown["mode"], shown["best"]) == (("accuracy", "latency"), ("max", "min"), None)
    assert [each["trial"] for each in shown["front"]] == list(range(size))


def test_trials_that_nothing_dominates_come_first_and_are_marked():
    goals = objectives(["accuracy", "valid_loss"], ["max", "min"])
    rows = [
        row(0, accuracy=0.5),
        row(1, accuracy=0.75, metrics={"accuracy": 0.75, "valid_loss": 0.5}),
        row(2, accuracy=0.625, metrics={"accuracy": 0.625, "valid_loss": 0.75}),
        row(3, accuracy=None, metrics={"accuracy": 1.0}),
        row(4, TrialState.FAILED, accuracy=1.0),
    ]
    head, *lines = rendered(trials_table(rows, goals))
    assert head.split() == [
        "trial",
        "state",
        "front",
        "accuracy",
        "last",
        "valid_loss",
        "last",
        "at",
        "epochs",
        "seconds",
        "config",
    ]
    assert [line.split()[:5] for line in lines if "3/9" in line] == [
        ["1", "complete", "*", "0.75", "0.75"],
        ["0", "complete", "*", "0.5", "0.5"],
        ["2", "complete", "0.625", "0.625", "0.75"],
        ["3", "complete", "1", "1", "–"],
        ["4", "failed", "1", "1", "0.25"],
    ]


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (123.4, "120 reports/s"),
        (1.0, "1 reports/s"),
        (0.25, "15 reports/min"),
        (0.002, "7.2 reports/h"),
        (0.0, "0 reports/h"),
    ],
)
def test_rates_have_the_unit_that_reads_well(rate, text):
    assert rate_text(rate, "reports") == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("a\x1b[31mb", r"a\x1b[31mb", id="colour"),
        pytest.param("a\nb\tc\0", r"a\nb\tc\x00", id="lines"),
        pytest.param("a\udc80b", r"a\udc80b", id="half a character"),
        pytest.param("a\u202eb", r"a\u202eb", id="writing from right to left"),
        pytest.param("größe 大\u00a0[b]", "größe 大\u00a0[b]", id="letters"),
    ],
)
def test_what_would_control_a_terminal_is_escaped(text, line):
    assert printable(text) == line
    goals = objectives(text, "max")
    seen = row(1, trial=Trial(1, {text: text}, 0, 0), metrics={text: 0.5}, best={text: 0.5}, reason=text)
    for table in (trials_table([seen], goals), best_table(seen, goals)):
        lines = "\n".join(rendered(table))
        assert line.split("\\")[0] in lines
        assert all(bad not in lines for bad in "\x1b\0\udc80\u202e")


def test_the_lines_of_a_reason_are_lines():
    assert printable("a\n\tb\x07", lines=True) == "a\n\tb\\x07"
