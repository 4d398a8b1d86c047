"""What epochs of jobs alone and beside others on a device measure, case by case."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from planner_samples import A as KEY
from planner_samples import B as OTHER
from planner_samples import member, profile

from shoal.core.array import Array, FusionKey
from shoal.core.demand import Demand, Profile
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.plan.cost.costs import EpochTimes
from shoal.plan.shares import CrowdingMeter

PROFILE = profile({1: 0.1, 2: 0.15}, compute=0.5)
GPU, OTHER_GPU = (Device(name, "H200", 2**30) for name in ("cuda:0", "cuda:1"))
OTHER_KIND = Device("cuda:2", "A100", 2**30)


def train(name: str, *, members: int = 1, known: Profile | None = PROFILE, key: FusionKey = KEY) -> Job:
    return Job(name, (Array(key, tuple(map(member, range(members))), known),))


def reported(job: str, seconds: float, members: int = 1) -> Reported:
    """An epoch that took so long."""
    return Reported(job, tuple(Report(number, 1, {}, seconds / members) for number in range(members)))


Step = Job | str | tuple[str, float] | tuple[str, float, int]


def play(meter: CrowdingMeter, story: Iterable[Step], device: Device = GPU) -> list[EpochTimes | None]:
    """What epochs measure: a job starts on the device, one ends, or an epoch of a job took a number of seconds.

    The third of an epoch is the number of its members.
    """
    seen = []
    for step in story:
        if isinstance(step, Job):
            meter.begin(step, device)
        elif isinstance(step, str):
            meter.end(step)
        else:
            seen.append(meter.epoch(reported(*step)))
    return seen


FIRST, SECOND, PAIR = train("a"), train("b"), train("pair", members=2)
ONE = (FIRST, ("a", 9.0), ("a", 1.0))  # the first epoch, in which it is started, and one that counts
BOTH = (*ONE, SECOND, ("b", 9.0), ("a", 9.0))
SHARE = replace(SECOND, demand=Demand(0.25, 10, 1.0, 1.0))
"""It was given a quarter."""
EVEN = replace(train("b", known=replace(PROFILE, compute=0.2)), demand=Demand(0.5, 10, 1.0, 1.0))
"""It was given half."""
PACK = Job("pack", (*train("x").arrays, *train("y", key=OTHER).arrays))
STORIES = {
    "alone": ((*ONE, ("a", 1.2)), [None, None, EpochTimes(1, 1, 1.0)]),
    "two, by the shortest of two epochs": (
        (*BOTH, ("a", 1.5), ("b", 2.0), ("a", 1.4), ("b", 2.5)),
        [None] * 6 + [EpochTimes(2, 1, 1.4, 1.0), EpochTimes(2, 1, 2.0, 1.0)],
    ),
    "never alone": (
        (FIRST, SECOND, ("a", 9.0), ("b", 9.0), ("a", 9.0), ("a", 1.5), ("a", 1.6)),
        [None] * 4 + [EpochTimes(2, 1, 1.5)],
    ),
    "beside others, and alone again": (
        (*BOTH, ("a", 1.5), "b", ("a", 1.5), ("a", 1.1), ("a", 0.9)),
        [None] * 7 + [EpochTimes(1, 1, 0.9)],
    ),
    "begun again": ((*ONE, FIRST, ("a", 9.0), ("a", 2.0)), [None] * 4),
    "a share that is not its part": ((*ONE, SHARE, *([("b", 4.0)] * 4)), [None] * 6),
    "a share that is": ((*ONE, EVEN, ("b", 9.0), ("b", 4.0), ("b", 4.0)), [None] * 4 + [EpochTimes(2, 1, 4.0, 1.0)]),
    "alone with a share": (
        (SHARE, ("b", 9.0), ("b", 4.0), ("b", 4.0), FIRST, *([("a", 2.0)] * 3)), [None] * 5 + [EpochTimes(2, 1, 2.0)]
    ),
    "more members": ((*ONE, PAIR, *([("pair", 3.0, 2)] * 3)), [None] * 4 + [EpochTimes(2, 2, 3.0)]),
    "fewer members than before": (
        (PAIR, *([("pair", 3.0, 2)] * 2), *([("pair", 2.0)] * 3)), [None] * 4 + [EpochTimes(1, 1, 2.0)]
    ),
    "a pack, and one beside it": (
        (PACK, ("pack", 9.0), ("pack", 1.0), FIRST, *([("a", 2.0)] * 3), ("pack", 1.0)),
        [None] * 4 + [EpochTimes(2, 1, 2.0), None],
    ),
    "a pack alone": ((PACK, *([("pack", 1.0)] * 4)), [None] * 4),
    "epochs that took no time": ((FIRST, *([("a", 0.0)] * 4)), [None] * 4),
    "without a profile": ((train("a", known=None), *([("a", 2.0)] * 3)), [None, None, EpochTimes(1, 1, 2.0)]),
    "a job that is on no device": ((("z", 1.0), ("z", 1.0), "z"), [None, None]),
}  # fmt: skip


@pytest.mark.parametrize(("story", "expected"), STORIES.values(), ids=STORIES)
def test_what_epochs_measure_alone_and_beside_others(
    story: tuple[Step, ...], expected: list[EpochTimes | None]
) -> None:
    assert play(CrowdingMeter(), story) == expected


def test_epochs_alone_are_those_of_the_kind_of_device() -> None:
    meter = CrowdingMeter()
    play(meter, (*ONE, "a"))
    assert play(meter, (FIRST, SECOND, *([("a", 3.0)] * 3)), OTHER_KIND)[-1] == EpochTimes(2, 1, 3.0)
    assert play(meter, (FIRST, SECOND, *([("a", 3.0)] * 3)), OTHER_GPU)[-1] == EpochTimes(2, 1, 3.0, 1.0)


def test_a_job_that_becomes_a_pack_still_crowds_the_device() -> None:
    meter = CrowdingMeter()
    seen = play(meter, (FIRST, SECOND, *([("a", 1.5)] * 3)))
    meter.change(replace(PACK, id="b"))
    for number in range(3):
        seen.append(meter.epoch(reported("a", 3.0)))
        turn = Reported("b", (Report(number % 2, 1, {}, 1.0),))
        assert meter.epoch(turn) is None, "its arrays report in turns"
    assert seen == [None, None, EpochTimes(2, 1, 1.5), None, None, EpochTimes(2, 1, 3.0)]


def test_members_at_different_epochs_are_not_a_measure() -> None:
    meter = CrowdingMeter()
    play(meter, (PAIR, SECOND))
    mixed = Reported("pair", (Report(0, 1, {}, 1.0), Report(1, 2, {}, 1.0)))
    assert [meter.epoch(mixed) for _ in range(4)] == [None] * 4
