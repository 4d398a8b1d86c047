"""The reference of the hypervolume follows from the first trials with values, and looks at each report once."""

from math import inf, nan

import pytest

from shoal.core.objective import Objective
from shoal.core.rows import StudyValue
from shoal.core.trial import Report, Trial, TrialState
from shoal.study import hypervolume_reference
from shoal.study.hypervolume_reference import ReferenceTracker
from shoal.study.trials import TrialRecord, TrialTable

BOTH = (Objective("a", "min"), Objective("b", "min"))


def tracker(goals: tuple[Objective, ...] = BOTH, is_fixed: bool = False) -> tuple[TrialTable, ReferenceTracker]:
    trials = TrialTable(goals)
    return trials, ReferenceTracker(goals, trials, is_fixed=is_fixed)


def report(trials: TrialTable, number: int, a: float, b: float, state: TrialState = TrialState.PAUSED) -> list[int]:
    if trials.get(number) is None:
        trials.move(TrialRecord(Trial(number, {}, 0, 0), 9), TrialState.RUNNING)
    assert trials.reported(Report(number, trials[number].epoch + 1, {"a": a, "b": b, "c": a, "d": b}, 1.0, state))
    return [number]


def test_ten_trials_with_values_fix_it_where_each_metric_has_a_finite_one() -> None:
    trials, found = tracker()
    for number in range(9):
        assert found.rows(report(trials, number, float(number), inf)) == []
    assert found.rows(report(trials, 9, nan, 1.0)) == [], "no value"
    assert found.rows(report(trials, 10, 99.0, 1.0, TrialState.FAILED)) == [], "the ranking leaves it out"
    assert found.rows(report(trials, 11, 5.0, inf)) == [], "b has no finite value"
    assert found.rows(report(trials, 0, 10.0, 2.0)) == [StudyValue("hypervolume_reference", [11.0, 2.2])]
    assert found.rows(report(trials, 1, 50.0, 50.0)) == [], "it stays"


def test_trials_of_earlier_runs_count() -> None:
    trials, found = tracker()
    for number in range(10):
        last = report(trials, number, 1.0, 2.0)
    assert found.rows(last) == [StudyValue("hypervolume_reference", [1.1, 2.2])]


@pytest.mark.parametrize(
    ("goals", "is_fixed"),
    [(BOTH[:1], False), (BOTH, True), (tuple(Objective(name, "min") for name in "abcd"), False)],
    ids=["one metric", "it is fixed", "more metrics than any hypervolume"],
)
def test_nothing_is_read_where_nothing_can_follow(
    goals: tuple[Objective, ...], is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, found = tracker(goals, is_fixed)
    monkeypatch.delattr(hypervolume_reference, "values")
    for number in range(12):
        assert found.rows(report(trials, number, 1.0, 1.0)) == []


def test_while_a_metric_has_no_finite_value_only_reported_trials_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, found = tracker()
    read: list[int] = []
    values = hypervolume_reference.values
    monkeypatch.setattr(
        hypervolume_reference, "values", lambda row, goals: (read.append(row.number), values(row, goals))[1]
    )
    for number in range(40):
        found.rows(report(trials, number, 1.0, inf))
    assert read == list(range(40))
