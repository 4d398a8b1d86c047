"""Fusion of trials into arrays: which waiting members train as one model, and how large arrays are."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import chain, pairwise
from math import inf
from operator import itemgetter
from typing import NamedTuple

from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.plan.cache import PlanCache
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.costs import Costs
from shoal.plan.waiting import WaitingClass

__all__ = ["CutArrays", "partition"]

MIN_SPLIT_GAIN = 0.25
"""Least saving for cutting a cohort further, relative to the saving if the time were proportional to the size."""

MAX_UNEVENNESS = 1.05
"""Makespan, relative to the mean load of the devices, from which a cut counts as even."""

MAX_FAILED_SPLITS = 32
"""Number of cuts without a shorter makespan, twice that of cohorts at least, after which no further cut is tried."""

SPLIT_DIVISOR = 32
"""A cohort of n arrays is cut into n // SPLIT_DIVISOR more at once, at least one more."""


MAX_ARRAYS = 32
"""Most arrays that a plan makes of one class of trials, unless many devices are idle. As these trials are alike, the
plan needs no more of them: those that are left are as long, and start no sooner."""

MAX_ARRAYS_IN_ALL = 256
"""Most arrays of all classes, unless `MIN_ARRAYS` of each are more or many devices are idle."""

MIN_ARRAYS = 4
"""Number of arrays of a class that a plan makes however many classes wait."""

ARRAYS_PER_DEVICE = 4
"""Number of arrays of a class that a plan makes for each idle device, if that is more."""

MAX_MEMBERS = 10_000
"""Most trials of one class of which a plan makes arrays, unless many devices are idle."""

MEMBERS_PER_DEVICE = 32
"""Number of trials of a class of which a plan makes arrays for each idle device, if that is more."""


class CutArrays(NamedTuple):
    """Arrays of waiting trials.

    Args:
        arrays: In the order of service.
        behind: For each class with more trials than were cut, an array of these, and how many such arrays they are.
    """

    arrays: list[Array]
    behind: list[tuple[Array, float]]


