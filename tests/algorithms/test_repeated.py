"""Repeats of configurations: their aggregates, their rows, and the algorithms around which they are put."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.bohb import BOHB
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.repeated import Repeated
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.errors import AlgorithmError
from shoal.core.objective import objectives
from shoal.core.repeats import ConfigurationRow, Repeats, p_value
from shoal.core.rows import TrialRow
from shoal.core.space import Space, choice, loguniform, randint
from shoal.core.trial import FIRST_ADDED, Report, Trial, TrialState
from shoal.spec import StudySpec
from shoal.testing.algorithms import (
    check_failures,
    check_order_does_not_matter,
    check_repeated_reports,
    check_replay,
    check_seeds,
    check_totals,
    check_wrong_reports,
)

SPACE = Space({"lr": loguniform(1e-4, 1e-1), "width": choice([16, 32])})
DISCRETE = Space({"width": choice([16, 32, 64]), "depth": randint(1, 3)})
LOSS = objectives("loss", "min")

ALGORITHMS: dict[str, tuple[Callable[[], Algorithm], Space, bool]] = {
    "grid": (lambda: Grid(epochs=2), DISCRETE, True),
    "random": (lambda: Random(n=5, epochs=3), SPACE, True),
    "successive_halving": (lambda: SuccessiveHalving(n=6, max_epochs=4, eta=2), SPACE, True),
    "hyperband": (lambda: Hyperband(max_epochs=4, eta=2), SPACE, True),
    "pbt": (lambda: PBT(n=4, epochs=4), SPACE, True),
    "asha": (lambda: ASHA(n=9, max_epochs=4, eta=2, concurrency=4), SPACE, False),
    "bohb": (lambda: BOHB(max_epochs=4, eta=2), SPACE, False),
    "median": (lambda: Median(n=6, epochs=3, concurrency=3, least=2), SPACE, False),
    "optuna": (lambda: OptunaSearch(n=4, epochs=2, concurrency=2), SPACE, False),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_with_repeats_conforms(name: str) -> None:
    """All checks but that of an extension, which counts the trials of the algorithm."""
    make, space, synchronous = ALGORITHMS[name]

    def repeated() -> Repeated:
        return Repeated(make(), Repeats(1, 2, "worst"))

    for check in (check_failures, check_seeds, check_totals, check_repeated_reports, check_replay, check_wrong_reports):
        check(repeated, space)
    if synchronous:
        check_order_does_not_matter(repeated, space)


def test_an_extension_counts_configurations() -> None:
    repeated = _bound(Random(n=2, epochs=1), Repeats(3))
    repeated.extend(4)
    assert [trial.number for group in repeated.next_groups(9) for trial in group.trials] == list(range(12))
    with pytest.raises(AlgorithmError, match="at most 1000000 trials"):
        repeated.extend(400_000)


def _bound(algorithm: Algorithm, repeats: Repeats) -> Repeated:
    repeated = Repeated(algorithm, repeats)
    repeated.bind(SPACE, metric="loss", mode="min", seed=0)
    return repeated


def test_repeats_have_one_config_and_other_seeds() -> None:
    plain = Random(n=2, epochs=1)
    plain.bind(SPACE, metric="loss", mode="min", seed=0)
    own = plain.next_groups(9)[0].trials
    trials = _bound(Random(n=2, epochs=1), Repeats(3)).next_groups(9)[0].trials
    assert [trial.config for trial in trials] == [config for each in own for config in [each.config] * 3]
    assert len({trial.seed for trial in trials}) == 6


def test_folds_number_the_configs_within_each_seed() -> None:
    trials = _bound(Random(n=2, epochs=1), Repeats(2, 3)).next_groups(1)[0].trials
    assert [trial.config["fold"] for trial in trials] == [0, 1, 2] * 4


def test_a_space_with_the_name_of_the_fold_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"config\['fold'\] is a fold's number; rename 'fold' in the space"):
        Repeated(Random(n=1, epochs=1), Repeats(1, 2)).bind(
            Space({"fold": choice([1])}), metric="x", mode="min", seed=0
        )


def test_a_copy_begins_with_the_same_repeat() -> None:
    repeated = _bound(PBT(n=2, epochs=2, truncation=0.5), Repeats(3))
    first = repeated.next_groups(9)[0].trials
    for trial in first:
        repeated.observe(Report(trial.number, 1, {"loss": trial.number}, state=TrialState.PAUSED))
    copies = [trial for trial in repeated.next_groups(9)[0].trials if trial.origin is not None]
    assert [(trial.number, trial.origin and trial.origin.trial) for trial in copies] == [(6, 0), (7, 1), (8, 2)]


def test_a_failed_repeat_fails_the_configuration_once_the_others_have_ended() -> None:
    repeated = _bound(Random(n=1, epochs=2), Repeats(3))
    repeated.next_groups(9)
    assert repeated.observe(Report(1, 1, state=TrialState.FAILED)) == []
    assert repeated.observe(Report(0, 2, {"loss": 1.0}, state=TrialState.PAUSED)) == []
    assert not repeated.finished
    decisions = repeated.observe(Report(2, 2, {"loss": 1.0}, state=TrialState.PAUSED))
    assert [(each.trial, each.state) for each in decisions] == [(0, TrialState.STOPPED), (2, TrialState.STOPPED)]
    assert "trial 1, a repeat of the same configuration, has failed or was stopped" in decisions[0].reason
    assert repeated.finished


@pytest.mark.parametrize(
    ("aggregate", "mode", "values", "expected"),
    [
        ("mean", "min", [1.0, 2.0, 6.0], 3.0),
        ("median", "min", [6.0, 1.0, 2.0], 2.0),
        ("worst", "min", [1.0, 6.0, 2.0], 6.0),
        ("worst", "max", [4.0, 1.0, 2.0], 1.0),
        ("mean", "min", [1.0, math.inf, 2.0], math.inf),
        ("mean", "min", [-math.inf, math.inf, 2.0], math.nan),
        ("median", "min", [1.0, math.nan, 2.0], math.nan),
        ("worst", "max", [1.0, math.nan, 2.0], math.nan),
    ],
)
def test_aggregates(aggregate: str, mode: str, values: list[float], expected: float) -> None:
    found = Repeats(3, 1, aggregate).aggregated([{"score": x} for x in values], objectives("score", mode))
    assert found == pytest.approx({"score": expected}, nan_ok=True)


def test_a_metric_that_a_repeat_lacks_has_no_aggregate() -> None:
    assert Repeats(2).aggregated([{"loss": 1.0, "extra": 2.0}, {"loss": 3.0}], LOSS) == {"loss": 2.0}


def _row(number: int, loss: float | None, state: TrialState = TrialState.COMPLETE, epoch: int = 3) -> TrialRow:
    metrics = {} if loss is None else {"loss": loss}
    trial = Trial(number, {"lr": number // 3}, number, 0)
    return TrialRow(trial, state, "", epoch, 3, 0, "cpu:0", "job", 2.0, metrics, metrics, loss, ranked=metrics)


@pytest.mark.parametrize(
    ("rows", "number", "state", "objective", "epoch"),
    [
        pytest.param([(0, 5.0), (1, 1.0), (2, 3.0)], 2, "complete", 3.0, 3, id="the median stands for all"),
        pytest.param([(0, 5.0), (1, 1.0)], 0, "complete", None, 3, id="one is not there"),
        pytest.param([(0, 5.0), (1, None, "running", 0), (2, 1.0)], 0, "running", None, 0, id="one has no value"),
        pytest.param([(0, 5.0), (1, 2.0, "failed", 1), (2, 1.0)], 1, "failed", None, 1, id="one has failed"),
        pytest.param([(0, 5.0), (1, math.nan, "complete"), (2, 1.0)], 0, "complete", None, 3, id="one is NaN"),
    ],
)
def test_the_row_of_a_configuration(
    rows: list[tuple[int, float | None, str, int]], number: int, state: str, objective: float | None, epoch: int
) -> None:
    made = [_row(*values[:2], *map(TrialState, values[2:3]), *values[3:]) for values in rows]
    made = [
        replace(row, objective=None) if row.objective is not None and math.isnan(row.objective) else row for row in made
    ]
    (found,) = Repeats(3).rows(made, LOSS)
    assert isinstance(found, ConfigurationRow)
    assert (found.number, found.state, found.objective, found.epoch) == (number, state, objective, epoch)
    assert found.seconds == 2.0 * len(rows)
    assert found.repeats == tuple(made)


def test_the_metric_of_the_best_epoch_has_its_mode_in_aggregates() -> None:
    """Its name alone would say that higher values are better."""
    of_best = StudySpec(metric="loss", mode="min", best_by={"rmse": "min"}).of_best
    repeats, values = Repeats(2, aggregate="worst"), [{"loss": 1.0, "rmse": 0.5}, {"loss": 2.0, "rmse": 0.3}]
    rows = [replace(_row(number, each["loss"]), ranked=each) for number, each in enumerate(values)]
    (found,) = repeats.rows(rows, LOSS, of_best=of_best)
    assert found.ranked == {"loss": 2.0, "rmse": 0.5}

    search = OptunaSearch(n=1, epochs=3)
    repeated = Repeated(search, repeats)
    repeated.bind(SPACE, metric="loss", mode="min", seed=0, of_best=of_best)
    repeated.next_groups(9)
    for number, each in enumerate(values):
        repeated.observe(Report(number, 1, each))
        repeated.observe(Report(number, 2, {"loss": 0.0, "rmse": 0.0} if number else {"loss": 0.0}))  # not the best
    assert search._best == {0: {"loss": 2.0, "rmse": 0.5}}


def test_a_repeat_that_ended_before_the_others_leaves_its_configuration_without_a_value() -> None:
    rows = [_row(0, 0.1, TrialState.STOPPED, 1), _row(1, 5.0), _row(2, 5.0)]
    (found,) = Repeats(3).rows(rows, LOSS)
    assert found.objective is None


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"lr": 0.01, "width": 16, "fold": 1}, ""),
        ({"lr": 0.01, "width": 16}, "`fold` must be the number of a fold, from 0 to 1, got None"),
        ({"lr": 0.01, "width": 16, "fold": 2}, "`fold` must be the number of a fold, from 0 to 1, got 2"),
    ],
)
def test_a_config_of_folds_names_its_fold(config: dict[str, object], fault: str) -> None:
    assert "; ".join(Repeats(1, 2).faults(SPACE, config)) == fault


def test_the_deviation_is_that_of_a_sample() -> None:
    (found,) = Repeats(3).rows([_row(0, 1.0), _row(1, 2.0), _row(2, 3.0)], LOSS)
    assert isinstance(found, ConfigurationRow)
    assert found.deviations == {"loss": 1.0}


def test_added_trials_are_no_repeats() -> None:
    added = _row(FIRST_ADDED + 4, 1.0)
    assert Repeats(3).rows([_row(0, 1.0), _row(1, 2.0), _row(2, 3.0), added], LOSS)[1] == added


def test_the_curve_of_a_configuration_has_the_epochs_of_all_repeats() -> None:
    curves = [[Report(i, epoch, {"loss": i + epoch}, 1.0) for epoch in range(1, 4 - i)] for i in range(2)]
    curves[1].append(Report(1, 3, state=TrialState.FAILED))
    found = Repeats(2).curve(curves, LOSS)
    assert [(report.epoch, report.metrics, report.seconds) for report in found] == [
        (1, {"loss": 1.5}, 2.0),
        (2, {"loss": 2.5}, 2.0),
    ]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 1.0], [1.0, 1.0], 1.0),
        ([1.0, 1.0], [2.0, 2.0], 0.0),
        # of scipy.stats.ttest_ind(..., equal_var=False)
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 0.0213),
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], 0.2879),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0], 0.3466),
    ],
)
def test_p_values(one: list[float], other: list[float], expected: float) -> None:
    assert p_value(one, other) == pytest.approx(expected, abs=1e-4)


_samples = st.lists(st.floats(-100, 100), min_size=2, max_size=9)


@given(_samples, _samples)
def test_a_p_value_is_a_probability_and_symmetric(one: list[float], other: list[float]) -> None:
    assert -1e-12 <= p_value(one, other) <= 1
    assert p_value(one, other) == pytest.approx(p_value(other, one), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seeds": 0}, "`repeats` must be an integer of at least 1, got 0"),
        ({"seeds": 2.0}, "`repeats` must be an integer of at least 1, got 2.0"),
        ({"folds": True}, "`folds` must be an integer of at least 1, got True"),
        ({"aggregate": "worst"}, "`aggregate='worst'` needs `repeats` or `folds` above 1"),
        ({"aggregate": "best"}, "`aggregate` must be one of mean, median, worst, got 'best'"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(AlgorithmError, match=words):
        Repeats(**settings)  # type: ignore[arg-type]


def test_a_study_has_no_more_trials_than_numbers() -> None:
    with pytest.raises(AlgorithmError, match="at most 1000000 trials"):
        _bound(ASHA(n=400_000, max_epochs=9), Repeats(3))
