"""What a packing strategy is told of an array, and which arrays can share samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from shoal.planner.packing.base import Candidate
from shoal.planner.partition import Profiles

__all__ = ["Amounts", "candidate", "candidates", "stream_of"]


class Amounts(NamedTuple):
    """What a strategy is told of an array, beside the array; see `Candidate`."""

    seconds: float
    fetching: float
    memory: int
    base: int
    tail: float


class _Following(NamedTuple):
    """What follows an array.

    Args:
        longest: epochs of one trial, beyond those of the member.
        last: epochs of that member, and these.
        work: epochs that all members together may expect, any trial of a group being as likely to go on as the others.
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
    """An array as a strategy sees it, with nothing that follows; the mean of those devices on which it is known.

    Args:
        array: that runs, or is to.
        profiles: what is known of a key on a kind of device.
        devices: that it can run on.
        amounts: of what is alike, as far as it was found before; what is found now is added.
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
    """Arrays as a strategy sees them, with what follows; the mean of those devices on which they are known.

    Args:
        arrays: that wait.
        profiles: what is known of a key on a kind of device.
        devices: that they can run on.
        group_of: what an algorithm wants a member trained with, and what follows that.
    """
    kinds = Counter(device.kind for device in devices)
    alike_fetching = _fetching_alike(profiles, arrays, kinds)
    amounts: dict[object, Amounts] = {}  # of what is alike, of which there may be thousands
    found = []
    for array in arrays:
        follows = _Following.of(array, group_of)
        sort = (array.key, array.epochs, follows)
        if sort not in amounts:
            amounts[sort] = _amounts(array, alike_fetching, kinds, follows)
        found.append(Candidate(array, *amounts[sort]))
    return found


def stream_of(array: Array, profile: Profile | None) -> object:
    """What arrays have in common that use the same samples at the same time."""
    if profile is None or profile.sharing not in ABREAST:
        return None
    place = (array.key.order, min(member.start for member in array.members))
    return place if profile.sharing == "window" else (*place, array.key.batch_size)


def _fetching_alike(profiles: Profiles, arrays: Iterable[Array], kinds: Iterable[str]) -> Profiles:
    """Profiles that agree on how long a sample of some data takes: what disturbs a measurement only makes it longer."""
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
    """What follows an array where samples are shared at one place in the data alone comes back to those that it was
    trained beside, and is counted as a part of it; anywhere else, as its tail.
    """
    epochs, more = array.epochs, [follows.longest]
    found = {kind: profiles(array.key, kind) for kind in kinds}
    known = [profile for profile in found.values() if profile is not None]
    devices = [kinds[kind] for kind, profile in found.items() if profile is not None]
    steps = fmean((seconds(profile, epochs) for profile in known), devices)
    tail = fmean((seconds(profile, more) for profile in known), devices)
    if known[0].sharing in ABREAST:  # which is up to the data, not to the device
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
