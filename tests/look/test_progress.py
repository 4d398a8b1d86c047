"""The display takes a snapshot only when it shows one, and says on a pipe only what is new."""

import io
from dataclasses import replace

import pytest
from report_samples import device, failed_job, row, snapshot
from rich.console import Console

from shoal.core.cause import causes
from shoal.core.event import EpochProgress
from shoal.core.job import Purpose
from shoal.core.rows import Verdict
from shoal.core.trial import TrialState
from shoal.look.progress import LineProgress, LiveProgress, SilentProgress, progress
from shoal.look.savings import Savings, Speedup
from shoal.look.snapshot import Best, DeviceUse, Failing, JobUse
from shoal.look.table import status_table


class Study:
    """Something to take snapshots of, and the time."""

    def __init__(self):
        self.now = 0.0
        self.taken = 0
        self.changes = {"best": None}

    def take(self):
        self.taken += 1
        return snapshot(elapsed=self.now, **self.changes)

    def clock(self):
        return self.now

    def improve(self, value):
        self.changes["best"] = Best(7, {"lr": 0.1}, value)


@pytest.fixture
def study():
    return Study()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


@pytest.fixture
def pipe():
    return Console(file=io.StringIO(), width=40)


def lines(console):
    return console.file.getvalue().splitlines()


def test_a_terminal_is_drawn_at_most_four_times_a_second(study, terminal):
    with LiveProgress(study.take, terminal, study.clock) as live:
        for step in range(1001):
            study.now = step / 500
            live.update()
    assert study.taken == 9 + 1
    assert "25 of 100" in terminal.file.getvalue()
    assert "12 trials (3, 4, 5, …): its model is being measured" in terminal.file.getvalue()


@pytest.mark.parametrize("display", [LiveProgress, LineProgress])
def test_a_display_that_takes_long_is_updated_less_often(display, study, terminal):
    def take():
        study.now += 0.5
        return study.take()

    with display(take, terminal, study.clock) as live:
        drawn = []
        for second in range(1, 31):
            study.now = float(second)
            live.update()
            drawn.append(study.taken)
    assert drawn == [1] * 9 + [2] * 10 + [3] * 10 + [4]


def test_a_terminal_shows_the_last_state_and_its_cursor_after_an_error(study, terminal):
    with pytest.raises(KeyboardInterrupt), LiveProgress(study.take, terminal, study.clock) as live:
        interrupt(live, study)
    shown = terminal.file.getvalue()
    assert "0.7654" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def interrupt(live, study):
    live.update()
    study.improve(0.7654)
    raise KeyboardInterrupt


def test_a_pipe_gets_a_line_for_what_is_unusual_once(study, pipe):
    with LineProgress(study.take, pipe, study.clock) as line:
        for second in range(5):
            study.now = float(second)
            line.update()
            study.changes["note"] = "trial 0: is unusual" + ("\ntrial 1: is more unusual" if second > 1 else "")
    assert [text for text in lines(pipe) if "unusual" in text] == [
        "shoal: 0:00:01 note: trial 0: is unusual",
        "shoal: 0:00:03 note: trial 1: is more unusual",
    ]


def test_a_pipe_gets_a_line_for_each_structure_that_cannot_be_an_array_once(study, pipe):
    fused, one, other = (Verdict(key, (0, 1), members=2, checks=1) for key in "abc")
    refused = replace(one, refusal="asks for a number"), replace(other, refusal="asks for a number")
    with LineProgress(study.take, pipe, study.clock) as line:
        for second, arrays in enumerate([(fused,), (refused[0], fused), refused, refused]):
            study.now = float(second)
            study.changes["arrays"] = arrays
            line.update()
    plain = "plain, 2 members (trials 0, 1), fused before epoch 1: asks for a number"
    assert [text for text in lines(pipe) if "members" in text] == [f"shoal: 0:00:01 {plain}", f"shoal: 0:00:02 {plain}"]


