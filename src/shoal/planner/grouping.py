"""Packing of arrays into jobs: the candidates and context of a packing, and arrays that must run alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import product
from math import inf
from statistics import fmean
from typing import NamedTuple

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import ABREAST, Profile
from shoal.core.device import Device
from shoal.core.trial import TrialGroup
from shoal.cost.estimate import fetching, seconds
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.groups import check_groups
from shoal.planner.partition import Profiles

__all__ = ["START_SECONDS", "Amounts", "Grouping", "Paces", "candidate", "candidates", "stream_of"]

START_SECONDS = 0.03
"""Fixed overhead of a job: planning, journaling, dispatch, completion. `benchmarks/placement.py` prints 28 ms for
planning and dispatch alone."""

Paces = Callable[[str], Mapping[tuple[str, str], float]]
"""Kind of a device -> measured pack speeds of pairs of structures; see `History.pack_speeds`."""


class Grouping:
    """Groups arrays into jobs by a packing.

    Arrays without a profile, opaque arrays, and trials that failed in a shared job get a job of their own.

    Args:
        packing: The packing; by default `Cost`.
        pack_speeds: Measured pack speeds of pairs of structures.
        axes: Ordered values of parameters of the space; see `PackingContext`.
        seed: Seed of the packing.
    """

    def __init__(
        self,
        packing: Packing | None = None,
        pack_speeds: Paces = lambda kind: {},
        axes: Mapping[str, Sequence[object]] | None = None,
        seed: int = 0,
    ) -> None:
        self._packing = packing or Cost()
        self._paces = pack_speeds
        self._axes = axes or {}
        self._seed = seed

    def groups(
        self,
        arrays: Sequence[Array],
        profiles: Profiles,
        devices: Sequence[Device],
        busy: Mapping[str, float],
        alone: AbstractSet[int],
        group_of: Callable[[Member], TrialGroup | None] = lambda member: None,
    ) -> list[tuple[Array, ...]]:
        """Groups of arrays, one per job, in the order of their first arrays.

        Args:
            arrays: Arrays in the order of service.
            profiles: Profile of a key on a kind of device, or None.
            devices: All healthy devices, at least one.
            busy: Name of a device that holds jobs -> expected seconds until it holds none.
            alone: Numbers of trials that get a job of their own.
            group_of: Trial group of a member, which says what training may follow; or None.
        """
        lone: list[Array] = []
        alike: dict[tuple[frozenset[str], object], list[Array]] = {}
        here = dict.fromkeys(device.kind for device in devices)
        able_on: dict[FusionKey, frozenset[str]] = {}
        for array in arrays:
            if array.key not in able_on:
                able_on[array.key] = frozenset(kind for kind in here if profiles(array.key, kind) is not None)
            kinds = able_on[array.key]
            together = not alone or not any(member.trial.number in alone for member in array.members)
            if kinds and together and not array.key.opaque:
                alike.setdefault((kinds, stream_of(array, profiles(array.key, min(kinds)))), []).append(array)
            else:
                lone.append(array)
        groups: list[tuple[Array, ...]] = [(array,) for array in lone]
        for (kinds, _), some in alike.items():
            able = [device for device in devices if device.kind in kinds]
            seen = candidates(some, profiles, able, group_of)
            context = self.context(seen, able, busy)
            grouped = self._packing.pack(seen, context)
            check_groups(grouped, seen, context)
            groups += [tuple(each.array for each in group) for group in grouped]
        place = {array.members[0].trial.number: position for position, array in enumerate(arrays)}
        return sorted(groups, key=lambda group: place[group[0].members[0].trial.number])

    def suits(self, incoming: Candidate, present: Sequence[Candidate], device: Device) -> bool:
        """Whether the packing admits a candidate to a running process with the present candidates."""
        return self._packing.suits(incoming, present, self.context([*present, incoming], [device], {}))

    def context(
        self, candidates: Sequence[Candidate], devices: Sequence[Device], busy: Mapping[str, float]
    ) -> PackingContext:
        """The packing context of candidates on devices; for `busy` see `groups`."""
        return PackingContext(
            loads=tuple(busy.get(device.name, 0.0) for device in devices),
            memory=min(device.memory for device in devices),
            start=START_SECONDS,
            pack_speeds=self._known_paces({each.key for each in candidates}, {device.kind for device in devices}),
            axes=self._axes,
            seed=self._seed,
        )

    def pack_speed(self, keys: AbstractSet[FusionKey], kinds: AbstractSet[str]) -> float:
        """Time of arrays of these keys in one process over their time one after another; 1 if never measured."""
        return fmean(self._known_paces(keys, kinds).values() or [1.0])

    def _known_paces(self, keys: AbstractSet[FusionKey], kinds: AbstractSet[str]) -> dict[frozenset[FusionKey], float]:
        """Pack speed of each measured pair of keys, the mean over the kinds of devices."""
        by_structure: dict[str, list[FusionKey]] = {}
        for key in keys:
            by_structure.setdefault(key.steps, []).append(key)
        found: dict[frozenset[FusionKey], list[float]] = {}
        for kind in sorted(kinds):
            for (one, other), pack_speed in self._paces(kind).items():
                for pair in product(by_structure.get(one, ()), by_structure.get(other, ())):
                    found.setdefault(frozenset(pair), []).append(pack_speed)
        return {pair: fmean(pack_speeds) for pair, pack_speeds in found.items()}


class Amounts(NamedTuple):
    """The fields of a `Candidate` other than its array."""

    seconds: float
    fetching: float
    memory: int
    base: int
    tail: float


class _Following(NamedTuple):
    """Training that may follow an array, by the groups of its members.

    Args:
        longest: Largest number of epochs that may follow a member.
        last: Largest sum of the epochs of a member and the epochs that may follow it.
        work: Expected epochs that follow all members, with all trials of a group equally likely to go on.
    """

    longest: int = 0
    last: int = 0
    work: float = 0.0

    @classmethod
    def of(cls, array: Array, group_of: Callable[[Member], TrialGroup | None]) -> "_Following":
        groups = [(member.epochs, group) for member in array.members if (group := group_of(member)) is not None]
        return cls(
            max((group.epochs_ahead for _, group in groups), default=0),
            max((epochs + group.epochs_ahead for epochs, group in groups), default=0),
            sum(group.work_ahead / len(group.trials) for _, group in groups),
        )


def candidate(
    array: Array, profiles: Profiles, devices: Sequence[Device], amounts: dict[object, Amounts] | None = None
) -> Candidate:
    """The packing candidate of an array, without training that follows; means over the devices with profiles.

    Args:
        array: A running or waiting array.
        profiles: Profile of a key on a kind of device, or None.
        devices: Devices on which the array can run.
        amounts: Cache for equal arrays, extended by this call.
    """
    kinds = [device.kind for device in devices]
    amounts = {} if amounts is None else amounts
    alike = (array.key, array.epochs, *kinds)
    if alike not in amounts:
        amounts[alike] = _amounts(array, profiles, Counter(kinds), _Following())
    return Candidate(array, *amounts[alike])


def candidates(
    arrays: Sequence[Array],
    profiles: Profiles,
    devices: Sequence[Device],
    group_of: Callable[[Member], TrialGroup | None],
) -> list[Candidate]:
    """The packing candidates of waiting arrays, with training that follows; means over the devices with profiles.

    Args:
        arrays: Waiting arrays.
        profiles: Profile of a key on a kind of device, or None.
        devices: Devices on which the arrays can run.
        group_of: Trial group of a member, which says what training may follow; or None.
    """
    kinds = Counter(device.kind for device in devices)
    alike_fetching = _fetching_alike(profiles, arrays, kinds)
    amounts: dict[object, Amounts] = {}  # one for equal arrays, of which there may be thousands
    found = []
    for array in arrays:
        follows = _Following.of(array, group_of)
        sort = (array.key, array.epochs, follows)
        if sort not in amounts:
            amounts[sort] = _amounts(array, alike_fetching, kinds, follows)
        found.append(Candidate(array, *amounts[sort]))
    return found


def stream_of(array: Array, profile: Profile | None) -> object:
    """Equal for arrays that use the same samples at the same time; None if the position in the data does not matter."""
    if profile is None or profile.sharing not in ABREAST:
        return None
    place = (array.key.order, min(member.start for member in array.members))
    return place if profile.sharing == "window" else (*place, array.key.batch_size)


def _fetching_alike(profiles: Profiles, arrays: Iterable[Array], kinds: Iterable[str]) -> Profiles:
    """Profiles with the least measured fetch time per sample of each data set, since disturbances only lengthen it."""
    least: dict[tuple[str, str], float] = {}
    keys = {array.key for array in arrays}
    for key, kind in product(keys, kinds):
        if (profile := profiles(key, kind)) is not None:
            place = key.data, kind
            least[place] = min(least.get(place, inf), profile.fetch_seconds / key.batch_size)

    def agreed(key: FusionKey, kind: str) -> Profile | None:
        profile = profiles(key, kind)
        return profile and replace(profile, fetch_seconds=least[key.data, kind] * key.batch_size)

    return agreed


def _amounts(array: Array, profiles: Profiles, kinds: Mapping[str, int], follows: _Following) -> Amounts:
    """Amounts of a candidate, as means over devices.

    If samples are shared only at the same position in the data, the training that follows returns to the same process
    and counts as part of the array; else it is the tail.
    """
    epochs, more = array.epochs, [follows.longest]
    found = {kind: profiles(array.key, kind) for kind in kinds}
    known = [profile for profile in found.values() if profile is not None]
    devices = [kinds[kind] for kind, profile in found.items() if profile is not None]
    steps = fmean((seconds(profile, epochs) for profile in known), devices)
    tail = fmean((seconds(profile, more) for profile in known), devices)
    if known[0].sharing in ABREAST:  # the data decides, not the device
        steps += follows.work * fmean((seconds(profile, [1]) for profile in known), devices)
        epochs, tail = (max(*epochs, follows.last),), 0.0
    fetched = fmean((fetching(profile, epochs) for profile in known), devices)
    return Amounts(
        seconds=steps + fetched,
        fetching=fetched,
        memory=max(len(array.members) * profile.member_memory for profile in known),
        base=max(profile.base_memory for profile in known),
        tail=tail,
    )
