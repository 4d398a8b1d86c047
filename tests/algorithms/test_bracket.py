from itertools import permutations

import pytest

from shoal.algorithms.base import Problem
from shoal.algorithms.bracket import Bracket, Rung
from shoal.core.errors import AlgorithmError, TaskError
from shoal.core.space import Space
from shoal.core.trial import Budget, Report, TrialState

NAN = float("nan")
RUNGS = [Rung(4, 1), Rung(2, 3), Rung(1, 9)]


def bracket(mode="min", rungs=RUNGS):
    problem = Problem(Space({"x": 1}), metric="loss", mode=mode, seed=0, data_seed=0)
    return Bracket("b", rungs, [problem.trial(number, {}) for number in range(rungs[0].trials)], problem)


def report(number, value, epoch=1, state=TrialState.PAUSED):
    if value is None:
        return Report(number, epoch, state=TrialState.FAILED, reason="boom")
    return Report(number, epoch, {"loss": value}, state=state)


def members(group):
    return None if group is None else [trial.number for trial in group.trials]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("values", "promoted", "reasons"),
    [
        pytest.param(
            [3, 1, 4, 2],
            {"min": [1, 3], "max": [0, 2]},
            {"rank 3 of 4 at epoch 1; the best 2 continue", "rank 4 of 4 at epoch 1; the best 2 continue"},
            id="distinct",
        ),
        pytest.param(
            [7, 7, 7, 7],
            {"min": [0, 1], "max": [0, 1]},
            {"rank 3 of 4 at epoch 1; the best 2 continue", "rank 4 of 4 at epoch 1; the best 2 continue"},
            id="ties go to the lower number",
        ),
        pytest.param(
            [NAN, 2, NAN, 1],
            {"min": [1, 3], "max": [1, 3]},
            {"loss is nan at epoch 1"},
            id="NaN is last",
        ),
        pytest.param(
            [NAN, NAN, 5, NAN],
            {"min": [2], "max": [2]},
            {"loss is nan at epoch 1"},
            id="NaN is not promoted though there is a place",
        ),
        pytest.param([NAN] * 4, {"min": None, "max": None}, {"loss is nan at epoch 1"}, id="all NaN"),
        pytest.param(
            [None, 2, 3, 1],
            {"min": [1, 3], "max": [1, 2]},
            {"rank 3 of 3 at epoch 1; the best 2 continue"},
            id="a failure leaves as many places",
        ),
        pytest.param([None, 2, None, None], {"min": [1], "max": [1]}, set(), id="fewer are left than places"),
        pytest.param([None] * 4, {"min": None, "max": None}, set(), id="all failed"),
        pytest.param(
            [float("inf"), float("-inf"), 0, None],
            {"min": [1, 2], "max": [0, 2]},
            {"rank 3 of 3 at epoch 1; the best 2 continue"},
            id="infinities",
        ),
    ],
)
def test_promotion_does_not_depend_on_the_order_of_reports(mode, values, promoted, reasons):
    for order in permutations(range(4)):
        rungs = bracket(mode)
        assert members(rungs.next_group()) == [0, 1, 2, 3]
        decisions = []
        for position, number in enumerate(order):
            assert decisions == [], f"decided after {position} reports"
            assert rungs.next_group() is None
            decisions = rungs.observe(report(number, values[number]))
        assert members(rungs.next_group()) == promoted[mode]
        assert rungs.finished == (promoted[mode] is None)
        assert {decision.reason for decision in decisions} == reasons
        stopped = {decision.trial for decision in decisions if decision.state is TrialState.STOPPED}
        assert stopped == set(range(4)) - set(promoted[mode] or []) - {n for n in range(4) if values[n] is None}


def test_a_trial_of_the_last_rung_is_complete_at_once():
    single = bracket(rungs=[Rung(2, 5)])
    assert single.next_group().budget == Budget(5)
    assert [d.state for d in single.observe(report(1, 0.5, epoch=5))] == [TrialState.COMPLETE]
    assert not single.finished
    assert single.observe(report(0, None)) == []
    assert single.finished


def test_a_single_place_is_worded_so():
    pair = bracket(rungs=[Rung(2, 1), Rung(1, 2)])
    pair.observe(report(0, 2.0))
    (stopped,) = pair.observe(report(1, 1.0))
    assert stopped.reason == "rank 2 of 2 at epoch 1; only the best continues"


def test_reports_before_the_budget_and_stale_ones_change_nothing():
    rungs = bracket()
    rungs.next_group()
    assert [rungs.observe(report(number, 0.0, state=TrialState.RUNNING)) for number in range(4)] == [[]] * 4
    assert rungs.next_group() is None
    for number in range(4):
        rungs.observe(report(number, number))
    assert members(rungs.next_group()) == [0, 1]
    for number in range(4):
        assert rungs.observe(report(number, 9.0)) == []
        assert rungs.observe(report(number, 9.0, epoch=1)) == []
    assert rungs.next_group() is None
    rungs.observe(report(0, 5.0, epoch=3))
    assert [d.trial for d in rungs.observe(report(1, 4.0, epoch=3))] == [0]


def test_the_first_of_two_values_counts():
    pair = bracket(rungs=[Rung(2, 1), Rung(1, 2)])
    pair.observe(report(0, 1.0))
    pair.observe(report(0, 9.0))
    pair.observe(report(1, 5.0))
    assert members(pair.next_group()) == [0]


@pytest.mark.parametrize("failure_first", [True, False])
def test_a_trial_that_paused_and_failed_has_failed(failure_first):
    pair = bracket(rungs=[Rung(2, 1), Rung(1, 2)])
    both = [report(0, None), report(0, 1.0)]
    for event in both if failure_first else reversed(both):
        pair.observe(event)
    pair.observe(report(1, 5.0))
    assert members(pair.next_group()) == [1]


def test_a_report_beyond_the_budget_is_refused():
    with pytest.raises(AlgorithmError, match="trial 2 reports epoch 3, but its budget is 1 epochs"):
        bracket().observe(report(2, 0.0, epoch=3))


@pytest.mark.parametrize("state", [TrialState.RUNNING, TrialState.PAUSED])
@pytest.mark.parametrize(
    ("metrics", "names"),
    [({"valid_loss": 1.0, "accuracy": 0.5}, "'accuracy', 'valid_loss'"), ({}, "nothing")],
    ids=["others", "none"],
)
def test_a_metric_that_is_not_reported_is_named_with_those_that_are(state, metrics, names):
    with pytest.raises(TaskError) as error:
        bracket().observe(Report(0, 1, metrics, state=state))
    assert str(error.value).startswith(f"metric 'loss' is not reported by the task; it reports {names}.")
