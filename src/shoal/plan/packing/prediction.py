"""Predicted times of packs of arrays in one process, and the makespan of jobs on devices."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from operator import add

from shoal.core.array import FusionKey
from shoal.plan.packing.base import Candidate, PackingContext

__all__ = ["Prediction", "lockstep_seconds", "makespan", "predicted"]


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of candidates apart, one after another (T_s(Seq) of Pack), and in one process (T_s(Pack))."""

    apart: float
    together: float

    @property
    def impv(self) -> float:
        """Saved part of the time, (T_s(Seq) - T_s(Pack)) / T_s(Seq); below 0 if time is lost."""
        return (self.apart - self.together) / self.apart if self.apart else 0.0


def predicted(pack: Sequence[Candidate], context: PackingContext) -> Prediction:
    """Predict the times of a pack.

    With s the start, f the seconds of fetching and c = seconds - f of each candidate: apart is Σ (s + f + c), together
    is s + max f + p Σ c. Samples are fetched and prepared once, for the candidate with the largest f; p is the mean
    measured relative time over all pairs, 1 for an unmeasured pair.
    """
    apart = sum(context.start + candidate.seconds for candidate in pack)
    fetching = max(candidate.fetching for candidate in pack)
    steps = sum(candidate.seconds - candidate.fetching for candidate in pack)
    return Prediction(
        apart, context.start + fetching + _mean_relative_time([candidate.key for candidate in pack], context) * steps
    )


def lockstep_seconds(pack: Sequence[Candidate], epochs: int | None = None) -> float:
    """Seconds of so many epochs, or of all, for candidates that train each epoch together in a running process."""
    lengths = [max(1, *each.array.epochs) for each in pack]
    done = [min(1.0, epochs / length) if epochs else 1.0 for length in lengths]
    steps = sum((each.seconds - each.fetching) * part for each, part in zip(pack, done, strict=True))
    return max(each.fetching * part for each, part in zip(pack, done, strict=True)) + steps


def makespan(lengths: Sequence[float], loads: Sequence[float], tails: Sequence[float] = ()) -> float:
    """Seconds until all jobs are done, the longest first, each on the device that is free first (LPT; Graham 1969).

    `loads` are the seconds until each device is free. `tails` are seconds after each job that need no device; jobs are
    ordered by length plus tail.
    """
    ordered = sorted(loads)
    last = ordered[-1]
    heap = ordered[: len(lengths)]  # the other devices get no job
    paths = list(map(add, lengths, tails)) if tails else lengths
    for path, length in sorted(zip(paths, lengths, strict=True), reverse=True):
        begins = heapq.heapreplace(heap, heap[0] + length)
        last = max(last, begins + path)
    return last


def _mean_relative_time(keys: Sequence[FusionKey], context: PackingContext) -> float:
    if len(keys) < 2 or not context.relative_times:
        return 1.0
    count = Counter(keys)
    kinds = len(count)
    pairs: Iterable[frozenset[FusionKey]]
    if kinds * (kinds + 1) // 2 < len(context.relative_times):
        pairs = map(frozenset, combinations_with_replacement(count, 2))
    else:
        pairs = (pair for pair in context.relative_times if count.keys() >= pair)
    change = 0.0
    for pair in pairs:
        relative_time = context.relative_times.get(pair)
        if relative_time is not None:
            one, other = (*pair, *pair)[:2]
            times = count[one] * (count[one] - 1) / 2 if one == other else count[one] * count[other]
            change += times * (relative_time - 1)
    return 1 + change / (len(keys) * (len(keys) - 1) / 2)
