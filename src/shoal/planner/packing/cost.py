"""The cost packing: groups with the least expected makespan, found by cuts and local search."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

from shoal.core.errors import PackError
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.candidate_order import CandidateOrder, Partition
from shoal.planner.packing.groups import memory_needed, ordered_groups
from shoal.planner.packing.prediction import makespan, predicted

__all__ = ["Cost", "local_search"]

_JOBS = (1, 2, 3, 4, 6, 8)
"""Numbers of jobs per device to try. More jobs balance devices better, but fewer arrays share a process."""

_SLACK = (1.0, 0.5)
"""Slack of a group beyond its even share, in mean lengths of a candidate, since groups are not filled exactly."""

_EVEN_JOBS = (1, 2)
"""Numbers of jobs per device to try for cuts that are as even as possible."""

_HALVINGS = 7
"""Bisection steps in the search for the length of even groups."""

_TOLERANCE = 0.01
"""Relative gain in makespan below which the search stops."""

_Score = tuple[float, int, float]
"""Makespan including tails, number of idle devices without a job, and total device seconds; compared in this order,
less is better."""

_SEARCH_EFFORT = 10_000
"""Limit of tried changes, times the square of the number of candidates. Both the number and the cost of changes grow
with the number of candidates."""


@final
@dataclass(frozen=True)
class Cost(Packing):
    """Groups arrays for the least expected makespan of all arrays and the training that follows; ties are broken by
    device time.

    Every group must save a part of the time of its arrays one after another, as predicted from measurements
    (`predicted`). So a group that was measured to save too little is split. The makespan assumes list scheduling, the
    longest group first, each on the first free device, so the search also keeps enough groups for all devices.

    Arrays are sorted so that matching arrays are neighbours (`CandidateOrder`), and the order is cut into groups of
    different length: single arrays, cuts that balance the devices, and the fewest groups that save time. The
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
        if len(candidates) < 2:
            return [(each,) for each in candidates]
        candidate_order = CandidateOrder(candidates, context, self.worth)

        def score_of(cut: Partition) -> _Score:
            return _score(cut, context.loads)

        best = min(_candidate_cuts(candidate_order, context.loads), key=score_of)
        starts = [best] if len(best.groups) == len(candidates) else [best, candidate_order.single()]
        improved = [local_search(cut, candidate_order, context.loads) for cut in starts]
        return ordered_groups(min(improved, key=score_of).groups, candidates)

    def admits(self, incoming: Candidate, present: Sequence[Candidate], context: PackingContext) -> bool:
        """Return whether sharing saves at least `worth` of the time of the incoming candidate alone."""
        group = [*present, incoming]
        if incoming.key.data != present[0].key.data or memory_needed(group) > context.memory:
            return False
        alone = context.start + incoming.seconds
        added = predicted(group, context).together - predicted(present, context).together
        return alone - added >= self.worth * alone


def _candidate_cuts(candidate_order: CandidateOrder, loads: Sequence[float]) -> Iterator[Partition]:
    """Return cuts from single arrays to as few groups as save time, until one reaches a bound of the makespan."""
    single, coarsest = candidate_order.single(), candidate_order.cut()
    yield single
    yield coarsest
    if len(coarsest.groups) == len(single.groups) or len(loads) == 1:
        return
    longest_path = min(loads) + max(map(sum, zip(single.lengths, single.tails, strict=True)))
    target = (1 + _TOLERANCE) * max(_water_level(sum(coarsest.lengths), loads), longest_path, *loads)
    best_makespan = min(_score(cut, loads)[0] for cut in (single, coarsest))
    total = sum(coarsest.lengths)
    for jobs, slack in product(_JOBS, _SLACK):
        if best_makespan <= target:
            return
        cut = candidate_order.cut((_water_level(total, loads) - min(loads)) / jobs + slack * total / len(single.groups))
        best_makespan, total = min(best_makespan, _score(cut, loads)[0]), sum(cut.lengths)
        yield cut
    for jobs in _EVEN_JOBS:
        if best_makespan <= target:
            return
        cut = _even_cut(candidate_order, jobs * len(loads), coarsest)
        best_makespan = min(best_makespan, _score(cut, loads)[0])
        yield cut


