"""Arrays to jobs: what a packing strategy is told, and where it may not choose."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import product
from math import inf
from statistics import fmean
from typing import NamedTuple

from shoal.cluster.device import Device
from shoal.cluster.mps_limits import limit_of
from shoal.cost.demand import ABREAST, Demand, Profile
from shoal.cost.estimate import fetching, memory, packed_demand, seconds
from shoal.planner.job import Array, ArrayKey, Job, Member, Purpose
from shoal.planner.packing.base import Candidate, Packing, Scene
from shoal.planner.packing.check import check_groups
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.prediction import seconds_abreast
from shoal.planner.partition import Profiles
from shoal.planner.room import Room
from shoal.trial import TrialGroup

__all__ = ["START_SECONDS", "Grouping", "Paces", "candidate"]

START_SECONDS = 0.03
"""What any job costs beside its steps: it is planned, written down, sent to a process, and its end is heard of. As
`benchmarks/placement.py` prints it: 28 ms for planning and dispatching alone."""

Paces = Callable[[str], Mapping[tuple[str, str], float]]
"""Kind of a device -> what is known of the steps of two structures in one process there; see `History.paces`."""


MOST_REFUSED = 16
"""Arrays that come into no job, after which nobody is looked at any more in this turn of planning."""


class _Amounts(NamedTuple):
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


class _Host(NamedTuple):
    """A running job that may take others in.

    Args:
        job: with the members that it has now.
        device: that it is on.
        present: the arrays in it, to which newcomers are added.
        streams: of these, as `_stream` tells them; of one whose members are at several epochs none.
    """

    job: Job
    device: Device
    present: list[Candidate]
    streams: frozenset[object]

    @property
    def abreast(self) -> bool:
        """Whether samples are shared only at the same place in the data."""
        return None not in self.streams

    @property
    def seconds(self) -> float:
        """Expected until it ends."""
        return seconds_abreast(self.present)


class Grouping:
    """Lets a strategy decide which arrays share a process.

    Arrays of which nothing is known, opaque ones, and trials that failed in company, have one of their own.

    Args:
        packing: the strategy.
        paces: what was measured of two structures in one process.
        axes: of the space, for distances between configurations; see `Scene`.
        seed: of what is random in it.
    """

    def __init__(
        self,
        packing: Packing | None = None,
        paces: Paces = lambda kind: {},
        axes: Mapping[str, Sequence[object]] | None = None,
        seed: int = 0,
    ) -> None:
        self._packing = packing or Cost()
        self._paces = paces
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
        for array in arrays:
            known = {device.kind: profiles(array.key, device.kind) for device in devices}
            kinds = frozenset(kind for kind, profile in known.items() if profile is not None)
            if kinds and not array.key.opaque and not any(member.trial.number in alone for member in array.members):
                stream = _stream(array, known[min(kinds)])
                alike.setdefault((kinds, stream), []).append(array)
            else:
                lone.append(array)
        groups: list[tuple[Array, ...]] = [(array,) for array in lone]
        for (kinds, _), some in alike.items():
            able = [device for device in devices if device.kind in kinds]
            alike_fetching = _fetching_alike(profiles, some, kinds)
            amounts: dict[object, _Amounts] = {}  # of what is alike, of which there may be thousands
            candidates = []
            for array in some:
                follows = _Following.of(array, group_of)
                sort = (array.key, array.epochs, follows)
                if sort not in amounts:
                    amounts[sort] = _amounts(array, alike_fetching, able, follows)
                candidates.append(Candidate(array, *amounts[sort]))
            scene = self.scene(candidates, able, busy)
            grouped = self._packing.pack(candidates, scene)
            check_groups(grouped, candidates, scene)
            groups += [tuple(each.array for each in group) for group in grouped]
        place = {array.members[0].trial.number: position for position, array in enumerate(arrays)}
        return sorted(groups, key=lambda group: place[group[0].members[0].trial.number])

    def taken_in(
        self,
        waiting: Sequence[Array],
        running: Sequence[tuple[Job, Device]],
        profiles: Profiles,
        free: Room,
        alone: AbstractSet[int],
    ) -> dict[str, tuple[Array, ...]]:
        """Which arrays that found no device come into a running job: those that suit it, the oldest first.

        Each comes into the job that is expected to end first, of those that it suits; into none that ends clearly later
        than another device is free that could have it, for that one would be left idle. The first that comes into none
        is the last that is looked at: nobody is to keep a device from those that came before.

        Where samples are shared only at the same place in the data, an array comes into a job that is in the epoch that
        it is to begin with, and catches up, unless it is done earlier on the device that is free next. That cannot
        wait: it may come out of turn, though it keeps the device for longer from those that came before. It stays apart
        from an array of its key, which it could be fused with at the end of the epoch only, and would stay behind.

        Args:
            waiting: in the order in which they are to be served.
            running: all jobs that hold devices, those that train with the members that they have now.
            profiles: what is known of a key on a kind of device.
            free: what no job takes; less what those take that come in.
            alone: numbers of trials that failed in company.

        Returns:
            Id of a job -> the arrays that come into it.
        """
        hosts, others = _hosts(running, profiles, alone)
        taken: dict[str, tuple[Array, ...]] = {}
        refused = 0
        for array in waiting:
            able = [host for host in hosts if _may_come(array, host, profiles, out_of_turn=refused > 0)]
            ends = [*others, *((host.device, host.seconds) for host in hosts)] if able else []
            free_in = min((end for device, end in ends if _can_have(device, array, profiles)), default=inf)
            for host in sorted(able, key=lambda host: host.seconds):
                newcomer = candidate(array, profiles, [host.device])
                if newcomer.memory > free.memory(host.device.name):
                    continue
                if _in_time(newcomer, host, free_in) and self._fits(newcomer, host, profiles, free):
                    joins = replace(array, profile=profiles(array.key, host.device.kind), apart=host.abreast)
                    taken[host.job.id] = (*taken.get(host.job.id, ()), joins)
                    host.present.append(newcomer)
                    break
            else:
                refused += 1
                if refused == MOST_REFUSED or not any(host.abreast for host in hosts):
                    break
        return taken

    def _fits(self, newcomer: Candidate, host: _Host, profiles: Profiles, free: Room) -> bool:
        """Whether there is room for a newcomer, which it then takes, and the strategy agrees."""
        device, present = host.device, host.present
        if not self._packing.suits(newcomer, present, self.scene([*present, newcomer], [device], {})):
            return False
        before, after = (_demand(some, profiles, device) for some in (present, [*present, newcomer]))
        more = after.memory - before.memory, max(0.0, after.cores - before.cores)
        limit = limit_of(host.job.demand, device)
        if not free.holds(device.name, *more) or (limit is not None and after.memory > limit):
            return False
        free.take(device.name, *more)
        return True

    def scene(self, candidates: Sequence[Candidate], devices: Sequence[Device], busy: Mapping[str, float]) -> Scene:
        """What the strategy is told of candidates that could run on devices; for `busy` see `groups`."""
        return Scene(
            loads=tuple(busy.get(device.name, 0.0) for device in devices),
            memory=min(device.memory for device in devices),
            start=START_SECONDS,
            paces=self._known_paces({each.key for each in candidates}, {device.kind for device in devices}),
            axes=self._axes,
            seed=self._seed,
        )

    def _known_paces(self, keys: AbstractSet[ArrayKey], kinds: AbstractSet[str]) -> dict[frozenset[ArrayKey], float]:
        """Of pairs of keys, the mean over the kinds of devices on which they were measured."""
        by_structure: dict[str, list[ArrayKey]] = {}
        for key in keys:
            by_structure.setdefault(key.steps, []).append(key)
        found: dict[frozenset[ArrayKey], list[float]] = {}
        for kind in sorted(kinds):
            for (one, other), pace in self._paces(kind).items():
                for pair in product(by_structure.get(one, ()), by_structure.get(other, ())):
                    found.setdefault(frozenset(pair), []).append(pace)
        return {pair: fmean(paces) for pair, paces in found.items()}


def _hosts(
    running: Sequence[tuple[Job, Device]], profiles: Profiles, alone: AbstractSet[int]
) -> tuple[list[_Host], list[tuple[Device, float]]]:
    """The running jobs that may take others in; and of the other ones for which that is known the device, and seconds
    until they end: none for those that measure, and those that all members have left.
    """
    hosts: list[_Host] = []
    others: list[tuple[Device, float]] = []
    for job, device in running:
        known = [x for x in job.arrays if profiles(x.key, device.kind) is not None and x.members and not x.key.opaque]
        present = [candidate(array, profiles, [device]) for array in known]
        if job.purpose is not Purpose.TRAIN or not job.members:
            others.append((device, 0.0))
        elif len(known) == len(job.arrays):
            if any(member.trial.number in alone for member in job.members):
                others.append((device, seconds_abreast(present)))
            else:
                level = [array for array in known if _level(array)]
                streams = frozenset(_stream(array, profiles(array.key, device.kind)) for array in level)
                hosts.append(_Host(job, device, present, streams))
    return hosts, others


def _may_come(array: Array, host: _Host, profiles: Profiles, out_of_turn: bool) -> bool:
    """Whether an array may share samples with a running job of the same data; out of turn, only if it cannot wait."""
    profile = profiles(array.key, host.device.kind)
    if profile is None or array.key.opaque:
        return False
    stream = _stream(array, profile)
    if stream is None:
        return not out_of_turn
    return stream in host.streams and _level(array)


def _level(array: Array) -> bool:
    """Whether all members are at one epoch."""
    return len({member.start for member in array.members}) == 1


def _in_time(newcomer: Candidate, host: _Host, free_in: float) -> bool:
    """Whether it is right not to wait for the device that is free next: the job ends before, or, where samples are
    shared at the same place alone, the newcomer is done in it before it would be there.
    """
    if not host.abreast:
        return host.seconds <= free_in + START_SECONDS
    done = seconds_abreast([*host.present, newcomer], max(newcomer.array.epochs))
    return done <= free_in + START_SECONDS + newcomer.seconds


def _can_have(device: Device, array: Array, profiles: Profiles) -> bool:
    """Whether an array could run on a device by itself."""
    profile = profiles(array.key, device.kind)
    return profile is not None and memory(profile, len(array.members)) <= device.memory


def _demand(arrays: Sequence[Candidate], profiles: Profiles, device: Device) -> Demand:
    """What arrays of which all is known take in one process."""
    known = [
        (profile, each.array.epochs)
        for each in arrays
        if (profile := profiles(each.array.key, device.kind)) is not None
    ]
    return packed_demand(known, cores=device.cores)


def _stream(array: Array, profile: Profile | None) -> object:
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

    def agreed(key: ArrayKey, kind: str) -> Profile | None:
        profile = profiles(key, kind)
        return profile and replace(profile, fetch_seconds=least[key.data, kind] * key.batch_size)

    return agreed


def candidate(array: Array, profiles: Profiles, devices: Sequence[Device]) -> Candidate:
    """An array as a strategy sees it: the mean of the devices it can run on."""
    return Candidate(array, *_amounts(array, profiles, devices, _Following()))


def _amounts(array: Array, profiles: Profiles, devices: Sequence[Device], follows: _Following) -> _Amounts:
    """What follows an array where samples are shared at one place in the data alone comes back to those that it was
    trained beside, and is counted as a part of it; anywhere else, as its tail.
    """
    epochs, more = array.epochs, [follows.longest]
    known = [profile for device in devices if (profile := profiles(array.key, device.kind)) is not None]
    steps = fmean(seconds(profile, epochs) for profile in known)
    tail = fmean(seconds(profile, more) for profile in known)
    if known[0].sharing in ABREAST:  # which is up to the data, not to the device
        steps += follows.work * fmean(seconds(profile, [1]) for profile in known)
        epochs, tail = (max(*epochs, follows.last),), 0.0
    fetched = fmean(fetching(profile, epochs) for profile in known)
    return _Amounts(
        seconds=steps + fetched,
        fetching=fetched,
        memory=max(len(array.members) * profile.member_memory for profile in known),
        base=max(profile.base_memory for profile in known),
        tail=tail,
    )
