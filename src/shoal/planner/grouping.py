"""Arrays to jobs: what a packing strategy is asked, and where it may not choose."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import product
from statistics import fmean

from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.trial import TrialGroup
from shoal.planner.candidates import candidates, stream_of
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.check import check_groups
from shoal.planner.packing.cost import Cost
from shoal.planner.partition import Profiles

__all__ = ["START_SECONDS", "Grouping", "Paces"]

START_SECONDS = 0.03
"""What any job costs beside its steps: it is planned, written down, sent to a process, and its end is heard of. As
`benchmarks/placement.py` prints it: 28 ms for planning and dispatching alone."""

Paces = Callable[[str], Mapping[tuple[str, str], float]]
"""Kind of a device -> what is known of the steps of two structures in one process there; see `History.pack_speeds`."""


class Grouping:
    """Lets a strategy decide which arrays share a process.

    Arrays of which nothing is known, opaque ones, and trials that failed in company, have one of their own.

    Args:
        packing: the strategy.
        pack_speeds: what was measured of two structures in one process.
        axes: of the space, for distances between configurations; see `PackingContext`.
        seed: of what is random in it.
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
        """The arrays as those of jobs, in the order of their first ones.

        Args:
            arrays: in the order in which they are to be served.
            profiles: what is known of a key on a kind of device.
            devices: all healthy devices, at least one.
            busy: name of a device that holds jobs -> expected seconds until it holds none.
            alone: numbers of trials that have a job of their own.
            group_of: what an algorithm wants a member trained with, and what follows that.
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
        """Whether the strategy lets an array into a process that runs on a device, with those that are in it."""
        return self._packing.suits(incoming, present, self.context([*present, incoming], [device], {}))

    def context(
        self, candidates: Sequence[Candidate], devices: Sequence[Device], busy: Mapping[str, float]
    ) -> PackingContext:
        """What the strategy is told of candidates that could run on devices; for `busy` see `groups`."""
        return PackingContext(
            loads=tuple(busy.get(device.name, 0.0) for device in devices),
            memory=min(device.memory for device in devices),
            start=START_SECONDS,
            pack_speeds=self._known_paces({each.key for each in candidates}, {device.kind for device in devices}),
            axes=self._axes,
            seed=self._seed,
        )

    def pack_speed(self, keys: AbstractSet[FusionKey], kinds: AbstractSet[str]) -> float:
        """How many times as long arrays of keys take in one process as one after another, as far as that is known."""
        return fmean(self._known_paces(keys, kinds).values() or [1.0])

    def _known_paces(self, keys: AbstractSet[FusionKey], kinds: AbstractSet[str]) -> dict[frozenset[FusionKey], float]:
        """Of pairs of keys, the mean over the kinds of devices on which they were measured."""
        by_structure: dict[str, list[FusionKey]] = {}
        for key in keys:
            by_structure.setdefault(key.steps, []).append(key)
        found: dict[frozenset[FusionKey], list[float]] = {}
        for kind in sorted(kinds):
            for (one, other), pack_speed in self._paces(kind).items():
                for pair in product(by_structure.get(one, ()), by_structure.get(other, ())):
                    found.setdefault(frozenset(pair), []).append(pack_speed)
        return {pair: fmean(pack_speeds) for pair, pack_speeds in found.items()}
