"""Trials to arrays: which waiting members train as one model."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.cost.estimate import TURN_SECONDS, best_size, fetching, fitting, fuse_seconds, seconds, step_seconds
from shoal.planner.packing.prediction import makespan

__all__ = ["Profiles", "ResourceLimit", "partition", "worth_mixing"]

Profiles = Callable[[FusionKey, str], Profile | None]
"""What is known of a key on a kind of device; None if it was never measured."""


@dataclass(frozen=True)
class ResourceLimit:
    """Of one trial; its array has a job of its own.

    Args:
        most: members of the array that it is in.
        memory: it has a device to itself, of at least so many bytes; None: it is promised what its array is expected to
            take.
    """

    most: int
    memory: int | None = None


WORTH_MIXING = 0.05
"""Members at different epochs are fused where that is expected to save this share at least."""

WORTH_FUSING = 0.05
"""Members are fused where that is expected to save this share at least of what they take one after another."""

WORTHWHILE = 0.25
"""A group is cut further where that saves this share of the time it would save if time were proportional to size."""

MANY = 32
"""A group in so many arrays is cut into more than one more at once, into a part more of them."""


def partition(
    waiting: Sequence[tuple[Member, FusionKey]],
    profiles: Profiles,
    devices: Sequence[Device],
    busy: Mapping[str, float],
    alone: AbstractSet[int] = frozenset(),
    elastic: bool = True,
    limits: Mapping[int, ResourceLimit] = MappingProxyType({}),
) -> list[Array]:
    """Cut the waiting members into arrays.

    Members of one key that start at the same epoch are a group, and those that start at others with them where fusing
    saves more than the batches that they share. A group is cut into as few arrays as memory and the
    most efficient size allow. Then, as long as there are fewer arrays than idle devices, or one takes longer than the
    mean load of a device, the group with the longest array is cut into one more, if that helps. Arrays of one group
    differ in size by at most one, hold members of similar targets, and follow the numbers of their trials.

    Args:
        waiting: members in any order; the arrays come in the order of their first members here.
        profiles: a key that is known on none of the devices gets arrays of one member.
        devices: all healthy devices, at least one, busy or not: those that are busy now will share the load later.
        busy: name of a device that holds jobs -> expected seconds until it holds none.
        alone: numbers of trials that get an array of their own.
        elastic: whether members of an array may start at different epochs.
        limits: number of a trial that ran out of memory -> what it is held to; such are fused with their like alone.
    """
    members: dict[tuple[FusionKey, int, int | None, int | None], list[Member]] = {}
    costs = _ArrayCosts(profiles, devices)
    for member, key in waiting:
        number = member.trial.number
        own = number if number in alone or not costs.known(key) else None
        most = limits[number].most if number in limits else None
        members.setdefault((key, member.start, own, most), []).append(member)
    groups = [_FusableGroup.of(key, group, costs, most) for (key, *_, most), group in members.items()]
    if elastic:
        apart = alone | limits.keys()
        groups = _mixed(groups, lambda key, members: _FusableGroup.of(key, members, costs), apart)
    order = {member.trial.number: position for position, (member, _) in enumerate(waiting)}
    loads = [busy.get(device.name, 0.0) for device in devices]
    idle = sum(device.name not in busy for device in devices)
    arrays = [array for arrays in _balanced(groups, loads, idle) for array in arrays]
    return sorted(arrays, key=lambda array: min(order[member.trial.number] for member in array.members))


def worth_fusing(profile: Profile, epochs: Sequence[int]) -> bool:
    """Whether members that train so many epochs are to be one array; that takes time to be made, as each alone does."""
    alone = sum(fuse_seconds(profile, 1) + seconds(profile, [each], TURN_SECONDS) for each in epochs)
    together = fuse_seconds(profile, len(epochs)) + seconds(profile, epochs, TURN_SECONDS)
    return together <= (1 - WORTH_FUSING) * alone


def worth_mixing(profile: Profile, one: int, other: int) -> bool:
    """Whether two arrays at different epochs, of `one` and of `other` members, are to be one.

    They then share no batches: what is the same for all of one batch has to be done for each member.
    """
    if profile.mixing is None:
        return False
    apart = step_seconds(profile, one) + step_seconds(profile, other) + 2 * TURN_SECONDS
    together = profile.mixing * step_seconds(profile, one + other) + TURN_SECONDS
    return together <= (1 - WORTH_MIXING) * apart


_Epochs = tuple[int, ...]
"""That the members of an array train."""


class _ArrayCosts:
    """What arrays cost; of those alike, of which there may be thousands, it is found once.

    Args:
        profiles: what is known of a key on a kind of device.
        devices: all healthy ones.
    """

    def __init__(self, profiles: Profiles, devices: Sequence[Device]) -> None:
        self._profiles = profiles
        self._alike = Counter((device.kind, device.memory) for device in devices)
        self._known: dict[FusionKey, list[tuple[int, Profile, int]]] = {}
        self._largest: dict[tuple[FusionKey, _Epochs, int | None], int] = {}
        self._seconds: dict[tuple[FusionKey, _Epochs], float] = {}

    def known(self, key: FusionKey) -> list[tuple[int, Profile, int]]:
        """Of the devices on whose kind a key was measured, those alike together: bytes, what is known, how many."""
        if key not in self._known:
            found = [(memory, self._profiles(key, kind), count) for (kind, memory), count in self._alike.items()]
            self._known[key] = [(memory, profile, count) for memory, profile, count in found if profile is not None]
        return self._known[key]

    def largest(self, key: FusionKey, epochs: _Epochs, most: int | None) -> int:
        """Members that an array may have: what is possible and efficient on every device that can run one member.

        Args:
            key: of all members.
            epochs: of all of them, ascending.
            most: a further limit, or None.
        """
        alike = (key, epochs, most)
        if alike not in self._largest:
            limits = [] if most is None else [most]
            for memory, profile, _ in self.known(key):
                if room := fitting(profile, memory, len(epochs)):
                    size = best_size(profile, room)
                    limits.append(size if worth_fusing(profile, epochs[-size:]) else 1)
            self._largest[alike] = min(limits, default=1)
        return self._largest[alike]

    def seconds(self, key: FusionKey, epochs: _Epochs) -> float:
        """Expected run time, the mean over the devices that can run it; 0 where nothing is known."""
        alike = (key, epochs)
        if alike not in self._seconds:
            known = self.known(key)
            each = [seconds(profile, epochs) + fetching(profile, epochs) for _, profile, _ in known]
            self._seconds[alike] = fmean(each, [count for _, _, count in known]) if each else 0.0
        return self._seconds[alike]


@dataclass(frozen=True)
class _FusableGroup:
    """Members that could all be one array.

    Args:
        key: of all of them.
        members: by the epochs that they are to train, then by number.
        costs: of arrays.
        largest: members an array may have.
    """

    key: FusionKey
    members: tuple[Member, ...]
    costs: _ArrayCosts
    largest: int

    @classmethod
    def of(
        cls, key: FusionKey, members: Sequence[Member], costs: _ArrayCosts, most: int | None = None
    ) -> "_FusableGroup":
        """The group of these members; `most` limits its arrays further."""
        ordered = _ordered(members)
        return cls(key, ordered, costs, costs.largest(key, tuple([member.epochs for member in ordered]), most))

    @property
    def fewest(self) -> int:
        """Arrays it takes at least."""
        return -(-len(self.members) // self.largest)

    def bounds(self, count: int) -> list[tuple[int, int]]:
        """The first member of each of `count` arrays, and that after the last, the sizes as even as can be."""
        return list(pairwise([len(self.members) * index // count for index in range(count + 1)]))

    def cut(self, count: int) -> list[Array]:
        """The members in `count` arrays, in order."""
        return [Array(self.key, self.members[low:high]) for low, high in self.bounds(count)]

    def seconds(self, count: int) -> list[float]:
        """Expected run time of each of `count` arrays."""
        epochs = [member.epochs for member in self.members]
        return [self.costs.seconds(self.key, tuple(epochs[low:high])) for low, high in self.bounds(count)]


def _ordered(members: Sequence[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: (member.epochs, member.trial.number)))


def _mixed(
    groups: Sequence[_FusableGroup],
    make: Callable[[FusionKey, Sequence[Member]], _FusableGroup],
    alone: AbstractSet[int],
) -> list[_FusableGroup]:
    """The groups, those of one key joined to the largest of it where that pays."""
    by_key: dict[FusionKey, _FusableGroup] = {}
    others: list[_FusableGroup] = []
    for group in sorted(groups, key=lambda group: -len(group.members)):
        lead = by_key.get(group.key)
        if not group.costs.known(group.key) or any(member.trial.number in alone for member in group.members):
            others.append(group)
        elif lead is None:
            by_key[group.key] = group
        else:
            both = make(group.key, (*lead.members, *group.members))
            if _pays(lead, group, both):
                by_key[group.key] = both
            else:
                others.append(group)
    return [*by_key.values(), *others]


def _pays(one: _FusableGroup, other: _FusableGroup, both: _FusableGroup) -> bool:
    """Whether an array of members of two groups is better than one of each."""
    first, second = (min(len(group.members), group.largest) for group in (one, other))
    fits = first + second <= both.largest
    return fits and all(worth_mixing(profile, first, second) for _, profile, _ in both.costs.known(both.key))


@dataclass(frozen=True)
class _ArraySplit:
    """A group in a number of arrays, and how long each takes."""

    group: _FusableGroup
    count: int
    seconds: list[float]
    longest: float
    total: float

    @classmethod
    def of(cls, group: _FusableGroup, count: int) -> "_ArraySplit":
        seconds = group.seconds(count)
        return cls(group, count, seconds, max(seconds), sum(seconds))

    def finer(self) -> "_ArraySplit | None":
        """The same with one array more, of very many with some more; None where that is impossible or does not pay."""
        if self.count == len(self.group.members):
            return None
        count = min(self.count + max(1, self.count // MANY), len(self.group.members))
        finer, worth = _ArraySplit.of(self.group, count), WORTHWHILE * (count - self.count) / count
        return finer if fmean(finer.seconds) <= fmean(self.seconds) * (1 - worth) else None


def _balanced(groups: Sequence[_FusableGroup], loads: Sequence[float], idle: int) -> list[list[Array]]:
    """Cut the groups until the devices are evenly loaded; of the cuts passed on the way, the one done first."""
    loads = sorted(loads)
    cuts = [_ArraySplit.of(group, group.fewest) for group in groups]
    best, best_makespan = list(cuts), _done(cuts, loads)
    open_indices = set(range(len(cuts)))
    while open_indices:
        index = max(sorted(open_indices), key=lambda index: cuts[index].longest)
        count = sum(cut.count for cut in cuts)
        mean_load = (sum(loads) + sum(cut.total for cut in cuts)) / len(loads)
        if count >= idle and cuts[index].longest <= mean_load:
            break
        finer = cuts[index].finer()
        if finer is None:
            open_indices.remove(index)
            continue
        cuts[index] = finer
        makespan = _done(cuts, loads)
        if count < idle or makespan < best_makespan:
            best, best_makespan = list(cuts), makespan
    return [cut.group.cut(cut.count) for cut in best]


def _done(cuts: Sequence[_ArraySplit], loads: Sequence[float]) -> float:
    return makespan([length for cut in cuts for length in cut.seconds], loads)
