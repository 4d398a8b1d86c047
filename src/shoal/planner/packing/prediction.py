"""What sharing a process is expected to save."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from operator import add

from shoal.core.array import FusionKey
from shoal.planner.packing.base import Candidate, PackingContext

__all__ = ["Prediction", "makespan", "predicted", "seconds_abreast"]


@dataclass(frozen=True)
class Prediction:
    """Of a group of candidates.

    Args:
        apart: seconds of all of them, one after another, each in a process of its own; T_s(Seq) of Pack.
        together: seconds in one process; T_s(Pack).
    """

    apart: float
    together: float

    @property
    def impv(self) -> float:
        """The part of the time that is saved, (T_s(Seq) - T_s(Pack)) / T_s(Seq); below 0 where time is lost."""
        return (self.apart - self.together) / self.apart if self.apart else 0.0


def predicted(group: Sequence[Candidate], context: PackingContext) -> Prediction:
    """What a group is expected to take and to save.

    With s the start, f the seconds of fetching and c = seconds - f of each: apart are Σ (s + f + c), together
    s + max f + p Σ c. Samples are fetched and prepared once, for the one that needs most of that; p is the mean over
    all pairs of their measured pace, 1 for a pair that was never measured.
    """
    apart = sum(context.start + candidate.seconds for candidate in group)
    fetching = max(candidate.fetching for candidate in group)
    steps = sum(candidate.seconds - candidate.fetching for candidate in group)
    return Prediction(apart, context.start + fetching + _pace([candidate.key for candidate in group], context) * steps)


def seconds_abreast(group: Sequence[Candidate], epochs: int | None = None) -> float:
    """What so many epochs, or all, take candidates that keep abreast, epoch by epoch, in a process that runs."""
    lengths = [max(1, *each.array.epochs) for each in group]
    done = [min(1.0, epochs / length) if epochs else 1.0 for length in lengths]
    steps = sum((each.seconds - each.fetching) * part for each, part in zip(group, done, strict=True))
    return max(each.fetching * part for each, part in zip(group, done, strict=True)) + steps


def makespan(lengths: Sequence[float], loads: Sequence[float], tails: Sequence[float] = ()) -> float:
    """Seconds until all jobs are done, the longest first, each on the device that is free first (LPT; Graham 1969).

    Args:
        lengths: seconds of each job.
        loads: seconds until each device is free.
        tails: seconds of what follows each job and takes no device, if anything does; a job is as long as with that.
    """
    ordered = sorted(loads)
    last = ordered[-1]
    heap = ordered[: len(lengths)]  # no job comes to any other
    paths = list(map(add, lengths, tails)) if tails else lengths
    for path, length in sorted(zip(paths, lengths, strict=True), reverse=True):
        begins = heapq.heapreplace(heap, heap[0] + length)
        last = max(last, begins + path)
    return last


def _pace(keys: Sequence[FusionKey], context: PackingContext) -> float:
    """Mean over all pairs of a group."""
    if len(keys) < 2 or not context.pack_speeds:
        return 1.0
    count = Counter(keys)
    kinds = len(count)
    pairs: Iterable[frozenset[FusionKey]]
    if kinds * (kinds + 1) // 2 < len(context.pack_speeds):
        pairs = map(frozenset, combinations_with_replacement(count, 2))
    else:
        pairs = (pair for pair in context.pack_speeds if count.keys() >= pair)
    change = 0.0
    for pair in pairs:
        pack_speed = context.pack_speeds.get(pair)
        if pack_speed is not None:
            one, other = (*pair, *pair)[:2]
            times = count[one] * (count[one] - 1) / 2 if one == other else count[one] * count[other]
            change += times * (pack_speed - 1)
    return 1 + change / (len(keys) * (len(keys) - 1) / 2)