def test_a_pipe_gets_a_line_at_the_start_for_each_new_best_and_at_the_end(study, pipe):
    with LineProgress(study.take, pipe, study.clock) as line:
        for second, value in [(0, None), (1, 0.5), (2, 0.6), (3, 0.7), (12, 0.7), (13, 0.6), (30, 0.65), (31, 0.8)]:
            study.now = float(second)
            if value is not None:
                study.improve(value)
            line.update()
    assert lines(pipe) == [
        "shoal: 0:00:00 training 8 trials",
        "shoal: 23 trials (15 waiting, 8 running) on cpu:0, cpu:1",
        "shoal: 0:00:01 best so far: accuracy 0.5 (trial 7) with lr=0.1",
        "shoal: 0:00:12 best so far: accuracy 0.7 (trial 7) with lr=0.1",
        "shoal: 0:00:31 best so far: accuracy 0.8 (trial 7) with lr=0.1",
        "shoal: 0:00:31 15 waiting, 8 running; best: accuracy 0.8 (trial 7) with lr=0.1",
    ]


def test_lower_is_better_when_the_study_says_so(study, pipe):
    study.changes["mode"] = "min"
    with LineProgress(study.take, pipe, study.clock) as line:
        for second, value in [(1, 0.5), (20, 0.6), (40, 0.4)]:
            study.now = float(second)
            study.improve(value)
            line.update()
        assert [text.split()[-5] for text in lines(pipe)[2:]] == ["0.5", "0.4"]


def test_of_several_metrics_a_change_of_the_front_is_news(study, pipe):
    study.changes |= {"metric": ("accuracy", "latency"), "mode": ("max", "min")}
    one, two = Best(7, {"lr": 0.1}, (0.5, 2.0)), Best(8, {"lr": 0.2}, (0.4, 1.0))
    with LineProgress(study.take, pipe, study.clock) as line:
        for second, front in [(0, ()), (20, (one,)), (40, (one,)), (50, (one, two))]:
            study.now = float(second)
            study.changes["front"] = front
            line.update()
        first = "best so far: accuracy 0.5 latency 2 (trial 7) with lr=0.1"
        assert lines(pipe)[2:] == [
            f"shoal: 0:00:20 {first}",
            f"shoal: 0:00:50 {first}, and 1 more that nothing dominates",
        ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {},
            "25 of 100 epochs, 0:03:04 left; cpu:0 95%, cpu:1 0% reserved; 15 trials waiting: 12 of them: its model is "
            "being measured",
            id="all",
        ),
        pytest.param(
            {"waiting": {"": [3]}, "devices": (DeviceUse(device("cpu:0")),)},
            "25 of 100 epochs, 0:03:04 left; cpu:0 0% reserved; 1 trial waiting: for a place in a job",
            id="one reason",
        ),
        pytest.param(
            {
                "waiting": {},
                "devices": tuple(
                    DeviceUse(device(f"cpu:{slot}"), (JobUse("1", Purpose.TRAIN, 8, 0.5),) * (slot % 2))
                    for slot in range(8)
                ),
            },
            "25 of 100 epochs, 0:03:04 left; 8 devices, 25% reserved",
            id="many devices",
        ),
        pytest.param({"waiting": {}, "devices": (), "paused": True}, "25 of 100 epochs", id="paused"),
    ],
)
def test_a_pipe_gets_a_line_each_minute(study, pipe, changes, words):
    study.changes |= changes
    with LineProgress(study.take, pipe, study.clock) as line:
        for second in range(150):
            study.now = float(second)
            line.update()
        assert [text for text in lines(pipe) if "25 of 100" in text] == [
            f"shoal: 0:01:00 {words}",
            f"shoal: 0:02:00 {words}",
        ]


def steps(step, trials=(0, 1), **changes):
    return replace(EpochProgress(trials, 1, step, 469, 0.4321, 9.2), **changes)


