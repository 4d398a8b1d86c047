"""A snapshot says what the journal says."""

from dataclasses import asdict, replace

import pytest
from support.recorded import RecordedJournal

from shoal.algorithms.base import Totals
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import EpochProgress
from shoal.core.job import Job, Purpose
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState
from shoal.look.snapshot import Best, JobUse, snapshot
from shoal.look.text import time_text
from shoal.spec import StudySpec

CLUSTER = Cluster((Node("one", 2, tuple(Device(f"cpu:{slot}", "cpu/1", 1000) for slot in range(2))),))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(tmp_path, clock):
    study = StudySpec(metric="accuracy", mode="max")
    with RecordedJournal.create(tmp_path, study, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_devices(CLUSTER)
        trials = tuple(Trial(number, {"lr": number}, number, 0) for number in range(4))
        journal.record_proposal(4, [TrialGroup(trials, Budget(4))])
        members = tuple(Member(trial, 0, 4) for trial in trials[:2])
        demand = Demand(0.5, 600, 1.0, 9.0)
        journal.record_job_start(Job("1", (Array(FusionKey("", "", 32), members),), demand=demand), "cpu:1")
        journal.record_waiting_reasons({2: "busy", 3: "busy"})
        yield journal


def report(journal, number, epoch, accuracy, state=TrialState.RUNNING):
    journal.record_reports("1", [Report(number, epoch, {"accuracy": accuracy}, 1.0, state)])


def test_before_the_first_report(journal):
    seen = snapshot(journal, 110.0)
    assert (seen.epochs_done, seen.epochs_asked, seen.elapsed, seen.seconds_left) == (0, 16, 10.0, None)
    assert seen.best is None
    assert seen.waiting == {"busy": [2, 3]}
    assert [use.device.name for use in seen.devices] == ["cpu:0", "cpu:1"]
    assert [use.jobs for use in seen.devices] == [(), (JobUse("1", Purpose.TRAIN, 2, 0.5, 600, 1.0),)]
    assert [(use.occupancy, use.reserved) for use in seen.devices] == [(0.0, 0), (0.5, 600)]
    assert (seen.trials, seen.ended, seen.finished) == (4, 0, False)


def test_time_left_follows_the_pace(journal):
    report(journal, 0, 1, 0.5)
    report(journal, 1, 1, 0.75)
    seen = snapshot(journal, 110.0)
    assert seen.seconds_left == pytest.approx(10.0 / 2 * 14)
    journal.put("paused", True)
    assert snapshot(journal, 110.0).seconds_left is None, "while it is paused nobody knows"
    assert seen.best == Best(1, {"lr": 1}, 0.75, epoch=1)


def test_time_left_is_that_of_all_rungs(journal):
    """Trials that failed are not waited for."""
    assert snapshot(journal, 110.0).totals is None
    journal.spec = replace(journal.spec, totals=Totals(9, 40, 60))
    report(journal, 0, 1, 0.5)
    report(journal, 0, 2, 0.5)
    seen = snapshot(journal, 110.0)
    assert (seen.epochs_asked, seen.epochs_total, seen.epochs_most, seen.unproposed) == (16, 40, 60, 5)
    assert seen.seconds_left == pytest.approx(10.0 / 2 * 38)
    report(journal, 1, 1, 0.5, TrialState.FAILED)
    seen = snapshot(journal, 110.0)
    assert (seen.epochs_total, seen.epochs_most) == (37, 57)
    assert seen.seconds_left == pytest.approx(10.0 / 3 * 34)


STEPS = EpochProgress((0, 1), 1, 30, 120, 0.5, 2.0)
"""Two trials are through a quarter of their epoch, and do an epoch a minute each."""


@pytest.mark.parametrize(
    ("progress", "reports", "begun", "left"),
    [
        pytest.param({}, 0, 0.0, None, id="nothing yet"),
        pytest.param({"1": (STEPS,)}, 0, 0.5, 15.5 * 30, id="by the steps of the first epoch"),
        pytest.param({"2": (STEPS,)}, 0, 0.0, None, id="of a job that has ended"),
        pytest.param({"1": (STEPS,)}, 2, 0.5, 10.0 / 2.5 * 13.5, id="by the run once epochs are done"),
        pytest.param({"1": (replace(STEPS, steps_per_second=None),)}, 0, 0.5, None, id="no rate"),
    ],
)
@pytest.mark.parametrize("live", [True, False], ids=["of the engine", "of the journal"])
def test_steps_within_an_epoch_count(journal, progress, reports, begun, left, live):
    for number in range(reports):
        report(journal, number, 1, 0.5)
    if not live:
        journal.put("progress", {job: [asdict(each) for each in some] for job, some in progress.items()})
    seen = snapshot(journal, 110.0, progress=progress if live else None)
    assert seen.epochs_begun == begun
    assert seen.epochs_done == reports
    assert seen.seconds_left == (None if left is None else pytest.approx(left))


def test_the_rate_of_a_job_is_that_of_all_its_trials_by_its_last_reports(journal):
    assert [job.rate for use in snapshot(journal, 110.0).devices for job in use.jobs] == [None]
    for epoch in range(1, 4):
        journal.record_reports("1", [Report(number, epoch, {"accuracy": 0.5}, 0.25) for number in (0, 1)])
    assert [job.rate for use in snapshot(journal, 110.0).devices for job in use.jobs] == [4.0]


def test_a_last_report_that_took_no_time_is_left_out_of_the_rate(journal):
    journal.record_reports("1", [Report(0, epoch, {"accuracy": 0.5}, 0.5) for epoch in (1, 2)])
    journal.record_reports("1", [Report(0, 2, {"accuracy": 0.5}, 0.0, TrialState.PAUSED)])
    assert [job.rate for use in snapshot(journal, 110.0).devices for job in use.jobs] == [2.0]


def test_time_counts_from_the_call_without_the_gap_between_runs(journal, clock, tmp_path):
    clock.now = 107.0
    report(journal, 0, 1, 0.5)
    journal.close()
    clock.now = 150.0
    with RecordedJournal.open(tmp_path, clock=clock) as again:
        again.begin_run(147.5)
        seen = snapshot(again, 160.0)
        assert (seen.elapsed, seen.span, seen.runs) == (7.0 + 12.5, 60.0, 2)
        assert time_text(seen) == "running time 0:00:20 in 2 runs, 0:01:00 since the first start"
    study = StudySpec(metric="accuracy", mode="max")
    with RecordedJournal.create(tmp_path / "other", study, task=b"", algorithm=b"", clock=clock, called=90.0) as new:
        assert snapshot(new, 110.0).elapsed == 20.0


def test_the_pace_is_that_of_the_process_that_runs_it(journal, clock, tmp_path):
    report(journal, 0, 1, 0.5)
    journal.close()
    clock.now = 1000.0
    with RecordedJournal.open(tmp_path, clock=clock) as again:
        again.begin_run()
        assert snapshot(again, 1010.0).seconds_left is None
        report(again, 0, 2, 0.5)
        report(again, 0, 3, 0.5)
        seen = snapshot(again, 1010.0)
        assert seen.elapsed == 10.0  # its report at the start is the last event of the first run
        assert seen.seconds_left == pytest.approx(10.0 / 2 * 13)


def test_nothing_runs_when_nobody_runs_it(journal, clock, tmp_path):
    clock.now = 107.0
    report(journal, 0, 1, 0.5)
    journal.close()
    with RecordedJournal.read(tmp_path) as view:
        seen = snapshot(view, 5000.0)
    assert (seen.pid, seen.elapsed, seen.seconds_left) == (None, 7.0, None)
    assert seen.devices == ()


def test_a_study_that_never_reported_ran_until_its_last_job_ended(journal, clock, tmp_path):
    clock.now = 104.0
    journal.record_job_end("1", "raised", "ValueError: x", failed=True)
    journal.close()
    with RecordedJournal.read(tmp_path) as view:
        assert snapshot(view, 5000.0).elapsed == 4.0


def test_finished(journal):
    report(journal, 0, 4, 0.5, TrialState.PAUSED)
    journal.record_decisions([Decision(number, TrialState.COMPLETE) for number in range(4)])
    seen = snapshot(journal, 110.0)
    assert seen.finished
    assert seen.seconds_left == 0.0


def test_jobs_that_share_a_device_and_trials_that_left(journal):
    report(journal, 0, 4, 0.5, TrialState.PAUSED)
    trial = Trial(2, {"lr": 2}, 2, 0)
    known = Job("2", (Array(FusionKey("", "", 32), (Member(trial, 0, 4),)),), demand=Demand(1.5, 300, 0.0, 1.0))
    journal.record_job_start(known, "cpu:1")
    journal.record_job_start(Job("3", known.arrays, Purpose.PROFILE), "cpu:0")
    idle, busy = snapshot(journal, 110.0).devices
    assert [(job.job, job.members) for job in busy.jobs] == [("1", 1), ("2", 1)]
    assert (busy.occupancy, busy.reserved) == (1.5, 900)  # nobody takes more than all of a device
    assert (idle.occupancy, idle.reserved) == (1.0, None)  # a job of which nothing is known takes all of it


def test_a_trial_that_failed_is_told_of_until_it_ends(journal):
    journal.record_job_end("1", "crashed", "killed\nLog: logs/1.log", failed=True)
    first, second = snapshot(journal, 110.0).failing
    assert (first.trial.number, first.job.id, first.job.cause, first.job.log) == (0, "1", "killed", "logs/1.log")
    assert first.retries == 2
    lone = Job("2", (Array(FusionKey("", "", 32), (Member(second.trial.trial, 0, 4),)),))
    journal.record_job_start(lone, "cpu:0")
    first, second = snapshot(journal, 110.0).failing
    assert (second.trial.state, second.trial.job, second.job.id) == (TrialState.RUNNING, "2", "1")
    journal.record_decisions([Decision(0, TrialState.STOPPED)])
    assert [failing.trial.number for failing in snapshot(journal, 110.0).failing] == [1]
