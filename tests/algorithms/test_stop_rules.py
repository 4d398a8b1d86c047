import math

import pytest

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Totals, call_text
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.rules import Moment, Patience, Percentile, Threshold
from shoal.algorithms.stop_rules import StopRules
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective
from shoal.core.space import Space, uniform
from shoal.core.trial import Decision, Report, TrialState

NAN = math.nan
SPACE = Space({"x": uniform(0, 1)})


def bound(inner, *rules, mode="min"):
    algorithm = StopRules(inner, rules)
    algorithm.bind(SPACE, metric="score", mode=mode, seed=0)
    return algorithm


def proposed(algorithm):
    return [([x.number for x in g.trials], g.budget.epochs) for g in algorithm.next_groups(1)]


def report(algorithm, number, epoch, value, state=TrialState.RUNNING):
    return [
        (x.trial, x.state, x.reason) for x in algorithm.observe(Report(number, epoch, {"score": value}, state=state))
    ]


@pytest.mark.parametrize(
    ("rule", "mode", "curve", "ends"),
    [
        pytest.param(Patience(2), "min", [3, 2, 1, 0.5], None, id="improves"),
        pytest.param(Patience(2), "min", [1, 1, 1, 1], (3, "score has not improved since epoch 1"), id="flat"),
        pytest.param(Patience(3), "max", [1, 5, 4, 4, 4], (5, "score has not improved since epoch 2"), id="worse"),
        pytest.param(Patience(2), "min", [3, 4, 2, 3, 1], None, id="in time"),
        pytest.param(
            Patience(2, 0.5), "min", [3, 2.8, 2.6, 2.0], (3, "score has not improved since epoch 1"), id="too little"
        ),
        pytest.param(Patience(3, 0.5), "min", [3, 2.8, 2.4, 2.0], None, id="enough in all"),
        pytest.param(Patience(2), "min", [NAN, NAN], (2, "score has not improved since epoch 0"), id="only nan"),
        pytest.param(Patience(2), "min", [1, NAN, 0.5, NAN], None, id="nan between"),
        pytest.param(Threshold(above=5), "min", [5, 6], (2, "score is 6, above 5, at epoch 2"), id="above"),
        pytest.param(Threshold(below=0.5), "max", [0.4], (1, "score is 0.4, below 0.5, at epoch 1"), id="below"),
        pytest.param(
            Threshold(below=0.5, warmup=2), "max", [0, 0, 0], (3, "score is 0, below 0.5, at epoch 3"), id="warm"
        ),
        pytest.param(Threshold(above=5), "min", [1, NAN], (2, "score is nan at epoch 2"), id="nan"),
        pytest.param(Threshold(above=5), "min", [math.inf], (1, "score is inf, above 5, at epoch 1"), id="inf"),
        pytest.param(Threshold(-1, 1), "min", [-1, 0, 1], None, id="within both"),
    ],
)
def test_when_a_trial_ends(rule, mode, curve, ends):
    algorithm = bound(Random(1, epochs=9), rule, mode=mode)
    algorithm.next_groups(1)
    answers = [(epoch, report(algorithm, 0, epoch, value)) for epoch, value in enumerate(curve, 1)]
    assert [(epoch, answer) for epoch, answer in answers if answer] == (
        [] if ends is None else [(ends[0], [(0, rule.ends, ends[1])])]
    )


