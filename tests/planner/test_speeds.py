"""What a tuner is told of jobs that share a device, case by case, and what comes of it."""

from collections import Counter
from collections.abc import Iterable

import pytest
from planner_samples import A as KEY
from planner_samples import member, profile

from shoal.cluster.device import Cluster, Device, Node
from shoal.cost.demand import Profile
from shoal.planner.event import Reported
from shoal.planner.job import Array, Job
from shoal.planner.speeds import Speeds
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.trial import Report

PROFILE = profile({1: 0.1, 2: 0.1}, compute=0.5)
"""An epoch takes a second, of one member or of two."""
GPUS = Cluster((Node("here", 8, tuple(Device(f"cuda:{i}", "H200", 2**30) for i in range(2))),))


class Spy(OversubscriptionTuner):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(kinds=["H200"], window=2)
        self.told: list[list[tuple[float, float]]] = []

    def observe(self, kind: str, jobs: Iterable[tuple[float, float]]) -> None:
        self.told.append(list(jobs))
        super().observe(kind, self.told[-1])


def train(name: str, *, members: int = 1, known: Profile | None = PROFILE) -> Job:
    return Job(name, (Array(KEY, tuple(map(member, range(members))), known),))


def reported(job: str, seconds: float, members: int = 1) -> Reported:
    """An epoch that took so long."""
    return Reported(job, tuple(Report(number, 1, {}, seconds / members) for number in range(members)))


def told(
    *story: tuple[float, Job | str, float], waiting: bool = True, members: int = 1
) -> list[list[tuple[float, float]]]:
    """What a tuner is told of one device: (now, a job that begins, 0), (now, name, seconds of the epoch that ended) or
    (now, name, 0) for one that ends."""
    tuner = Spy()
    speeds = Speeds(tuner)
    for now, who, seconds in story:
        if isinstance(who, Job):
            speeds.begin(who, GPUS.device("cuda:0"), now)
        elif seconds:
            speeds.epoch(reported(who, seconds, members), now, lambda: waiting)
        else:
            speeds.end(who, now)
    return tuner.told


FIRST, SECOND = train("a"), train("b")
BOTH = (
    (0.0, FIRST, 0.0),
    (0.0, SECOND, 0.0),
    (4.0, "a", 2.0),
    (5.0, "b", 2.0),
)  # both have been through their first epoch
STORIES = {
    "the first epoch does not count": (((0.0, FIRST, 0.0), (4.0, "a", 1.0)), []),
    "alone": (((0.0, FIRST, 0.0), (4.0, "a", 1.0), (5.25, "a", 1.25)), [[(0.5, 0.8)]]),
    "two, once each has had an epoch": ((*BOTH, (7.0, "a", 2.0)), []),
    "two": ((*BOTH, (7.0, "a", 2.0), (7.0, "b", 1.25)), [[(0.5, 0.5), (0.5, 0.8)]]),
    "the newest epoch counts": ((*BOTH, (7.0, "a", 2.0), (8.0, "a", 1.0), (8.0, "b", 2.0)), [[(0.5, 1.0), (0.5, 0.5)]]),
    "an epoch that began in other company": ((*BOTH, (6.0, "a", 2.0), (7.0, "b", 2.0)), []),
    "somebody has left": ((*BOTH, (7.0, "a", 2.0), (7.5, "b", 0.0), (8.0, "a", 1.0), (8.5, "a", 1.0)), [[(0.5, 1.0)]]),
    "of one nothing is known": (
        ((0.0, FIRST, 0.0), (0.0, train("c", known=None), 0.0), (4.0, "a", 2.0), (5.0, "c", 2.0), (9.0, "a", 2.0),
         (9.0, "c", 2.0)), []
    ),
    "a job that is on no device here": (((4.0, "z", 1.0), (5.0, "z", 0.0)), []),
    "epochs that took no time": (((0.0, FIRST, 0.0), (4.0, "a", 1.0), (5.0, "a", 0.0)), []),
}  # fmt: skip


@pytest.mark.parametrize(("story", "expected"), STORIES.values(), ids=STORIES)
def test_what_a_tuner_is_told(story, expected):
    assert told(*story) == [[pytest.approx(pair) for pair in pairs] for pairs in expected]


def test_nothing_while_no_trial_waits():
    assert told(*BOTH, (7.0, "a", 2.0), (7.0, "b", 1.25), waiting=False) == []


def test_an_array_counts_as_the_members_that_reported():
    story = ((0.0, train("pair", members=2), 0.0), (4.0, "pair", 1.0), (6.0, "pair", 2.0))
    assert told(*story, members=2) == [[pytest.approx((0.5, 0.5))]]


def test_a_new_ratio_begins_anew_on_all_devices_of_the_kind():
    tuner = Spy()
    speeds = Speeds(tuner)
    for name, job in (("cuda:0", FIRST), ("cuda:1", SECOND)):
        speeds.begin(job, GPUS.device(name), 0.0)
        speeds.epoch(reported(job.id, 1.0), 4.0, lambda: True)
    for now in (5.0, 6.0):  # a window of two
        speeds.epoch(reported("a", 1.0), now, lambda: True)
    assert [device.oversubscription for _, device in speeds.cluster(GPUS)] == [1.5, 1.5]
    speeds.epoch(reported("b", 1.5), 7.0, lambda: True)
    assert len(tuner.told) == 2
    speeds.epoch(reported("b", 1.0), 8.0, lambda: True)
    assert len(tuner.told) == 3


def test_other_kinds_are_left_alone():
    speeds = Speeds(OversubscriptionTuner(kinds=()))
    speeds.begin(FIRST, GPUS.device("cuda:0"), 0.0)
    for now in (4.0, 5.0, 6.0):
        speeds.epoch(reported("a", 1.0), now, lambda: pytest.fail("nobody has to know"))
    assert speeds.cluster(GPUS) == GPUS


@pytest.mark.parametrize(("holds", "least", "most"), [(1.0, 1.0, 1.25), (2.0, 1.75, 2.5), (3.0, 2.5, 3.5)])
def test_a_device_is_given_what_it_can_hold(holds, least, most):
    """Jobs of half a device by their counters, on a device that runs `holds` / 0.5 of them at full speed.

    The ratio that is in force most of the time counts, for others are tried now and then.
    """
    tuner = OversubscriptionTuner(kinds=["H200"])
    speeds = Speeds(tuner)
    device = GPUS.device("cuda:0")
    now, begun = 0.0, 0
    here: list[str] = []
    ratios: Counter[float] = Counter()
    for _ in range(400):
        capacity = speeds.cluster(GPUS).device("cuda:0").capacity
        while len(here) > 1 and 0.5 * len(here) > capacity:  # jobs are short: what is too much ends soon
            speeds.end(here.pop(0), now)
        while 0.5 * (len(here) + 1) <= capacity:
            here.append(f"job-{begun}")
            begun += 1
            speeds.begin(train(here[-1]), device, now)
        seconds = max(1.0, 0.5 * len(here) / holds)
        now += seconds
        for name in here:
            speeds.epoch(reported(name, seconds), now, lambda: True)
        ratios[tuner.ratio("H200")] += 1
    assert least <= ratios.most_common(1)[0][0] <= most
