"""Every algorithm with every kind of domain, computed values, orders and conditions."""

import logging

import pytest

from shoal.algorithms import (
    ASHA,
    BOHB,
    PBT,
    Grid,
    Hyperband,
    Median,
    OptunaSearch,
    Random,
    SuccessiveHalving,
    SyncBOHB,
)
from shoal.algorithms.projection import projection
from shoal.core.errors import SpaceError
from shoal.core.reference import ref
from shoal.core.space import (
    Space,
    choice,
    lognormal,
    logrange,
    normal,
    ordinal,
    qloguniform,
    quniform,
    randint,
    uniform,
)
from shoal.core.trial import Report, TrialState, derive_seed
from shoal.testing import check_algorithm

RICH = Space(
    {
        "mean": normal(0, 1),
        "cut": normal(0, 1, low=-1, high=0.5),
        "lr": lognormal(1e-3, 3),
        "noise": qloguniform(0.1, 2, 0.1),
        "width": logrange(8, 64, 4, integer=True),
        "augment": ordinal(["none", "weak", "strong"]),
        "kind": choice(["a", "b"], weights=[3, 1]),
        "layers": randint(1, 5),
        "dropout": uniform(0, ref("noise")),
        "heads": randint(1, ref("layers") + 1),
        "parameters": ref("layers") * ref("width"),
        "low": quniform(0, 1, 0.1),
        "high": quniform(0, 1, 0.1),
        "optimizer": choice([{"name": "sgd", "decay": uniform(0, ref("noise"))}, {"name": "adam"}]),
    },
    where=[ref("parameters") <= 128],
    ordered=[("low", "high")],
)
ALGORITHMS = {
    "random": lambda: Random(n=20, epochs=2),
    "successive_halving": lambda: SuccessiveHalving(n=12, max_epochs=9),
    "hyperband": lambda: Hyperband(max_epochs=9),
    "asha": lambda: ASHA(n=20, max_epochs=9, concurrency=4),
    "asha, tpe": lambda: ASHA(n=20, max_epochs=4, concurrency=2, sampler="tpe"),
    "median": lambda: Median(n=12, epochs=4),
    "sync_bohb": lambda: SyncBOHB(max_epochs=9, brackets=4, random_fraction=0, min_points=3),
    "bohb": lambda: BOHB(max_epochs=9, brackets=4, random_fraction=0, min_points=3),
    "pbt": lambda: PBT(n=8, epochs=6, truncation=0.5),
    "pbt, all": lambda: PBT(n=6, epochs=4, truncation=0.5, resample=0, explored=list(RICH.domains())[:12]),
    **{
        f"optuna, {sampler}": lambda sampler=sampler: OptunaSearch(n=14, epochs=1, sampler=sampler, concurrency=2)
        for sampler in ("tpe", "random", "nsga2")
    },
}