@pytest.mark.parametrize(
    ("rule", "before", "value", "others", "stops"),
    [
        pytest.param(Percentile(25), math.inf, 3, [1, 2, 3, 4, 5, 6, 7, 8], True, id="third of nine"),
        pytest.param(Percentile(50), math.inf, 3, [1, 2, 3, 4, 5, 6, 7, 8], False, id="third of nine, median"),
        pytest.param(Percentile(25), 1, 3, [1, 2, 3, 4, 5, 6, 7, 8], False, id="was better before"),
        pytest.param(Percentile(25), math.inf, 3, [1, 2, 4, 5], False, id="too few others"),
        pytest.param(Percentile(25, startup=4), math.inf, 3, [1, 2, 4, 5], True, id="enough others"),
        pytest.param(Percentile(25, warmup=3), math.inf, 9, [1] * 8, False, id="warms up"),
        pytest.param(Percentile(0), math.inf, 1, [1] * 8, False, id="as good as all"),
        pytest.param(Percentile(0), math.inf, 2, [1, *[2] * 8], True, id="not the best"),
        pytest.param(Percentile(100), math.inf, 2, [1] * 8, True, id="the worst"),
        pytest.param(Percentile(100), math.inf, NAN, [1] * 7 + [math.inf], False, id="nan as others"),
        pytest.param(Percentile(99), math.inf, NAN, [1] * 8, True, id="nan"),
    ],
)
def test_whom_a_percentile_stops(rule, before, value, others, stops):
    _, reason = rule.decide(None, Moment(Objective("score", "min"), 3, value, before, others))
    assert bool(reason) is stops


