"""Packing of arrays into jobs: the candidates and context of a packing, and arrays that must run alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import product
from math import fsum, inf
from operator import mul
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from shoal.core.array import Array, FusionKey
from shoal.core.demand import LOCKSTEP
from shoal.core.device import Device
from shoal.core.trial import TrialGroup
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.costs import Costs
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.cost import CostPacking
from shoal.plan.packing.packs import check_packs

__all__ = ["START_SECONDS", "ArrayPacker", "CandidateCosts", "RelativeTimes", "candidate", "candidates", "stream_of"]

START_SECONDS = 0.01
"""Fixed overhead of a job, as measured on a CPU slot: planning, journaling, dispatch, completion."""

RelativeTimes = Callable[[str], Mapping[tuple[str, str], float]]
"""Kind of a device -> relative times of pairs of structures; see `History.relative_times`."""


class ArrayPacker:
    """Packs arrays into jobs, as a packing decides.

    An array gets a job of its own if it has no profile, is opaque, or has a trial that failed in a shared job.
    """

    def __init__(
        self,
        packing: Packing | None = None,
        relative_times: RelativeTimes = lambda kind: {},
        axes: Mapping[str, Sequence[object]] | None = None,
        seed: int = 0,
    ) -> None:
        self._packing = packing or CostPacking()
        self._relative_times = relative_times
        self._axes = axes or {}
        self._seed = seed

    def packs(
        self,
        arrays: Sequence[Array],
        costs: Costs,
        devices: Sequence[Device],
        busy: Mapping[str, float],
        needs_own_job: AbstractSet[int],
        trial_groups: Mapping[int, TrialGroup] = MappingProxyType({}),
    ) -> list[tuple[Array, ...]]:
        """Return the packs, one per job, in the order of their first arrays.

        Args:
            arrays: In the order of service.
            devices: All healthy devices, at least one.
            busy: Name of a device that holds jobs -> expected seconds until it holds none.
            trial_groups: Number of a trial -> its TrialGroup.
        """
        single: list[Array] = []
        by_stream: dict[tuple[frozenset[str], object], list[Array]] = {}
        kinds_here = dict.fromkeys(device.kind for device in devices)
        kinds_of_key: dict[FusionKey, frozenset[str]] = {}
        for array in arrays:
            if array.key not in kinds_of_key:
                kinds_of_key[array.key] = frozenset(
                    kind for kind in kinds_here if costs.of(array.key, kind) is not None
                )
            kinds = kinds_of_key[array.key]
            may_share = not needs_own_job or not any(member.trial.number in needs_own_job for member in array.members)
            if kinds and may_share and not array.key.opaque:
                by_stream.setdefault((kinds, stream_of(array, costs.of(array.key, min(kinds)))), []).append(array)
            else:
                single.append(array)
        packs: list[tuple[Array, ...]] = [(array,) for array in single]
        for (kinds, _), stream_arrays in by_stream.items():
            devices_of_kinds = [device for device in devices if device.kind in kinds]
            stream_candidates = candidates(stream_arrays, costs, devices_of_kinds, trial_groups)
            context = self.context(stream_candidates, devices_of_kinds, busy)
            chosen = self._packing.pack(stream_candidates, context)
            check_packs(chosen, stream_candidates, context)
            packs += [tuple(each.array for each in pack) for pack in chosen]
        place = {array.members[0].trial.number: position for position, array in enumerate(arrays)}
        return sorted(packs, key=lambda pack: place[pack[0].members[0].trial.number])

    def admits(self, incoming: Candidate, present: Sequence[Candidate], device: Device) -> bool:
        """Return whether the packing admits a candidate to a running process with the present candidates."""
        return self._packing.admits(incoming, present, self.context([*present, incoming], [device], {}))

    def context(
        self, candidates: Sequence[Candidate], devices: Sequence[Device], busy: Mapping[str, float]
    ) -> PackingContext:
        """The packing context of candidates on devices; for `busy` see `packs`."""
        return PackingContext(
            loads=tuple(busy.get(device.name, 0.0) for device in devices),
            memory=min(device.memory for device in devices),
            start=START_SECONDS,
            relative_times=self._measured_relative_times(
                {each.key for each in candidates}, {device.kind for device in devices}
            ),
            axes=self._axes,
            seed=self._seed,
        )

    def relative_time(self, keys: AbstractSet[FusionKey], kinds: AbstractSet[str]) -> float:
        """Time of arrays of these keys in one process over their time one after another; 1 if never measured."""
        return fmean(self._measured_relative_times(keys, kinds).values() or [1.0])

    def _measured_relative_times(
        self, keys: AbstractSet[FusionKey], kinds: AbstractSet[str]
    ) -> dict[frozenset[FusionKey], float]:
        """Return the relative time of each measured pair of keys, the mean over the kinds of devices."""
        by_structure: dict[str, list[FusionKey]] = {}
        for key in keys:
            by_structure.setdefault(key.steps, []).append(key)
        found: dict[frozenset[FusionKey], list[float]] = {}
        for kind in sorted(kinds):
            for (one, other), relative_time in self._relative_times(kind).items():
                for pair in product(by_structure.get(one, ()), by_structure.get(other, ())):
                    found.setdefault(frozenset(pair), []).append(relative_time)
        return {pair: fmean(relative_times) for pair, relative_times in found.items()}


class CandidateCosts(NamedTuple):
    """The fields of a `Candidate` other than its array."""

    seconds: float
    fetching: float
    memory: int
    base: int
    tail: float


class _FollowUp(NamedTuple):
    max_epochs: int = 0
    last_epoch: int = 0
    work: float = 0.0

    @classmethod
    def of(cls, array: Array, trial_groups: Mapping[int, TrialGroup]) -> "_FollowUp":
        found = [(member.epochs, group) for member in array.members if (group := trial_groups.get(member.trial.number))]
        return cls(
            max((group.epochs_ahead for _, group in found), default=0),
            max((epochs + group.epochs_ahead for epochs, group in found), default=0),
            sum(group.work_ahead / len(group.trials) for _, group in found),
        )


def candidate(
    array: Array, costs: Costs, devices: Sequence[Device], known: dict[object, CandidateCosts] | None = None
) -> Candidate:
    """The packing candidate of an array, without training that follows, as a mean over devices; `known` is a cache."""
    known = {} if known is None else known
    cache_key = (array.key, array.epochs, *(device.kind for device in devices))
    if cache_key not in known:
        kinds = Counter(device.kind for device in devices)
        found = {kind: cost for kind in kinds if (cost := costs.of(array.key, kind)) is not None}
        known[cache_key] = _candidate_costs(array, found, kinds, _FollowUp())
    return Candidate(array, *known[cache_key])


def candidates(
    arrays: Sequence[Array],
    costs: Costs,
    devices: Sequence[Device],
    trial_groups: Mapping[int, TrialGroup],
) -> list[Candidate]:
    """The packing candidates of waiting arrays, with training that follows; means over the devices that have costs."""
    kinds = Counter(device.kind for device in devices)
    costs_of_key = _with_common_fetching(costs, {array.key for array in arrays}, kinds)
    known: dict[object, CandidateCosts] = {}  # thousands of equal arrays share one entry
    found = []
    for array in arrays:
        follow_up = _FollowUp.of(array, trial_groups)
        cache_key = (array.key, array.epochs, follow_up)
        if cache_key not in known:
            known[cache_key] = _candidate_costs(array, costs_of_key[array.key], kinds, follow_up)
        found.append(Candidate(array, *known[cache_key]))
    return found


def stream_of(array: Array, cost: Cost | None) -> object:
    """A key equal for arrays that use the same samples at the same time; None if they share them at any position."""
    if cost is None or cost.sample_sharing not in LOCKSTEP:
        return None
    place = (array.key.order, min(member.start for member in array.members))
    return place if cost.sample_sharing == "window" else (*place, array.key.batch_size)


def _with_common_fetching(
    costs: Costs, keys: AbstractSet[FusionKey], kinds: Iterable[str]
) -> dict[FusionKey, dict[str, Cost]]:
    """The costs of keys by kind, with the least fetch time per sample of each data set, since disturbances only
    lengthen it.
    """
    found = {(key, kind): cost for key, kind in product(keys, kinds) if (cost := costs.of(key, kind)) is not None}
    least: dict[tuple[str, str], float] = {}
    for (key, kind), cost in found.items():
        place = key.data, kind
        least[place] = min(least.get(place, inf), cost.fetch_seconds / key.batch_size)
    common: dict[FusionKey, dict[str, Cost]] = {}
    for (key, kind), cost in found.items():
        common.setdefault(key, {})[kind] = cost.with_fetch_seconds(least[key.data, kind] * key.batch_size)
    return common


def _candidate_costs(
    array: Array, costs: Mapping[str, Cost], kinds: Mapping[str, int], follow_up: _FollowUp
) -> CandidateCosts:
    """Return the amounts of a candidate, as means over devices.

    If samples are shared only at the same position in the data, the training that follows returns to the same process
    and counts as part of the array; else it is the tail.

    Args:
        costs: Kind of device -> cost of the key there.
        kinds: Kind of device -> number of devices.
    """
    epochs, follow_up_epochs = array.epochs, [follow_up.max_epochs]
    found, devices = list(costs.values()), [kinds[kind] for kind in costs]
    steps = _mean((cost.seconds(epochs) for cost in found), devices)
    tail = _mean((cost.seconds(follow_up_epochs) for cost in found), devices)
    if found[0].sample_sharing in LOCKSTEP:  # `sample_sharing` depends on the data, not on the device
        steps += follow_up.work * _mean((cost.seconds([1]) for cost in found), devices)
        epochs, tail = (max(*epochs, follow_up.last_epoch),), 0.0
    fetched = _mean((cost.fetching(epochs) for cost in found), devices)
    return CandidateCosts(
        seconds=steps + fetched,
        fetching=fetched,
        memory=max(cost.memory(len(array.members)) - cost.memory(0) for cost in found),
        base=max(cost.memory(0) for cost in found),
        tail=tail,
    )


def _mean(values: Iterable[float], weights: Sequence[int]) -> float:
    """Return the weighted mean, as `statistics.fmean` does in several times the time."""
    return fsum(map(mul, values, weights)) / sum(weights)
