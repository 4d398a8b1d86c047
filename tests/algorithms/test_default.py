import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.base import call_text
from shoal.algorithms.default import SearchBudget, choose
from shoal.core.errors import AlgorithmError
from shoal.core.reference import ref
from shoal.core.space import Space, choice, loguniform, quniform, randint, uniform

OPEN = Space({"lr": loguniform(1e-4, 1)})
SIX = Space({"width": choice([16, 32, 64]), "depth": randint(1, 3)})


@pytest.mark.parametrize(
    ("space", "size"),
    [
        pytest.param({"lr": 0.1}, 1, id="constant"),
        pytest.param({"x": choice([1, {"y": randint(0, 3)}]), "z": choice([1, 2])}, 8, id="options with parameters"),
        pytest.param({"x": quniform(0, 1, 0.25)}, 5, id="steps"),
        pytest.param({"x": choice([1, {"y": uniform(0, 1)}])}, None, id="continuous under an option"),
    ],
)
def test_the_size_of_a_space(space, size):
    assert Space(space).size == size


@pytest.mark.parametrize(
    ("space", "trials", "epochs", "devices", "fuses", "optuna", "algorithm", "why"),
    [
        pytest.param(SIX, 6, 27, 1, True, True, "Grid(epochs=27)", "6 points, and 6 trials", id="all points"),
        pytest.param(
            Space({"a": randint(0, 20), "b": randint(0, 20)}, where=[ref("a") == ref("b")]), 64, 27, 1, True, True,
            "Grid(epochs=27)", "20 points, and 64 trials", id="the points that a condition allows",
        ),
        pytest.param(
            Space({"a": randint(0, 200), "b": randint(0, 200)}, where=[ref("a") == ref("b")]), 256, 27, 1, True, False,
            "ASHA(n=256, max_epochs=27, concurrency=8)", "Optuna, which is not installed", id="too many to enumerate",
        ),
        pytest.param(
            Space({"a": randint(0, 9), "b": 6 // ref("a")}), 8, 27, 1, True, True,
            "Grid(epochs=27)", "8 points, and 8 trials", id="the points that can be computed",
        ),
        pytest.param(
            Space({"x": randint(0, 500)}), 64, 27, 1, True, False, "ASHA(n=64, max_epochs=27, concurrency=8)",
            "needs Optuna, which is not installed", id="more points than trials",
        ),
        pytest.param(SIX, 5, 27, 1, True, True, "Random(n=5, epochs=27)", "too few to learn", id="few trials"),
        pytest.param(
            OPEN, 64, 27, 2, True, True, "ASHA(n=64, max_epochs=27, concurrency=16, sampler='tpe')",
            "16 at a time leave results to model", id="long, few slots",
        ),
        pytest.param(
            OPEN, 64, 27, 5, True, True, "ASHA(n=64, max_epochs=27, concurrency=40)",
            "40 at a time leave too few", id="long, many slots",
        ),
        pytest.param(
            OPEN, 64, 27, 99, True, True, "ASHA(n=64, max_epochs=27, concurrency=64)", "64 at a time", id="all at once"
        ),
        pytest.param(
            OPEN, 64, 3, 2, False, True, "OptunaSearch(n=64, epochs=3, concurrency=2)",
            "too short", id="short, few slots",
        ),
        pytest.param(OPEN, 64, 3, 5, True, True, "Random(n=64, epochs=3)", "too short", id="short, many slots"),
        pytest.param(OPEN, 64, 3, 1, False, False, "Random(n=64, epochs=3)", "not installed", id="without Optuna"),
        pytest.param(
            OPEN, 64, 9, 0, False, False, "ASHA(n=64, max_epochs=9, concurrency=1)", "long enough", id="no node yet"
        ),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(space, trials, epochs, devices, fuses, optuna, algorithm, why):
    chosen = choose(space, SearchBudget(trials, epochs, devices, fuses), has_optuna=optuna)
    assert call_text(chosen.algorithm) == algorithm
    assert why in chosen.why


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ((2, True), 16), ((2, False), 2), ((2, True, 5), 3), ((1, False, 5), 1), ((0, True), 1), ((99, True), 64),
        ((99, True, 3, 12), 4),
    ],
)  # fmt: skip
def test_how_many_configurations_train_at_once(settings, slots):
    assert SearchBudget(64, 27, *settings).slots == slots


def test_several_metrics_need_optuna():
    budget = SearchBudget(64, 27, 1, fuses=True)
    assert call_text(choose(SIX, budget, 2, has_optuna=True).algorithm).startswith("OptunaSearch(n=64, epochs=27")
    with pytest.raises(AlgorithmError, match=r"2 metrics needs Optuna, which is not installed.*pip install"):
        choose(SIX, budget, 2, has_optuna=False)


@given(
    trials=st.integers(1, 500),
    epochs=st.integers(1, 200),
    devices=st.integers(0, 20),
    fuses=st.booleans(),
    space=st.sampled_from([OPEN, SIX]),
)
def test_the_choice_keeps_to_the_budget(trials, epochs, devices, fuses, space):
    algorithm = choose(space, SearchBudget(trials, epochs, devices, fuses), has_optuna=False).algorithm
    algorithm.bind(space, metric="loss", mode="min", seed=0)
    assert algorithm.longest_budget == epochs
    assert algorithm.totals.trials <= trials
    assert algorithm.totals.most <= trials * epochs
