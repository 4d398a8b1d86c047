"""The cost packing: groups with the least expected makespan, found by cuts and local search."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

from shoal.core.errors import PackError
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.candidate_order import CandidateOrder, Partition
from shoal.planner.packing.groups import arranged, needed
from shoal.planner.packing.prediction import makespan, predicted

__all__ = ["Cost", "local_search"]

_JOBS = (1, 2, 3, 4, 6, 8)
"""Jobs per device to try: more jobs balance devices better, but fewer arrays share a process."""

_SPARE = (1.0, 0.5)
"""Slack of a group beyond its even share, in mean lengths of a candidate: groups are never filled exactly."""

_EVEN_JOBS = (1, 2)
"""Jobs per device to try for cuts that are as even as possible."""

_HALVINGS = 7
"""Bisection steps in the search for the length of even groups."""

_NEAR = 0.01
"""Relative gain in makespan below which the search stops."""

_Score = tuple[float, int, float]
"""Makespan including tails, number of idle devices without a job, and total device seconds; compared in this order,
less is better."""

_EFFORT = 10_000
"""Tried changes times the square of the number of candidates: both the number and the cost of changes grow with it."""


@final
@dataclass(frozen=True)
class Cost(Packing):
    """Groups arrays for the least expected makespan of all arrays and the training that follows; ties are broken by
    device time.

    Every group must save a part of the time of its arrays one after another, as predicted from measurements
    (`predicted`). So a group that was measured to save too little is split. The makespan assumes list scheduling, the
    longest group first, each on the first free device, so there are enough groups for all devices.

    Arrays are sorted so that matching arrays are neighbours (`CandidateOrder`), and the order is cut into groups of
    different length: from single arrays, over cuts that balance the devices, to as few groups as are worthwhile. The
    best cut, and the cut into single arrays, are then improved by changes of one or two arrays. For few arrays this
    nearly always finds the best groups; for many arrays there are no changes, and the time is linear in their number.

    Args:
        worth: Part of its time that a group must save.

    Raises:
        PackError: `worth` is not at least 0 and below 1.
    """

    worth: float = 0.05

    def __post_init__(self) -> None:
        number = isinstance(self.worth, int | float) and not isinstance(self.worth, bool)
        if not (number and 0 <= self.worth < 1):
            raise PackError(f"`worth` must be at least 0 and below 1, got {self.worth!r}; 0.05 is 5 % of the time")

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Return the best groups found."""
        if not candidates:
            return []
        row = CandidateOrder(candidates, context, self.worth)

        def judged(cut: Partition) -> _Score:
            return _score(cut, context.loads)

        best = min(_passed(row, context.loads), key=judged)
        starts = [best] if len(best.groups) == len(candidates) else [best, row.single()]
        ends = [local_search(cut, row, context.loads) for cut in starts]
        return arranged(min(ends, key=judged).groups, candidates)

    def suits(self, incoming: Candidate, present: Sequence[Candidate], context: PackingContext) -> bool:
        """Whether sharing saves enough of the time that the incoming candidate would take alone."""
        group = [*present, incoming]
        if incoming.key.data != present[0].key.data or needed(group) > context.memory:
            return False
        alone = context.start + incoming.seconds
        added = predicted(group, context).together - predicted(present, context).together
        return alone - added >= self.worth * alone


def _passed(row: CandidateOrder, loads: Sequence[float]) -> Iterator[Partition]:
    """Cuts from single arrays to as few groups as are worthwhile, until one is as good as can be expected."""
    single, few = row.single(), row.cut()
    yield single
    yield few
    if len(few.groups) == len(single.groups) or len(loads) == 1:
        return
    path = min(loads) + max(map(sum, zip(single.lengths, single.tails, strict=True)))
    enough = (1 + _NEAR) * max(_level(sum(few.lengths), loads), path, *loads)
    reached = min(_score(cut, loads)[0] for cut in (single, few))
    total = sum(few.lengths)
    for jobs, spare in product(_JOBS, _SPARE):
        if reached <= enough:
            return
        cut = row.cut((_level(total, loads) - min(loads)) / jobs + spare * total / len(single.groups))
        reached, total = min(reached, _score(cut, loads)[0]), sum(cut.lengths)
        yield cut
    for jobs in _EVEN_JOBS:
        if reached <= enough:
            return
        cut = _even(row, jobs * len(loads), few)
        reached = min(reached, _score(cut, loads)[0])
        yield cut


