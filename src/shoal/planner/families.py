"""Partial fusion in a search: trials that differ in some submodules as one array, where that is measured to gain."""

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
"""Seconds that the trials of a family must take apart from each other, for it to be measured as one array."""


def by_family(
    waiting: Sequence[Waiting],
    profiles: Profiles,
    kinds: Collection[str],
    unmeasurable: AbstractSet[tuple[FusionKey, str]] = frozenset(),
    apart: AbstractSet[int] = frozenset(),
    pack_speed: Callable[[AbstractSet[FusionKey]], float] = lambda keys: 1.0,
) -> Sequence[Waiting]:
    """Give the trials of a family the key of the family, where one array of them is faster than one of each structure.

    So they have it while the family is still to be measured, once its structures are. All other trials keep their keys;
    if all do, `waiting` itself is returned.

    Args:
        waiting: trials with the keys of their structures, in the order in which they are to be served.
        profiles: what is known of a key on a kind of device.
        kinds: of devices, which decide together.
        unmeasurable: (key, kind) that cannot be measured.
        apart: numbers of trials that keep their keys.
        pack_speed: how many times as long arrays of some keys take in one process as one after another.
    """
    shared: dict[int, FusionKey] = {}
    for family, members in families(waiting, apart).items():
        found = [_gains(family, members, profiles, unmeasurable, kind, pack_speed) for kind in kinds]
        known = [gains for gains in found if gains is not None]
        if known and all(known):
            shared.update((member.trial.number, family) for member, _ in members)
    return [(member, shared.get(member.trial.number, key)) for member, key in waiting] if shared else waiting


def families(waiting: Sequence[Waiting], apart: AbstractSet[int] = frozenset()) -> dict[FusionKey, list[Waiting]]:
    """Of each family of at least two structures the trials, by the key that they have as one array."""
    family_of = {key: key.of_family for key in {key for _, key in waiting} if key.family}
    if len(set(family_of.values())) == len(family_of):
        return {}
    found: dict[FusionKey, list[Waiting]] = {}
    for member, key in waiting:
        if key in family_of and member.trial.number not in apart:
            found.setdefault(family_of[key], []).append((member, key))
    return {family: members for family, members in found.items() if len({key for _, key in members}) > 1}


def in_turns(waiting: Sequence[Waiting]) -> list[Member]:
    """The members in turns of their structures: the first of each, then the second of each."""
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
    """Whether one array is faster on a kind of device, or may be; None if that cannot be said."""
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
    """Seconds of a step for each of so many members, in arrays of the most efficient size."""
    size = best_size(profile, members)
    return (step_seconds(profile, size) + TURN_SECONDS) / size