def trials_of(algorithm, space):
    """All trials of an algorithm whose trials all report noise."""
    algorithm.bind(space, metric="score", mode="min", seed=3, data_seed=0)
    trials, waiting = {}, []
    while not algorithm.finished:
        for group in algorithm.next_groups(4):
            trials |= {trial.number: trial for trial in group.trials}
            waiting += [(trial.number, group.budget.epochs) for trial in group.trials]
        number, epochs = waiting.pop(0)
        value = derive_seed("noise", number, epochs) / 2**63
        algorithm.observe(Report(number, epochs, {"score": value}, state=TrialState.PAUSED))
    return [trials[number] for number in sorted(trials)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_configurations_belong_to_the_space(name):
    trials = trials_of(ALGORITHMS[name](), RICH)
    assert len(trials) >= 12
    assert [RICH.faults(trial.config) for trial in trials] == [()] * len(trials)
    assert trials == trials_of(ALGORITHMS[name](), RICH), "the same again, as a resumed study needs it"


@pytest.mark.parametrize("name", ["random", "pbt, all"])
def test_the_contract_holds_with_rules(name):
    check_algorithm(ALGORITHMS[name], RICH)


def test_gp_and_cmaes_go_on_after_refused_proposals():
    space = Space({"x": uniform(0, 1), "y": normal(0, 1), "n": logrange(1, 8, 4)}, where=[ref("x") <= 0.4])
    for sampler in ("gp", "cmaes"):
        trials = trials_of(OptunaSearch(n=12, epochs=1, sampler=sampler, concurrency=1), space)
        assert all(trial.config["x"] <= 0.4 for trial in trials)


def test_a_sampler_is_told_of_refused_proposals_and_a_random_one_takes_their_place(monkeypatch):
    space = Space({"x": uniform(0, 1), "n": ordinal([1, 2])}, where=[ref("x") > 0.5])
    problem = Random(n=1, epochs=1)
    problem.bind(space, metric="score", mode="min", seed=0, data_seed=0)
    monkeypatch.setattr("shoal.algorithms.projection._MOST_ATTEMPTS", 1)
    proposed = projection(problem.problem, "random", (1,), 8)
    configs = [proposed.propose() for _ in range(8)]
    assert all(config["x"] > 0.5 for config in configs)
    for number in range(8):
        proposed.add_values(number, 1, [float(number)])
    states = [trial.state.name for trial in proposed._study.trials]
    assert states.count("COMPLETE") == 8
    assert 0 < states.count("FAIL") == len(states) - 8
    assert [trial.values for trial in proposed._study.trials if trial.values] == [[float(i)] for i in range(8)]
    complete = [trial for trial in proposed._study.trials if trial.values]
    assert [trial.params["x"] for trial in complete] == [config["x"] for config in configs]
    assert [trial.params["n"] + 1 for trial in complete] == [config["n"] for config in configs]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_sampler_learns_where_the_conditions_refuse_even_if_the_best_values_are_beyond(mode):
    space = Space({"x": uniform(0, 1), "y": uniform(0, 1)}, where=[ref("x") + ref("y") <= 1])
    search = Random(n=1, epochs=1)
    search.bind(space, metric="score", mode=mode, seed=0, data_seed=0)
    proposed = projection(search.problem, "tpe", (1,), 24)
    for number in range(24):
        config = proposed.propose()
        total = config["x"] + config["y"]
        proposed.add_values(number, 1, [total if mode == "max" else -total])
    shown = proposed._study.trials
    assert len(shown) < 80, "as FAIL, each trial after the tenth took a hundred proposals"
    values = [trial.value for trial in shown if trial.value is not None]
    assert len(values) > 24
    assert len({*values}) == 24, "a refused proposal has the worst value of a trial"


def test_a_grid_leaves_out_refused_points_and_says_how_many(caplog):
    space = Space({"a": [1, 2, 3], "b": logrange(1, 4, 3, integer=True)}, where=[ref("a") * ref("b") <= 4])
    with caplog.at_level(logging.WARNING, "shoal.algorithms"):
        trials = trials_of(Grid(epochs=1), space)
    assert [(trial.config["a"], trial.config["b"]) for trial in trials] == [
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (2, 2),
        (3, 1),
    ]
    assert "refuse 3 of its 9 points" in caplog.text
    with pytest.raises(SpaceError, match="refuse all of its 3 points"):
        Grid(epochs=1).bind(
            Space({"a": [1, 2, 3]}, where=[ref("a") > 5]), metric="score", mode="min", seed=0, data_seed=0
        )


def test_pbt_computes_anew_and_keeps_the_parent_where_every_change_is_refused():
    space = Space({"a": uniform(1, 2), "twice": ref("a") * 2})
    for trial in trials_of(PBT(n=6, epochs=5, truncation=0.5), space):
        assert trial.config["twice"] == trial.config["a"] * 2
    fixed = Space({"a": choice([1, 2]), "b": uniform(0, 1), "c": ref("b") * 1}, where=[ref("b") >= 0.9])
    trials = trials_of(PBT(n=6, epochs=5, truncation=0.5, resample=0), fixed)
    parents = {trial.number: trial.config for trial in trials}
    copies = [trial for trial in trials if trial.origin is not None]
    assert copies
    assert all(trial.config["b"] >= 0.9 and trial.config["c"] == trial.config["b"] for trial in copies)
    equal = [trial.config == parents[trial.origin.trial] for trial in copies]
    assert not all(equal)


def test_pbt_keeps_the_parents_configuration_after_too_many_refusals(monkeypatch):
    monkeypatch.setattr("shoal.algorithms.pbt._MOST_ATTEMPTS", 0)
    trials = trials_of(PBT(n=4, epochs=3, truncation=0.5), RICH)
    copies = [trial for trial in trials if trial.origin is not None]
    assert copies
    assert all(trial.config == trials[trial.origin.trial].config for trial in copies)


@pytest.mark.parametrize("explored", ["width", "augment"])
def test_pbt_exchanges_values_in_an_order_for_adjacent_ones(explored):
    values = RICH.domains()[explored][0].values
    trials = trials_of(PBT(n=8, epochs=8, truncation=0.5, resample=0, explored=[explored]), RICH)
    steps = {
        values.index(trial.config[explored]) - values.index(trials[trial.origin.trial].config[explored])
        for trial in trials
        if trial.origin is not None
    }
    assert steps <= {-1, 0, 1}
    assert len(steps) > 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_configuration_that_cannot_be_computed_is_refused(name):
    space = Space({"x": randint(0, 4), "y": 12 / ref("x"), "z": uniform(0, 2), "w": uniform(1, ref("z"))})
    if name == "pbt, all":
        algorithm = PBT(n=6, epochs=4, truncation=0.5, resample=0, explored=["x", "z"])
    else:
        algorithm = ALGORITHMS[name]()
    trials = trials_of(algorithm, space)
    assert len(trials) >= 12
    assert all(trial.config["x"] * trial.config["y"] == pytest.approx(12) for trial in trials)
    assert all(1 <= trial.config["w"] <= trial.config["z"] for trial in trials)


def test_a_grid_leaves_out_what_cannot_be_computed(caplog):
    space = Space({"x": randint(0, 4), "y": 12 // ref("x")}, where=[6 % ref("y") == 0])
    assert [trial.config for trial in trials_of(Grid(epochs=1), space)] == [{"x": 2, "y": 6}]
    assert "refuse 3 of its 4 points" in caplog.text


def test_what_can_never_be_computed_names_the_trial_and_the_remedy():
    space = Space({"a": 0, "b": 1 / ref("a"), "c": uniform(0, 1)})
    words = r"^trial 0: none of 1000 .* 1000 cannot be computed: `b`: 1 / a has no value for a = 0 \(division by zero\)"
    with pytest.raises(
        SpaceError, match=words + r"; exclude it by a condition, such as where=\[shoal.ref\('a'\) != 0\]"
    ):
        trials_of(Random(n=20, epochs=1), space)


def test_a_given_value_of_which_another_cannot_be_computed_is_an_error():
    space = Space({"a": randint(0, 3), "b": 1 / ref("a")})
    words = r"^`b`: 1 / a has no value for a = 0 .* such as where=\[shoal.ref\('a'\) != 0\]"
    with pytest.raises(SpaceError, match=words):
        space.sample(0, {"a": 0})
    assert space.sample(0, {"a": 2})["b"] == 0.5
