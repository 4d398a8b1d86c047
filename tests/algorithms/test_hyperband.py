import math
from fractions import Fraction

import pytest

from shoal.algorithms.base import Totals
from shoal.algorithms.hyperband import Hyperband, deepest_bracket, rungs
from shoal.core.errors import AlgorithmError
from shoal.core.space import Space, uniform
from shoal.core.trial import Budget, Report, TrialState

# Worked by hand from Li et al. 2018, Algorithm 1: per bracket, s_max first, its rungs as (trials, epochs).
TABLES = {
    (27, 3): [
        [(27, 1), (9, 3), (3, 9), (1, 27)],
        [(12, 3), (4, 9), (1, 27)],
        [(6, 9), (2, 27)],
        [(4, 27)],
    ],
    (81, 3): [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ],
    (250, 5): [
        [(125, 2), (25, 10), (5, 50), (1, 250)],
        [(34, 10), (6, 50), (1, 250)],
        [(10, 50), (2, 250)],
        [(4, 250)],
    ],
    (100, 3): [  # epochs are cut to whole ones: 100/81, 100/27, 100/9, 100/3
        [(81, 1), (27, 3), (9, 11), (3, 33), (1, 100)],
        [(34, 3), (11, 11), (3, 33), (1, 100)],
        [(15, 11), (5, 33), (1, 100)],
        [(8, 33), (2, 100)],
        [(5, 100)],
    ],
    (2, 2): [[(2, 1), (1, 2)], [(2, 2)]],
    # Printed in the documentation of mlr3hyperband, another implementation (mlr_tuners_hyperband).
    (8, 2): [[(8, 1), (4, 2), (2, 4), (1, 8)], [(6, 2), (3, 4), (1, 8)], [(4, 4), (2, 8)], [(4, 8)]],
}


def bound(algorithm, mode="min"):
    algorithm.bind(Space({"x": uniform(0, 1)}), metric="loss", mode=mode, seed=5, data_seed=1)
    return algorithm


def paused(number, epoch, loss):
    return Report(number, epoch, {"loss": loss}, state=TrialState.PAUSED)


@pytest.mark.parametrize(("setting", "table"), TABLES.items(), ids=str)
def test_rungs_are_those_of_the_paper(setting, table):
    brackets = [rungs(*setting, s) for s in reversed(range(len(table)))]
    assert [[(rung.trials, rung.epochs) for rung in bracket] for bracket in brackets] == table
    assert deepest_bracket(*setting) == len(table) - 1


def by_the_formulas(most, eta, least):
    """Falkner et al. 2018, Algorithm 1, in exact fractions: every bracket's rungs, as if budgets could be so."""
    s_max = 0
    while Fraction(most, least) >= eta ** (s_max + 1):
        s_max += 1
    for s in range(s_max, -1, -1):
        n = math.ceil(Fraction(s_max + 1, s + 1) * eta**s)
        yield [(math.floor(Fraction(n, eta**i)), Fraction(most, eta ** (s - i))) for i in range(s + 1)]


@pytest.mark.parametrize(
    "setting", [(81, 3, 1), (27, 3, 1), (250, 5, 1), (243, 3, 9), (54, 3, 2), (100, 4, 3)], ids=str
)
def test_rungs_are_those_of_the_formulas(setting):
    most, eta, least = setting
    expected = list(by_the_formulas(*setting))
    found = [rungs(most, eta, s, least) for s in reversed(range(len(expected)))]
    assert [[(rung.trials, rung.epochs) for rung in bracket] for bracket in found] == [
        [(trials, math.floor(epochs)) for trials, epochs in bracket] for bracket in expected
    ]
    assert min(rung.epochs for bracket in found for rung in bracket) >= least


@pytest.mark.parametrize("eta", [2, 3, 4, 5, 10])
@pytest.mark.parametrize("power", [1, 5, 12])
def test_the_deepest_bracket_is_exact_around_powers(eta, power):
    around = [deepest_bracket(eta**power + offset, eta) for offset in (-1, 0, 1)]
    assert around == [power - 1, power, power + (eta**power + 1 == eta ** (power + 1))]


def test_all_first_rungs_are_proposed_at_once_with_consecutive_numbers():
    groups = bound(Hyperband(27)).next_groups(free=1)
    assert [(len(group.trials), group.budget) for group in groups] == [
        (27, Budget(1)),
        (12, Budget(3)),
        (6, Budget(9)),
        (4, Budget(27)),
    ]
    assert [trial.number for group in groups for trial in group.trials] == list(range(49))
    assert [group.name for group in groups] == [
        "bracket 3, rung 0",
        "bracket 2, rung 0",
        "bracket 1, rung 0",
        "bracket 0",
    ]
    assert [group.epochs_ahead for group in groups] == [26, 24, 18, 0], "the last of each gets to 27"
    assert [group.work_ahead for group in groups] == [9 * 2 + 3 * 6 + 18, 4 * 6 + 18, 2 * 18, 0]


def test_brackets_limits_them_to_those_of_the_most_trials():
    groups = bound(Hyperband(27, brackets=2)).next_groups(free=1)
    assert [len(group.trials) for group in groups] == [27, 12]


