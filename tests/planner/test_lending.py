"""Which running jobs borrow the cores of idle CPU slots, case by case."""

from dataclasses import replace

import pytest
from planner_samples import LINEAR, A, array, slots

from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Job, Purpose
from shoal.planner.lending import lent_cores

HERE, THERE = slots(4), [replace(slot, name=f"other {slot.name}") for slot in slots(2)]
WHERE = Cluster((Node("here", 4, tuple(HERE)), Node("there", 2, tuple(THERE))))
GPU = Device("cuda:0", "H200", memory=100)


def train(name, target=10, profile=LINEAR, key=A, **fields):
    """One member, of so many epochs."""
    return Job(name, (replace(array(key, 0, target=target), profile=profile),), **fields)


SHORT, LONG = train("short"), train("long", target=100)
PROGRAM = train("program", key=replace(A, opaque=True))

CASES = {
    "one job gets all idle slots": ([(SHORT, HERE[0])], HERE[1:], {"short": 4}),
    "no slot is idle": ([(SHORT, HERE[0])], [], {}),
    "nothing runs": ([], HERE, {}),
    "the job that ends last gets the slot": ([(SHORT, HERE[0]), (LONG, HERE[1])], HERE[2:3], {"long": 2}),
    "it gets all until it would end first": ([(SHORT, HERE[0]), (LONG, HERE[1])], HERE[2:], {"long": 3}),
    "equal jobs get one each": ([(SHORT, HERE[0]), (train("same"), HERE[1])], HERE[2:], {"short": 2, "same": 2}),
    "a job of unknown length gets it": ([(LONG, HERE[0]), (train("?", profile=None), HERE[1])], HERE[2:3], {"?": 2}),
    "slots of another machine do not count": ([(SHORT, HERE[0])], THERE, {}),
    "a slot of several cores": (
        [(SHORT, replace(HERE[0], cores=4))],
        [replace(HERE[1], cores=4)],
        {"short": 8},
    ),
    "jobs that measure borrow nothing": ([(train("profile", purpose=Purpose.PROFILE), HERE[0])], HERE[1:], {}),
    "nor do programs": ([(PROGRAM, HERE[0])], HERE[1:], {}),
    "nor jobs on several devices": (
        [(train("wide"), HERE[0]), (train("helper", purpose=Purpose.ASSIST, assists="wide"), HERE[1])],
        HERE[2:],
        {},
    ),
}


@pytest.mark.parametrize(("running", "idle", "expected"), CASES.values(), ids=CASES)
def test_idle_slots_are_lent(running, idle, expected):
    assert lent_cores(running, idle, WHERE) == expected


def test_jobs_on_a_gpu_borrow_nothing():
    where = Cluster((Node("here", 4, (GPU, *HERE)),))
    assert lent_cores([(SHORT, GPU)], HERE, where) == {}
    assert lent_cores([(SHORT, HERE[0])], [GPU], where) == {}
