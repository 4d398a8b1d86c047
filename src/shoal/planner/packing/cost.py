"""What is expected to be done first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

from shoal.core.errors import PackError
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.candidate_order import CandidateOrder, Partition
from shoal.planner.packing.groups import arranged, needed
from shoal.planner.packing.local_search import Score, local_search, score
from shoal.planner.packing.prediction import predicted

__all__ = ["Cost"]

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

        def judged(cut: Partition) -> Score:
            return score(cut, context.loads)

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
    reached = min(score(cut, loads)[0] for cut in (single, few))
    total = sum(few.lengths)
    for jobs, spare in product(_JOBS, _SPARE):
        if reached <= enough:
            return
        cut = row.cut((_level(total, loads) - min(loads)) / jobs + spare * total / len(single.groups))
        reached, total = min(reached, score(cut, loads)[0]), sum(cut.lengths)
        yield cut
    for jobs in _EVEN_JOBS:
        if reached <= enough:
            return
        cut = _even(row, jobs * len(loads), few)
        reached = min(reached, score(cut, loads)[0])
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
