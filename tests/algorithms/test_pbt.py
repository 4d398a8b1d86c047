"""Population based training: who is replaced, by copies of whom, and how these differ."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.pbt import PBT
from shoal.core.errors import AlgorithmError, SpaceError
from shoal.core.space import Space, choice, loguniform, quniform, randint, uniform
from shoal.core.trial import Budget, Origin, Report, TrialState

SPACE = Space({"lr": loguniform(1e-4, 1), "width": choice([8, 16, 32]), "momentum": uniform(0, 1)})


def population(mode="max", space=SPACE, **settings):
    algorithm = PBT(**{"n": 5, "epochs": 6, "interval": 2, "truncation": 0.4, **settings})
    algorithm.bind(space, metric="score", mode=mode, seed=0, data_seed=1)
    return algorithm


def report(number, epoch, value, state=TrialState.PAUSED):
    return Report(number, epoch, {} if state is TrialState.FAILED else {"score": value}, state=state)


def generation(algorithm, values):
    """Let a generation report at its end; the next one, and what was decided, by number."""
    (group,) = algorithm.next_groups(1)
    decisions = []
    for trial in group.trials:
        value = values[trial.number]
        state = TrialState.FAILED if value is None else TrialState.PAUSED
        decisions += algorithm.observe(report(trial.number, group.budget.epochs, value, state))
    return {decision.trial: decision for decision in decisions}


@pytest.mark.parametrize(
    ("mode", "values", "stopped", "parents"),
    [
        pytest.param("max", [0.1, 0.5, 0.3, 0.9, 0.2], {0, 4}, {1, 3}, id="the worst two go, the best two are copied"),
        pytest.param("min", [0.1, 0.5, 0.3, 0.9, 0.2], {1, 3}, {0, 4}, id="the least is the best"),
        pytest.param("max", [0.1, 0.5, 0.3, math.nan, 0.2], {0, 3}, {1, 2}, id="nan is the worst"),
        pytest.param("max", [0.1, 0.5, math.nan, None, math.nan], {2, 4}, {0, 1}, id="more are lost than are replaced"),
        pytest.param("max", [1.0] * 5, {3, 4}, {0, 1}, id="of equals the older ones"),
        pytest.param("max", [math.inf, 0.5, -math.inf, 0.2, 0.3], {2, 3}, {0, 1}, id="infinities have their order"),
    ],
)
def test_selection(mode, values, stopped, parents):
    algorithm = population(mode)
    decisions = generation(algorithm, values)
    assert decisions.keys() == stopped
    assert {decision.state for decision in decisions.values()} == {TrialState.STOPPED}
    (group,) = algorithm.next_groups(1)
    assert (len(group.trials), group.budget) == (5, Budget(4))
    copies = [trial for trial in group.trials if trial.origin is not None]
    assert [trial.number for trial in copies] == list(range(5, 10 - len(group.trials) + len(copies)))
    assert {trial.origin.trial for trial in copies} <= parents
    assert {trial.origin.epoch for trial in copies} == {2}


def test_when_all_are_lost_the_search_is_over():
    algorithm = population()
    decisions = generation(algorithm, [math.nan, None, math.nan, None, math.nan])
    assert {number: decision.reason for number, decision in decisions.items()} == dict.fromkeys(
        (0, 2, 4), "score is nan at epoch 2, as for all trials of the generation"
    )
    assert algorithm.finished
    assert algorithm.next_groups(1) == []


def test_generations_end_at_the_interval_and_at_the_last_epoch():
    algorithm = population(epochs=5)
    budgets = []
    while not algorithm.finished:
        (group,) = algorithm.next_groups(1)
        budgets.append(group.budget.epochs)
        decisions = [
            decision
            for trial in group.trials
            for decision in algorithm.observe(report(trial.number, group.budget.epochs, float(trial.number)))
        ]
    assert budgets == [2, 4, 5]
    assert {decision.state for decision in decisions} == {TrialState.COMPLETE}
    assert len(decisions) == 5


@given(seed=st.integers(0, 10**6), resample=st.sampled_from([0.0, 0.25, 1.0]))
def test_copies_are_configurations_of_the_space_near_their_parents(seed, resample):
    space = Space(
        {
            "lr": loguniform(1e-4, 1),
            "layers": randint(1, 4),
            "drop": quniform(0, 1, 0.1),
            "constant": 3,
            "opt": choice([{"name": "sgd", "momentum": uniform(0.5, 1)}, {"name": "adam"}]),
        }
    )
    algorithm = PBT(n=6, epochs=3, truncation=0.5, resample=resample)
    algorithm.bind(space, metric="score", mode="max", seed=seed, data_seed=1)
    trials = {}
    while not algorithm.finished:
        (group,) = algorithm.next_groups(1)
        trials |= {trial.number: trial for trial in group.trials}
        for trial in group.trials:
            algorithm.observe(report(trial.number, group.budget.epochs, float(trial.number % 5)))
    copies = [trial for trial in trials.values() if trial.origin is not None]
    assert len(copies) == 6
    for trial in copies:
        parent = trials[trial.origin.trial]
        space.parameters(trial.config)  # raises for what is none of the space
        assert trial.config["opt"]["name"] == parent.config["opt"]["name"]
        if resample == 0:
            assert trial.config["lr"] / parent.config["lr"] in (pytest.approx(0.8), pytest.approx(1.2)) or (
                trial.config["lr"] in (1e-4, 1)
            )
            assert abs(trial.config["layers"] - parent.config["layers"]) <= 1


def test_options_are_explored_when_they_are_named():
    space = Space({"width": choice([8, 16, 32]), "lr": uniform(0, 1)})
    algorithm = population(space=space, explored=["width"], resample=0.0, n=40, epochs=20, interval=1)
    trials = {}
    while not algorithm.finished:
        (group,) = algorithm.next_groups(1)
        trials |= {trial.number: trial for trial in group.trials}
        for trial in group.trials:
            algorithm.observe(report(trial.number, group.budget.epochs, float(trial.number)))
    pairs = [(trials[t.origin.trial].config, t.config) for t in trials.values() if t.origin is not None]
    assert all(parent["lr"] == child["lr"] for parent, child in pairs)
    order = [8, 16, 32]
    steps = {order.index(child["width"]) - order.index(parent["width"]) for parent, child in pairs}
    assert steps == {-1, 0, 1}, "0 where there is no option beside it"


def test_every_trial_of_a_line_has_a_number_of_its_own():
    algorithm = population(n=4, epochs=8, interval=1)
    lines = []
    while not algorithm.finished:
        (group,) = algorithm.next_groups(1)
        lines.append([trial.number for trial in group.trials])
        for trial in group.trials:
            algorithm.observe(report(trial.number, group.budget.epochs, float(-trial.number)))
    assert all(set(after) - set(before) == {max(before) + 1} for before, after in pairwise(lines))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 1}, "`n` must be an integer of at least 2, got 1"),
        ({"epochs": 0}, "`epochs` must be an integer of at least 1, got 0"),
        ({"interval": 1.5}, "`interval` must be an integer of at least 1, got 1.5"),
        ({"truncation": 0.6}, "`truncation` must be a number from 0 to 0.5, got 0.6"),
        ({"truncation": math.nan}, "`truncation` must be a number from 0 to 0.5, got nan"),
        ({"resample": True}, "`resample` must be a number from 0 to 1, got True"),
        ({"explored": "lr"}, r"`explored` must be a list of names, got 'lr'; give \['lr'\]"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(AlgorithmError, match=message):
        population(**settings)


def test_what_is_explored_must_be_in_the_space():
    with pytest.raises(SpaceError, match="`depth` is to be explored, but the space has lr, width, momentum"):
        population(explored=["lr", "depth"])


def test_a_report_beyond_the_generation_is_refused():
    algorithm = population()
    algorithm.next_groups(1)
    with pytest.raises(AlgorithmError, match="trial 0 reports epoch 3, but its budget is 2 epochs"):
        algorithm.observe(report(0, 3, 1.0))


def test_the_origin_says_where_a_trial_begins():
    algorithm = population()
    generation(algorithm, [0.1, 0.5, 0.3, 0.9, 0.2])
    (group,) = algorithm.next_groups(1)
    assert {trial.start for trial in group.trials} == {0, 2}
    assert group.trials[-1].origin == Origin(group.trials[-1].origin.trial, 2)


def test_only_members_of_the_newest_generation_may_return():
    algorithm = population(epochs=4)

    def may_return(numbers):
        return [number for number in range(numbers) if algorithm.may_return(number)]

    assert may_return(5) == [0, 1, 2, 3, 4]
    stopped = generation(algorithm, [0.1, 0.5, 0.3, 0.9, 0.2])
    assert may_return(5) == sorted({0, 1, 2, 3, 4} - stopped.keys()) == [1, 2, 3]
    (last,) = algorithm.next_groups(1)
    assert {trial.origin.trial for trial in last.trials if trial.origin} <= {1, 3}
    assert may_return(7) == [], "the last generation ends, and nothing copies it"
