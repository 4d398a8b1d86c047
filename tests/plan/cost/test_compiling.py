"""When recording or compiling a step is worth its time."""

from dataclasses import replace

import pytest

from shoal.core.demand import Profile
from shoal.plan.cost.capturing import (
    EXPECTED_COMPILE_SECONDS,
    EXPECTED_GAINS,
    EXPECTED_RELOAD_SHARE,
    EXPECTED_STEPS_TO_RECORD,
    MIN_SAVED_BY_CAPTURING,
    capturing_pays,
)

NEVER = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0)
GAINED = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={16: 2.0}, compile_seconds=3.0)
LOST = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={16: 0.9}, compile_seconds=6.0)
RELOADED = replace(GAINED, reload_seconds=0.5)
ENOUGH = MIN_SAVED_BY_CAPTURING * EXPECTED_COMPILE_SECONDS / (1 - 1 / EXPECTED_GAINS["compiled"])

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
    assert capturing_pays("compiled", profile, 16, eager, int(steps)) is expected


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
    assert capturing_pays("compiled", profile, 16, eager, steps, compiled_before=True) is expected


AHEAD = {
    "12 s of steps after the 3 s save 6 s, and tracing twice costs 1 s": (RELOADED, 1.0, 15, {}, True),
    "2 s of steps after the 3 s save 1 s": (RELOADED, 1.0, 5, {}, False),
    "the steps end before the code is there": (RELOADED, 1.0, 2, {}, False),
    "so they do, but later arrays have it": (RELOADED, 1.0, 2, {8: 1}, True),
    "slower before: never again": (LOST, 1.0, 10**9, {}, False),
}


@pytest.mark.parametrize(("profile", "eager", "steps", "later", "expected"), AHEAD.values(), ids=AHEAD)
def test_compiling_beside_the_steps_pays_earlier(
    profile: Profile, eager: float, steps: int, later: dict[int, float], expected: bool
) -> None:
    assert capturing_pays("compiled", profile, 16, eager, steps, later, ahead=True) is expected


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
    assert capturing_pays("compiled", RELOADED, 16, 1.0, 4, later) is expected


RECORDED = replace(NEVER, recorded_gain={16: 1.25}, record_seconds=3.0)
ENOUGH_STEPS = int(MIN_SAVED_BY_CAPTURING * EXPECTED_STEPS_TO_RECORD / (1 - 1 / EXPECTED_GAINS["captured"]))

RECORDS = {
    "nothing known, too few steps": (None, 1.0, ENOUGH_STEPS, False),
    "nothing known, enough steps": (NEVER, 1.0, ENOUGH_STEPS + 1, True),
    "their time does not matter where nothing is known": (NEVER, 1e-4, ENOUGH_STEPS + 1, True),
    "31 steps of 1 s save 6.2 s, and recording costs 3 s": (RECORDED, 1.0, 31, True),
    "29 steps save 5.8 s": (RECORDED, 1.0, 29, False),
    "never faster: not again": (replace(RECORDED, recorded_gain={16: 1.0}), 1.0, 10**9, False),
    "no step left": (RECORDED, 1.0, 0, False),
}


@pytest.mark.parametrize(("profile", "seconds", "steps", "expected"), RECORDS.values(), ids=RECORDS)
def test_recording_pays(profile: Profile | None, seconds: float, steps: int, expected: bool) -> None:
    """Each array records its steps anew, so later ones do not matter."""
    assert capturing_pays("captured", profile, 16, seconds, steps, {10**6: 100.0}) is expected