def _even_cut(candidate_order: CandidateOrder, groups: int, cut: Partition) -> Partition:
    """Return the cut into at most `groups` groups whose longest group is shortest, by bisection: shared fetching makes
    the length of groups unpredictable from the sum of lengths."""
    low, high = 0.0, max(cut.lengths)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        finer = candidate_order.cut(middle)
        if len(finer.groups) <= groups:
            cut, high = finer, middle
        else:
            low = middle
    return cut


def _water_level(seconds: float, loads: Sequence[float]) -> float:
    """Return the time at which all devices are free if `seconds` are spread over them as evenly as possible
    (water-filling).
    """
    ordered = sorted(loads)
    filled = next(
        count
        for count in range(1, len(ordered) + 1)
        if count == len(ordered) or seconds + sum(ordered[:count]) <= count * ordered[count]
    )
    return (seconds + sum(ordered[:filled])) / filled


def _score(cut: Partition, loads: Sequence[float]) -> _Score:
    """Return the score of groups."""
    unused = max(0, loads.count(0) - len(cut.groups))
    return _without_rounding(makespan(cut.lengths, loads, cut.tails)), unused, _without_rounding(sum(cut.lengths))


def local_search(cut: Partition, candidate_order: CandidateOrder, loads: Sequence[float]) -> Partition:
    """Improve groups by small changes until none is better, or the effort is used up.

    Args:
        cut: The initial groups.
        candidate_order: The order from which they were cut.
        loads: Seconds until each device is free.
    """
    best = _score(cut, loads)
    neighbours = _neighbours(cut, candidate_order)
    for _ in range(_SEARCH_EFFORT // sum(map(len, cut.groups)) ** 2):
        other = next(neighbours, cut)
        if other is cut:  # there is no neighbour
            break
        if other is not None and (found := _score(other, loads)) < best:
            cut, best, neighbours = other, found, _neighbours(other, candidate_order)
    return cut


def _without_rounding(seconds: float) -> float:
    """Round to nine digits, since the order of a sum changes its last digits."""
    return float(f"{seconds:.9g}")


def _neighbours(cut: Partition, candidate_order: CandidateOrder) -> Iterator[Partition | None]:
    """Return the groups after moving one candidate to another group or to a new one, or swapping two; None if
    impossible.

    The longest groups come first, since they are likely to end last.
    """
    order = sorted(range(len(cut.groups)), key=lambda index: -cut.lengths[index])
    for source in order:
        for index in cut.groups[source]:
            rest = [other for other in cut.groups[source] if other != index]
            if rest:
                yield _replaced(cut, candidate_order, (source,), (rest, [index]))
            for target in order:
                if target == source:
                    continue
                group = cut.groups[target]
                yield _replaced(cut, candidate_order, (source, target), (rest, [*group, index]))
                for other in group if rest else ():
                    kept = [each for each in group if each != other]
                    yield _replaced(cut, candidate_order, (source, target), ([*rest, other], [*kept, index]))


def _replaced(
    cut: Partition, candidate_order: CandidateOrder, old: tuple[int, ...], new: tuple[list[int], ...]
) -> Partition | None:
    """Return the cut with the groups at indices `old` replaced by the non-empty groups of `new`."""
    groups = [group for index, group in enumerate(cut.groups) if index not in old]
    lengths = [length for index, length in enumerate(cut.lengths) if index not in old]
    tails = [tail for index, tail in enumerate(cut.tails) if index not in old]
    for group in filter(None, new):
        joined = candidate_order.evaluate(group)
        if joined is None:
            return None
        groups.append(group)
        lengths.append(joined[0])
        tails.append(joined[1])
    return Partition(groups, lengths, tails)
