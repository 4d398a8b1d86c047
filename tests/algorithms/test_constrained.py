"""Algorithms that compare trials by constraints and by several metrics."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState as Shown

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm, Problem
from shoal.algorithms.bohb import SyncBOHB
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.projection import projection
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.constraint import parse_constraints
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective
from shoal.core.space import Space, uniform
from shoal.core.trial import Report, TrialState

LINE = Space({"x": uniform(0, 1)})
NAN = float("nan")
BOUNDS = {"latency_ms": "<= 10"}

HALVING: dict[str, Callable[[], Algorithm]] = {
    "successive_halving": lambda: SuccessiveHalving(6, max_epochs=3, eta=3),
    "hyperband": lambda: Hyperband(max_epochs=3, eta=3, brackets=1),
    "asha": lambda: ASHA(6, max_epochs=3, eta=3),
    "pbt": lambda: PBT(6, epochs=3, truncation=0.34),
}


def kept(make: Callable[[], Algorithm], points: list[Mapping[str, float]], **goals: Any) -> tuple[set[int], list[str]]:
    """Numbers of the first trials that continue after their first epoch, and the reasons of those that do not."""
    algorithm = make()
    algorithm.bind(LINE, **{"metric": "loss", "mode": "min", "seed": 0} | goals)
    first = {trial.number for group in algorithm.next_groups(100) for trial in group.trials}
    reasons = []
    for number in sorted(first):
        state = TrialState.PAUSED
        reasons += [each.reason for each in algorithm.observe(Report(number, 1, dict(points[number]), state=state))]
    return {trial.number for group in algorithm.next_groups(100) for trial in group.trials} & first, reasons


def points(losses: list[float], latencies: list[float]) -> list[Mapping[str, float]]:
    pairs = zip(losses, latencies, strict=True)
    return [{"loss": loss} if ms == -1 else {"loss": loss, "latency_ms": ms} for loss, ms in pairs]


CONSTRAINED = {
    "feasible before better": (points([0, 1, 2, 3, 4, 5], [99, 99, 9, 99, 9, 10]), {2, 4}),
    "then the least violation": (points([0, 1, 2, 3, 4, 5], [14, 13, 12, 30, 11, 30]), {2, 4}),
    "NaN and missing are the worst": (points([0, 1, 2, 3, 4, 5], [NAN, -1, 80, 90, NAN, -1]), {2, 3}),
    "equal violations by the loss": (points([5, 4, 3, 2, 1, 0], [11, 11, 11, 11, 11, 11]), {4, 5}),
    "a loss of NaN is worse than any violation": (points([NAN, NAN, NAN, NAN, 1, 0], [1, 1, 1, 1, NAN, 99]), {4, 5}),
}


@pytest.mark.parametrize("case", CONSTRAINED)
@pytest.mark.parametrize("name", ["successive_halving", "asha"])
def test_constraints_decide_who_goes_on(name: str, case: str) -> None:
    reports, expected = CONSTRAINED[case]
    assert kept(HALVING[name], reports, constraints=BOUNDS)[0] == expected


def test_the_reason_names_the_violation() -> None:
    reports, _ = CONSTRAINED["then the least violation"]
    _, reasons = kept(HALVING["successive_halving"], reports, constraints=BOUNDS)
    assert "rank 6 of 6 at epoch 1; the best 2 continue; violates the constraints by 2" in reasons


TWO = {"metric": ["loss", "size"], "mode": ["min", "max"]}
SEVERAL = {
    "the front": ([(0, 0), (1, 1), (2, 2), (1, 0), (2, 1), (3, 1)], {0, 2}, {0, 1, 2}),
    "fronts one by one, not an argsort": ([(2, -2), (3, -3), (1, -1), (4, -4), (5, -5), (6, -6)], {0, 2}, {0, 1, 2}),
    "ends of a long front": ([(3, 3), (0, 0), (1, 1), (5, 5), (2, 2), (4, 4)], {1, 3}, {1, 3, 4}),
    "NaN in one metric": ([(NAN, 9), (0, NAN), (5, 1), (6, 0), (7, -1), (8, -2)], {2, 3}, {2, 3, 4}),
}


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("name", HALVING)
def test_several_metrics_rank_a_rung_as_a_set(name: str, case: str) -> None:
    pairs, two, three = SEVERAL[case]
    reports = [{"loss": float(loss), "size": float(size)} for loss, size in pairs]
    found = kept(HALVING[name], reports, **TWO)[0]
    if name == "pbt":  # the worst two of six are replaced, and those with NaN
        assert two <= found
        assert len(found) == 4
    elif name == "hyperband":  # its bracket has three trials, one of which continues
        assert len(found) == 1
    else:
        assert found == two <= three


@pytest.mark.parametrize("make", [lambda: SyncBOHB(3), lambda: Median(3, 2)], ids=["bohb", "median"])
def test_two_refuse_several_metrics(make: Callable[[], Algorithm]) -> None:
    with pytest.raises(AlgorithmError, match=r"compares trials by one metric, got \['loss', 'size'\]"):
        make().bind(LINE, **TWO, seed=0)


def test_the_model_of_bohb_takes_infeasible_trials_for_bad_ones() -> None:
    """The loss falls with x, and only x below a half is feasible."""
    algorithm = SyncBOHB(3, brackets=12, random_fraction=0.0, min_points=3)
    algorithm.bind(LINE, metric="loss", mode="min", seed=3, constraints={"x": "<= 0.5"})
    proposed = []
    while groups := algorithm.next_groups(1):
        for group in groups:
            for trial in group.trials:
                x = trial.config["x"]
                proposed.append(x)
                metrics = {"loss": -x, "x": x}
                algorithm.observe(Report(trial.number, group.budget.epochs, metrics, state=TrialState.PAUSED))
    late = proposed[len(proposed) // 2 :]
    assert sum(x <= 0.5 for x in late) > 0.8 * len(late)
    assert max(x for x in late if x <= 0.5) > 0.4


class Witness(optuna.samplers.RandomSampler):
    """Notes the constraints and the values that it can see."""

    def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        self.seen = {each.number: each for each in study.get_trials() if each.number != trial.number}


def test_a_sampler_sees_every_constraint_of_the_newest_report() -> None:
    made: list[Witness] = []

    def make(seed: int) -> Witness:
        made.append(Witness(seed))
        return made[-1]

    constraints = parse_constraints({"a": "<= 10", "b": ">= 0"})
    others = (Objective("size", "max"),)
    problem = Problem(LINE, "loss", "min", 0, None, others, constraints=constraints)
    shown = projection(problem, make, (1, 3), 100)
    for _ in range(3):
        shown.propose()
    common = {"loss": 0.5, "size": 2.0}
    shown.add_report(Report(0, 1, common | {"a": 5.0, "b": 1.0}))
    shown.add_report(Report(1, 1, common | {"a": 5.0, "b": 1.0}))
    shown.add_report(Report(1, 3, common | {"a": 20.0, "b": 0.5}))
    shown.add_report(Report(2, 1, common | {"a": NAN}))
    shown.propose()
    seen = made[0].seen
    assert [seen[number].state for number in range(3)] == [Shown.COMPLETE] * 3
    assert [seen[number].values for number in range(3)] == [[0.5, 2.0]] * 3
    assert [seen[number].constraints for number in range(3)] == [
        {"a <= 10": -0.5, "b >= 0": -1.0},
        {"a <= 10": 1.0, "b >= 0": -0.5},
        {"a <= 10": 1e9, "b >= 0": 1e9},
    ]


def test_a_trial_that_was_left_behind_is_no_better_than_the_worst_by_any_metric() -> None:
    made: list[Witness] = []

    def make(seed: int) -> Witness:
        made.append(Witness(seed))
        return made[-1]

    shown = projection(Problem(LINE, "loss", "min", 0, None, (Objective("size", "max"),)), make, (1, 3), 100)
    for number in range(11):
        shown.propose()
        shown.add_values(number, 1, (0.1, 9.0))
        if number:
            shown.add_values(number, 3, (0.5 + number / 100, 2.0 - number / 100))
    shown.propose()
    assert made[0].seen[0].values == [0.6, 1.9]


@pytest.mark.parametrize(
    "sampler", ["tpe", lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=10)], ids=["tpe", "nsga2"]
)
def test_samplers_keep_the_constraint(sampler: Any) -> None:
    """Without the constraint, they go to where the sum is the greatest; none of the last is feasible then."""
    algorithm = OptunaSearch(120, 1, sampler, concurrency=1)
    space = Space({name: uniform(0, 1) for name in "abcdef"})
    algorithm.bind(space, metric="loss", mode="min", seed=1, constraints={"sum": "<= 3"})
    proposed: list[float] = []
    while groups := algorithm.next_groups(1):
        (trial,) = groups[0].trials
        proposed.append(sum(trial.config.values()))
        metrics = {"loss": -proposed[-1], "sum": proposed[-1]}
        algorithm.observe(Report(trial.number, 1, metrics, state=TrialState.PAUSED))
    late = [value for value in proposed[-40:] if value <= 3]
    assert len(late) >= 16
    assert sum(late) / len(late) > 2.5


def test_cmaes_is_refused_and_others_that_ignore_constraints_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for make in ("cmaes", lambda seed: optuna.samplers.CmaEsSampler(seed=seed)):
        with pytest.raises(AlgorithmError, match=r"ignores constraints \(latency_ms <= 10\); use 'tpe'"):
            OptunaSearch(3, 1, make).bind(LINE, metric="loss", mode="min", seed=0, constraints=BOUNDS)
    with caplog.at_level(logging.WARNING, "shoal.algorithms"):
        OptunaSearch(3, 1, "random").bind(LINE, metric="loss", mode="min", seed=0, constraints=BOUNDS)
    assert "sampler 'random' ignores constraints (latency_ms <= 10) in its proposals" in caplog.text
