"""The journal keeps reservations of jobs, devices, and causes of failed jobs."""

from dataclasses import replace

import pytest
from journal_samples import create, group, job, trial
from support.recorded import RecordedJournal

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Purpose
from shoal.core.rows import DeviceRow, JobRow, Reservation
from shoal.journal.view import JournalView

DEMAND = Demand(compute=0.5, memory=700, cores=1.5, seconds=60.0)


@pytest.fixture
def journal(tmp_path):
    with create(tmp_path / "study") as journal:
        journal.record_proposal(4, [group(range(4), 3)])
        yield journal


def machines(*names, memory=1000):
    return Cluster((Node("one", 4, tuple(Device(name, "H200", memory) for name in names)),))


def test_a_job_has_its_last_reservation(journal):
    journal.record_job_start(replace(job("1", [0]), demand=DEMAND), "cuda:0")
    (started,) = journal.jobs()
    assert started.reservation == Reservation(started.started, 0.5, 700, 1.5)
    journal.record_reservations({"1": replace(DEMAND, memory=900)})
    (changed,) = journal.jobs(running=True)
    assert (changed.reservation.memory, changed.reservation.time > started.started) == (900, True)
    assert journal.reservations() == {"1": [started.reservation, changed.reservation]}


@pytest.mark.parametrize(
    ("demand", "known"),
    [
        pytest.param(None, (None, None, None), id="nothing"),
        pytest.param(Demand(1.0, 0, 0.0, 0.0), (1.0, None, None), id="a whole device, of unknown memory and cores"),
        pytest.param(Demand(0.0, 5, 0.5, 0.0), (0.0, 5, 0.5), id="all"),
    ],
)
def test_unknown_demands_are_not_reserved(journal, demand, known):
    journal.record_job_start(replace(job("1", [0]), demand=demand), "cuda:0")
    (started,) = journal.jobs()
    assert (started.reservation.compute, started.reservation.memory, started.reservation.cores) == known


def test_a_job_has_the_keys_of_its_arrays_and_of_those_that_joined(journal):
    journal.record_job_start(job("1", [0]), "cuda:0")
    come = [Array(FusionKey(name, "d", 8), (Member(trial(number), 0, 3),)) for name, number in (("t", 1), ("t", 2))]
    journal.record_join("1", "cuda:0", come)
    journal.record_job_start(job("2", [3], purpose=Purpose.PROFILE), "cuda:1")
    assert [(row.trials, row.keys) for row in journal.jobs()] == [((0, 1, 2), ("s x 32", "t x 8")), ((3,), ())]
    assert [row.members for row in journal.jobs()] == [{"s x 32": (0,), "t x 8": (1, 2)}, {}]


def test_devices_are_as_they_were_last_recorded(journal):
    journal.record_devices(machines("cuda:1", "cuda:0"))
    assert journal.devices() == [DeviceRow(name, "one", 4, "H200", 1000, 1) for name in ("cuda:1", "cuda:0")]
    fallen = Device("cuda:0", "H200", 1000, healthy=False, note="has fallen off the bus")
    held = Device("cuda:2", "H200", 50, note="never told, as it is well")
    journal.record_devices(Cluster((Node("one", 4, (fallen, held)),)))
    assert [(row.name, row.healthy, row.reason, row.memory) for row in journal.devices()] == [
        ("cuda:1", False, "removed", 1000),
        ("cuda:0", False, "has fallen off the bus", 1000),
        ("cuda:2", True, "", 50),
    ]
    journal.record_devices(machines("cuda:1"))
    assert next((row.name, row.healthy) for row in journal.devices()) == ("cuda:1", True)


def test_only_changes_of_devices_are_written(journal):
    journal.record_devices(machines("cuda:0", "cuda:1"))
    changes = journal.tables.connection.total_changes
    journal.record_devices(machines("cuda:0", "cuda:1"))
    journal.record_devices(machines("cuda:0"))
    journal.record_devices(machines("cuda:0"))
    assert journal.tables.connection.total_changes == changes + 1


def test_each_run_has_its_own_devices(journal):
    journal.record_devices(machines("cuda:0"))
    journal.close()
    with RecordedJournal.open(journal.directory) as again:
        again.begin_run()
        assert [row.name for row in again.devices()] == ["cuda:0"]
        again.record_devices(machines("cuda:0", "cuda:3"))
        again.record_devices(machines("cuda:3"))
    with RecordedJournal.open(journal.directory) as again:
        again.begin_run()
        again.record_devices(machines("cpu:0"))
    with JournalView.read(journal.directory) as view:
        assert [row.name for row in view.devices()] == ["cpu:0"]
        assert sorted(row.name for row in view.devices(all_runs=True)) == ["cpu:0", "cuda:0", "cuda:3"]


@pytest.mark.parametrize(
    ("outcome", "message", "failed", "cause", "log"),
    [
        ("crashed", "killed by SIGKILL\nLog: /a b/job-1.log", True, "killed by SIGKILL", "/a b/job-1.log"),
        ("raised", "Traceback\n  File x\nValueError: 3\n\nLog: l", True, "ValueError: 3", "l"),
        ("out of memory", "", True, "", ""),
        ("finished", "", False, "", ""),
        ("stopped", "", False, "", ""),
        ("orphaned", "the engine died", False, "the engine died", ""),
        ("", "", False, "", ""),
    ],
)
def test_why_a_job_failed(outcome, message, failed, cause, log):
    row = JobRow("1", Purpose.TRAIN, "cuda:0", (0,), 1.0, 2.0, outcome, message)
    assert (row.failed, row.cause, row.log) == (failed, cause, log)


def test_trials_that_are_tried_again_have_the_newest_of_their_jobs_that_failed(journal):
    for name, numbers in (("1", [0, 1]), ("2", [0]), ("3", [2])):
        journal.record_job_start(job(name, numbers), "cuda:0")
        journal.record_job_end(name, "crashed", failed=True)
    journal.record_job_start(job("4", [1, 3]), "cuda:0")
    journal.record_dropped_trials("4", [3], failed=True)
    assert [(row.number, row.failures, failed and failed.id) for row, failed in journal.failures()] == [
        (0, 2, "2"),
        (1, 1, "1"),
        (2, 1, "3"),
        (3, 1, None),
    ]
