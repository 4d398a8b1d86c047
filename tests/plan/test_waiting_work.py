"""Arrays that train later can reuse what an array compiles."""

import pytest

from shoal.core.array import Array, FusionKey, Member
from shoal.core.trial import Budget, Trial, TrialGroup
from shoal.plan.planner import WaitingWork

KEY, OTHER = FusionKey("structure", "data", 32), FusionKey("other", "data", 32)


def array(*epochs: int, key: FusionKey = KEY, first: int = 0) -> Array:
    return Array(key, tuple(Member(Trial(first + b, {}, 0, 0), 1, 1 + each) for b, each in enumerate(epochs)))


CASES = {
    "nothing else waits": ([], {}),
    "two arrays of its size": ([array(3, 2, first=2), array(3, 5, first=4)], {3: 1, 5: 1}),
    "one with as many epochs": ([array(3, 3, first=2)], {3: 1}),
    "arrays of another size": ([array(3, first=2), array(3, 3, 3, first=4)], {}),
    "one of another structure": ([array(3, 3, key=OTHER, first=2)], {}),
    "one without members": ([array()], {}),
}


@pytest.mark.parametrize(("others", "later"), CASES.values(), ids=CASES)
def test_waiting_arrays_of_the_same_size_count(others: list[Array], later: dict[int, float]) -> None:
    mine = array(3, 1)
    work = WaitingWork([(mine,), tuple(others)])
    assert work.besides(mine) == later


@pytest.mark.parametrize(
    ("size", "later"),
    [
        pytest.param(1, {1: 26, 26: 54 / 26}, id="single members can reuse it in later rungs"),
        pytest.param(3, {1: 8}, id="larger arrays shrink"),
    ],
)
def test_later_rungs_count(size: int, later: dict[int, float]) -> None:
    """27 trials with budgets of 1, 3, 9 and 27 epochs: 9, 3 and 1 of them train 2, 6 and 18 epochs more."""
    arrays = [array(*[1] * size, first=first) for first in range(0, 27, size)]
    trials = tuple(member.trial for each in arrays for member in each.members)
    group = TrialGroup(trials, Budget(2), epochs_ahead=26, work_ahead=54)
    work = WaitingWork(
        [(each,) for each in arrays],
        trial_groups=dict.fromkeys((x.trial.number for each in arrays for x in each.members), group),
    )
    assert work.besides(arrays[0]) == pytest.approx(later)
