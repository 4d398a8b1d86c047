"""Profiles that were wrong, made right."""

from dataclasses import replace

import pytest

from shoal.core.demand import Profile
from shoal.cost.correct import after_running_out, with_memory, with_seconds
from shoal.cost.estimate import memory

WRONG = Profile({1: 0.01, 4: 0.02}, 10, 1, base_memory=100, member_memory=10, compute=0.5, cores=1.0)


@pytest.mark.parametrize(
    ("members", "device", "peak", "expected"),
    [
        pytest.param(4, 1000, 0, 15, id="half as much again"),
        pytest.param(4, 1000, 140, 15, id="what was seen is less"),
        pytest.param(4, 1000, 300, 50, id="what was seen is more"),
        pytest.param(4, 112, 0, 12, id="one member still fits"),
        pytest.param(4, 105, 0, 10, id="never less than before"),
    ],
)
def test_after_running_out_more_is_expected_of_a_member(members: int, device: int, peak: int, expected: int) -> None:
    assert after_running_out(WRONG, members, device, peak) == replace(WRONG, member_memory=expected)


def test_running_out_again_and_again_is_more_each_time_also_from_nothing() -> None:
    profile, seen = replace(WRONG, member_memory=0), []
    for _ in range(4):
        profile = after_running_out(profile, 4, 10_000)
        seen.append(profile.member_memory)
    assert seen == [1, 2, 3, 5]


@pytest.mark.parametrize(("peak", "raised"), [(140, False), (175, False), (176, True), (280, True), (90, False)])
def test_memory_that_is_far_above_the_profile_raises_it(peak: int, raised: bool) -> None:
    found = with_memory([(WRONG, 4)], peak, 10_000)
    assert (found is not None) == raised
    if found is not None:
        assert peak <= memory(found[0], 4) <= peak + 5
        assert found[0].step_seconds == WRONG.step_seconds


def test_arrays_in_one_process_are_raised_together_and_not_above_the_device() -> None:
    other = replace(WRONG, base_memory=50, member_memory=30)
    one, two = with_memory([(WRONG, 2), (other, 1)], 300, 10_000) or ()
    assert (one.base_memory, one.member_memory, two.base_memory, two.member_memory) == (200, 20, 100, 60)
    (limited,) = with_memory([(WRONG, 4)], 10_000, 280) or ()
    assert memory(limited, 4) == 280


@pytest.mark.parametrize(("measured", "factor"), [(1.0, None), (1.2, None), (0.85, None), (3.0, 3.0), (0.25, 0.25)])
def test_steps_that_took_another_time_scale_all_sizes(measured: float, factor: float | None) -> None:
    found = with_seconds(WRONG, 1.0, measured)
    expected = factor and replace(WRONG, step_seconds={size: s * factor for size, s in WRONG.step_seconds.items()})
    assert found == expected
