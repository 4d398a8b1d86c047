"""The median stopping rule on cases worked out by hand."""

import pytest

from shoal.algorithms.median import Median
from shoal.core.errors import AlgorithmError
from shoal.core.space import Space, uniform
from shoal.core.trial import Decision, Report, TrialState

NAN = float("nan")


def bound(mode="min", **settings):
    algorithm = Median(**{"n": 4, "epochs": 3, "least": 2, "concurrency": 1, **settings})
    algorithm.bind(Space({"x": uniform(0, 1)}), metric="loss", mode=mode, seed=5, data_seed=1)
    return algorithm


def trained(algorithm, *losses):
    """Train the next trial for as long as it continues; (the epochs to which it was trained, how it ended)."""
    ((trial,),) = (group.trials for group in algorithm.next_groups(free=1))
    for epoch in range(1, 10):
        state = TrialState.PAUSED if epoch == algorithm.training[trial.number] else TrialState.RUNNING
        decisions = algorithm.observe(Report(trial.number, epoch, {"loss": losses[epoch - 1]}, state=state))
        if decisions:
            (decision,) = decisions
            assert decision.trial == trial.number
            return epoch, decision
        if state is TrialState.PAUSED:
            ((again,),) = (group.trials for group in algorithm.next_groups(free=1))
            assert again == trial
    raise AssertionError("it continues for ever")


def test_the_best_so_far_against_the_median_of_means():
    algorithm = bound()
    assert trained(algorithm, 4.0, 2.0, 1.0) == (3, Decision(0, TrialState.COMPLETE))  # means 4, 3, 7/3
    assert trained(algorithm, 6.0, 1.0, 1.0) == (3, Decision(1, TrialState.COMPLETE))  # means 6, 3.5, 8/3
    # After one epoch the others had 4 and 6, so 5 is not worse than the middle; after two 3 and 3.5, and 4 is.
    epoch, decision = trained(algorithm, 5.0, 4.0, 0.0)
    assert (epoch, decision.state) == (2, TrialState.STOPPED)
    assert decision.reason == (
        "the best loss up to epoch 2, 4, is worse than the median of the means of 2 others, 3.25"
    )
    # The best counts, not the last: it had 3 once.
    assert trained(algorithm, 3.0, 9.0, 9.0) == (3, Decision(3, TrialState.COMPLETE))
    assert algorithm.finished


def test_the_most_is_the_best():
    algorithm = bound("max", n=3)
    trained(algorithm, 0.5, 0.6, 0.7)
    trained(algorithm, 0.4, 0.5, 0.6)
    epoch, decision = trained(algorithm, 0.3, 0.9, 0.9)
    assert epoch == 1
    assert decision.reason.endswith("up to epoch 1, 0.3, is worse than the median of the means of 2 others, 0.45")


def test_nobody_is_stopped_before_others_got_so_far_or_within_its_grace():
    assert trained(bound(least=1), 9.0, 9.0, 9.0)[1].state is TrialState.COMPLETE
    algorithm = bound(least=1, grace=2)
    trained(algorithm, 1.0, 1.0, 1.0)
    assert trained(algorithm, 9.0, 9.0, 9.0)[0] == 2


def test_decisions_every_so_many_epochs():
    algorithm = bound(least=1, interval=2)
    trained(algorithm, 9.0, 1.0, 1.0)  # asked at epochs 2 and 3; what came between does not count
    assert trained(algorithm, 0.0, 2.0, 2.0)[0] == 2


def test_nan_ends_a_trial_and_is_the_worst_for_the_others():
    algorithm = bound(least=1)
    assert trained(algorithm, NAN, 0.0, 0.0) == (1, Decision(0, TrialState.STOPPED, "loss is nan at epoch 1"))
    assert trained(algorithm, 99.0, 99.0, 99.0)[1].state is TrialState.COMPLETE


INF = float("inf")
EXTREMES = {
    # name -> losses of two trials that are trained to the end; of a third; after how many epochs that is stopped
    "both infinities": ([-INF, INF, 0.0], [INF, -INF, 0.0], [5.0, 6.0, 0.0], 3),
    "best for one, worst for one": ([-INF, -INF, -INF], [INF, 0.0, 0.0], [5.0, 6.0, 7.0], 3),
    "best for both": ([-INF, 0.0, 0.0], [-INF, 0.0, 0.0], [5.0, 6.0, 7.0], 1),
    "sums beyond the floats": ([1.4e308, 1e308, 1e308], [1.6e308, 1.2e308, 1e308], [1.4e308, 1.4e308, 0.0], 2),
    "below them": ([-1e308, -1.6e308, 0.0], [-1.2e308, -1.6e308, 0.0], [-1.2e308, -1.2e308, 0.0], 2),
}


@pytest.mark.parametrize(("first", "second", "third", "epochs"), EXTREMES.values(), ids=EXTREMES)
def test_values_beyond_all_measure(first, second, third, epochs):
    algorithm = bound(n=3, grace=3)  # within its grace nobody is stopped
    trained(algorithm, *first)
    trained(algorithm, *second)
    algorithm.grace = 1
    assert trained(algorithm, *third)[0] == epochs


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 1.7e308, -1.7e308, INF, -INF])
@pytest.mark.parametrize("epochs", [1, 3, 7, 9])
def test_equals_of_the_others_go_on(value, epochs):
    algorithm = bound(epochs=epochs)
    for _ in range(4):
        assert trained(algorithm, *[value] * epochs)[1].state is TrialState.COMPLETE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "`interval` must be an integer of at least 1, got 0"),
        ({"least": 0}, "`least` must be an integer of at least 1, got 0"),
        ({"grace": 4}, "`grace` must be at most `epochs`, 3, got 4"),
    ],
    ids=str,
)
def test_bad_settings(settings, message):
    with pytest.raises(AlgorithmError) as error:
        bound(**settings)
    assert str(error.value) == message
