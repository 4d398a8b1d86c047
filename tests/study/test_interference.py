"""Observations that the tuner gets of jobs on a shared device, case by case."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from planner_samples import A as KEY
from planner_samples import B as OTHER
from planner_samples import member, profile

from shoal.core.array import Array, FusionKey
from shoal.core.demand import Demand, Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import Reported
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.cost.store import EpochTimes
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.study.interference import InterferenceTracker

PROFILE = profile({1: 0.1, 2: 0.15}, compute=0.5)
GPUS = Cluster((Node("here", 8, tuple(Device(f"cuda:{i}", "H200", 2**30) for i in range(2))),))


class Spy(OversubscriptionTuner):
    """Keeps what it is told, and its ratio unless it tunes."""

    def __init__(self, tuning: bool = False, known: float = 1.0) -> None:
        super().__init__(kinds=["H200"], known={"H200": known})
        self.tuning = tuning
        self.told: list[list[tuple[float, float]]] = []

    def observe(self, kind: str, jobs: Iterable[tuple[float, float]]) -> None:
        self.told.append(list(jobs))
        if self.tuning:
            super().observe(kind, self.told[-1])


def train(name: str, *, members: int = 1, known: Profile | None = PROFILE, key: FusionKey = KEY) -> Job:
    return Job(name, (Array(key, tuple(map(member, range(members))), known),))


def reported(job: str, seconds: float, members: int = 1) -> Reported:
    """An epoch that took so long."""
    return Reported(job, tuple(Report(number, 1, {}, seconds / members) for number in range(members)))


Step = Job | str | tuple[str, float] | tuple[str, float, int]


def told(*story: Step, tuner: Spy | None = None, waiting: bool = True) -> list[list[tuple[float, float]]]:
    """The observations that a tuner gets of one device: a job starts or ends, or an epoch took a number of seconds.

    The third of an epoch is the number of its members.
    """
    tuner = tuner or Spy()
    play(InterferenceTracker(tuner), story, waiting)
    return tuner.told


def play(speeds: InterferenceTracker, story: Iterable[Step], waiting: bool = True) -> list[EpochTimes | None]:
    """The measured epoch times of a scenario; see `told`."""
    seen = []
    for step in story:
        if isinstance(step, Job):
            speeds.begin(step, GPUS.device("cuda:0"))
        elif isinstance(step, str):
            speeds.end(step)
        else:
            seen.append(speeds.epoch(reported(*step), lambda: waiting))
    return seen


FIRST, SECOND, PAIR = train("a"), train("b"), train("pair", members=2)
ONE = (FIRST, ("a", 9.0), ("a", 1.0))  # the first epoch, in which it is started, and one that counts
BOTH = (*ONE, SECOND, ("b", 9.0), ("a", 1.5), ("a", 1.5), ("b", 2.0))
STORIES = {
    "the first epoch does not count": ((FIRST, ("a", 9.0)), []),
    "alone": (ONE, [[(0.5, 1.0)]]),
    "the least seconds alone are the measure": ((*ONE, ("a", 1.25)), [[(0.5, 1.0)], [(0.5, 0.8)]]),
    "two, once each has had an epoch that counts": (BOTH[:-1], [[(0.5, 1.0)]]),
    "two": (BOTH, [[(0.5, 1.0)], [(0.5, 1 / 1.5), (0.5, 0.5)]]),
    "the newest epoch counts": (
        (*BOTH[:-1], ("a", 2.0), ("b", 1.0)), [[(0.5, 1.0)], [(0.5, 0.5), (0.5, 1.0)]]
    ),
    "an epoch that began in other company": ((*ONE, SECOND, ("b", 9.0), ("a", 1.0), ("b", 2.0)), [[(0.5, 1.0)]]),
    "somebody has left": ((*BOTH[:-1], "b", ("a", 1.0), ("a", 1.0)), [[(0.5, 1.0)], [(0.5, 1.0)]]),
    "of one nothing is known": (
        (FIRST, train("c", known=None), *([("a", 1.0), ("c", 1.0)] * 4)), []
    ),
    "as many members as there were": (
        (PAIR, ("pair", 9.0, 2), ("pair", 3.0, 2), ("pair", 9.0, 1), ("pair", 2.0, 1), ("pair", 2.5, 1)),
        [[(0.5, 1.0)], [(0.5, 1.0)], [(0.5, 0.8)]],
    ),
    "reports that were left over from before": (
        (PAIR, ("pair", 0.1, 1), ("pair", 9.0, 2), ("pair", 3.0, 2)), [[(0.5, 1.0)]]
    ),
    "a job that is on no device here": ((("z", 1.0), ("z", 1.0), "z"), []),
    "epochs that took no time": ((*ONE, ("a", 0.0), ("a", -1.0), ("a", 2.0)), [[(0.5, 1.0)], [(0.5, 0.5)]]),
    "one that was begun again": ((*ONE, FIRST, ("a", 9.0)), [[(0.5, 1.0)]]),
}  # fmt: skip


@pytest.mark.parametrize(("story", "expected"), STORIES.values(), ids=STORIES)
def test_what_a_tuner_is_told(story, expected):
    assert told(*story) == [[pytest.approx(pair) for pair in pairs] for pairs in expected]


def test_nothing_while_no_trial_waits():
    assert told(*BOTH, waiting=False) == []


def test_nothing_of_a_device_that_holds_more_than_the_ratio_allows():
    """A third job that came when the ratio was higher; of it, what it takes alone is known."""
    third = train("c")
    crowd = (third, *([("a", 1.5), ("b", 1.5), ("c", 1.5)] * 3))
    assert told(*BOTH, *crowd) == told(*BOTH)


def test_nothing_of_a_key_that_was_only_seen_where_too_much_was_promised(monkeypatch):
    monkeypatch.setattr("shoal.schedule.oversubscription.WINDOW", 2)
    tuner = Spy(tuning=True)
    for _ in range(2):
        tuner.observe("H200", [(1.0, 1.0)])
    tuner.told.clear()
    assert tuner.ratio("H200") == 1.5
    other = train("c", key=OTHER)
    assert told(*ONE, SECOND, other, *([("a", 1.5), ("b", 1.5), ("c", 1.5)] * 3), tuner=tuner) == [[(0.5, 1.0)]]
    known = (other, ("c", 9.0), ("c", 1.0), "c")
    assert len(told(*known, *ONE, SECOND, other, *([("a", 1.5), ("b", 1.5), ("c", 1.5)] * 3), tuner=tuner)) > 2


EARLIER = replace(PROFILE, epoch_seconds={1: 1.0, 2: 3.0})
"""Of a structure whose epochs alone are in the history, for one member and for two."""
A1, A2, A3 = (train(name, known=EARLIER) for name in "abc")
THREE = (A1, A2, A3, ("a", 9.0), ("b", 9.0), ("c", 9.0))
KNOWN_STORIES = {
    "three on a device, which a ratio of 1 would not allow": (
        (*THREE, *([("a", 2.0), ("b", 4.0), ("c", 1.0)] * 2)), 3.0, [[(0.5, 0.5), (0.5, 0.25), (0.5, 1.0)]]
    ),
    "an epoch that is hardly shorter than in the history": (
        (*THREE, *([("a", 2.0), ("b", 2.0), ("c", 0.95)] * 2)), 3.0, [[(0.5, 0.5), (0.5, 0.5), (0.5, 1 / 0.95)]]
    ),
    "an epoch that is much shorter than in the history": (
        (*THREE, *([("a", 2.0), ("b", 2.0), ("c", 0.8)] * 3)), 1.0, []
    ),
    "an epoch of this study comes before the history": (
        (A1, ("a", 9.0), ("a", 2.0), ("a", 4.0)), 3.0, [[(0.5, 1.0)], [(0.5, 0.5)]]
    ),
    "a number of members that the history lacks": (
        (train("a", members=3, known=EARLIER), ("a", 9.0, 3)), 1.0, []
    ),
    "a structure that the history lacks": ((train("a"), ("a", 9.0)), 1.0, []),
    "a structure without a profile": ((train("a", known=None), ("a", 9.0)), 1.0, []),
    "a job of several arrays": (
        (Job("a", (*A1.arrays, *train("y", key=OTHER, known=EARLIER).arrays)), ("a", 9.0)), 1.0, []
    ),
    "a share of the device": ((replace(A1, demand=Demand(0.25, 10, 1.0, 1.0)), ("a", 9.0)), 1.0, []),
    "one that is unknown after others that were observed": (
        (A1, ("a", 9.0), ("a", 1.0), train("b", key=OTHER), ("b", 9.0)), 1.0, [[(0.5, 1.0)]]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("story", "ratio", "expected"), KNOWN_STORIES.values(), ids=KNOWN_STORIES)
def test_a_ratio_of_earlier_studies_stays_while_speeds_are_known(story, ratio, expected):
    tuner = Spy(tuning=True, known=3.0)
    assert told(*story, tuner=tuner) == [[pytest.approx(pair) for pair in pairs] for pairs in expected]
    assert tuner.ratio("H200") == ratio


def test_epochs_alone_are_those_without_oversubscription():
    speeds = InterferenceTracker(Spy())
    play(speeds, BOTH)
    assert [speeds.epoch_alone(job) for job in ("a", "b", "c")] == [(1, 1.0), (1, 1.0), None]
    play(speeds, (PAIR, *([("pair", 9.0, 2)] * 3)))
    assert speeds.epoch_alone("pair") is None, "it was never seen but beside others, on an oversubscribed device"
    speeds.change(replace(PACK, id="b"))
    assert speeds.epoch_alone("b") is None, "its arrays take turns"


def test_a_new_ratio_begins_anew_on_all_devices_of_the_kind(monkeypatch):
    monkeypatch.setattr("shoal.schedule.oversubscription.WINDOW", 2)
    tuner = Spy(tuning=True)
    speeds = InterferenceTracker(tuner)
    for name, job in (("cuda:0", FIRST), ("cuda:1", SECOND)):
        speeds.begin(job, GPUS.device(name))
        speeds.epoch(reported(job.id, 9.0), lambda: True)
    for _ in range(2):  # a window
        speeds.epoch(reported("a", 1.0), lambda: True)
    assert [device.oversubscription for _, device in speeds.cluster(GPUS)] == [1.5, 1.5]
    speeds.epoch(reported("b", 1.0), lambda: True)
    assert len(tuner.told) == 2
    speeds.epoch(reported("b", 1.0), lambda: True)
    assert len(tuner.told) == 3


SHARE = replace(SECOND, demand=Demand(0.25, 10, 1.0, 1.0))
"""It was given a quarter."""
EVEN = replace(train("b", known=replace(PROFILE, compute=0.2)), demand=Demand(0.5, 10, 1.0, 1.0))
"""It was given half."""
PACK = Job("pack", (*train("x").arrays, *train("y", key=OTHER).arrays))
COMPANY = (*ONE, SECOND, ("b", 9.0), ("a", 9.0))
CROWDS = {
    "alone": ((*ONE, ("a", 1.2)), [None, None, EpochTimes(1, 1, 1.0)]),
    "two, by the shortest of two epochs": (
        (*COMPANY, ("a", 1.5), ("b", 2.0), ("a", 1.4), ("b", 2.5)),
        [None] * 6 + [EpochTimes(2, 1, 1.4, 1.0), EpochTimes(2, 1, 2.0, 1.0)],
    ),
    "never alone": (
        (FIRST, SECOND, ("a", 9.0), ("b", 9.0), ("a", 9.0), ("a", 1.5), ("a", 1.6)),
        [None] * 4 + [EpochTimes(2, 1, 1.5)],
    ),
    "in other company, and alone again": (
        (*COMPANY, ("a", 1.5), "b", ("a", 1.5), ("a", 1.1), ("a", 0.9)),
        [None] * 7 + [EpochTimes(1, 1, 0.9)],
    ),
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
}  # fmt: skip


@pytest.mark.parametrize(("story", "expected"), CROWDS.values(), ids=CROWDS)
def test_what_epochs_show_alone_and_in_company(story, expected):
    assert play(InterferenceTracker(Spy()), story) == expected


def test_a_job_that_becomes_a_pack_is_company_still():
    speeds = InterferenceTracker(Spy())
    for job in (FIRST, SECOND):
        speeds.begin(job, GPUS.device("cuda:0"))
    seen = [speeds.epoch(reported("a", 1.5), lambda: True) for _ in range(3)]
    speeds.change(replace(PACK, id="b"))
    for number in range(3):
        seen.append(speeds.epoch(reported("a", 3.0), lambda: True))
        turn = Reported("b", (Report(number % 2, 1, {}, 1.0),))
        assert speeds.epoch(turn, lambda: True) is None, "its arrays report in turns"
    assert seen == [None, None, EpochTimes(2, 1, 1.5), None, None, EpochTimes(2, 1, 3.0)]


def test_members_at_different_epochs_are_not_a_measure():
    speeds = InterferenceTracker(Spy())
    for job in (PAIR, SECOND):
        speeds.begin(job, GPUS.device("cuda:0"))
    mixed = Reported("pair", (Report(0, 1, {}, 1.0), Report(1, 2, {}, 1.0)))
    assert [speeds.epoch(mixed, lambda: True) for _ in range(4)] == [None] * 4


def test_a_share_says_nothing_of_a_ratio():
    assert told(*ONE, SHARE, ("b", 9.0), ("a", 1.5), ("a", 1.5), ("b", 2.0), ("b", 2.0)) == [[(0.5, 1.0)]]


def test_kinds_that_are_not_tuned_show_what_sharing_costs_too():
    speeds = InterferenceTracker(OversubscriptionTuner(kinds=()))
    speeds.begin(FIRST, GPUS.device("cuda:0"))
    nobody = [speeds.epoch(reported("a", 1.0), lambda: pytest.fail("nobody has to know")) for _ in range(3)]
    assert nobody == [None, None, EpochTimes(1, 1, 1.0)]
    speeds.begin(SECOND, GPUS.device("cuda:0"))
    both = [speeds.epoch(reported("a", 2.0), lambda: pytest.fail("nobody has to know")) for _ in range(3)]
    assert both == [None, None, EpochTimes(2, 1, 2.0, 1.0)]
    assert speeds.cluster(GPUS) is GPUS


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("pace", [0.25, 1.0, 4.0])
@pytest.mark.parametrize(("holds", "least", "most"), [(1.0, 1.0, 1.25), (2.0, 1.75, 2.5), (3.0, 2.5, 3.5)])
@pytest.mark.parametrize("before", [None, 1.0, 4.0, 0.25], ids="{} x the history".format)
@pytest.mark.parametrize("first", [1.0, 4.0])
def test_a_device_is_given_what_it_can_hold(first, before, holds, least, most, pace):
    """Jobs of half a device by their counters, on a device that runs `holds` / 0.5 of them at full speed.

    The ratio that is in force most of the time counts, for others are tried now and then. An epoch takes `pace` seconds
    alone, whatever its profile says. The history has a ratio that may be too small or too large, and none or `before`
    times the epochs alone. Where these were shorter, as of a task that has become slower, all jobs seem to slow down.
    Then a ratio that is too small may stay, but none that is too large.
    """
    known = PROFILE if before is None else replace(PROFILE, epoch_seconds={1: pace * before})
    least = 1.0 if before == 0.25 else least
    tuner = OversubscriptionTuner(kinds=["H200"], known={"H200": first})
    speeds = InterferenceTracker(tuner)
    device = GPUS.device("cuda:0")
    begun = 0
    here: list[str] = []
    ratios: Counter[float] = Counter()
    for _ in range(600):
        capacity = speeds.cluster(GPUS).device("cuda:0").capacity
        while len(here) > 1 and 0.5 * len(here) > capacity:  # jobs are short: what is too much ends soon
            speeds.end(here.pop(0))
        while 0.5 * (len(here) + 1) <= capacity:
            here.append(f"job-{begun}")
            begun += 1
            speeds.begin(train(here[-1], known=known), device)
        seconds = pace * max(1.0, 0.5 * len(here) / holds)
        for name in here:
            speeds.epoch(reported(name, seconds), lambda: True)
        ratios[tuner.ratio("H200")] += 1
    assert least <= ratios.most_common(1)[0][0] <= most
