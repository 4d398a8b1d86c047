"""What fusing has saved, by hand."""

import pytest
from report_samples import device

from shoal.core.demand import Profile
from shoal.core.job import Purpose
from shoal.cost.history import History, history_path
from shoal.journal.rows import JobRow
from shoal.reporting.fusion_gain import FusionGain, fusion_gain, measured_profiles
from shoal.reporting.overview import Bar, Usage

PROFILE = Profile({1: 1.0, 8: 2.0}, 10, 1, 0, 0, 1.0, 1.0, fused_gain={8: 4.0})
KEY = "net x 32"


def bar(begin, end, members, purpose=Purpose.TRAIN):
    trials = tuple(number for some in members.values() for number in some)
    job = JobRow("job-1", purpose, "cpu:0", trials, 0.0, 1.0, "finished", "", tuple(members), members=members)
    return Bar(job, begin, end)


EIGHT, ONE = tuple(range(8)), (8,)
CASES = [
    pytest.param([], FusionGain(0, 0, 0, 0, 0, 0), id="nothing trained"),
    pytest.param([bar(0, 9, {KEY: EIGHT}, Purpose.PROFILE)], FusionGain(0, 0, 0, 0, 0, 0), id="profiles do not train"),
    pytest.param([bar(0, 10, {KEY: ONE})], FusionGain(10, 0, 0, 0, 1, 0), id="a trial alone is not fused"),
    pytest.param([bar(5, 15, {KEY: EIGHT})], FusionGain(10, 10, 10, 30, 8, 0), id="four times as fast"),
    pytest.param([bar(0, 10, {"other x 32": EIGHT})], FusionGain(10, 10, 0, 0, 8, 0), id="never measured"),
    pytest.param(
        [bar(0, 18, {KEY: EIGHT, "other x 32": ONE})], FusionGain(18, 16, 16, 48, 9, 18), id="two arrays in a job"
    ),
]


@pytest.mark.parametrize(("bars", "expected"), CASES)
def test_seconds_are_those_of_the_measured_speed_up(bars, expected) -> None:
    usage = [Usage(device("cpu:0"), 1.0, 1.0, {}, 1, 0)]
    assert fusion_gain(bars, usage, {(KEY, "cpu/1"): [PROFILE]}) == expected


def test_profiles_are_those_of_the_job_history() -> None:
    history_path().unlink(missing_ok=True)
    assert measured_profiles() == {}
    History().put("net", "data", 32, "cpu/1", PROFILE)
    assert measured_profiles() == {(KEY, "cpu/1"): [PROFILE]}