def in_epoch(*progress):
    job = JobUse("job-00012", Purpose.TRAIN, 8, 0.5, progress=progress)
    return {"best": None, "epochs_done": 0, "waiting": {}, "devices": (DeviceUse(device("cpu:0"), (job,)),)}


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        pytest.param(
            (steps(120),), "2 trials at step 120 of 469 of epoch 1, lowest loss 0.4321, 9.2 steps/s", id="an array"
        ),
        pytest.param((steps(1, (3,)),), "1 trial at step 1 of 469 of epoch 1, loss 0.4321, 9.2 steps/s", id="a trial"),
        pytest.param(
            (steps(1, loss=None, steps_per_second=0.5),),
            "2 trials at step 1 of 469 of epoch 1, 30 steps/min",
            id="no finite loss",
        ),
        pytest.param(
            (steps(1, steps_per_second=None),),
            "2 trials at step 1 of 469 of epoch 1, lowest loss 0.4321",
            id="no rate",
        ),
        pytest.param(
            (steps(5, (7,)), steps(7), steps(9, (8, 9, 6))),
            "3 trials at step 9 of 469 of epoch 1, lowest loss 0.4321, 9.2 steps/s, "
            "and 3 more in 2 other jobs or arrays",
            id="several arrays",
        ),
    ],
)
def test_a_pipe_gets_a_line_for_the_first_steps_of_a_long_epoch_and_one_each_minute(study, pipe, progress, words):
    with LineProgress(study.take, pipe, study.clock) as line:
        for second in range(62):
            study.now = float(second)
            study.changes |= in_epoch(*(progress if second else ()))
            line.update()
    assert [text for text in lines(pipe) if "step" in text] == [
        f"shoal: 0:00:01 {words}; 0:03:04 left",
        f"shoal: 0:01:00 0 of 100 epochs, 0:03:04 left; {words}; cpu:0 50% reserved",
    ]


@pytest.mark.parametrize("width", [40, 100])
def test_a_terminal_shows_the_steps_of_an_epoch_and_moves_its_bar(study, width):
    study.changes |= in_epoch(steps(234), steps(1, (7,)), steps(2, (8,)), steps(3, (9,)), steps(4, (10,)))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(status_table(study.take()))
    shown = " ".join(console.file.getvalue().split())
    assert "now 2 trials at step 234 of 469 of epoch 1, lowest loss 0.4321, 9.2 steps/s" in shown
    assert "2 more in 2 other jobs or arrays" in shown
    assert study.take().epochs_begun == pytest.approx((2 * 234 + 10) / 469)


def test_a_pipe_gets_a_line_for_the_measured_speedup_once(study, pipe):
    with LineProgress(study.take, pipe, study.clock) as line:
        for second in range(4):
            study.now = float(second)
            study.changes["speedup"] = None if second < 2 else Speedup(1.0, 1.04, 8, "core")
            line.update()
        study.changes["speedup"] = Speedup(1.0, 1.05, 16, "core")
    expected = "expect 1.0 to 1.1 times the speed of one trial at a time, as measured"
    told = f"training steps of one of these models already fill a core: {expected}"
    assert [text for text in lines(pipe) if "times the speed" in text] == [f"shoal: 0:00:02 {told}"]
    console = Console(file=io.StringIO(), width=40, color_system=None)
    console.print(status_table(study.take()))
    assert f"speed {told}" in " ".join(console.file.getvalue().split())


def test_the_last_line_says_what_was_saved(study, pipe):
    study.changes |= {"savings": Savings(640, 95.0, 412.0, 0.0, 8.0), "speedup": Speedup(3.0, 3.0, 8, "")}
    with LineProgress(study.take, pipe, study.clock):
        pass
    assert lines(pipe)[-1].startswith(
        "shoal: fusing: faster by 0:05:17, less 0:00:08 of measuring: 0:05:09 of device time saved;"
    )


def test_a_pipe_waits_for_the_first_trials_and_looks_once_a_second(study, pipe):
    study.changes |= {"states": dict.fromkeys(TrialState, 0), "devices": ()}
    with LineProgress(study.take, pipe, study.clock) as line:
        for step in range(30):
            study.now = step / 10
            line.update()
        assert study.taken == 3
        assert lines(pipe) == []