def _even(row: CandidateOrder, groups: int, cut: Partition) -> Partition:
    """The cut into at most `groups` groups whose longest group is shortest, by bisection: shared fetching makes the
    length of groups unpredictable from the sum of lengths.

    Args:
        row: The order to cut.
        groups: Largest number of groups, unless `cut` has more.
        cut: The cut into as few groups as are worthwhile.
    """
    low, high = 0.0, max(cut.lengths)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        finer = row.cut(middle)
        if len(finer.groups) <= groups:
            cut, high = finer, middle
        else:
            low = middle
    return cut


def _level(seconds: float, loads: Sequence[float]) -> float:
    """Time at which all devices are free if `seconds` are spread over them as evenly as possible (water-filling)."""
    ordered = sorted(loads)
    filled = next(
        count
        for count in range(1, len(ordered) + 1)
        if count == len(ordered) or seconds + sum(ordered[:count]) <= count * ordered[count]
    )
    return (seconds + sum(ordered[:filled])) / filled


def _score(cut: Partition, loads: Sequence[float]) -> _Score:
    """Score of groups.

    Args:
        cut: The groups.
        loads: Seconds until each device is free.
    """
    unused = max(0, loads.count(0) - len(cut.groups))
    return _without_rounding(makespan(cut.lengths, loads, cut.tails)), unused, _without_rounding(sum(cut.lengths))


def local_search(cut: Partition, row: CandidateOrder, loads: Sequence[float]) -> Partition:
    """Improve groups by small changes until none is better, or the effort is used up.

    Args:
        cut: The initial groups.
        row: The order from which they were cut.
        loads: Seconds until each device is free.
    """
    best = _score(cut, loads)
    neighbours = _neighbours(cut, row)
    for _ in range(_EFFORT // sum(map(len, cut.groups)) ** 2):
        other = next(neighbours, cut)
        if other is cut:  # no neighbour is left
            break
        if other is not None and (found := _score(other, loads)) < best:
            cut, best, neighbours = other, found, _neighbours(other, row)
    return cut


def _without_rounding(seconds: float) -> float:
    """Round to nine digits, since the order of a sum changes its last digits."""
    return float(f"{seconds:.9g}")


def _neighbours(cut: Partition, row: CandidateOrder) -> Iterator[Partition | None]:
    """The groups after moving one candidate to another group or to a new one, or swapping two; None if impossible.

    The longest groups come first, since they are likely to end last.
    """
    order = sorted(range(len(cut.groups)), key=lambda index: -cut.lengths[index])
    for source in order:
        for place in cut.groups[source]:
            rest = [other for other in cut.groups[source] if other != place]
            if rest:
                yield _changed(cut, row, (source,), (rest, [place]))
            for target in order:
                if target == source:
                    continue
                group = cut.groups[target]
                yield _changed(cut, row, (source, target), (rest, [*group, place]))
                for other in group if rest else ():
                    kept = [each for each in group if each != other]
                    yield _changed(cut, row, (source, target), ([*rest, other], [*kept, place]))


def _changed(cut: Partition, row: CandidateOrder, old: tuple[int, ...], new: tuple[list[int], ...]) -> Partition | None:
    """The cut with the groups at indices `old` replaced by the non-empty groups of `new`."""
    groups = [group for index, group in enumerate(cut.groups) if index not in old]
    lengths = [length for index, length in enumerate(cut.lengths) if index not in old]
    tails = [tail for index, tail in enumerate(cut.tails) if index not in old]
    for group in filter(None, new):
        joined = row.joined(group)
        if joined is None:
            return None
        groups.append(group)
        lengths.append(joined[0])
        tails.append(joined[1])
    return Partition(groups, lengths, tails)
