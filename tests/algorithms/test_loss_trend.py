"""The rule that ends trials whose learning curves cannot reach the best value."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.algorithms.loss_trend import LossTrend
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.rules import Leader, Moment
from shoal.algorithms.stop_rules import StopRules
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective
from shoal.core.space import Space, uniform
from shoal.core.trial import Report, TrialState

NAN, INF = math.nan, math.inf
SPACE = Space({"x": uniform(0, 1)})
END = 20


def first_end(rule, curve, best, mode="min"):
    """Epoch and reason of the first decision to stop while trial 4 has `best`; None if there is none."""
    goal, memory, before = Objective("valid_loss", mode), None, INF
    leader = None if best is None else Leader(4, goal.loss(best))
    for epoch, value in enumerate(curve, 1):
        moment = Moment(goal, epoch, value, before, [], leader, END)
        memory, reason = rule.decide(memory, moment)
        before = moment.best
        if reason:
            return epoch, reason
    return None


def power(epoch, start=0.8, exponent=0.5, floor=1.5):
    return floor + start * epoch**-exponent


def bound(inner, rule, **problem):
    algorithm = StopRules(inner, [rule])
    algorithm.bind(SPACE, **{"metric": "score", "mode": "min", "seed": 0, **problem})
    return algorithm


@pytest.mark.parametrize(
    ("rule", "curve", "best", "mode", "ends"),
    [
        pytest.param(
            LossTrend(), [2.2, 2.1, 2.05, 2.0, 1.98], 1.5, "min",
            (5, "valid_loss 1.98 at epoch 5 falls by at most 0.016 an epoch, and reaches at best 1.745 at 20; "
                "trial 4 has 1.5"),
            id="too slow",
        ),
        pytest.param(
            LossTrend(), [0.5, 0.6, 0.65, 0.7, 0.71, 0.712], 0.9, "max",
            (6, "valid_loss 0.712 at epoch 6 rises by at most 0.011 an epoch, and reaches at best 0.8722 at 20; "
                "trial 4 has 0.9"),
            id="too slow, of a metric to maximise",
        ),
        pytest.param(LossTrend(), [2.2, 2.1, 2.05, 2.0, 1.98], 1.8, "min", None, id="may still reach it"),
        pytest.param(LossTrend(), [2.2, 2.1, 2.05, 2.0, 1.98], None, "min", None, id="no other trial"),
        pytest.param(LossTrend(), [1.4, 1.9, 2.5, 3.0, 4.0, 5.0], 1.5, "min", None, id="the best itself gets worse"),
        pytest.param(LossTrend(), [2.2 - 0.05 * k for k in range(9)], 1.3, "min", None, id="a slow start"),
        pytest.param(
            LossTrend(), [2.2 - 0.05 * k for k in range(9)], 1.2, "min",
            (5, "valid_loss 2 at epoch 5 falls by at most 0.05 an epoch, and reaches at best 1.25 at 20; "
                "trial 4 has 1.2"),
            id="a slow start that is too slow",
        ),
        pytest.param(
            LossTrend(), [1.9, 1.9, 1.9, 2.0, 2.5], 1.5, "min",
            (5, "valid_loss 2.5 at epoch 5 falls no more, its best is 1.9; trial 4 has 1.5"), id="diverges",
        ),
        pytest.param(LossTrend(), [5, 9, 9, 9], 1.5, "min", None, id="two epochs after the warm-up"),
        pytest.param(
            LossTrend(warmup=0), [5, 9, 9], 1.5, "min",
            (3, "valid_loss 9 at epoch 3 falls no more, its best is 5; trial 4 has 1.5"), id="no warm-up",
        ),
        pytest.param(
            LossTrend(warmup=0, margin=0), [2.0, 1.7, 1.75], 1.0, "min",
            (3, "valid_loss 1.75 at epoch 3 falls by at most 0.031 an epoch, and reaches at best 1.218 at 20; "
                "trial 4 has 1"),
            id="noise, no margin",
        ),
        pytest.param(LossTrend(warmup=0, margin=1), [2.0, 1.7, 1.75], 1.0, "min", None, id="noise, a margin"),
        pytest.param(LossTrend(), [NAN, NAN, NAN], None, "min", (3, "valid_loss is nan at epoch 3"), id="nan"),
        pytest.param(LossTrend(), [2, 2, -INF], None, "max", (3, "valid_loss is -inf at epoch 3"), id="infinite"),
        pytest.param(LossTrend(warmup=END - 3), [2.0] * END, 1.5, "min", None, id="ends anyway"),
        pytest.param(LossTrend(warmup=0), [1e308, 1.7e308, 1e308], 1.5, "min", None, id="noise beyond all numbers"),
        pytest.param(LossTrend(warmup=0), [0.0, 0.0, 0.0], -1.0, "min",
                     (3, "valid_loss 0 at epoch 3 falls no more; trial 4 has -1"), id="only zeros"),
    ],
)  # fmt: skip
def test_when_a_trial_ends(rule, curve, best, mode, ends):
    assert first_end(rule, curve, best, mode) == ends


@given(
    start=st.floats(0.01, 5.0), exponent=st.floats(0.05, 2.0), floor=st.floats(-1.0, 3.0), window=st.integers(3, 8),
    ahead=st.floats(1e-6, 1.0),
)  # fmt: skip
def test_no_power_law_is_stopped_that_would_reach_the_best(start, exponent, floor, window, ahead):
    curve = [power(epoch, start, exponent, floor) for epoch in range(1, END + 1)]
    assert first_end(LossTrend(0, window), curve, curve[-1] + ahead) is None


def test_a_mirrored_curve_ends_at_the_same_epoch():
    curve = [power(epoch) for epoch in range(1, END)]
    at = first_end(LossTrend(), curve, 1.45)
    mirrored = first_end(LossTrend(), [-loss for loss in curve], -1.45, "max")
    assert at is not None
    assert mirrored is not None
    assert at[0] == mirrored[0] > 4


def test_the_best_is_of_another_trial_that_keeps_the_constraints():
    """Trial 0 is the best but breaks its bound, trial 1 is the best within; trial 2 cannot reach trial 1."""
    algorithm = bound(Random(3, epochs=END), LossTrend(warmup=0), constraints={"ms": "<= 5"})
    algorithm.next_groups(1)
    answers = {}
    for number, loss, latency in [(0, 0.1, 9), (1, 1.0, 5), (2, 2.0, 1)]:
        for epoch in (1, 2, 3):
            answers[number] = algorithm.observe(Report(number, epoch, {"score": loss, "ms": latency}))
    assert answers[0] == answers[1] == []
    (decision,) = answers[2]
    assert decision.state is TrialState.STOPPED
    assert decision.reason == "score 2 at epoch 3 falls no more; trial 1 has 1"


def test_on_a_rung_the_bound_is_at_the_end_of_the_longest_trials():
    algorithm = bound(SuccessiveHalving(2, max_epochs=8, eta=2, min_epochs=4), LossTrend(warmup=0))
    algorithm.next_groups(1)
    for epoch, loss in enumerate([2.0, 1.5, 1.2], 1):  # reaches 0.5 at epoch 8, and 1.0 at the end of the rung
        assert algorithm.observe(Report(0, epoch, {"score": 0.8})) == []
        assert algorithm.observe(Report(1, epoch, {"score": loss})) == []


class Endless(Random):
    @property
    def longest_budget(self):
        return None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: LossTrend(warmup=-1), "`warmup` must be an integer of at least 0, got -1", id="warm-up"),
        pytest.param(lambda: LossTrend(window=2), "`window` must be an integer of at least 3, got 2", id="window"),
        pytest.param(lambda: LossTrend(margin=NAN), "`margin` must be a number from 0", id="margin"),
        pytest.param(
            lambda: bound(SuccessiveHalving(4, 4), LossTrend(), metric=["a", "b"], mode=["min", "max"]),
            "LossTrend compares trials by one metric, and this study has a, b", id="two metrics",
        ),
        pytest.param(lambda: bound(Endless(4, 4), LossTrend()), "let its `longest_budget` return", id="no end"),
    ],
)  # fmt: skip
def test_what_is_refused(make, words):
    with pytest.raises(AlgorithmError, match=words):
        make()


def test_copies_are_judged_by_their_own_reports():
    algorithm = bound(PBT(4, epochs=8, interval=4), LossTrend(warmup=0))
    (group,) = algorithm.next_groups(4)
    assert len(group.trials) == 4
    ended = [
        decision.trial
        for epoch in (1, 2, 3)
        for trial in group.trials
        for decision in algorithm.observe(Report(trial.number, epoch, {"score": 1.0 + trial.number}))
    ]
    assert ended == [1, 2, 3]


def test_it_is_public():
    assert shoal.LossTrend is LossTrend
