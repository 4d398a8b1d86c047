"""What an epoch of a plan takes, and what is said of it: all worked out by hand."""

import dataclasses

import pytest

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.dry_run.result import DryRunPlan, planned
from shoal.planner.grouping import START_SECONDS, Grouping
from shoal.planner.packing.base import NoPacking
from shoal.planner.packing.cost import Cost

DEVICE = Device("cpu:0", "cpu/1", memory=4_200_000_000)


def profile(step=0.01, fused=None, steps=10, fetch=0.0, sharing="resident", base=100, member=10):
    """Steps of `step` seconds alone, of `fused` for two, no validation."""
    sizes = {1: step} if fused is None else {1: step, 2: fused}
    return Profile(sizes, steps, 0, base, member, 1.0, 1.0, fetch_seconds=fetch, sharing=sharing)


def array(numbers, known, structure="mlp", data="data"):
    """An array of the trials of these numbers."""
    trials = [Trial(number, {"lr": 0.1 * (1 + number)}, seed=number, data_seed=0) for number in numbers]
    return Array(FusionKey(structure, data, 32), tuple(Member(trial, 0, 1) for trial in trials), known)


def plan(*jobs, relative_times=None):
    profiles = {array.key: array.profile for arrays in jobs for array in arrays}
    grouping = Grouping(Cost(), lambda kind: relative_times or {})
    return DryRunPlan(DEVICE, lambda key, kind: profiles[key], grouping, list(jobs))


SLOW = profile(0.001, fetch=0.05, sharing="window")
KEPT = profile(0.01, fetch=0.05, sharing="kept")


@pytest.mark.parametrize(
    ("jobs", "shared", "expected"),
    [
        pytest.param([(array([0], profile()),)], False, 0.1, id="a step at a time"),
        pytest.param([(array([0, 1], profile(0.01, 0.012)),)], True, 0.12, id="fused"),
        pytest.param([(array([0], SLOW),), (array([1], SLOW, "cnn"),)], True, 1.02, id="samples of each job"),
        pytest.param([(array([0], SLOW), array([1], SLOW, "cnn"))], True, 0.52, id="of a pack once"),
        pytest.param([(array([0], KEPT),), (array([1], KEPT, "cnn"),)], True, 0.7, id="kept for all jobs"),
        pytest.param([(array([0], KEPT),), (array([1], KEPT, "cnn"),)], False, 1.2, id="kept where nothing is shared"),
        pytest.param([(array([0], KEPT),), (array([1], KEPT, "mlp", "b"),)], True, 1.2, id="kept of other data"),
    ],
)
def test_an_epoch_of_a_plan_is_that_of_its_jobs(jobs, shared, expected):
    assert plan(*jobs).seconds(shared) == pytest.approx(expected + len(jobs) * START_SECONDS)


def test_steps_of_a_pack_go_at_the_pace_that_was_measured():
    jobs = [(array([0], profile(0.1), "a"), array([1], profile(0.1), "b"))]
    found = plan(*jobs, relative_times={("a x 32", "b x 32"): 0.6})
    assert found.seconds(True) == pytest.approx(0.6 * 2 + START_SECONDS)


LARGE = profile(0.1, base=10, member=3_000_000_000)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        pytest.param([(array([0], profile()),)], "by itself: no other array has its data", id="nobody"),
        pytest.param(
            [(array([0, 1], profile(0.021, 0.02)),)], "2 trials fused; by itself: no other array has its data", id="all"
        ),
        pytest.param(
            [(array([0], profile()),), (array([1], profile(), data="other"),)],
            "by itself: no other array has its data",
            id="other data",
        ),
        pytest.param(
            [(array([0], profile(1.0)),), (array([1], profile(1.0), "cnn"),)],
            "by itself: sharing would save up to 0 %, at least 5 % is asked",
            id="saves too little",
        ),
        pytest.param(
            [(array([0], LARGE),), (array([1], LARGE, "cnn"),)],
            "by itself: needs 6.0 GB with another array, cpu:0 has 4.2 GB",
            id="does not fit with another",
        ),
        pytest.param(
            [(array([0], profile(1.0)),), (array([1], profile(1.0)),)],
            "not fused: together no faster; by itself: sharing would save up to 0 %, at least 5 % is asked",
            id="fusing is slower",
        ),
        pytest.param(
            [(array([0], LARGE),), (array([1], LARGE),)],
            "not fused: two take 6.0 GB, cpu:0 has 4.2 GB; "
            "by itself: needs 6.0 GB with another array, cpu:0 has 4.2 GB",
            id="two are too large",
        ),
    ],
)
def test_an_array_by_itself_has_a_reason(jobs, expected):
    (first, *_) = planned(plan(*jobs), Cost(), True, {})
    assert first.decision == expected


def test_a_packed_array_says_with_whom_and_what_that_saves():
    jobs = [(array([3], profile(), data="other"),), (array([0, 1], SLOW), array([2], SLOW, "cnn"))]
    single, fused, lone = planned(plan(*jobs), Cost(), True, {})
    # 0.02 + 0.01 + 0.5 and a start against 0.03 + 2 * 0.5 and two
    share = f"{100 * (0.5 + START_SECONDS) / (1.03 + 2 * START_SECONDS):.0f}"
    assert fused.decision == f"2 trials fused; packed with 3: saves {share} %"
    assert lone.decision == f"packed with 2: saves {share} %"
    assert [(each.job, each.packed_with) for each in (single, fused, lone)] == [(1, ()), (2, (2,)), (2, (1,))]
    assert fused.seconds == lone.seconds == pytest.approx(0.53 + START_SECONDS)
    assert (fused.separate_seconds, lone.separate_seconds) == pytest.approx(
        (2 * (0.51 + START_SECONDS), 0.51 + START_SECONDS)
    )


def test_other_reasons_are_those_of_the_study_and_of_what_went_wrong():
    jobs = [(array([0], profile()),), (array([1], profile()),)]
    (unfused, _) = planned(plan(*jobs), NoPacking(), False, {})
    assert unfused.decision.startswith("not fused: fuse=False; by itself: sharing would save up to ")
    assert unfused.decision.endswith(", NoPacking() decides")
    others = [(array([0], SLOW),), (array([1], SLOW, "cnn"),)]
    (_, wrong) = planned(plan(*others), Cost(), True, {"RuntimeError: no": ((0,), (1,))})
    assert wrong.decision == "by itself: measuring it with others failed: RuntimeError: no"


def test_figures_of_an_array_are_those_of_its_profile():
    (found,) = planned(plan((array([0, 1], profile(0.01, 0.012, fetch=0.03, sharing="kept")),)), Cost(), True, {})
    assert (found.step_alone, found.step_fused) == (0.01, 0.006)
    assert found.gain == pytest.approx(1 / 0.6)
    assert (found.memory_alone, found.memory) == (110, 120)
    assert found.preprocessing == 0.75
    assert dataclasses.replace(found, array=found.array).members == 2