def partition(
    waiting: Sequence[WaitingClass],
    costs: Costs,
    devices: Sequence[Device],
    busy: Mapping[str, float],
    elastic: bool = True,
    fuse: bool = True,
    cache: PlanCache | None = None,
) -> CutArrays:
    """Cut the waiting members into arrays.

    Members of one key that start at the same epoch are a cohort. Cohorts of one key are joined if fusing members at
    different epochs saves more time than shared batches do. A cohort is cut into as few arrays as memory and the most
    efficient size allow. While there are fewer arrays than idle devices, an array takes longer than the mean load of a
    device, or the devices are loaded unevenly, the cohort with the longest array is cut into one more array if that
    saves time. Arrays of one cohort differ in size by at most one, and hold members of similar targets in the order of
    their trial numbers. Of a large class only the first trials are cut; see `MAX_ARRAYS`, `MAX_ARRAYS_IN_ALL` and
    `MAX_MEMBERS`.

    Args:
        costs: Costs of the keys; a key that was not measured gets arrays of one member.
        devices: All healthy devices, at least one; busy devices will share the load later.
        busy: Name of a device that holds jobs -> expected seconds until it holds none.
        fuse: Whether arrays may have several members.
    """
    by_cohort: dict[tuple[FusionKey, int, bool, int | None], list[WaitingClass]] = {}
    idle = sum(device.name not in busy for device in devices)
    max_arrays = max(MIN_ARRAYS, ARRAYS_PER_DEVICE * idle, min(MAX_ARRAYS, MAX_ARRAYS_IN_ALL // max(1, len(waiting))))
    max_members = max(MAX_MEMBERS, MEMBERS_PER_DEVICE * idle)
    array_costs = _ArrayCosts(costs, devices, max_arrays, max_members, cache or PlanCache())
    for each in waiting:
        key = each.fused_key
        apart = not fuse or each.own_job or key.opaque or not array_costs.known(key)
        most = 1 if apart else None if each.oom_limit is None else each.oom_limit.max_members
        by_cohort.setdefault((key, each.start, each.may_share_job and not apart, most), []).append(each)
    cohorts = [_Cohort.of(key, classes, array_costs, most) for (key, *_, most), classes in by_cohort.items()]
    if elastic:
        joinable = [may_share for _, _, may_share, _ in by_cohort]
        cohorts = _join_cohorts(cohorts, joinable)
    loads: dict[str, list[float]] = {device.kind: [] for device in devices}
    for device in devices:
        loads[device.kind].append(busy.get(device.name, 0.0))
    cut = _balance(cohorts, [sorted(each) for each in loads.values()], idle)
    ranks = {member.trial.number: each.rank for each in waiting if each.rank for member in each.members}
    arrays = [array for each in cut for array in each]
    arrays.sort(key=lambda array: min([(ranks.get(x.trial.number, 0), x.trial.number) for x in array.members]))
    return CutArrays(arrays, [each for cohort in cohorts for each in cohort.behind])


_Epochs = tuple[int, ...]


class _ArrayTimes(NamedTuple):
    mean: float
    by_kind: tuple[float, ...]


class _ArrayCosts:
    """Costs of arrays, cached for equal arrays, of which there may be thousands."""

    def __init__(
        self, costs: Costs, devices: Sequence[Device], max_arrays: int, max_members: int, cache: PlanCache
    ) -> None:
        self.max_arrays = max_arrays
        self.max_members = max_members
        self._costs = costs
        self._kinds = dict.fromkeys((device.kind, device.memory) for device in devices)
        self._kind_counts = Counter(device.kind for device in devices)
        self._costs_of_key: dict[FusionKey, list[tuple[int, Cost, int]]] = cache.table("costs of keys")
        self._worth: dict[object, bool] = cache.table("arrays worth fusing")
        self._times: dict[tuple[FusionKey, _Epochs], _ArrayTimes] = cache.table("times of arrays")

    def known(self, key: FusionKey) -> list[tuple[int, Cost, int]]:
        """Memory in bytes, cost and count of devices of the kind, for each of these on which the key was measured."""
        if key not in self._costs_of_key:
            self._costs_of_key[key] = [
                (memory, cost, self._kind_counts[kind])
                for kind, memory in self._kinds
                if (cost := self._costs.of(key, kind)) is not None
            ]
        return self._costs_of_key[key]

    def largest(self, key: FusionKey, epochs: _Epochs, max_members: int | None) -> int:
        """Largest number of members that is possible and efficient on every device that can run one member."""
        if max_members == 1:
            return 1
        limits = [] if max_members is None else [max_members]
        for place, (memory, cost, devices) in enumerate(self.known(key)):
            if room := cost.largest_fitting(memory, len(epochs)):
                size = cost.best_size(room, devices)
                limits.append(size if self._worth_fusing((key, place), cost, epochs[-size:]) else 1)
        return min(limits, default=1)

    def _worth_fusing(self, known: object, cost: Cost, epochs: _Epochs) -> bool:
        alike = (len(epochs), epochs[0]) if epochs[0] == epochs[-1] else epochs  # they are sorted
        cache_key = (known, alike)
        if cache_key not in self._worth:
            self._worth[cache_key] = cost.fusing_pays(epochs)
        return self._worth[cache_key]

    def times(self, key: FusionKey, epochs: _Epochs) -> _ArrayTimes:
        cache_key = (key, epochs)
        if cache_key not in self._times:
            counts = self._kind_counts
            known = {
                kind: cost.seconds(epochs) + cost.fetching(epochs)
                for kind in counts
                if (cost := self._costs.of(key, kind)) is not None
            }
            mean = _harmonic_mean([(value, counts[kind]) for kind, value in known.items()])
            self._times[cache_key] = _ArrayTimes(mean, tuple(known.get(kind, inf if known else 0.0) for kind in counts))
        return self._times[cache_key]


def _harmonic_mean(weighted: Collection[tuple[float, int]]) -> float:
    """Return the harmonic mean of values with weights, as `statistics.harmonic_mean` does in many times the time."""
    if not all(value for value, _ in weighted):
        return 0.0
    return sum(weight for _, weight in weighted) / (sum(weight / value for value, weight in weighted) or 1.0)


@dataclass(frozen=True)
class _Cohort:
    """Waiting members that may train as arrays of at most `largest`; `behind` are those that are not cut."""

    key: FusionKey
    members: tuple[Member, ...]
    costs: _ArrayCosts
    largest: int
    behind: tuple[tuple[Array, float], ...]

    @classmethod
    def of(
        cls, key: FusionKey, classes: Sequence[WaitingClass], costs: _ArrayCosts, max_members: int | None = None
    ) -> "_Cohort":
        epochs = ((each.epochs, min(len(each.members), costs.max_members)) for each in classes)
        largest = costs.largest(key, tuple([length for length, n in sorted(epochs) for _ in range(n)]), max_members)
        most = min(costs.max_members, largest * costs.max_arrays)
        rest = [(Array(key, x.members[most : most + largest]), len(x.members) - most) for x in classes]
        behind = tuple([(array, left / len(array.members)) for array, left in rest if left > 0])
        return cls(key, _sorted_members(classes, most), costs, largest, behind)

    def with_members(self, other: "_Cohort") -> "_Cohort":
        """Return the cohort of the members of both."""
        every = tuple(sorted((*self.members, *other.members), key=_length_and_number))
        largest = self.costs.largest(self.key, _epochs(every), None)
        return replace(self, members=every, largest=largest, behind=(*self.behind, *other.behind))

    @property
    def seconds_behind(self) -> float:
        """Mean seconds of all arrays that are not cut, one after another."""
        return sum(self.costs.times(self.key, array.epochs).mean * times for array, times in self.behind)

    @property
    def min_arrays(self) -> int:
        return -(-len(self.members) // self.largest)

    def bounds(self, count: int) -> list[tuple[int, int]]:
        """Return the index ranges of the members of each of `count` arrays, of sizes as even as possible."""
        return list(pairwise([len(self.members) * index // count for index in range(count + 1)]))

    def cut(self, count: int) -> list[Array]:
        return [Array(self.key, self.members[low:high]) for low, high in self.bounds(count)]

    def times(self, count: int) -> list[tuple[_ArrayTimes, int]]:
        """Return the times of the arrays of a cut, and how many arrays have them."""
        length = self.members[0].epochs
        if length == self.members[-1].epochs:  # they are sorted: all are equally long
            size, larger = divmod(len(self.members), count)
            sizes = [(size, count - larger), (size + 1, larger)]
            return [(self.costs.times(self.key, (length,) * members), n) for members, n in sizes if n]
        epochs = [member.epochs for member in self.members]
        return [(self.costs.times(self.key, tuple(epochs[low:high])), 1) for low, high in self.bounds(count)]


def _sorted_members(classes: Sequence[WaitingClass], most: int) -> tuple[Member, ...]:
    """Return the first members of each class, at most so many, the shortest first."""
    return tuple(sorted(chain.from_iterable(x.members[:most] for x in classes), key=_length_and_number))


def _epochs(members: Sequence[Member]) -> _Epochs:
    return tuple([member.epochs for member in members])


def _length_and_number(member: Member) -> tuple[int, int]:
    return member.epochs, member.trial.number


def _join_cohorts(cohorts: Sequence[_Cohort], joinable: Sequence[bool]) -> list[_Cohort]:
    """Return the cohorts, with those of one key joined to the largest of them where that pays."""
    by_key: dict[FusionKey, _Cohort] = {}
    others: list[_Cohort] = []
    for cohort, may_join in sorted(zip(cohorts, joinable, strict=True), key=lambda each: -len(each[0].members)):
        largest_cohort = by_key.get(cohort.key)
        if not may_join:
            others.append(cohort)
        elif largest_cohort is None:
            by_key[cohort.key] = cohort
        else:
            joined = largest_cohort.with_members(cohort)
            if _is_worth_joining(largest_cohort, cohort, joined):
                by_key[cohort.key] = joined
            else:
                others.append(cohort)
    return [*by_key.values(), *others]


def _is_worth_joining(one: _Cohort, other: _Cohort, joined: _Cohort) -> bool:
    first, second = (min(len(cohort.members), cohort.largest) for cohort in (one, other))
    fits = first + second <= joined.largest
    return fits and all(cost.mixing_pays(first, second) for _, cost, _ in joined.costs.known(joined.key))


@dataclass(frozen=True)
class _ArraySplit:
    """A cohort cut into a number of arrays, with their times, the longest mean time, and the sum of mean times."""

    cohort: _Cohort
    count: int
    times: list[tuple[_ArrayTimes, int]]
    longest: float
    total: float

    @classmethod
    def of(cls, cohort: _Cohort, count: int) -> "_ArraySplit":
        times = cohort.times(count)
        longest, total = max(each.mean for each, _ in times), sum(each.mean * n for each, n in times)
        return cls(cohort, count, times, longest, total)

    def split_further(self) -> "_ArraySplit | None":
        """The same cohort in one more array, or some more if it has many; None if impossible or not worthwhile."""
        if self.count == len(self.cohort.members):
            return None
        count = min(self.count + max(1, self.count // SPLIT_DIVISOR), len(self.cohort.members))
        finer, worth = _ArraySplit.of(self.cohort, count), MIN_SPLIT_GAIN * (count - self.count) / count
        return finer if finer.total / count <= self.total / self.count * (1 - worth) else None


def _balance(cohorts: Sequence[_Cohort], loads: Sequence[Sequence[float]], idle: int) -> list[list[Array]]:
    """Cut the cohorts until the devices are evenly loaded, and return the cut with the least makespan on the way. While
    a running job ends last, no array is longer than the mean load of a device if a cut saves time."""
    devices, last = sum(map(len, loads)), max(each[-1] for each in loads)
    load = sum(map(sum, loads)) + sum(cohort.seconds_behind for cohort in cohorts)
    cuts = [_ArraySplit.of(cohort, cohort.min_arrays) for cohort in cohorts]
    count = sum(cut.count for cut in cuts)
    best, best_makespan = list(cuts), _makespan(cuts, loads) if count >= idle else inf
    open_indices, failed_splits = set(range(len(cuts))), 0
    while open_indices and failed_splits < max(MAX_FAILED_SPLITS, 2 * len(cuts)):
        index = max(sorted(open_indices), key=lambda index: cuts[index].longest)
        mean_load = (load + sum(cut.total for cut in cuts)) / devices
        if count >= idle and cuts[index].longest <= mean_load and best_makespan <= MAX_UNEVENNESS * mean_load:
            break
        finer = cuts[index].split_further()
        if finer is None:
            open_indices.remove(index)
            continue
        before, count = count, count + finer.count - cuts[index].count
        cuts[index] = finer
        if count < idle:  # each cut gives a device work
            best = list(cuts)
            continue
        makespan = _makespan(cuts, loads)
        # Where a running job ends last, no cut changes the makespan; that is no reason to leave an array as long.
        too_long = makespan <= last and max(cut.longest for cut in best) > mean_load
        failed_splits += 1
        if before < idle or makespan < best_makespan or too_long:
            best, best_makespan, failed_splits = list(cuts), makespan, 0
    return [cut.cohort.cut(cut.count) for cut in best]


def _makespan(cuts: Sequence[_ArraySplit], loads: Sequence[Sequence[float]]) -> float:
    """Seconds until all arrays are done, the longest first, each on the device where it ends first (minimum completion
    time; O. H. Ibarra and C. E. Kim, 1977); see `_balance`.
    """
    arrays = [times for cut in cuts for times, n in cut.times for _ in range(n)]
    arrays.sort(key=itemgetter(0), reverse=True)
    last = max(each[-1] for each in loads)
    kinds = [list(each[: len(arrays)]) for each in loads]  # the other devices get no array
    if arrays and len(kinds) == 1 and kinds[0][0] == kinds[0][-1]:  # the longest arrays get a device each
        taken = kinds[0][: len(arrays)]
        kinds[0] = sorted(load + by_kind[0] for load, (_, by_kind) in zip(taken, arrays, strict=False))
        last, arrays = max(last, kinds[0][-1]), arrays[len(taken) :]
    for _, by_kind in arrays:
        end = inf
        for heap, length in zip(kinds, by_kind, strict=True):
            if heap[0] + length < end:
                end, earliest = heap[0] + length, heap
        heapreplace(earliest, end)
        if end > last:
            last = end
    return last
