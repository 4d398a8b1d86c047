"""Profiles whose times are wrong, found by the epochs of a job."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shoal.core.demand import Profile
from shoal.core.event import Reported
from shoal.core.trial import Report
from shoal.study.drift import ProfileDrift

PROFILE = Profile({1: 0.1, 2: 0.2}, 10, 0, base_memory=0, member_memory=1, compute=1.0, cores=1.0)
"""An epoch of two members takes two seconds."""

COMPILED = replace(PROFILE, compiled_gain={2: 3.0})


def epoch(number: int, seconds: float, trials: Sequence[int] = (0, 1)) -> Reported:
    return Reported("job", tuple(Report(trial, number, {}, seconds / len(trials)) for trial in trials))


@pytest.mark.parametrize(
    ("profile", "seconds", "factor"),
    [
        pytest.param(PROFILE, [6, 6, 6], 3.0, id="three times as long"),
        pytest.param(PROFILE, [6, 6], None, id="only one epoch that counts"),
        pytest.param(PROFILE, [60, 2, 2, 2], None, id="the first one does not count"),
        pytest.param(PROFILE, [2, 9, 2], None, id="disturbed once"),
        pytest.param(PROFILE, [1, 1, 1], 0.5, id="half as long"),
        pytest.param(COMPILED, [1, 1, 1], None, id="compiled"),
        pytest.param(COMPILED, [6, 6, 6], 3.0, id="slow although compiled"),
        pytest.param(PROFILE, [0, 0, 0], None, id="no time at all"),
    ],
)
def test_epochs_alike_show_whether_the_profile_is_right(
    profile: Profile, seconds: Sequence[float], factor: float | None
) -> None:
    tempo = ProfileDrift()
    (*_, last) = [tempo.epoch(epoch(number, took), profile) for number, took in enumerate(seconds, start=1)]
    if factor is None:
        assert last is None
    else:
        assert last is not None
        assert last.step_seconds == pytest.approx({1: 0.1 * factor, 2: 0.2 * factor})


def test_what_changes_in_between_is_no_measure() -> None:
    tempo = ProfileDrift()
    for number in range(1, 9):
        assert tempo.epoch(epoch(number, 6.0, (0, 1) if number % 3 else (0,)), PROFILE) is None
        if number == 5:
            tempo.interrupt("job")
