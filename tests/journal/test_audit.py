"""The audit finds reservations above the capacity at any time of a journal."""

from dataclasses import replace

import pytest
from journal_samples import SPEC, group, job
from support.audit import Overcommitment, faults_of_teams, overcommitments
from support.recorded import RecordedJournal

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import JournalError
from shoal.core.job import Purpose

GPUS = tuple(Device(f"cuda:{index}", "H200", 100) for index in range(2))
CLUSTER = Cluster((Node("one", 4, GPUS), Node("two", 4, (Device("cuda:2", "H200", 100),))))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def start(name, device, memory, cores=1.0):
    return lambda journal: journal.record_job_start(
        replace(job(name, [0]), demand=Demand(0.5, memory, cores, 1.0)), device
    )


def end(name):
    return lambda journal: journal.record_job_end(name, "finished", failed=False)


def reserve(name, memory, cores=1.0):
    return lambda journal: journal.record_reservations({name: Demand(0.5, memory, cores, 1.0)})


CASES = {
    "all of it": ([(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 40))], []),
    "one too many": (
        [(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 41))],
        [Overcommitment("cuda:0", "bytes", 2.0, 101, 100, ("a", "b"))],
    ),
    "one after the other": ([(1, start("a", "cuda:0", 60)), (2, end("a")), (3, start("b", "cuda:0", 60))], []),
    "at the same moment": ([(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 60)), (2, end("a"))], []),
    "a job of no duration": ([(1, start("a", "cuda:0", 160)), (1, end("a"))], []),
    "on two devices": ([(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:1", 60))], []),
    "less is reserved in time": (
        [(1, start("a", "cuda:0", 60)), (2, reserve("a", 30)), (3, start("b", "cuda:0", 70))],
        [],
    ),
    "less is reserved too late": (
        [(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 70)), (3, reserve("a", 30))],
        [Overcommitment("cuda:0", "bytes", 2.0, 130, 100, ("a", "b"))],
    ),
    "too many join": (
        [(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 10)), (3, reserve("a", 95)), (4, reserve("a", 99))],
        [
            Overcommitment("cuda:0", "bytes", 3.0, 105, 100, ("a", "b")),
            Overcommitment("cuda:0", "bytes", 4.0, 109, 100, ("a", "b")),
        ],
    ),
    "unknown memory": ([(1, start("a", "cuda:0", 0, 0.0)), (2, start("b", "cuda:0", 100, 4.0))], []),
    "cores of a node, on its devices together": (
        [(1, start("a", "cuda:0", 1, 2.5)), (2, start("b", "cuda:2", 1, 2.5)), (3, start("c", "cuda:1", 1, 2.5))],
        [Overcommitment("one", "cores", 3.0, 5.0, 4, ("a", "c"))],
    ),
    "rounding": ([(1, start(name, "cuda:0", 1, 4 / 3)) for name in "abc"], []),
}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(tmp_path, clock):
    with RecordedJournal.create(tmp_path, SPEC, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_proposal(1, [group([0], 3)])
        yield journal


@pytest.mark.parametrize(("events", "expected"), CASES.values(), ids=CASES)
def test_over_promised(events, expected, journal, clock):
    for time, event in events:
        clock.now = float(time)
        event(journal)
    assert overcommitments(journal, CLUSTER) == expected


def test_a_violation_reads_well():
    assert str(Overcommitment("cuda:0", "bytes", 2.0, 101, 100, ("a", "b"))) == (
        "cuda:0: 101 of 100 bytes were reserved at 2.000 to a, b"
    )


def test_a_device_that_never_was_is_named(journal):
    start("a", "cuda:9", 1)(journal)
    with pytest.raises(JournalError, match=r"a ran on cuda:9, which is not among the devices: cuda:0, cuda:1, cuda:2"):
        overcommitments(journal, CLUSTER)


def helper(name, leader, device):
    assisting = replace(job(name, [0]), purpose=Purpose.ASSIST, assists=leader)
    return lambda journal: journal.record_job_start(assisting, device)


TEAMS = {
    "a helper on another device, which ends": (
        [(1, start("a", "cuda:0", 1)), (1, helper("b", "a", "cuda:1")), (2, end("b")), (3, end("a"))],
        [],
    ),
    "its device gets another job once it has ended": (
        [(1, start("a", "cuda:0", 1)), (1, helper("b", "a", "cuda:1")), (2, end("b")), (2, start("c", "cuda:1", 1))],
        [],
    ),
    "it never ended": (
        [(1, start("a", "cuda:0", 1)), (1, helper("b", "a", "cuda:1")), (2, end("a"))],
        ["b on cuda:1 has not ended"],
    ),
    "it shared its device": (
        [(1, start("a", "cuda:0", 1)), (1, helper("b", "a", "cuda:1")), (2, start("c", "cuda:1", 1)), (3, end("b"))],
        ["b and c were on cuda:1 at the same time"],
    ),
    "it assists nothing": (
        [(1, helper("b", "a", "cuda:1")), (2, end("b"))],
        ["b on cuda:1 assists 'a', no training job of another device"],
    ),
}


@pytest.mark.parametrize("name", TEAMS)
def test_helpers_end_and_have_their_devices_to_themselves(name, tmp_path):
    changes, expected = TEAMS[name]
    clock = Clock()
    with RecordedJournal.create(tmp_path, SPEC, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_proposal(1, [group([0], 3)])
        for clock.now, change in changes:
            change(journal)
        assert faults_of_teams(journal) == expected


def test_a_helper_ends_with_its_engine_and_changes_no_trial(tmp_path):
    with RecordedJournal.create(tmp_path, SPEC, task=b"", algorithm=b"") as journal:
        journal.record_proposal(1, [group([0], 3)])
        start("a", "cuda:0", 1)(journal)
        helper("b", "a", "cuda:1")(journal)
        (trial,) = journal.trials()
        assert (trial.job, trial.device) == ("a", "cuda:0")
        journal.requeue_running()
        found = {row.id: (row.purpose, row.assists, row.outcome, row.keys) for row in journal.jobs()}
        assert found["b"] == (Purpose.ASSIST, "a", "orphaned", ())
        assert [row.failures for row in journal.trials()] == [0]
