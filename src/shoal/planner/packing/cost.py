"""What is expected to be done first."""

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
"""That a device is to have, one after another: the more there are, the evener the devices, the fewer share."""

_SPARE = (1.0, 0.5)
"""Mean lengths of a candidate by which a group may be longer than its even share: groups are not filled to the brim."""

_EVEN_JOBS = (1, 2)
"""The same, for cuts that are made as even as can be."""

_HALVINGS = 7
"""Of the range in which the length of even groups is looked for."""

_NEAR = 0.01
"""Part of a makespan: nobody looks for what is better by no more than that."""

_Score = tuple[float, int, float]
"""Makespan with what follows, idle devices that get nothing, seconds of all devices: the first that differs decides,
less is better."""

_EFFORT = 10_000
"""Changes looked at, times the square of the candidates: as many more there are, and as much longer does each take."""


@final
@dataclass(frozen=True)
class Cost(Packing):
    """Those arrays share a process with which all, and what follows them, are expected to be done first; of equals,
    with least device time.

    Every group is worth it: it saves a part of the time that its arrays take one after another, as far as that is known
    (`predicted`). So a group that was measured to save too little is undone. The makespan is that of the longest group
    first, each on the device that is free first, so there are no fewer groups than devices have use for.

    The arrays are put in a row in which those that suit each other stand together, and the row is cut into groups of
    different length: from all single, over some that balance the devices, to as few as are worth it. The best cut, and
    that of all single, is then changed by one array or two as long as that is better. Of few arrays this finds the best
    groups nearly always; of many there is no time for changes, and it takes time in proportion to their number.

    Args:
        worth: part of its time that a group must save.

    Raises:
        PackError: `worth` is not at least 0 and below 1.
    """

    worth: float = 0.05

    def __post_init__(self) -> None:
        number = isinstance(self.worth, int | float) and not isinstance(self.worth, bool)
        if not (number and 0 <= self.worth < 1):
            raise PackError(f"`worth` must be at least 0 and below 1, got {self.worth!r}; 0.05 is 5 % of the time")

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """The best groups found."""
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
        """Whether that saves enough of the time that the incoming candidate would take by itself."""
        group = [*present, incoming]
        if incoming.key.data != present[0].key.data or needed(group) > context.memory:
            return False
        alone = context.start + incoming.seconds
        added = predicted(group, context).together - predicted(present, context).together
        return alone - added >= self.worth * alone


def _passed(row: CandidateOrder, loads: Sequence[float]) -> Iterator[Partition]:
    """Cuts from all single to as few as are worth it; no more of them once one is as good as can be expected."""
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
    """The cut into so many groups at most of which the longest is shortest; where they all fetch the same samples, no
    sum of lengths tells beforehand how long that is.

    Args:
        row: to be cut.
        groups: at most, unless there are more in `cut`.
        cut: into as few as are worth it.
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
    """When all devices are free if so much is spread over them as evenly as their loads allow (water-filling)."""
    ordered = sorted(loads)
    filled = next(
        count
        for count in range(1, len(ordered) + 1)
        if count == len(ordered) or seconds + sum(ordered[:count]) <= count * ordered[count]
    )
    return (seconds + sum(ordered[:filled])) / filled


def _score(cut: Partition, loads: Sequence[float]) -> _Score:
    """How good groups are.

    Args:
        cut: the groups.
        loads: seconds until each device is free.
    """
    unused = max(0, loads.count(0) - len(cut.groups))
    return _without_rounding(makespan(cut.lengths, loads, cut.tails)), unused, _without_rounding(sum(cut.lengths))


def local_search(cut: Partition, row: CandidateOrder, loads: Sequence[float]) -> Partition:
    """Change groups as long as that makes them better, or too many changes have been looked at.

    Args:
        cut: the groups to begin with.
        row: that they were cut from.
        loads: seconds until each device is free.
    """
    best = _score(cut, loads)
    neighbours = _neighbours(cut, row)
    for _ in range(_EFFORT // sum(map(len, cut.groups)) ** 2):
        other = next(neighbours, cut)
        if other is cut:  # there is no other left
            break
        if other is not None and (found := _score(other, loads)) < best:
            cut, best, neighbours = other, found, _neighbours(other, row)
    return cut


def _without_rounding(seconds: float) -> float:
    """To nine digits: sums that differ by less may be the same in another order."""
    return float(f"{seconds:.9g}")


def _neighbours(cut: Partition, row: CandidateOrder) -> Iterator[Partition | None]:
    """The groups with one candidate in another or by itself, or two in each other's; None where that cannot be.

    The longest groups come first, for they are likely to be the last that end.
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
    """Groups in place of others, which are given by index; an empty one is left out."""
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
