"""The audit finds reservations above the capacity at any time of a journal."""

from dataclasses import replace

import pytest
from journal_samples import STUDY, group, job

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import JournalError
from shoal.journal.audit import Overcommitment, overcommitments
from shoal.journal.writer import Journal

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


def promise(name, memory, cores=1.0):
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
        [(1, start("a", "cuda:0", 60)), (2, promise("a", 30)), (3, start("b", "cuda:0", 70))],
        [],
    ),
    "less is reserved too late": (
        [(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 70)), (3, promise("a", 30))],
        [Overcommitment("cuda:0", "bytes", 2.0, 130, 100, ("a", "b"))],
    ),
    "too many join": (
        [(1, start("a", "cuda:0", 60)), (2, start("b", "cuda:0", 10)), (3, promise("a", 95)), (4, promise("a", 99))],
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
    with Journal.create(tmp_path, STUDY, task=b"", algorithm=b"", clock=clock) as journal:
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
