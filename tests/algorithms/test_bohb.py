"""BOHB on cases worked out by hand: which budget is modelled, what is good, when brackets begin, what is proposed."""

import math
from random import Random
from statistics import fmean

import pytest

from shoal.algorithms import bohb
from shoal.algorithms.bohb import BOHB, SyncBOHB
from shoal.algorithms.hyperband import Hyperband
from shoal.core.errors import AlgorithmError
from shoal.core.space import Space, choice, loguniform, randint, uniform
from shoal.core.trial import Report, TrialState

NAN = float("nan")
LINE = Space({"x": uniform(0, 1)})
NESTED = Space(
    {
        "lr": loguniform(1e-4, 1),
        "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 1)}, {"name": "adam", "beta": uniform(0.5, 1)}]),
        "layers": randint(1, 5),
        "fixed": choice([7]),
    }
)


def bound(algorithm, space=LINE, mode="min", seed=5):
    algorithm.bind(space, metric="loss", mode=mode, seed=seed, data_seed=1)
    return algorithm


def asked(algorithm):
    """(trial, epochs) of all that is proposed."""
    return [(trial, group.budget.epochs) for group in algorithm.next_groups(free=1) for trial in group.trials]


def told(algorithm, trial, epochs, loss):
    if loss is None:
        return algorithm.observe(Report(trial.number, epochs, state=TrialState.FAILED, reason="bad luck"))
    return algorithm.observe(Report(trial.number, epochs, {"loss": loss}, state=TrialState.PAUSED))


def run(algorithm, loss):
    """Train all there is, in the order in which it is proposed; the trials and how far each was trained."""
    trials, reached, waiting = {}, {}, asked(algorithm)
    while waiting:
        trial, epochs = waiting.pop(0)
        trials[trial.number], reached[trial.number] = trial, epochs
        told(algorithm, trial, epochs, loss(trial.config))
        waiting += asked(algorithm)
    assert algorithm.finished
    return [trials[number] for number in sorted(trials)], reached


@pytest.fixture
def densities(monkeypatch):
    """Every pair (good, bad) of point lists that was modelled, in order."""
    found = []

    class Spy(bohb.Density):
        def __init__(self, points, options, least):
            super().__init__(points, options, least)
            found.append(sorted(x for (x,) in points))

    monkeypatch.setattr(bohb, "Density", Spy)
    return found


def test_brackets_are_those_of_hyperband_in_turn():
    ours, theirs = bound(SyncBOHB(27, random_fraction=1)), bound(Hyperband(27))
    together = run(theirs, lambda config: config["x"])
    assert run(ours, lambda config: config["x"]) == together, "without a model it is Hyperband"
    _, reached = run(bound(SyncBOHB(9, brackets=5)), lambda config: config["x"])
    assert list(reached.values()).count(9) == 1 + 1 + 3 + 1 + 1
    assert len(reached) == 9 + 5 + 3 + 9 + 5


def test_rungs_begin_at_the_least_budget():
    algorithm = bound(BOHB(54, min_epochs=2, concurrency=100))
    assert [(len(group.trials), group.budget.epochs) for group in algorithm.next_groups(free=1)] == [
        (27, 2),
        (12, 6),
        (6, 18),
        (4, 54),
    ]


def test_the_next_bracket_begins_when_few_enough_are_to_be_trained():
    algorithm = bound(BOHB(9, concurrency=3))
    first = asked(algorithm)
    assert [epochs for _, epochs in first] == [1] * 9
    for trial, epochs in first[:6]:
        told(algorithm, trial, epochs, trial.number)
        assert asked(algorithm) == []
    told(algorithm, *first[6], 6.0)  # two are left
    second = asked(algorithm)
    assert [epochs for _, epochs in second] == [3] * 5
    told(algorithm, *first[7], 7.0)
    told(algorithm, *first[8], 8.0)
    assert [(trial.number, epochs) for trial, epochs in asked(algorithm)] == [(0, 3), (1, 3), (2, 3)]


def test_brackets_one_after_the_other():
    algorithm = bound(SyncBOHB(3))
    first = asked(algorithm)
    for trial, epochs in first:
        told(algorithm, trial, epochs, trial.number)
    ((best, epochs),) = asked(algorithm)
    assert (best.number, epochs) == (0, 3)
    assert not algorithm.finished
    told(algorithm, best, 3, 0.0)
    assert [epochs for _, epochs in asked(algorithm)] == [3, 3]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_longest_budget_with_enough_trials_is_modelled(densities, mode):
    """d = 1, so at least 2 in each density and 4 in all; 9 trials at 1 epoch, then 3 + 5 at 3, then 1 + 1 + 3 at 9."""
    algorithm = bound(SyncBOHB(9, brackets=4, good_fraction=0.45), mode=mode)
    sign = 1 if mode == "min" else -1
    trials, reached = run(algorithm, lambda config: sign * config["x"])
    x = [trial.config["x"] for trial in trials]
    after = [sorted(x[:9]), sorted(value for number, value in enumerate(x[:14]) if reached[number] >= 3)]
    after.append(sorted(value for number, value in enumerate(x[:17]) if reached[number] >= 9))
    assert len(after[1]) == 8
    assert len(after[2]) == 5
    assert densities == [after[0][:4], after[0][4:], after[1][:3], after[1][3:], after[2][:2], after[2][2:]]


