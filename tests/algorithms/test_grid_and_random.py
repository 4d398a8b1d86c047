import copy
import dataclasses

import pytest

from shoal import algorithms
from shoal.algorithms import ALGORITHMS, Grid, Hyperband, Random
from shoal.core.errors import AlgorithmError, SpaceError
from shoal.core.space import Space, choice, loguniform, randint
from shoal.core.trial import Budget, Decision, Report, TrialState, derive_seed

SPACE = Space({"width": choice([64, 128]), "depth": randint(1, 4)})


def bind(algorithm, space=SPACE, **changes):
    algorithm.bind(space, **{"metric": "loss", "mode": "min", "seed": 3, "data_seed": None} | changes)
    return algorithm


def test_grid_takes_every_point_in_order():
    (group,) = bind(Grid(epochs=5)).next_groups(free=2)
    assert [trial.config for trial in group.trials] == SPACE.grid()
    assert [trial.number for trial in group.trials] == [0, 1, 2, 3, 4, 5]
    assert group.budget == Budget(5)


def test_grid_refuses_a_continuum_when_bound():
    with pytest.raises(SpaceError, match="`lr`: loguniform"):
        bind(Grid(epochs=5), Space({"lr": loguniform(1e-3, 1)}))


def test_random_takes_n_configurations_that_follow_from_seed_and_number():
    space = Space({"lr": loguniform(1e-4, 1), "width": choice([64, 128])})
    (group,) = bind(Random(n=20, epochs=2), space).next_groups(free=1)
    assert [trial.config for trial in group.trials] == [space.sample(derive_seed(3, "config", n)) for n in range(20)]
    assert len({trial.config["lr"] for trial in group.trials}) == 20
    (other,) = bind(Random(n=20, epochs=2), space, seed=4).next_groups(free=1)
    assert {trial.config["lr"] for trial in group.trials}.isdisjoint(trial.config["lr"] for trial in other.trials)


def test_seeds():
    (group,) = bind(Random(n=3, epochs=2)).next_groups(free=1)
    assert [(trial.seed, trial.data_seed) for trial in group.trials] == [
        (derive_seed(3, "trial", n), derive_seed(3, "data", n)) for n in range(3)
    ]
    (group,) = bind(Random(n=3, epochs=2), data_seed=8).next_groups(free=1)
    assert [trial.data_seed for trial in group.trials] == [8, 8, 8]


def test_a_trial_is_complete_when_it_reaches_the_budget():
    algorithm = bind(Random(n=2, epochs=2))
    algorithm.next_groups(free=1)
    assert algorithm.observe(Report(1, 1, {"loss": 1.0})) == []
    assert algorithm.observe(Report(1, 2, {"loss": 1.0}, state=TrialState.PAUSED)) == [Decision(1, TrialState.COMPLETE)]
    assert not algorithm.finished
    assert algorithm.observe(Report(0, 2, state=TrialState.FAILED)) == []
    assert algorithm.finished
    assert algorithm.next_groups(free=1) == []


@pytest.mark.parametrize("make", [lambda: Random(6, 9, compare_after=2), lambda: Grid(9, compare_after=2)])
def test_all_trials_train_to_the_first_comparison_and_then_all_to_the_end(make):
    algorithm, whole = bind(make()), bind(dataclasses.replace(make(), compare_after=None))
    (first,), (plain,) = algorithm.next_groups(free=1), whole.next_groups(free=1)
    assert (first.trials, first.budget) == (plain.trials, Budget(2))
    for number in range(6):
        assert algorithm.next_groups(free=1) == []
        value = float("nan") if number == 4 else -number
        answer = algorithm.observe(Report(number, 2, {"loss": value}, state=TrialState.PAUSED))
    assert answer == [Decision(4, TrialState.STOPPED, "loss is nan at epoch 2")]
    (rest,) = algorithm.next_groups(free=1)
    assert rest.budget == Budget(9)
    assert [trial.number for trial in rest.trials] == [0, 1, 2, 3, 5]
    assert algorithm.totals.most == whole.totals.most == 54


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: Random(6, 9, compare_after=9), "must be below `epochs`, 9, got 9", id="at the end"),
        pytest.param(lambda: Grid(1, compare_after=2), "must be below `epochs`, 1, got 2", id="beyond the end"),
        pytest.param(lambda: Grid(4, compare_after=0), "`compare_after` must be an integer of at least 1", id="zero"),
        pytest.param(lambda: Random(6, 9, compare_after=0.5), "`compare_after` must be an integer", id="a share"),
    ],
)
def test_a_wrong_first_comparison_is_refused(make, words):
    with pytest.raises(AlgorithmError, match=words):
        make()


def test_an_unknown_trial_is_refused():
    with pytest.raises(AlgorithmError, match=r"trial 6 is unknown; Grid\(epochs=1, .*\) has the trials 0 to 5"):
        bind(Grid(epochs=1)).observe(Report(6, 1, {"loss": 0.0}))


def test_an_algorithm_serves_one_study_but_a_copy_serves_another():
    algorithm = Hyperband(max_epochs=9)
    fresh = copy.deepcopy(algorithm)
    bind(algorithm)
    with pytest.raises(
        AlgorithmError, match=r"Hyperband\(max_epochs=9, eta=3, .*, group_by=\(\), skip_last=0\) serves another study"
    ):
        bind(algorithm)
    bind(fresh)


@pytest.mark.parametrize(
    "use",
    [
        lambda algorithm: algorithm.next_groups(free=1),
        lambda algorithm: algorithm.observe(Report(0, 1)),
        lambda algorithm: algorithm.finished,
    ],
    ids=["next_groups", "observe", "finished"],
)
def test_an_algorithm_that_is_not_bound_says_so(use):
    with pytest.raises(AlgorithmError, match=r"Random\(n=1, epochs=1, .*\) has no search space yet"):
        use(Random(n=1, epochs=1))


def test_an_unknown_mode_is_refused_and_leaves_the_algorithm_free():
    algorithm = Random(n=1, epochs=1)
    with pytest.raises(AlgorithmError, match='`mode` must be "min" or "max", got \'best\''):
        bind(algorithm, mode="best")
    bind(algorithm)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Random(n=0, epochs=1), "`n` must be an integer of at least 1, got 0"),
        (lambda: Random(n=2, epochs=1.5), "`epochs` must be an integer of at least 1, got 1.5"),
        (lambda: Grid(epochs=0), "`epochs` must be an integer of at least 1, got 0"),
        (lambda: Grid(epochs=True), "`epochs` must be an integer of at least 1, got True"),
    ],
    ids=["n", "epochs of Random", "epochs of Grid", "bool"],
)
def test_bad_settings(make, message):
    with pytest.raises(AlgorithmError) as error:
        make()
    assert str(error.value) == message


def test_the_registry_names_every_algorithm():
    others = ("ALGORITHMS", "Algorithm", "Totals")
    exported = {getattr(algorithms, name) for name in algorithms.__all__ if name not in others}
    assert set(ALGORITHMS.values()) == exported


def test_more_random_trials_are_those_of_a_search_with_so_many_from_the_beginning():
    space = Space({"lr": loguniform(1e-4, 1), "width": choice([64, 128])})
    extended, whole = bind(Random(n=10, epochs=2), space), bind(Random(n=20, epochs=2), space)
    first = extended.next_groups(free=1)
    extended.extend(20)
    trials = [trial for group in [*first, *extended.next_groups(free=1)] for trial in group.trials]
    assert trials == [trial for group in whole.next_groups(free=1) for trial in group.trials]
    assert extended.totals == whole.totals
