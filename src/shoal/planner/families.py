"""Families for partial fusion: trials that differ in some submodules are one array where profiles show a gain."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from statistics import fmean

from shoal.core.array import FusionKey, Member
from shoal.core.demand import Profile
from shoal.cost.estimate import TURN_SECONDS, best_size, seconds, step_seconds
from shoal.planner.partition import WORTH_FUSING, Profiles

__all__ = ["Waiting", "by_family", "families", "in_turns"]

Waiting = tuple[Member, FusionKey]

WORTH_MEASURING = 5.0
"""Least total time of the trials of a family, in separate arrays, for which the family is profiled as one array."""


def by_family(
    waiting: Sequence[Waiting],
    profiles: Profiles,
    kinds: Collection[str],
    unmeasurable: AbstractSet[tuple[FusionKey, str]] = frozenset(),
    apart: AbstractSet[int] = frozenset(),
    pack_speed: Callable[[AbstractSet[FusionKey]], float] = lambda keys: 1.0,
) -> Sequence[Waiting]:
    """Give the trials of a family the key of the family, if one array of them is faster than one per structure.

    They also get it while the family has no profile, once all its structures have one. All other trials keep their
    keys; if all do, `waiting` itself is returned.

    Args:
        waiting: Trials with the keys of their structures, in the order of service.
        profiles: Profile of a key on a kind of device, or None.
        kinds: Kinds of devices; the family must gain on each kind with profiles.
        unmeasurable: Pairs of key and kind of device that cannot be profiled.
        apart: Numbers of trials that keep their keys.
        pack_speed: Time of arrays of some keys in one process over their time one after another.
    """
    shared: dict[int, FusionKey] = {}
    for family, members in families(waiting, apart).items():
        found = [_gains(family, members, profiles, unmeasurable, kind, pack_speed) for kind in kinds]
        known = [gains for gains in found if gains is not None]
        if known and all(known):
            shared.update((member.trial.number, family) for member, _ in members)
    return [(member, shared.get(member.trial.number, key)) for member, key in waiting] if shared else waiting


def families(waiting: Sequence[Waiting], apart: AbstractSet[int] = frozenset()) -> dict[FusionKey, list[Waiting]]:
    """The trials of each family of at least two structures, by the key of the family."""
    family_of = {key: key.family_key for key in {key for _, key in waiting} if key.family}
    if len(set(family_of.values())) == len(family_of):
        return {}
    found: dict[FusionKey, list[Waiting]] = {}
    for member, key in waiting:
        if key in family_of and member.trial.number not in apart:
            found.setdefault(family_of[key], []).append((member, key))
    return {family: members for family, members in found.items() if len({key for _, key in members}) > 1}


def in_turns(waiting: Sequence[Waiting]) -> list[Member]:
    """The members round-robin by structure: the first of each, then the second of each."""
    by_key: dict[FusionKey, list[Member]] = {}
    for member, key in waiting:
        by_key.setdefault(key, []).append(member)
    return [member for turn in zip_longest(*by_key.values()) for member in turn if member is not None]


def _gains(
    family: FusionKey,
    members: Sequence[Waiting],
    profiles: Profiles,
    unmeasurable: AbstractSet[tuple[FusionKey, str]],
    kind: str,
    pack_speed: Callable[[AbstractSet[FusionKey]], float],
) -> bool | None:
    """Whether one array is faster on a kind of device, or worth profiling; None if profiles are missing."""
    counts = Counter(key for _, key in members)
    known = {key: profile for key in counts if (profile := profiles(key, kind)) is not None}
    if len(known) < len(counts) or (family, kind) in unmeasurable:
        return None
    together = profiles(family, kind)
    if together is None:
        epochs = fmean(member.epochs for member, _ in members)
        return sum(count * epochs * seconds(known[key], [1]) for key, count in counts.items()) >= WORTH_MEASURING
    if best_size(together, len(members)) == 1:
        return False
    steps = pack_speed(counts.keys()) * sum(count * _for_each(known[key], count) for key, count in counts.items())
    return len(members) * _for_each(together, len(members)) <= (1 - WORTH_FUSING) * steps


def _for_each(profile: Profile, members: int) -> float:
    """Seconds of a step per member, for `members` in arrays of the most efficient size."""
    size = best_size(profile, members)
    return (step_seconds(profile, size) + TURN_SECONDS) / size
