"""The arrays that wait in one turn of planning, as work for which compiled code can be reused."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.core.array import Array, Member
from shoal.core.trial import TrialGroup

__all__ = ["WaitingWork"]


class WaitingWork:
    """Counts the waiting arrays of each key and size by their epochs.

    Later rungs of single members count, too: the trials of a group that go on train `TrialGroup.work_ahead` epochs
    together, counted as members that train `epochs_ahead` epochs each. Larger arrays shrink from rung to rung, and
    compiled code is for one size.

    Args:
        groups: Arrays of each job that waits or is suspended.
        group_of: Trial group of a member, or None.
    """

    def __init__(
        self, groups: Iterable[Sequence[Array]], group_of: Callable[[Member], TrialGroup | None] = lambda member: None
    ) -> None:
        self._arrays: defaultdict[object, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        for array in (array for arrays in groups for array in arrays if array.members):
            arrays_of_size = self._arrays[_size(array)]
            arrays_of_size[max(array.epochs)] += 1
            group = group_of(array.members[0]) if len(array.members) == 1 else None
            if group is not None and group.epochs_ahead:
                arrays_of_size[group.epochs_ahead] += group.work_ahead / group.epochs_ahead / len(group.trials)

    def besides(self, array: Array) -> Mapping[int, float]:
        """Return `Array.later` of one of the arrays."""
        later = dict(self._arrays[_size(array)])
        if array.members:
            later[max(array.epochs)] -= 1
        return {epochs: count for epochs, count in later.items() if count > 0}


def _size(array: Array) -> tuple[str, str, int, int]:
    """Return what arrays have to agree in to share compiled code."""
    return array.key.structure, array.key.data, array.key.batch_size, len(array.members)
