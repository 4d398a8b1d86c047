"""Families: trials of several structures that train as one partially fused array."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from shoal.core.array import FusionKey
from shoal.plan.cost.cost import MIN_FUSING_GAIN
from shoal.plan.cost.costs import Costs
from shoal.plan.waiting import WaitingClass

__all__ = ["by_family", "families"]

MIN_SECONDS_TO_PROFILE = 5.0
"""A family is profiled as one array if its trials take at least this many seconds in separate arrays. On a GPU
they take at least `Cost.min_work_to_measure`, since with less only a single member is timed."""


def by_family(
    waiting: Sequence[WaitingClass],
    costs: Costs,
    kinds: Collection[str],
    unmeasurable: AbstractSet[tuple[FusionKey, str]] = frozenset(),
    relative_time: Callable[[AbstractSet[FusionKey]], float] = lambda keys: 1.0,
) -> Sequence[WaitingClass]:
    """Give the trials of a family the key of the family, if one array of them is faster than one per structure.

    If the family has no profile, its trials also get its key once all its structures have profiles. It must gain on
    each kind of device with profiles. All other trials keep their keys. Without a change it is `waiting` itself.
    """
    chosen: set[FusionKey | None] = set()
    for family, classes in families(waiting).items():
        found = [_is_faster_as_family(family, classes, costs, unmeasurable, kind, relative_time) for kind in kinds]
        known = [gains for gains in found if gains is not None]
        if known and all(known):
            chosen.add(family)
    if not chosen:
        return waiting
    return [replace(x, family=_family(x)) if _family(x) in chosen else x for x in waiting]


def _family(waiting: WaitingClass) -> FusionKey | None:
    """Return the key of the family that some trials may join; None if there is none."""
    return waiting.key.family_key if waiting.key.family and waiting.may_share_job else None


def families(waiting: Sequence[WaitingClass]) -> dict[FusionKey, list[WaitingClass]]:
    """Return the trials of each family of at least two structures, by the key of the family."""
    found: dict[FusionKey, list[WaitingClass]] = {}
    for each in waiting:
        if (family := _family(each)) is not None:
            found.setdefault(family, []).append(each)
    return {family: classes for family, classes in found.items() if len({each.key for each in classes}) > 1}


def _is_faster_as_family(
    family: FusionKey,
    classes: Sequence[WaitingClass],
    costs: Costs,
    unmeasurable: AbstractSet[tuple[FusionKey, str]],
    kind: str,
    relative_time: Callable[[AbstractSet[FusionKey]], float],
) -> bool | None:
    """Return whether one array is faster on a kind of device, or worth profiling; None if profiles are missing."""
    counts = Counter[FusionKey]()
    for each in classes:
        counts[each.key] += len(each.members)
    known = {key: cost for key in counts if (cost := costs.of(key, kind)) is not None}
    if len(known) < len(counts) or (family, kind) in unmeasurable:
        return None
    family_cost = costs.of(family, kind)
    if family_cost is None:
        epochs = sum(each.remaining_epochs for each in classes) / counts.total()
        work = sum(count * epochs * known[key].seconds([1]) for key, count in counts.items())
        return work >= max(MIN_SECONDS_TO_PROFILE, *(cost.min_work_to_measure for cost in known.values()))
    if family_cost.best_size(counts.total()) == 1:
        return False
    steps = relative_time(counts.keys()) * sum(
        count * known[key].seconds_per_member(count) for key, count in counts.items()
    )
    return counts.total() * family_cost.seconds_per_member(counts.total()) <= (1 - MIN_FUSING_GAIN) * steps
