"""Groups made better by changes of one or two candidates."""

from collections.abc import Iterator, Sequence

from shoal.planner.packing.candidate_order import CandidateOrder, Partition
from shoal.planner.packing.prediction import makespan

__all__ = ["Score", "local_search", "score"]

Score = tuple[float, int, float]
"""Makespan with what follows, idle devices that get nothing, seconds of all devices: the first that differs decides,
less is better."""

_EFFORT = 10_000
"""Changes looked at, times the square of the candidates: as many more there are, and as much longer does each take."""


def score(cut: Partition, loads: Sequence[float]) -> Score:
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
    best = score(cut, loads)
    neighbours = _neighbours(cut, row)
    for _ in range(_EFFORT // sum(map(len, cut.groups)) ** 2):
        other = next(neighbours, cut)
        if other is cut:  # there is no other left
            break
        if other is not None and (found := score(other, loads)) < best:
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
