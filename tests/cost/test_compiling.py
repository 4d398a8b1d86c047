"""When compiling is worth its time."""

import pytest

from shoal.core.demand import Profile
from shoal.cost.estimate import EXPECTED_COMPILE_SECONDS, EXPECTED_GAIN, compiling_pays

NEVER = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0)
GAINED = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={16: 2.0}, compile_seconds=6.0)
LOST = Profile({1: 1.0, 16: 4.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={16: 0.9}, compile_seconds=6.0)
ENOUGH = EXPECTED_COMPILE_SECONDS / (1 - 1 / EXPECTED_GAIN)

CASES = {
    "never compiled, a short budget": (NEVER, 1.0, 0.9 * ENOUGH, False),
    "never compiled, a long budget": (NEVER, 1.0, 1.1 * ENOUGH, True),
    "nothing known at all": (None, 1.0, 1.1 * ENOUGH, True),
    "twice as fast before, two steps of 7 s save 7 s and cost 6 s": (GAINED, 7.0, 2, True),
    "twice as fast before, two steps of 5 s save 5 s and cost 6 s": (GAINED, 5.0, 2, False),
    "slower before: never again": (LOST, 1.0, 10**9, False),
    "no step left": (GAINED, 1.0, 0, False),
}


@pytest.mark.parametrize(("profile", "eager", "steps", "expected"), CASES.values(), ids=CASES)
def test_compiling_pays(profile: Profile | None, eager: float, steps: float, expected: bool) -> None:
    assert compiling_pays(profile, 16, eager, int(steps)) is expected
