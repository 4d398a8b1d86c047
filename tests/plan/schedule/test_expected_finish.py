from math import exp, inf, log, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_samples import decide, running, suspended, turn, waiting

from shoal.core.errors import PolicyError
from shoal.plan.schedule import ExpectedFinish, Resume, Suspend
from shoal.plan.schedule.expected_finish import Trend, trend

TRENDS = {
    "one turn: from the first loss to its middle": (
        [turn(3.0, *[2.0] * 8, 1.0)],
        Trend(3.0, 2.0, 1.0 / log(10), 10.0, 5.0),
    ),
    "two turns: since the end of the first": (
        [turn(3.0, 1.0), turn(1.4, 1.0)],
        Trend(3.0, 1.2, 0.8 / log(2), 20.0, 5.0),
    ),
    "four turns: since the end of the second": (
        [turn(9.0), turn(3.0), turn(2.0), turn(1.0)],
        Trend(9.0, 1.0, 2.0 / log(2), 40.0, 5.0),
    ),
    "turns of unequal length": (
        [turn(3.0, seconds=10), turn(2.0, seconds=30), turn(1.0, seconds=40)],
        Trend(3.0, 1.0, 1.0 / log(2), 80.0, 5.0),
    ),
    "a loss that rises does not fall": ([turn(1.0), turn(2.0)], Trend(1.0, 2.0, 0.0, 20.0, 5.0)),
    "a single loss tells no slope": ([turn(1.0)], Trend(1.0, 1.0, 0.0, 10.0, 5.0)),
    "not a number": ([turn(1.0), turn(nan)], None),
    "infinite": ([turn(inf)], None),
    "a turn without a loss between others": (
        [turn(3.0, 1.0), turn(inf), turn(1.4, 1.0)],
        Trend(3.0, 1.2, 0.8 / log(3), 30.0, 5.0),
    ),
    "a first turn without a loss": (
        [turn(nan), turn(3.0, *[2.0] * 8, 1.0)],
        Trend(3.0, 2.0, 1.0 / log(20 / 11), 20.0, 5.0),
    ),
    "no time": ([turn(1.0, seconds=0.0)], Trend(1.0, 1.0, 0.0, 1e-9, 5.0)),
}


@pytest.mark.parametrize("name", TRENDS)
def test_trend_of_given_losses(name):
    quanta, expected = TRENDS[name]
    found = trend(quanta, 5.0)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert vars(found) == pytest.approx(vars(expected))


def test_seconds_of_given_trends():
    """The best is expected to reduce its loss by 2 + 0.5 ln 2, nine tenths of which are the goal for all."""
    ahead, behind = Trend(3.0, 1.0, 0.5, 10.0, 10.0), Trend(3.0, 2.0, 0.8, 10.0, 10.0)
    goal = 0.9 * (2 + 0.5 * log(2))
    expected = [10 * (exp((goal - 2) / (0.5 + 0.2)) - 1), 10 * (exp((goal - 1) / (0.8 + 0.2)) - 1)]
    assert ExpectedFinish(goal=0.9, doubt=0.1).seconds([ahead, behind]) == pytest.approx(expected)


def test_after_the_goal_the_remaining_time_counts():
    done, near = Trend(3.0, 1.0, 0.0, 10.0, 40.0), Trend(3.0, 1.3, 0.1, 10.0, 40.0)
    seconds = ExpectedFinish().seconds([done, near])
    assert seconds[0] == 40.0
    assert seconds[1] < 40.0


def test_without_any_reduction_the_least_run_time_goes_first():
    assert ExpectedFinish().seconds([Trend(1.0, 1.0, 0.0, 20.0, 5.0), Trend(1.0, 1.0, 0.0, 10.0, 5.0)]) == [20.0, 10.0]


def test_no_trend_at_all():
    assert ExpectedFinish().seconds([None, None]) == [inf, inf]