# HFTA, Table 11: its two searches by Hyperband, with the number of last rounds that they skip.
SKIPPED = {
    (250, 5, 1): [[(125, 2), (25, 10), (5, 50)], [(34, 10), (6, 50)], [(10, 50)]],
    (81, 3, 2): [[(81, 1), (27, 3), (9, 9)], [(34, 3), (11, 9)], [(15, 9)]],
    (27, 3, 3): [[(27, 1)]],
}


@pytest.mark.parametrize(("setting", "table"), SKIPPED.items(), ids=str)
def test_the_last_rungs_of_each_bracket_may_be_skipped(setting, table):
    most, eta, skip = setting
    algorithm = bound(Hyperband(most, eta=eta, skip_last=skip))
    first = algorithm.next_groups(free=1)
    assert [group.epochs_ahead for group in first] == [rungs[-1][1] - rungs[0][1] for rungs in table]
    found, open_groups = [], first
    states = {}
    while open_groups:
        found += [(len(group.trials), group.budget.epochs) for group in open_groups]
        for group in open_groups:
            for trial in group.trials:
                for decision in algorithm.observe(paused(trial.number, group.budget.epochs, loss=trial.number)):
                    states[decision.trial] = decision.state
        open_groups = algorithm.next_groups(free=1)
    assert sorted(found) == sorted(rung for rungs in table for rung in rungs)
    assert algorithm.finished
    completed = sum(state is TrialState.COMPLETE for state in states.values())
    assert completed == sum(rungs[-1][0] for rungs in table)
    begun, epochs = sum(rungs[0][0] for rungs in table), sum(trials * (now - before) for rungs in table
        for (trials, now), before in zip(rungs, [0, *(now for _, now in rungs)], strict=False))  # fmt: skip
    assert algorithm.totals == Totals(begun, epochs, epochs)


def test_a_promoted_trial_is_the_same_trial_and_trials_follow_from_seed_and_number():
    algorithm = bound(Hyperband(9, brackets=1))
    (first,) = algorithm.next_groups(free=9)
    for trial in first.trials:
        assert algorithm.next_groups(free=9) == []
        decisions = algorithm.observe(paused(trial.number, 1, loss=10 - trial.number))
    (second,) = algorithm.next_groups(free=9)
    assert second.trials == first.trials[6:]
    assert second.budget == Budget(3)
    assert second.name == "bracket 2, rung 1"
    assert (first.epochs_ahead, second.epochs_ahead) == (8, 6)
    assert (first.work_ahead, second.work_ahead) == (3 * 2 + 6, 6)
    assert [(decision.trial, decision.state, decision.reason) for decision in decisions] == [
        (number, TrialState.STOPPED, f"rank {9 - number} of 9 at epoch 1; the best 3 continue")
        for number in (5, 4, 3, 2, 1, 0)
    ]
    # Another algorithm with fewer trials gives the same numbers the same configurations.
    (small,) = bound(Hyperband(3, brackets=1)).next_groups(free=9)
    assert small.trials == first.trials[:3]


def test_a_study_to_its_end():
    algorithm = bound(Hyperband(4, eta=2), mode="max")
    stretches = []
    for _ in range(10):
        for group in algorithm.next_groups(free=2):
            stretches.append(([trial.number for trial in group.trials], group.budget.epochs))
            for trial in group.trials:
                algorithm.observe(paused(trial.number, group.budget.epochs, loss=trial.number))
    assert stretches == [
        ([0, 1, 2, 3], 1),
        ([4, 5, 6], 2),
        ([7, 8, 9], 4),
        ([2, 3], 2),
        ([6], 4),
        ([3], 4),
    ]
    assert algorithm.finished


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": 27, "eta": 1.5}, "`eta` must be an integer of at least 2, got 1.5"),
        ({"max_epochs": 27, "eta": 1}, "`eta` must be an integer of at least 2, got 1"),
        ({"max_epochs": 27, "eta": True}, "`eta` must be an integer of at least 2, got True"),
        ({"max_epochs": 0}, "`max_epochs` must be an integer of at least 1, got 0"),
        ({"max_epochs": 2.0}, "`max_epochs` must be an integer of at least 1, got 2.0"),
        ({"max_epochs": 2}, "`max_epochs` must be at least eta, 3, or there is nothing to halve; got 2"),
        ({"max_epochs": 27, "brackets": 0}, "`brackets` must be an integer of at least 1, got 0"),
        ({"max_epochs": 27, "brackets": 5}, "`brackets` must be at most 4 for max_epochs=27 and eta=3, got 5"),
        ({"max_epochs": 27, "skip_last": -1}, "`skip_last` must be an integer of at least 0, got -1"),
        (
            {"max_epochs": 27, "skip_last": 4},
            "`skip_last` must be at most 3 for max_epochs=27 and eta=3, or no rung is left; got 4",
        ),
        (
            {"max_epochs": 27, "skip_last": 1, "brackets": 4},
            "`brackets` must be at most 3 for max_epochs=27 and eta=3, skip_last=1, got 4",
        ),
    ],
    ids=str,
)
def test_bad_settings(settings, message):
    with pytest.raises(AlgorithmError) as error:
        Hyperband(**settings)
    assert str(error.value) == message
