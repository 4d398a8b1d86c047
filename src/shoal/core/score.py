"""Scores of trials, and their order: by violation of constraints, by one loss or by the front of several."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf, isnan
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.core.constraint import Constraint, violation
from shoal.core.objective import Objective

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Score", "order", "score_of", "worst_score"]


class Score(NamedTuple):
    """The result of a trial that algorithms and tables compare; of two with one loss each, the lesser is better.

    Args:
        is_nan: Whether one of the objectives is NaN, or the trial has failed: such trials are the last.
        violation: Violation of the constraints, 0 if the trial is feasible.
        losses: Losses by each objective, less is better; all infinite if `is_nan`.
    """

    is_nan: bool
    violation: float
    losses: tuple[float, ...]

    @property
    def note(self) -> str:
        """The end of a reason for which a trial is stopped: its violation, if it has one."""
        return f"; violates the constraints by {self.violation:.3g}" if self.violation else ""


def score_of(
    values: Sequence[float],
    metrics: Mapping[str, float],
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint] = (),
) -> Score:
    """The score of a report.

    Args:
        values: Values of the objectives.
        metrics: All reported values, of which the constraints read theirs.
    """
    if any(map(isnan, values)):
        return worst_score(len(objectives))
    losses = tuple([goal.loss(value) for goal, value in zip(objectives, values, strict=True)])
    return Score(False, violation(constraints, metrics) if constraints else 0.0, losses)


def worst_score(objectives: int) -> Score:
    """The score of a trial that failed or measured NaN."""
    return Score(True, inf, (inf,) * objectives)


def order(scores: Mapping[int, Score]) -> list[int]:
    """Numbers of trials, the best first.

    With one loss: by violation, loss and number. With several: by violation, by the front on which a trial is among
    those of equal violation (the first front is what no other trial dominates, the second what none dominates without
    the first, ...), and within a front by an epsilon-net: first the trial with the least first loss, then always the
    one farthest from all before, each loss scaled to its range in the front (Schmucker et al. 2021, MO-ASHA). Equal
    trials are ordered by number. NaN comes last. The order within a front depends on the scale of the losses, the
    fronts do not.
    """
    ranking = sorted(scores, key=lambda number: (scores[number], number))
    if not ranking or len(scores[ranking[0]].losses) == 1:
        return ranking
    found: list[int] = []
    for _, group in groupby(ranking, key=lambda number: scores[number][:2]):
        losses = {number: scores[number].losses for number in group}
        for front in _fronts(losses):
            found += _epsilon_net(front, losses)
    return found


def _fronts(losses: Mapping[int, tuple[float, ...]]) -> list[list[int]]:
    """Non-dominated sorting of trials that are in lexicographic order of their losses.

    A trial that a front dominates is dominated by all fronts before, so that bisection finds its front (efficient
    non-dominated sort, Zhang et al. 2015).
    """
    fronts: list[list[int]] = []
    place_of = _places_by_second_loss() if len(next(iter(losses.values()))) == 2 else _places_by_all_losses()
    previous: tuple[float, ...] | None = None
    place = 0
    for number, point in losses.items():
        if point != previous:
            place, previous = place_of(point), point
        if place == len(fronts):
            fronts.append([])
        fronts[place].append(number)
    return fronts


def _places_by_second_loss() -> Callable[[tuple[float, ...]], int]:
    """Places of points of two losses: the last point of a front has its least second loss."""
    least: list[float] = []

    def place_of(point: tuple[float, ...]) -> int:
        place = bisect_right(least, point[1])
        least[place : place + 1] = [point[1]]
        return place

    return place_of


def _places_by_all_losses() -> Callable[[tuple[float, ...]], int]:
    """Places of points of any number of losses."""
    fronts: list[_Points] = []

    def place_of(point: tuple[float, ...]) -> int:
        low, high = 0, len(fronts)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fronts[middle].dominate(point) else (low, middle)
        if low == len(fronts):
            fronts.append(_Points(len(point)))
        fronts[low].add(point)
        return low

    return place_of


class _Points:
    """The points of one front, in an array that grows."""

    def __init__(self, losses: int) -> None:
        import numpy as np

        self._array: NDArray[Any] = np.empty((8, losses))
        self._count = 0

    def add(self, point: tuple[float, ...]) -> None:
        if self._count == len(self._array):
            self._array = self._array.repeat(2, axis=0)
        self._array[self._count] = point
        self._count += 1

    def dominate(self, point: tuple[float, ...]) -> bool:
        """Whether one of them is nowhere worse than a point that comes after them and differs from them."""
        return bool((self._array[: self._count] <= point).all(axis=1).any())


def _epsilon_net(front: Sequence[int], losses: Mapping[int, tuple[float, ...]]) -> Iterator[int]:
    """The trials of a front, each the farthest from those before."""
    import numpy as np

    numbers = sorted(front)
    columns = list(zip(*(losses[number] for number in numbers), strict=True))
    if all(len(set(column)) == 1 for column in columns):
        yield from numbers
        return
    scaled = [_scaled(np.array(column)) for column in columns]
    nearest = np.full(len(numbers), inf)
    chosen = int(np.argmin(columns[0]))
    for _ in numbers:
        yield numbers[chosen]
        # Sums of squares in a fixed order, so that a replay finds the same numbers.
        nearest = np.minimum(nearest, sum((column - column[chosen]) ** 2 for column in scaled))
        nearest[chosen] = -1.0
        chosen = int(np.argmax(nearest))


def _scaled(column: "NDArray[Any]") -> "NDArray[Any]":
    """Losses scaled to the range of the finite ones; infinite ones lie at its ends, equal ones together."""
    import numpy as np

    finite = column[np.isfinite(column)] / 2  # halves, whose differences cannot overflow
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    if low == high:
        return np.sign(np.where(np.isfinite(column), 0.0, column)) / 2
    scaled: NDArray[Any] = np.clip((column / 2 - low) / (high - low), 0.0, 1.0)
    return scaled