def test_failures_and_nan_are_the_worst_and_densities_share_trials_when_there_are_few(densities):
    algorithm = bound(SyncBOHB(9, brackets=2, min_points=6))
    losses = {3: None, 5: NAN}
    first = asked(algorithm)
    for trial, epochs in first:
        told(algorithm, trial, epochs, losses.get(trial.number, float(trial.number)))
    for trial, epochs in asked(algorithm):
        told(algorithm, trial, epochs, 0.0)
        last = trial
    assert densities == []
    told(algorithm, *asked(algorithm)[0], 0.0)
    assert last.number == 2
    x = [trial.config["x"] for trial, _ in first]
    ranking = [0, 1, 2, 4, 6, 7, 8, 3, 5]
    assert densities == [sorted(x[number] for number in part) for part in (ranking[:6], ranking[-6:])]


def test_all_may_fail():
    run(bound(SyncBOHB(9, brackets=6), NESTED), lambda config: None)
    run(bound(BOHB(9, brackets=6), NESTED), lambda config: NAN)


def test_the_proposal_is_the_candidate_with_the_greatest_ratio():
    """The draws again with the same seed, and densities computed one by one."""
    algorithm = bound(SyncBOHB(9, brackets=2, random_fraction=0, samples=16))
    trials, _ = run(algorithm, lambda config: (config["x"] - 0.3) ** 2)
    ranking = sorted((trial.config["x"] for trial in trials[:9]), key=lambda x: (x - 0.3) ** 2)
    good, bad = (bohb.Density([[x] for x in part], [0], 1e-3) for part in (ranking[:2], ranking[2:]))
    for trial in trials[9:]:
        rng = Random(bohb.derive_seed(5, "bohb", trial.number))
        rng.random()
        draws = [good.near(good.centre(rng), 0, 3.0, rng) for _ in range(16)]
        ratios = [math.exp(good.log([[x]])[0] - bad.log([[x]])[0]) for x in draws]
        assert trial.config["x"] == pytest.approx(draws[ratios.index(max(ratios))])


def test_a_third_is_random_and_follows_from_the_number():
    algorithm = bound(SyncBOHB(81, brackets=2))
    trials, _ = run(algorithm, lambda config: abs(config["x"] - 0.9))
    problem = algorithm.problem
    random = [trial.number for trial in trials[81:] if trial.config == problem.sample(trial.number)]
    assert 5 <= len(random) <= 18  # of 34, 11.3 on average
    assert all(trial.config == problem.sample(trial.number) for trial in trials[:81])
    modelled = [trial.config["x"] for trial in trials[81:] if trial.number not in random]
    assert sum(abs(x - 0.9) for x in modelled) / len(modelled) < 0.1


def test_parameters_within_options():
    """Proposals get better, and have nothing that belongs to another option."""

    def loss(config):
        worse = config["optimizer"]["name"] == "sgd"
        return worse + abs(math.log10(config["lr"]) + 3) + abs(config["layers"] - 2)

    first, late = [], []
    for seed in range(2):
        trials, _ = run(bound(SyncBOHB(27, brackets=12), NESTED, seed=seed), loss)
        for trial in trials:
            NESTED.parameters(trial.config)  # raises if it is none of the space
        first += [loss(trial.config) for trial in trials[:27]]
        late += [loss(trial.config) for trial in trials[98:]]
    assert fmean(late) < 0.6 * fmean(first)  # a third of them is still random


def test_gather_orders_the_random_part_only():
    def part(group_by):
        algorithm = bound(SyncBOHB(27, brackets=2, random_fraction=0.7, group_by=group_by), NESTED)
        trials, _ = run(algorithm, lambda config: config["layers"])
        return [trial.config for trial in trials[:27]], algorithm

    plain, _ = part(())
    grouped, _ = part(["layers", "optimizer.name"])
    assert sorted(map(repr, plain)) == sorted(map(repr, grouped))
    assert plain != grouped


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": 27, "eta": 1}, "`eta` must be an integer of at least 2, got 1"),
        ({"max_epochs": 2}, "`max_epochs` must be at least min_epochs · eta, 3, or there is nothing to halve; got 2"),
        ({"max_epochs": 9, "brackets": 0}, "`brackets` must be an integer of at least 1, got 0"),
        ({"max_epochs": 9, "min_points": 0}, "`min_points` must be an integer of at least 1, got 0"),
        ({"max_epochs": 9, "samples": 0}, "`samples` must be an integer of at least 1, got 0"),
        ({"max_epochs": 9, "concurrency": 0}, "`concurrency` must be an integer of at least 1, got 0"),
        ({"max_epochs": 9, "random_fraction": 1.5}, "`random_fraction` must be a number from 0 to 1, got 1.5"),
        ({"max_epochs": 9, "good_fraction": NAN}, "`good_fraction` must be a number from 0 to 1, got nan"),
        ({"max_epochs": 9, "bandwidth_factor": 0}, "`bandwidth_factor` must be a number from 0.001 to 1000, got 0"),
        ({"max_epochs": 9, "min_bandwidth": "0"}, "`min_bandwidth` must be a number from 1e-06 to 1, got '0'"),
    ],
    ids=str,
)
def test_bad_settings(settings, message):
    with pytest.raises(AlgorithmError) as error:
        BOHB(**settings)
    assert str(error.value) == message