CHOICES = {
    "the lower loss of two that fall alike": (
        [running("a", turn(3.0), turn(2.5)), suspended("b", turn(3.0), turn(1.0))],
        {"a": Suspend, "b": Resume},
    ),
    "a bad start is not rewarded": (
        [running("good", turn(1.0), turn(0.2)), suspended("bad", turn(9.0), turn(4.0))],
        {},
    ),
    "who has diverged is last": (
        [running("a", turn(2.0), turn(nan)), suspended("b", turn(3.0), turn(2.9))],
        {"a": Suspend, "b": Resume},
    ),
    "of two that stand still, the one that has had less": (
        [running("a", *[turn(3.0)] * 4), suspended("b", turn(3.0), turn(3.0)), suspended("c", turn(3.0), turn(1.0))],
        {"a": Suspend, "c": Resume},
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    jobs, expected = CHOICES[name]
    assert decide(ExpectedFinish(), jobs)[0] == expected


@pytest.mark.parametrize(("cost", "expected"), [(0.0, {"a": Suspend, "b": Resume}), (1000.0, {})])
def test_a_switch_has_to_be_worth_its_cost(cost, expected):
    losses = [(3.0, 2.0, 1.9), (3.0, 2.0, 1.8)]
    a, b = ([turn(loss) for loss in each] for each in losses)
    jobs = [running("a", *a, switch_seconds=cost), suspended("b", *b, switch_seconds=cost)]
    assert decide(ExpectedFinish(), jobs)[0] == expected


LOSSES = st.lists(
    st.lists(st.integers(1, 1000).map(lambda parts: parts / 128), min_size=1, max_size=6),
    min_size=2,
    max_size=6,
)


@settings(max_examples=40, deadline=None, database=None)
@given(LOSSES, st.integers(10, 1000).map(lambda parts: parts / 128), st.sampled_from([0.25, 2.0, 64.0]))
def test_the_unit_and_the_height_of_losses_do_not_matter(losses, shift, scale):  # exactly: ties have to stay ties
    def seconds(change):
        return ExpectedFinish().seconds([trend([turn(change(loss)) for loss in each], 50.0) for each in losses])

    assert seconds(lambda loss: scale * loss + shift) == pytest.approx(seconds(lambda loss: loss), rel=1e-3, abs=1e-3)


@settings(max_examples=40, deadline=None, database=None)
@given(LOSSES)
def test_every_job_runs_eventually(losses):
    """However bad a loss, its time to the goal is finite."""
    seconds = ExpectedFinish().seconds([trend([turn(loss) for loss in each], 50.0) for each in losses])
    assert all(0 <= each < inf for each in seconds)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"goal": 0.0}, "`goal` must be above 0 and at most 1, got 0.0"),
        ({"goal": 1.5}, "`goal` must be above 0 and at most 1, got 1.5"),
        ({"doubt": 0.0}, "`doubt` must be above 0 and finite, got 0.0"),
        ({"doubt": inf}, "`doubt` must be above 0 and finite, got inf"),
    ],
)
def test_bad_settings(changes, words):
    with pytest.raises(PolicyError, match=words):
        ExpectedFinish(**changes)


def test_a_job_that_never_ran_goes_before_the_best():
    jobs = [running("a", turn(3.0), turn(0.1)), waiting("b")]
    assert decide(ExpectedFinish(), jobs)[0]["a"] is Suspend


def test_the_best_of_those_that_have_ended_still_counts():
    """Among bad ones that have stopped falling, the best would be at the goal; but the study has seen better."""
    flat = [Trend(3.0, 2.9, 0.0, 40.0, 5.0), Trend(3.0, 3.0, 0.0, 40.0, 5.0)]
    assert ExpectedFinish().seconds(flat)[0] == 5.0
    assert ExpectedFinish().seconds(flat, best=0.1)[0] > 1000.0


def test_losses_of_different_studies_do_not_compare():
    small = [turn(0.3), turn(0.1)], [turn(0.3), turn(0.2)]
    large = [turn(30.0), turn(10.0)], [turn(30.0), turn(20.0)]
    jobs = [suspended(f"s{index}", *quanta, study="small") for index, quanta in enumerate(small)]
    jobs += [suspended(f"l{index}", *quanta, study="large") for index, quanta in enumerate(large)]
    priorities = ExpectedFinish().priorities(jobs, 20.0)
    assert priorities[:2] == pytest.approx(priorities[2:])
