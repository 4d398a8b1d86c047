"""Packing of arrays into jobs: the candidates and context of a packing, and arrays that must run alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import product
from math import fsum, inf
from operator import mul
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from shoal.core.array import Array, FusionKey
from shoal.core.demand import LOCKSTEP, Profile
from shoal.core.device import Device
from shoal.core.trial import TrialGroup
from shoal.cost.estimate import fetching, seconds
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.groups import check_groups
from shoal.planner.partition import Profiles

__all__ = ["START_SECONDS", "CandidateCosts", "Grouping", "RelativeTimes", "candidate", "candidates", "stream_of"]

START_SECONDS = 0.03
"""Fixed overhead of a job: planning, journaling, dispatch, completion. `benchmarks/placement.py` prints 28 ms for
planning and dispatch alone."""

RelativeTimes = Callable[[str], Mapping[tuple[str, str], float]]
"""Kind of a device -> relative times of pairs of structures; see `History.relative_times`."""


class Grouping:
    """Groups arrays into jobs by a packing.

    An array gets a job of its own if it has no profile, is opaque, or has a trial that failed in a shared job.
    """

    def __init__(
        self,
        packing: Packing | None = None,
        relative_times: RelativeTimes = lambda kind: {},
        axes: Mapping[str, Sequence[object]] | None = None,
        seed: int = 0,
    ) -> None:
        self._packing = packing or Cost()
        self._relative_times = relative_times
        self._axes = axes or {}
        self._seed = seed

    def groups(
        self,
        arrays: Sequence[Array],
        profiles: Profiles,
        devices: Sequence[Device],
        busy: Mapping[str, float],
        alone: AbstractSet[int],
        trial_groups: Mapping[int, TrialGroup] = MappingProxyType({}),
    ) -> list[tuple[Array, ...]]:
        """Return the groups of arrays, one per job, in the order of their first arrays.

        Args:
            arrays: In the order of service.
            devices: All healthy devices, at least one.
            busy: Name of a device that holds jobs -> expected seconds until it holds none.
            trial_groups: Number of a trial -> its group.
        """
        ungrouped: list[Array] = []
        by_stream: dict[tuple[frozenset[str], object], list[Array]] = {}
        kinds_here = dict.fromkeys(device.kind for device in devices)
        kinds_of_key: dict[FusionKey, frozenset[str]] = {}
        for array in arrays:
            if array.key not in kinds_of_key:
                kinds_of_key[array.key] = frozenset(
                    kind for kind in kinds_here if profiles(array.key, kind) is not None
                )
            kinds = kinds_of_key[array.key]
            may_share = not alone or not any(member.trial.number in alone for member in array.members)
            if kinds and may_share and not array.key.opaque:
                by_stream.setdefault((kinds, stream_of(array, profiles(array.key, min(kinds)))), []).append(array)
            else:
                ungrouped.append(array)
        groups: list[tuple[Array, ...]] = [(array,) for array in ungrouped]
        for (kinds, _), stream_arrays in by_stream.items():
            devices_of_kinds = [device for device in devices if device.kind in kinds]
            stream_candidates = candidates(stream_arrays, profiles, devices_of_kinds, trial_groups)
            context = self.context(stream_candidates, devices_of_kinds, busy)
            grouped = self._packing.pack(stream_candidates, context)
            check_groups(grouped, stream_candidates, context)
            groups += [tuple(each.array for each in group) for group in grouped]
        place = {array.members[0].trial.number: position for position, array in enumerate(arrays)}
        return sorted(groups, key=lambda group: place[group[0].members[0].trial.number])

    def admits(self, incoming: Candidate, present: Sequence[Candidate], device: Device) -> bool:
        """Return whether the packing admits a candidate to a running process with the present candidates."""
        return self._packing.admits(incoming, present, self.context([*present, incoming], [device], {}))

    def context(
        self, candidates: Sequence[Candidate], devices: Sequence[Device], busy: Mapping[str, float]
    ) -> PackingContext:
        """The packing context of candidates on devices; for `busy` see `groups`."""
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
    def of(cls, array: Array, groups: Mapping[int, TrialGroup]) -> "_FollowUp":
        found = [(member.epochs, group) for member in array.members if (group := groups.get(member.trial.number))]
        return cls(
            max((group.epochs_ahead for _, group in found), default=0),
            max((epochs + group.epochs_ahead for epochs, group in found), default=0),
            sum(group.work_ahead / len(group.trials) for _, group in found),
        )


def candidate(
    array: Array, profiles: Profiles, devices: Sequence[Device], costs: dict[object, CandidateCosts] | None = None
) -> Candidate:
    """The packing candidate of an array, without training that follows, as a mean over devices; `costs` is a cache."""
    kinds = [device.kind for device in devices]
    costs = {} if costs is None else costs
    cost_key = (array.key, array.epochs, *kinds)
    if cost_key not in costs:
        costs[cost_key] = _candidate_costs(array, profiles, Counter(kinds), _FollowUp())
    return Candidate(array, *costs[cost_key])


def candidates(
    arrays: Sequence[Array],
    profiles: Profiles,
    devices: Sequence[Device],
    trial_groups: Mapping[int, TrialGroup],
) -> list[Candidate]:
    """The packing candidates of waiting arrays, with training that follows; means over the devices with profiles."""
    kinds = Counter(device.kind for device in devices)
    common_profiles = _with_common_fetching(profiles, arrays, kinds)
    costs: dict[object, CandidateCosts] = {}  # thousands of equal arrays share one entry
    found = []
    for array in arrays:
        follow_up = _FollowUp.of(array, trial_groups)
        cost_key = (array.key, array.epochs, follow_up)
        if cost_key not in costs:
            costs[cost_key] = _candidate_costs(array, common_profiles, kinds, follow_up)
        found.append(Candidate(array, *costs[cost_key]))
    return found


def stream_of(array: Array, profile: Profile | None) -> object:
    """A key equal for arrays that use the same samples at the same time; None if they share them at any position."""
    if profile is None or profile.sample_sharing not in LOCKSTEP:
        return None
    place = (array.key.order, min(member.start for member in array.members))
    return place if profile.sample_sharing == "window" else (*place, array.key.batch_size)


def _with_common_fetching(profiles: Profiles, arrays: Iterable[Array], kinds: Iterable[str]) -> Profiles:
    """The profiles with the least fetch time per sample of each data set, since disturbances only lengthen it."""
    least: dict[tuple[str, str], float] = {}
    keys = {array.key for array in arrays}
    for key, kind in product(keys, kinds):
        if (profile := profiles(key, kind)) is not None:
            place = key.data, kind
            least[place] = min(least.get(place, inf), profile.fetch_seconds / key.batch_size)

    def with_least_fetching(key: FusionKey, kind: str) -> Profile | None:
        profile = profiles(key, kind)
        fetch_seconds = least[key.data, kind] * key.batch_size
        if profile is None or profile.fetch_seconds == fetch_seconds:
            return profile
        return replace(profile, fetch_seconds=fetch_seconds)

    return with_least_fetching


def _candidate_costs(
    array: Array, profiles: Profiles, kinds: Mapping[str, int], follow_up: _FollowUp
) -> CandidateCosts:
    """Return the amounts of a candidate, as means over devices.

    If samples are shared only at the same position in the data, the training that follows returns to the same process
    and counts as part of the array; else it is the tail.
    """
    epochs, follow_up_epochs = array.epochs, [follow_up.max_epochs]
    found = {kind: profiles(array.key, kind) for kind in kinds}
    profiles_found = [profile for profile in found.values() if profile is not None]
    devices = [kinds[kind] for kind, profile in found.items() if profile is not None]
    steps = _mean((seconds(profile, epochs) for profile in profiles_found), devices)
    tail = _mean((seconds(profile, follow_up_epochs) for profile in profiles_found), devices)
    if profiles_found[0].sample_sharing in LOCKSTEP:  # `sample_sharing` depends on the data, not on the device
        steps += follow_up.work * _mean((seconds(profile, [1]) for profile in profiles_found), devices)
        epochs, tail = (max(*epochs, follow_up.last_epoch),), 0.0
    fetched = _mean((fetching(profile, epochs) for profile in profiles_found), devices)
    return CandidateCosts(
        seconds=steps + fetched,
        fetching=fetched,
        memory=max(len(array.members) * profile.member_memory for profile in profiles_found),
        base=max(profile.base_memory for profile in profiles_found),
        tail=tail,
    )


def _mean(values: Iterable[float], weights: Sequence[int]) -> float:
    """Return the weighted mean, as `statistics.fmean` does in several times the time."""
    return fsum(map(mul, values, weights)) / sum(weights)