def test_silence(study, capfd):
    with progress(study.take, silent=True) as silent:
        silent.update()
    assert isinstance(silent, SilentProgress)
    assert study.taken == 0
    assert capfd.readouterr() == ("", "")


def test_the_display_suits_where_it_goes(study, terminal, pipe, capfd):
    assert isinstance(progress(study.take, console=terminal), LiveProgress)
    assert isinstance(progress(study.take, console=pipe), LineProgress)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(progress(study.take, console=dumb), LineProgress), "it cannot move its cursor"
    with progress(study.take) as line:
        line.update()
    out, err = capfd.readouterr()
    assert out == ""
    assert "shoal: 23 trials" in err


@pytest.mark.parametrize("fault", [BrokenPipeError, OSError, ValueError])
def test_a_progress_that_cannot_be_written_is_not_shown(fault, study, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise fault("nobody reads it")

        def flush(self):
            raise fault("nobody reads it")

    monkeypatch.setattr("sys.stderr", Gone())
    with progress(study.take) as line:
        line.print_lines(["begins"])
        line.update()
    assert study.taken == 2, "at the beginning and at the end"


def follow(study, line, *moments):
    """Let the study change, and the line look at it, at each of some seconds."""
    for second, changes in moments:
        study.now = float(second)
        study.changes |= changes
        line.update()


def test_a_pipe_gets_a_line_for_each_new_cause_of_failures(study, pipe):
    """When a trial is to be tried again for it, and not once more when it has failed for good of it."""
    again = Failing(row(3, TrialState.PENDING, failures=1), failed_job("raised", "ValueError: x", trials=(3,)), 2)
    with LineProgress(study.take, pipe, study.clock) as line:
        follow(
            study,
            line,
            (1, {}),
            (2, {"failing": (again,)}),
            (3, {"failing": (), "causes": causes([(3, "ValueError: x")])}),
            (4, {"causes": causes([(3, "ValueError: x"), (4, "ValueError: y")])}),
        )
    assert lines(pipe)[2:-1] == [
        "shoal: 0:00:02 trial 3 failed once (raised: ValueError: x), waits to be tried again alone (try 2 of 3)",
        "shoal: 0:00:04 1 failed: ValueError: y (trial 4)",
    ]


def at_work(purpose):
    """Two jobs, of 17 trials together."""
    return tuple(DeviceUse(device(f"cpu:{slot}"), (JobUse(f"job-0000{slot}", purpose, 8 + slot),)) for slot in range(2))


def test_a_pipe_gets_a_line_at_once_for_each_thing_that_is_done_for_the_first_time(study, pipe):
    study.changes |= {"states": dict.fromkeys(TrialState, 0), "starting": True, "devices": at_work(Purpose.SIGNATURE)}
    line = LineProgress(study.take, pipe, study.clock)
    line.print_lines(["Digits: 17 trials"])
    with line:
        assert lines(pipe) == ["shoal: Digits: 17 trials", "shoal: 0:00:00 starting workers"]
        follow(
            study,
            line,
            (1, {}),
            (2, {"starting": False}),
            (3, {"devices": at_work(Purpose.PROFILE)}),
            (4, {"devices": at_work(Purpose.TRAIN)}),
            (5, {"devices": at_work(Purpose.SIGNATURE)}),
        )
    assert lines(pipe)[2:-1] == [
        "shoal: 0:00:02 comparing the models of 17 trials",
        "shoal: 0:00:03 measuring 17 trials",
        "shoal: 0:00:04 training 17 trials",
    ]


def test_a_terminal_shows_at_once_what_is_begun(study, terminal):
    study.changes["starting"] = True
    live = LiveProgress(study.take, terminal, study.clock)
    live.print_lines(["Digits: 17 trials"])
    with live:
        shown = terminal.file.getvalue()
    assert shown.startswith("shoal: Digits: 17 trials\n")
    assert "workers  are being started" in shown
