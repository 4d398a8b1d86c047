"""Searches that are extended before they have ended."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms import ASHA, Algorithm, Median, OptunaSearch, Random, SuccessiveHalving
from shoal.algorithms.hyperband import Hyperband
from shoal.core.space import Space, choice, loguniform
from shoal.core.trial import Report, TrialState, derive_seed

SPACE = Space({"lr": loguniform(1e-4, 1), "width": choice([16, 32, 64])})
GROUPED = ("width",)

EXTENDED: dict[str, Callable[[], Algorithm]] = {
    "random": lambda: Random(10, 1, group_by=GROUPED),
    "halving": lambda: SuccessiveHalving(10, 3, group_by=GROUPED),
    "hyperband": lambda: Hyperband(4, eta=2, group_by=GROUPED),
    "asha": lambda: ASHA(11, 4, eta=2, concurrency=4, group_by=GROUPED),
    "asha, stopping": lambda: ASHA(11, 4, eta=2, concurrency=4, variant="stopping", group_by=GROUPED),
    "median": lambda: Median(11, 2, least=2, concurrency=4, group_by=GROUPED),
    "optuna": lambda: OptunaSearch(6, 1, sampler="random", concurrency=2),
}


def configs(algorithm: Algorithm, extensions: dict[int, int]) -> list[object]:
    """All configurations, by number; extensions are trials in all by the number of reports before."""
    algorithm.bind(SPACE, metric="loss", mode="min", seed=3)
    tried: dict[int, object] = {}
    budgets: list[tuple[int, int]] = []
    reports = 0
    while True:
        if reports in extensions:
            algorithm.extend(extensions[reports])
        for group in algorithm.next_groups(free=1):
            tried |= {trial.number: trial.config for trial in group.trials}
            budgets += [(trial.number, group.budget.epochs) for trial in group.trials]
        if algorithm.finished:
            return [tried[number] for number in sorted(tried)]
        number, epoch = budgets.pop(0)
        metrics = {"loss": derive_seed(number, epoch) / 2**63}
        algorithm.observe(Report(number, epoch, metrics, state=TrialState.PAUSED))
        reports += 1


@pytest.mark.parametrize("case", EXTENDED)
@given(first=st.integers(0, 10), later=st.integers(0, 10), more=st.integers(1, 9))
def test_an_extension_changes_no_trial_that_was_to_come(case: str, first: int, later: int, more: int) -> None:
    single = configs(EXTENDED[case](), {})
    at, then = first % len(single), (first + 1 + later) % len(single)
    once = configs(EXTENDED[case](), {at: len(single) + more})
    assert once[: len(single)] == single
    if then > at:
        twice = configs(EXTENDED[case](), {at: len(single) + more, then: len(once) + more})
        assert twice[: len(once)] == once
