"""The clock of a job divides its time among nested activities."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from shoal.core.activity import Activity
from shoal.host.activity_clock import ActivityClock, during


class HandSet:
    """A clock that somebody else sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand_set() -> HandSet:
    return HandSet()


@pytest.fixture
def passes(hand_set: HandSet) -> Callable[[float], None]:
    def add(seconds: float) -> None:
        hand_set.now += seconds

    return add


def test_time_goes_to_the_innermost_activity(hand_set: HandSet, passes: Callable[[float], None]) -> None:
    clock = ActivityClock(Activity.STEPS, hand_set)
    with clock.running():
        passes(1)
        with during(Activity.VALIDATION):
            passes(2)
            with during(Activity.AUTOTUNE):
                passes(4)
            passes(8)
        passes(16)
    assert clock.seconds == {Activity.STEPS: 17, Activity.VALIDATION: 10, Activity.AUTOTUNE: 4}


def test_time_between_two_turns_of_a_job_goes_to_nothing(hand_set: HandSet, passes: Callable[[float], None]) -> None:
    one, two = ActivityClock(Activity.STEPS, hand_set), ActivityClock(Activity.PROFILE, hand_set)
    for clock, seconds in ((one, 1), (two, 2), (one, 4)):
        with clock.running():
            passes(seconds)
        passes(100)
    assert (one.seconds, two.seconds) == ({Activity.STEPS: 5}, {Activity.PROFILE: 2})


def test_an_activity_ends_with_an_error(hand_set: HandSet, passes: Callable[[float], None]) -> None:
    clock = ActivityClock(Activity.STEPS, hand_set)
    with clock.running():
        with suppress(ValueError), during(Activity.BUILD):
            passes(1)
            int("no number")
        passes(2)
    assert clock.seconds == {Activity.BUILD: 1, Activity.STEPS: 2}


def test_without_a_job_an_activity_is_not_counted(hand_set: HandSet, passes: Callable[[float], None]) -> None:
    clock = ActivityClock(Activity.STEPS, hand_set)
    with during(Activity.COMPILE):
        passes(1)
    assert clock.seconds == {}
