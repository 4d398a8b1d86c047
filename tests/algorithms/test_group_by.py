"""Proposals in an order that fills arrays: the same configurations, those that agree side by side."""

from collections import Counter
from itertools import groupby

import pytest

from shoal.algorithms import ASHA, BOHB, Grid, Hyperband, Median, OptunaSearch, Random, SuccessiveHalving, SyncBOHB
from shoal.core.errors import AlgorithmError
from shoal.core.space import Space, choice, flatten, loguniform
from shoal.core.trial import Report, TrialState

SPACE = Space(
    {
        "lr": loguniform(1e-4, 1),
        "width": choice([16, 32, 64]),
        "optimizer": choice([{"name": "sgd", "sizes": choice([[1], [1, 2]])}, {"name": "adam"}]),
    }
)
DISCRETE = Space({"width": choice([16, 32, 64]), "depth": choice([1, 2]), "act": choice(["relu", "gelu"])})
NAMES = ("width", "optimizer.name")

# name -> algorithm of a `group_by`, and the blocks of consecutive trials whose sets of configurations stay as they are.
CASES = {
    "random": (lambda group_by: Random(40, 1, group_by=group_by), [40]),
    "halving": (lambda group_by: SuccessiveHalving(30, 9, group_by=group_by), [30]),
    "hyperband": (lambda group_by: Hyperband(27, group_by=group_by), [27, 12, 6, 4]),
    "asha": (lambda group_by: ASHA(50, 3, concurrency=16, group_by=group_by), [16, 16, 16, 2]),
    "median": (lambda group_by: Median(20, 2, concurrency=32, group_by=group_by), [20]),
    "bohb, all random": (lambda group_by: BOHB(27, random_fraction=1, group_by=group_by), [27, 12, 6, 4]),
    "sync_bohb, all random": (lambda group_by: SyncBOHB(9, random_fraction=1, group_by=group_by), [9, 5, 3]),
}


def configs(algorithm, space):
    """All configurations that are tried, by number."""
    algorithm.bind(space, metric="loss", mode="min", seed=3)
    trials = {}
    while not algorithm.finished:
        for group in algorithm.next_groups(free=1):
            for trial in group.trials:
                trials[trial.number] = trial.config
                epochs = group.budget.epochs
                algorithm.observe(Report(trial.number, epochs, {"loss": 0.0}, state=TrialState.PAUSED))
    return [trials[number] for number in sorted(trials)]


def structure(config, names=NAMES):
    row = flatten(config)
    return tuple(row[name] for name in names)


def runs(block, names=NAMES):
    return [key for key, _ in groupby(structure(config, names) for config in block)]


@pytest.mark.parametrize("case", CASES)
def test_each_block_has_the_same_configurations_and_those_that_agree_come_together(case):
    make, blocks = CASES[case]
    plain, grouped = configs(make(()), SPACE), configs(make(NAMES), SPACE)
    assert len(plain) == len(grouped) == sum(blocks)
    assert plain != grouped
    first = 0
    for size in blocks:
        before, after = plain[first : first + size], grouped[first : first + size]
        assert Counter(map(repr, before)) == Counter(map(repr, after))
        assert len(runs(after)) == len(set(runs(after))), "those that agree are apart"
        # Stable: groups in the order of their first members, members in the order in which they were drawn.
        keys = list(dict.fromkeys(map(structure, before)))
        assert after == sorted(before, key=lambda config: keys.index(structure(config)))
        first += size


def test_a_grid_is_put_in_order():
    plain, grouped = configs(Grid(1), DISCRETE), configs(Grid(1, group_by=["act"]), DISCRETE)
    assert plain == DISCRETE.grid()
    assert Counter(map(repr, plain)) == Counter(map(repr, grouped))
    assert len(runs(plain, ["act"])) == 12
    assert runs(grouped, ["act"]) == [("relu",), ("gelu",)]


def test_a_parameter_that_some_configurations_lack_or_that_is_a_list():
    grouped = configs(Random(40, 1, group_by=["optimizer.sizes"]), SPACE)
    keys = [key for key, _ in groupby(repr(config["optimizer"].get("sizes")) for config in grouped)]
    assert sorted(keys) == ["None", "[1, 2]", "[1]"]


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_name_is_refused_when_bound(case):
    message = (
        r"`group_by` names 'widht', which is not in the search space; "
        r"it has 'lr', 'optimizer.name', 'optimizer.sizes', 'width'"
    )
    with pytest.raises(AlgorithmError, match=message):
        CASES[case][0](["widht"]).bind(SPACE, metric="loss", mode="min", seed=3)


def test_a_single_name_is_not_a_list_of_names():
    with pytest.raises(AlgorithmError, match=r"`group_by` must be a list of names, got 'width'; write \['width'\]"):
        Grid(1, group_by="width").bind(DISCRETE, metric="loss", mode="min", seed=3)


@pytest.mark.parametrize("group_by", [None, 3, ["width", 3], [None], [["width"]], {"width"}, {"width": 1}], ids=str)
@pytest.mark.parametrize("make", [lambda group_by: Grid(1, group_by=group_by), CASES["asha"][0]], ids=["grid", "asha"])
def test_what_is_not_a_list_of_names_is_refused_when_bound(make, group_by):
    with pytest.raises(AlgorithmError) as error:
        make(group_by).bind(DISCRETE, metric="loss", mode="min", seed=3)
    assert str(error.value) == f"`group_by` must be a list of names, such as ['width'], or [], got {group_by!r}"


def test_what_a_sampler_proposes_is_not_gathered():
    with pytest.raises(TypeError, match="group_by"):
        OptunaSearch(3, 1, group_by=["width"])
