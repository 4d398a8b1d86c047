"""A snapshot says what the journal says."""

import pytest

from shoal.journal.writer import Journal
from shoal.planner.job import Array, ArrayKey, Job, Member
from shoal.report.snapshot import Best, DeviceUse, snapshot
from shoal.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(tmp_path, clock):
    study = {"metric": "accuracy", "mode": "max"}
    with Journal.create(tmp_path, study, task=b"", algorithm=b"", clock=clock) as journal:
        trials = tuple(Trial(number, {"lr": number}, number, 0) for number in range(4))
        journal.asked(4, [TrialGroup(trials, Budget(4))])
        members = tuple(Member(trial, 0, 4) for trial in trials[:2])
        journal.job_started(Job("1", (Array(ArrayKey("", "", 32), members),)), "cpu:1")
        journal.waiting_reasons({2: "busy", 3: "busy"})
        yield journal


def report(journal, number, epoch, accuracy, state=TrialState.RUNNING):
    journal.reported("1", [Report(number, epoch, {"accuracy": accuracy}, 1.0, state)])


def test_before_the_first_report(journal):
    seen = snapshot(journal, 110.0, ["cpu:0", "cpu:1"])
    assert (seen.epochs_done, seen.epochs_asked, seen.elapsed, seen.seconds_left) == (0, 16, 10.0, None)
    assert seen.best is None
    assert seen.waiting == {"busy": [2, 3]}
    assert seen.devices == (DeviceUse("cpu:0"), DeviceUse("cpu:1", "1", "train", 2))
    assert (seen.trials, seen.ended, seen.finished) == (4, 0, False)


def test_time_left_follows_the_pace(journal):
    report(journal, 0, 1, 0.5)
    report(journal, 1, 1, 0.75)
    seen = snapshot(journal, 110.0)
    assert seen.seconds_left == pytest.approx(10.0 / 2 * 14)
    assert seen.best == Best(1, {"lr": 1}, 0.75)


def test_the_pace_is_that_of_the_process_that_runs_it(journal, clock, tmp_path):
    report(journal, 0, 1, 0.5)
    journal.close()
    clock.now = 1000.0
    with Journal.open(tmp_path, clock=clock) as again:
        assert snapshot(again, 1010.0).seconds_left is None
        report(again, 0, 2, 0.5)
        report(again, 0, 3, 0.5)
        seen = snapshot(again, 1010.0)
        assert seen.elapsed == 10.0
        assert seen.seconds_left == pytest.approx(10.0 / 2 * 13)


def test_nothing_runs_when_nobody_runs_it(journal, clock, tmp_path):
    clock.now = 107.0
    report(journal, 0, 1, 0.5)
    journal.close()
    with Journal.read(tmp_path) as view:
        seen = snapshot(view, 5000.0, ["cpu:1"])
    assert (seen.pid, seen.elapsed, seen.seconds_left) == (None, 7.0, None)
    assert seen.devices == (DeviceUse("cpu:1"),)


def test_finished(journal):
    report(journal, 0, 4, 0.5, TrialState.PAUSED)
    journal.decided([Decision(number, TrialState.COMPLETE) for number in range(4)])
    seen = snapshot(journal, 110.0)
    assert seen.finished
    assert seen.seconds_left == 0.0
