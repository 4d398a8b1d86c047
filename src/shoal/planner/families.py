"""Families for partial fusion: trials that differ in some submodules are one array where profiles show a gain."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from statistics import fmean

from shoal.core.array import FusionKey, Member
from shoal.core.demand import Profile
from shoal.cost.estimate import STEP_OVERHEAD_SECONDS, best_size, seconds, step_seconds
from shoal.planner.partition import MIN_FUSING_GAIN, Profiles

__all__ = ["Waiting", "by_family", "families", "round_robin"]

Waiting = tuple[Member, FusionKey]

MIN_SECONDS_TO_PROFILE = 5.0
"""A family is profiled as one array if its trials take at least this many seconds in separate arrays."""


def by_family(
    waiting: Sequence[Waiting],
    profiles: Profiles,
    kinds: Collection[str],
    unmeasurable: AbstractSet[tuple[FusionKey, str]] = frozenset(),
    excluded: AbstractSet[int] = frozenset(),
    relative_time: Callable[[AbstractSet[FusionKey]], float] = lambda keys: 1.0,
) -> Sequence[Waiting]:
    """Give the trials of a family the key of the family, if one array of them is faster than one per structure.

    If the family has no profile, its trials also get its key once all its structures have profiles. All other trials
    keep their keys. If no key changes, `waiting` itself is returned.

    Args:
        waiting: Trials with the keys of their structures, in the order of service.
        profiles: Profile of a key on a kind of device, or None.
        kinds: Kinds of devices; the family must gain on each kind with profiles.
        unmeasurable: Pairs of key and kind of device that cannot be profiled.
        excluded: Numbers of trials that keep their keys.
        relative_time: Time of arrays of some keys in one process over their time one after another.
    """
    family_keys: dict[int, FusionKey] = {}
    for family, members in families(waiting, excluded).items():
        found = [_is_faster_as_family(family, members, profiles, unmeasurable, kind, relative_time) for kind in kinds]
        known = [gains for gains in found if gains is not None]
        if known and all(known):
            family_keys.update((member.trial.number, family) for member, _ in members)
    return [(member, family_keys.get(member.trial.number, key)) for member, key in waiting] if family_keys else waiting


def families(waiting: Sequence[Waiting], excluded: AbstractSet[int] = frozenset()) -> dict[FusionKey, list[Waiting]]:
    """Return the trials of each family of at least two structures, by the key of the family."""
    family_of = {key: key.family_key for key in {key for _, key in waiting} if key.family}
    if len(set(family_of.values())) == len(family_of):
        return {}
    found: dict[FusionKey, list[Waiting]] = {}
    for member, key in waiting:
        if key in family_of and member.trial.number not in excluded:
            found.setdefault(family_of[key], []).append((member, key))
    return {family: members for family, members in found.items() if len({key for _, key in members}) > 1}


def round_robin(waiting: Sequence[Waiting]) -> list[Member]:
    """Return the members round-robin by structure: the first of each, then the second of each."""
    by_key: dict[FusionKey, list[Member]] = {}
    for member, key in waiting:
        by_key.setdefault(key, []).append(member)
    return [member for turn in zip_longest(*by_key.values()) for member in turn if member is not None]


def _is_faster_as_family(
    family: FusionKey,
    members: Sequence[Waiting],
    profiles: Profiles,
    unmeasurable: AbstractSet[tuple[FusionKey, str]],
    kind: str,
    relative_time: Callable[[AbstractSet[FusionKey]], float],
) -> bool | None:
    """Return whether one array is faster on a kind of device, or worth profiling; None if profiles are missing."""
    counts = Counter(key for _, key in members)
    known = {key: profile for key in counts if (profile := profiles(key, kind)) is not None}
    if len(known) < len(counts) or (family, kind) in unmeasurable:
        return None
    family_profile = profiles(family, kind)
    if family_profile is None:
        epochs = fmean(member.epochs for member, _ in members)
        return sum(count * epochs * seconds(known[key], [1]) for key, count in counts.items()) >= MIN_SECONDS_TO_PROFILE
    if best_size(family_profile, len(members)) == 1:
        return False
    steps = relative_time(counts.keys()) * sum(
        count * _seconds_per_member(known[key], count) for key, count in counts.items()
    )
    return len(members) * _seconds_per_member(family_profile, len(members)) <= (1 - MIN_FUSING_GAIN) * steps


def _seconds_per_member(profile: Profile, members: int) -> float:
    """Return the seconds of a step per member, for `members` in arrays of the most efficient size."""
    size = best_size(profile, members)
    return (step_seconds(profile, size) + STEP_OVERHEAD_SECONDS) / size
