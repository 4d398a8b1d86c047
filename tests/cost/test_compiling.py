"""When compiling is worth its time."""

from dataclasses import replace

import pytest

from shoal.core.demand import Profile
from shoal.cost.estimate import (
    EXPECTED_COMPILE_SECONDS,
    EXPECTED_GAIN,
    EXPECTED_RELOAD_SHARE,
    MIN_SAVED_BY_COMPILING,
    compiling_pays,
)

NEVER = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0)
GAINED = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={16: 2.0}, compile_seconds=3.0)
LOST = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={16: 0.9}, compile_seconds=6.0)
RELOADED = replace(GAINED, reload_seconds=0.5)
ENOUGH = MIN_SAVED_BY_COMPILING * EXPECTED_COMPILE_SECONDS / (1 - 1 / EXPECTED_GAIN)

CASES = {
    "never compiled, a short budget": (NEVER, 1.0, 0.9 * ENOUGH, False),
    "never compiled, a long budget": (NEVER, 1.0, 1.1 * ENOUGH, True),
    "nothing known at all": (None, 1.0, 1.1 * ENOUGH, True),
    "twice as fast before, two steps of 7 s save 7 s and cost 3 s": (GAINED, 7.0, 2, True),
    "twice as fast before, two steps of 5 s save 5 s and cost 3 s": (GAINED, 5.0, 2, False),
    "slower before: never again": (LOST, 1.0, 10**9, False),
    "no step left": (GAINED, 1.0, 0, False),
}


@pytest.mark.parametrize(("profile", "eager", "steps", "expected"), CASES.values(), ids=CASES)
def test_compiling_pays(profile: Profile | None, eager: float, steps: float, expected: bool) -> None:
    assert compiling_pays(profile, 16, eager, int(steps)) is expected


RELOADS = {
    "two steps of 2 s save 2 s, and reloading costs half a second": (RELOADED, 2.0, 2, True),
    "one of 1 s saves half a second": (RELOADED, 1.0, 1, False),
    "what reloading costs was not measured": (GAINED, 12.1 * EXPECTED_RELOAD_SHARE, 1, True),
    "which costs less than compiling": (GAINED, 11.9 * EXPECTED_RELOAD_SHARE, 1, False),
    "nothing known at all": (None, 1.1 * ENOUGH * EXPECTED_RELOAD_SHARE, 1, True),
    "slower before: not even reloaded": (LOST, 1.0, 10**9, False),
}


@pytest.mark.parametrize(("profile", "eager", "steps", "expected"), RELOADS.values(), ids=RELOADS)
def test_reloading_pays_earlier(profile: Profile | None, eager: float, steps: int, expected: bool) -> None:
    assert compiling_pays(profile, 16, eager, steps, compiled_before=True) is expected


LATER = {
    "none": ({}, False),
    "one that saves 3.5 s beyond reloading, with 2 s here too little": ({8: 1}, False),
    "two of these": ({8: 2}, True),
    "one that may come or not": ({8: 0.5}, False),
    "many that save less than reloading costs": ({1: 1000}, False),
}


@pytest.mark.parametrize(("later", "expected"), LATER.values(), ids=LATER)
def test_later_arrays_of_the_size_save_time_too(later: dict[int, float], expected: bool) -> None:
    """Compiling costs 3 s, so that it is to save 6 s; four steps of 1 s save 2 s, and reloading costs 0.5 s."""
    assert compiling_pays(RELOADED, 16, 1.0, 4, later) is expected
