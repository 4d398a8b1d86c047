"""Fronts of points by several losses: non-dominated sorting, of all or one by one, staircase and epsilon-net."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import compress
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SortedFronts", "Staircase", "epsilon_net", "fronts"]


class SortedFronts:
    """Trials in the order of `shoal.core.score.order` by their losses, added one by one.

    Only the fronts that a new trial changes are sorted anew, and the epsilon-net of a front is built as far as a rank
    is asked for.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, ...]] = {}
        self._fronts: list[_Front] = []

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, number: int, losses: tuple[float, ...]) -> None:
        """Add a trial. What it dominates of its front moves to the next one, with what that dominates there, ..."""
        self._losses[number] = losses
        moved = _Front.of(number, losses)
        for place in range(self._place_of(losses), len(self._fronts)):
            front = self._fronts[place]
            dominated = moved.dominates(front)
            if dominated.all():  # so is all that this front dominates: all later fronts move by one place
                self._fronts.insert(place, moved)
                return
            if not dominated.any():
                front.merge(moved)
                return
            kept, falling = front.split(dominated)
            kept.merge(moved)
            self._fronts[place], moved = kept, falling
        self._fronts.append(moved)

    def _place_of(self, losses: tuple[float, ...]) -> int:
        point = _Front.of(0, losses)
        return bisect_left(self._fronts, True, key=lambda front: not front.dominates(point).any())

    def rank(self, number: int) -> int:
        """Number of better trials."""
        place = self._place_of(self._losses[number])
        return sum(map(len, self._fronts[:place])) + self._fronts[place].best_of({number}, self._losses)[0]

    def best_of(self, numbers: Set[int]) -> tuple[int, int]:
        """The rank of the best of some of the trials, and its number.

        Args:
            numbers: At least one trial.
        """
        better = 0
        for front in self._fronts:
            if not numbers.isdisjoint(front.numbers):
                place, number = front.best_of(numbers, self._losses)
                return better + place, number
            better += len(front)
        raise ValueError(f"none of {numbers} is ranked")


class _Front:
    """Trials of which none dominates another, with as much of their epsilon-net as was asked for."""

    def __init__(self, numbers: list[int], points: "NDArray[Any]") -> None:
        self.numbers = numbers
        self._points = points
        self._ranking: list[int] = []
        self._net: Iterator[int] | None = None

    @staticmethod
    def of(number: int, losses: tuple[float, ...]) -> "_Front":
        """A front of one trial."""
        import numpy as np

        return _Front([number], np.array([losses], dtype=float))

    def __len__(self) -> int:
        return len(self.numbers)

    def dominates(self, other: "_Front") -> "NDArray[Any]":
        """Which trials of another front one of these dominates."""
        import numpy as np

        mine, theirs = self._points[:, None], other._points
        pairs = (mine <= theirs).all(axis=2) & (mine < theirs).any(axis=2)
        found: NDArray[Any] = np.logical_or.reduce(pairs, axis=0)
        return found

    def merge(self, other: "_Front") -> None:
        """Add the trials of a front, none of which dominates one of these or is dominated by it."""
        import numpy as np

        self.numbers = self.numbers + other.numbers
        self._points = np.concatenate([self._points, other._points])
        self._net = None

    def split(self, chosen: "NDArray[Any]") -> "tuple[_Front, _Front]":
        """The trials that are not chosen, and those that are."""
        rest, picked = (
            _Front(list(compress(self.numbers, each.tolist())), self._points[each]) for each in (~chosen, chosen)
        )
        return rest, picked

    def best_of(self, numbers: Set[int], losses: Mapping[int, tuple[float, ...]]) -> tuple[int, int]:
        """The place in the epsilon-net of the first of some trials, one of which is in the front, and its number."""
        if self._net is None:
            self._net, self._ranking = epsilon_net(self.numbers, losses), []
        place = next((place for place, number in enumerate(self._ranking) if number in numbers), None)
        if place is None:
            for number in self._net:
                self._ranking.append(number)
                if number in numbers:
                    break
            place = len(self._ranking) - 1
        return place, self._ranking[place]