def test_a_percentile_says_how_many_were_better():
    _, reason = Percentile(25).decide(None, Moment(Objective("score", "max"), 3, 5.0, -5.0, [-8, -7, -6, -1, -1]))
    assert reason == "3 of 5 others had a better score at epoch 3; the best 25 % continue"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: Patience(0), "`epochs` must be an integer of at least 1, got 0", id="no patience"),
        pytest.param(lambda: Patience(3, -1), "`min_delta` must be a number from 0", id="negative delta"),
        pytest.param(lambda: Patience(3, math.inf), "`min_delta` must be a number from 0", id="infinite delta"),
        pytest.param(Threshold, "needs a bound", id="no bound"),
        pytest.param(lambda: Threshold(below=1, above=0), "exchange `below` and `above`", id="exchanged bounds"),
        pytest.param(lambda: Threshold(above=NAN), "`above` must be a number", id="nan as a bound"),
        pytest.param(lambda: Percentile(101), "`percentile` must be a number from 0 to 100, got 101", id="over 100"),
        pytest.param(lambda: StopRules(Random(1, 1), [Patience]), "must be a list of rules", id="a class"),
        pytest.param(lambda: StopRules(Random(1, 1), []), "must be a list of rules", id="no rule"),
        pytest.param(
            lambda: StopRules(PBT(4, 4), [Threshold(above=1), Patience(epochs=3)]),
            r"Patience\(epochs=3\) does not go with PBT",
            id="patience with PBT",
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(AlgorithmError, match=words):
        make()


def test_a_trial_out_of_patience_keeps_its_place_and_holds_its_value():
    algorithm = bound(SuccessiveHalving(n=9, max_epochs=9), Patience(1))
    assert proposed(algorithm) == [(list(range(9)), 1)]
    for number in range(9):
        report(algorithm, number, 1, number, TrialState.PAUSED)
    assert proposed(algorithm) == [([0, 1, 2], 3)]
    assert report(algorithm, 0, 2, 5.0) == [(0, TrialState.COMPLETE, "score has not improved since epoch 1")]
    assert report(algorithm, 0, 3, 0.0) == [], "it is over, whatever comes late"
    assert report(algorithm, 1, 2, 0.5) == []
    assert report(algorithm, 1, 3, 7.0, TrialState.PAUSED) == [
        (1, TrialState.COMPLETE, "score has not improved since epoch 2")
    ]
    assert report(algorithm, 2, 2, 1.5) == []
    last = report(algorithm, 2, 3, 6.0, TrialState.PAUSED)
    assert last == [(2, TrialState.COMPLETE, "score has not improved since epoch 2")]
    assert proposed(algorithm) == []
    assert algorithm.finished, "the best of the rung, trial 0, went to the end without training"


def test_others_compete_with_the_value_that_is_held():
    algorithm = bound(ASHA(n=3, max_epochs=9, concurrency=3), Patience(2))
    algorithm.next_groups(1)
    report(algorithm, 0, 1, 1.0, TrialState.PAUSED)
    report(algorithm, 1, 1, 2.0, TrialState.PAUSED)
    report(algorithm, 2, 1, 3.0, TrialState.PAUSED)
    assert proposed(algorithm) == [([0], 3)]
    assert report(algorithm, 0, 2, 1.0) == []
    decisions = report(algorithm, 0, 3, 1.0, TrialState.PAUSED)
    assert [(number, state) for number, state, _ in decisions] == [
        (0, TrialState.COMPLETE),
        (1, TrialState.STOPPED),
        (2, TrialState.STOPPED),
    ]
    assert algorithm.finished, "trial 0 holds its value at epoch 9, so that no other is promoted"


def test_a_trial_that_is_stopped_is_a_failed_one_to_the_algorithm():
    algorithm = bound(SuccessiveHalving(n=3, max_epochs=3), Threshold(above=5))
    algorithm.next_groups(1)
    assert report(algorithm, 0, 1, 9.0, TrialState.PAUSED) == [
        (0, TrialState.STOPPED, "score is 9, above 5, at epoch 1")
    ]
    report(algorithm, 1, 1, 2.0, TrialState.PAUSED)
    assert report(algorithm, 2, 1, 1.0, TrialState.PAUSED) == [
        (1, TrialState.STOPPED, "rank 2 of 2 at epoch 1; only the best continues")
    ]
    assert proposed(algorithm) == [([2], 3)]
    assert report(algorithm, 2, 3, 9.0, TrialState.PAUSED) == [(2, TrialState.COMPLETE, "")], "it has ended anyway"
    assert algorithm.finished


def test_groups_of_several_reports_come_as_one():
    algorithm = bound(ASHA(n=6, max_epochs=9, min_epochs=3, concurrency=3), Patience(1))
    algorithm.next_groups(1)
    report(algorithm, 0, 1, 1.0)
    report(algorithm, 0, 2, 1.0)
    report(algorithm, 1, 3, 2.0, TrialState.PAUSED)
    assert proposed(algorithm) == [([3, 4], 3)]


@pytest.mark.parametrize(
    ("inner", "rule", "totals"),
    [
        pytest.param(Random(5, epochs=4), Patience(2), Totals(5, 5, 20), id="random"),
        pytest.param(Hyperband(9), Percentile(50), Totals(17, 17, 69), id="hyperband"),
        pytest.param(PBT(6, epochs=4), Threshold(above=1), None, id="one that replaces what is stopped"),
    ],
)
def test_each_trial_may_end_after_an_epoch(inner, rule, totals):
    assert bound(inner, rule).totals == totals


def test_it_is_shown_as_the_algorithm_with_its_rules():
    algorithm = StopRules(Random(5, epochs=4), [Patience(3), Threshold(above=2.0)])
    assert call_text(algorithm) == "Random(n=5, epochs=4) with Patience(epochs=3) and Threshold(above=2.0)"
    assert algorithm.longest_budget == 4


def test_a_bound_algorithm_serves_no_other_study():
    inner = Random(5, epochs=4)
    inner.bind(SPACE, metric="score", mode="min", seed=0)
    with pytest.raises(AlgorithmError, match="serves another study already"):
        StopRules(inner, [Patience(3)]).bind(SPACE, metric="score", mode="min", seed=0)


def test_an_algorithm_that_decides_within_a_budget_is_believed():
    class Hasty(Random):
        def observe(self, report):
            super().observe(report)
            return [Decision(report.trial, TrialState.STOPPED, "at once")]

    algorithm = bound(Hasty(2, epochs=4), Patience(1))
    algorithm.next_groups(1)
    assert report(algorithm, 0, 1, 1.0) == [(0, TrialState.STOPPED, "at once")]
    assert report(algorithm, 0, 2, 1.0) == []
