"""The view that a sampler gets of trials that pause, continue and end."""

import math

import optuna
import pytest
from optuna.trial import TrialState as Shown

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Problem
from shoal.algorithms.projection import projection
from shoal.core.space import Space, choice, uniform
from shoal.core.trial import Report, TrialState

LINE = Space({"x": uniform(0, 1)})
PLANE = Space({"x": uniform(0, 1), "net": choice([{"kind": "deep", "depth": uniform(1, 2)}, {"kind": "flat"}])})
BUDGETS = (1, 3, 9)


class Witness(optuna.samplers.RandomSampler):
    """Notes what it can see whenever it is asked."""

    def __init__(self, seed):
        super().__init__(seed=seed)
        self.seen = []
        self.told = []

    def before_trial(self, study, trial):
        self.seen.append([(each.state, each.value) for each in study.get_trials() if each.number != trial.number])

    def after_trial(self, study, trial, state, values):
        self.told.append((trial.number, state, values))


def witnessed(n=100, space=LINE, budgets=BUDGETS):
    made = []

    def make(seed):
        made.append(Witness(seed))
        return made[-1]

    problem = Problem(space, "loss", "min", 0, None)
    return projection(problem, make, budgets, n), made[0]


def test_how_a_trial_is_shown_on_its_way():
    shown, witness = witnessed()
    for _ in range(5):
        shown.propose()
    shown.add_values(0, 1, (0.5,))
    shown.add_values(1, 1, (0.75,))
    shown.add_values(1, 3, (0.25,))  # the model is still of the lowest budget
    shown.mark_failed(2)
    shown.add_values(3, 1, (math.nan,))
    shown.propose()
    assert witness.seen[-1] == [
        (Shown.COMPLETE, 0.5),
        (Shown.COMPLETE, 0.75),
        (Shown.FAIL, None),
        (Shown.FAIL, None),
        (Shown.RUNNING, None),
    ]
    assert witness.told == [
        (0, Shown.COMPLETE, (0.5,)),
        (1, Shown.COMPLETE, (0.75,)),
        (2, Shown.FAIL, None),
        (3, Shown.FAIL, None),
    ]


def test_the_model_moves_up_once_a_budget_has_enough_and_stays():
    shown, witness = witnessed()
    for number in range(14):
        shown.propose()
        shown.add_values(number, 1, (1.0,))
    for number in range(9):
        shown.add_values(number, 3, (0.5,))
    shown.propose()
    assert witness.seen[-1] == [(Shown.COMPLETE, 1.0)] * 14
    shown.mark_failed(9)  # it had got to the first budget
    shown.add_values(10, 3, (0.5,))
    shown.propose()
    reached, lost, left_behind = (Shown.COMPLETE, 0.5), (Shown.FAIL, None), (Shown.COMPLETE, 1.0)
    assert witness.seen[-1] == [*[reached] * 9, lost, reached, *[left_behind] * 3, (Shown.RUNNING, None)]
    shown.mark_training(11)
    shown.propose()
    assert witness.seen[-1][11] == (Shown.WAITING, None)
    shown.add_values(11, 3, (2.0,))  # the worst there is no better than who was left behind
    shown.propose()
    assert witness.seen[-1][11:14] == [(Shown.COMPLETE, 2.0)] * 3


def test_a_space_of_many_parameters_needs_more():
    space = Space({f"x{i}": uniform(0, 1) for i in range(9)})
    shown, witness = witnessed(space=space)
    for number in range(12):
        shown.propose()
        shown.add_values(number, 1, (1.0,))
        if number < 11:
            shown.add_values(number, 3, (0.5,))
    shown.propose()
    assert {value for _, value in witness.seen[-1]} == {1.0}
    shown.add_values(11, 3, (0.5,))
    shown.propose()
    assert {value for _, value in witness.seen[-1][:12]} == {0.5}


def test_a_sampler_finds_the_best_trial_as_in_any_study():
    shown, witness = witnessed()
    for number, value in enumerate((3.0, 1.0, 2.0)):
        shown.propose()
        shown.add_values(number, 1, (value,))
    study = shown._study
    assert (study.best_trial.number, study.best_value) == (1, 1.0)
    study.stop()  # as a grid does when nothing is left; here it is not for the sampler to say
    assert len(witness.seen) == 3