class Staircase:
    """The points of two losses that no other is nowhere worse than: the first loss rises, and the second falls."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._second: list[float] = []

    def covers(self, first: float, second: float) -> bool:
        """Whether one of the points is nowhere worse than another point."""
        place = bisect_right(self._first, first)
        return place > 0 and self._second[place - 1] <= second

    def add(self, first: float, second: float, reference: Sequence[float] = (inf, inf)) -> float:
        """Add a point that is not covered, in place of those that it covers.

        Returns:
            The area within a reference point that is covered now and was not before.
        """
        low = high = bisect_left(self._first, first)
        left, top = first, self._second[low - 1] if low else reference[1]
        area = 0.0
        while high < len(self._first) and self._second[high] >= second:
            area += _area(left, self._first[high], second, top)
            left, top = self._first[high], self._second[high]
            high += 1
        area += _area(left, self._first[high] if high < len(self._first) else reference[0], second, top)
        self._first[low:high], self._second[low:high] = [first], [second]
        return area


def _area(left: float, right: float, low: float, high: float) -> float:
    """The area of a rectangle, 0 where one side is 0 and the other infinite."""
    return (right - left) * (high - low) if left < right and low < high else 0.0


def fronts(losses: Mapping[int, tuple[float, ...]]) -> list[list[int]]:
    """Non-dominated sorting of trials that are in lexicographic order of their losses.

    A trial that a front dominates is dominated by all fronts before, so that bisection finds its front (efficient
    non-dominated sort, Zhang et al. 2015).
    """
    found: list[list[int]] = []
    place_of = _places_by_second_loss() if len(next(iter(losses.values()))) == 2 else _places_by_all_losses()
    previous: tuple[float, ...] | None = None
    place = 0
    for number, point in losses.items():
        if point != previous:
            place, previous = place_of(point), point
        if place == len(found):
            found.append([])
        found[place].append(number)
    return found


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
    found: list[_Points] = []

    def place_of(point: tuple[float, ...]) -> int:
        place = bisect_left(found, True, key=lambda points: not points.dominate(point))
        if place == len(found):
            found.append(_Points(len(point)))
        found[place].add(point)
        return place

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


def epsilon_net(front: Sequence[int], losses: Mapping[int, tuple[float, ...]]) -> Iterator[int]:
    """The trials of a front, each the farthest from those before."""
    import numpy as np

    numbers = sorted(front)
    columns = list(zip(*(losses[number] for number in numbers), strict=True))
    if all(len(set(column)) == 1 for column in columns):
        yield from numbers
        return
    scaled = np.array([_scaled(np.array(column)) for column in columns])
    nearest, squares = np.full(len(numbers), inf), np.empty_like(scaled)
    total, *others = squares
    chosen = int(np.argmin(columns[0]))
    for _ in numbers:
        yield numbers[chosen]
        np.subtract(scaled, scaled[:, chosen, None], out=squares)
        np.multiply(squares, squares, out=squares)
        for other in others:  # in a fixed order, so that a replay finds the same sums
            np.add(total, other, out=total)
        np.minimum(nearest, total, out=nearest)
        nearest[chosen] = -1.0
        chosen = int(nearest.argmax())


def _scaled(column: "NDArray[Any]") -> "NDArray[Any]":
    """Losses scaled to the range of the finite ones; infinite ones lie at its ends, equal ones together."""
    import numpy as np

    finite = column[np.isfinite(column)] / 2  # halves, whose differences cannot overflow
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    if low == high:
        return np.sign(np.where(np.isfinite(column), 0.0, column)) / 2
    scaled: NDArray[Any] = np.clip((column / 2 - low) / (high - low), 0.0, 1.0)
    return scaled