@pytest.mark.parametrize(("budgets", "halved"), [((1,), False), (BUDGETS, True)], ids=["one budget", "several"])
def test_a_new_worst_value_changes_only_what_was_left_behind(budgets, halved, monkeypatch):
    shown, _ = witnessed(budgets=budgets, n=200)
    numbers = []
    show = shown._storage.show
    monkeypatch.setattr(shown._storage, "show", lambda trial, *how: (numbers.append(trial.number), show(trial, *how)))
    for number in range(100):
        shown.propose()
        shown.add_values(number, 1, (float(number),))
    assert numbers == [*range(100)]  # each is worse than all before it, and changes nothing of them
    if halved:
        for number in range(10):
            shown.add_values(number, 3, (1000.0 + number,))
        assert numbers[100:109] == [*range(9)]
        assert numbers[109:] == [*range(100)]  # the model has moved up
        shown.add_values(10, 3, (2000.0,))
        assert sorted(numbers[209:]) == [*range(10, 100)]  # nine have been there before
        shown.add_values(11, 3, (0.0,))
        assert numbers[299:] == [11]


def near(proposals):
    return sum(abs(x - 0.25) < 0.1 for x in proposals) / len(proposals)


def test_paused_trials_do_not_push_tpe_away_as_the_naive_way_does():
    """60 trials, one by one: those near 0.25 are paused at the top, the others end at once."""

    def loss(x):
        return abs(x - 0.25)

    shown = projection(Problem(LINE, "loss", "min", 0, None), "tpe", BUDGETS, 100)
    naive = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))
    ours, theirs = [], []
    for number in range(60):
        ours.append(shown.propose()["x"])
        shown.add_values(number, 1, (loss(ours[-1]),))
        trial = naive.ask()
        theirs.append(trial.suggest_float("x", 0, 1))
        if loss(theirs[-1]) >= 0.1:  # else it is paused, for which Optuna has no word but RUNNING
            naive.tell(trial, loss(theirs[-1]))
    assert near(ours[20:]) >= 0.6
    assert near(theirs[20:]) <= 0.4


def searched(algorithm, space, loss):
    """Every trial's configuration, of a study that trains one stretch at a time."""
    algorithm.bind(space, metric="loss", mode="min", seed=3)
    configs, open_ = {}, []
    while True:
        for group in algorithm.next_groups(free=1):
            open_ += [(trial, group.budget.epochs) for trial in group.trials]
        if not open_:
            assert algorithm.finished
            return [configs[number] for number in sorted(configs)]
        trial, epochs = open_.pop(0)
        configs[trial.number] = trial.config
        value = loss(trial.config) + 0.1 / epochs
        algorithm.observe(Report(trial.number, epochs, {"loss": value}, state=TrialState.PAUSED))


def halving(sampler, **settings):
    return ASHA(**{"n": 60, "max_epochs": 9, "concurrency": 4, "sampler": sampler} | settings)


def distance(config):
    return abs(config["x"] - 0.7)


@pytest.mark.parametrize("variant", ["promotion", "stopping"])
def test_halving_with_a_model_looks_where_it_is_good(variant):
    modelled = searched(halving("tpe", variant=variant), PLANE, distance)
    random = searched(halving(None, variant=variant), PLANE, distance)
    assert sum(map(distance, modelled[30:])) < 0.5 * sum(map(distance, random[30:]))


@pytest.mark.parametrize(
    "sampler",
    ["tpe", "random", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qmc", "nsga2", Witness))],
)
def test_the_same_reports_give_the_same_proposals(sampler):
    first, second = (searched(halving(sampler), PLANE, distance) for _ in range(2))
    assert first == second
    assert len({config["x"] for config in first}) >= 50  # children of NSGA-II can be twins


@pytest.mark.thorough
def test_gp_with_halving():
    configs = searched(halving("gp", n=20, max_epochs=3, concurrency=2), LINE, distance)
    assert min(map(distance, configs[10:])) < 0.05


def test_cmaes_with_halving():
    pytest.importorskip("cmaes")
    space = Space({"x": uniform(0, 1), "y": uniform(0, 1)})
    configs = searched(halving("cmaes", n=80), space, lambda config: distance(config) + config["y"])
    assert len({config["x"] for config in configs}) == 80
