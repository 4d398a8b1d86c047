"""Admission of waiting arrays to running jobs, where that is faster than waiting for a free device."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf

from shoal.cluster.mps_limits import limit_of
from shoal.core.array import Array, FusionKey, Member, add_members
from shoal.core.demand import Demand, Profile
from shoal.core.device import Cluster, Device
from shoal.core.job import Job, Purpose
from shoal.cost.estimate import best_size, fitting, fuse_seconds, memory, packed_demand, seconds
from shoal.planner.grouping import START_SECONDS, Amounts, Grouping, candidate, stream_of
from shoal.planner.packing.base import Candidate
from shoal.planner.packing.prediction import seconds_abreast
from shoal.planner.partition import Profiles, worth_mixing
from shoal.schedule.ledger import ROUNDING

__all__ = ["MOST_REFUSED", "FreeResources", "admitted"]

MOST_REFUSED = 16
"""Number of refused arrays after which admission ends for this turn of planning."""


class FreeResources:
    """Free bytes of devices and free cores of nodes.

    If jobs take more than there is, because their estimates have grown beyond their reservations, nothing is free.

    Args:
        cluster: The current cluster; unhealthy devices have nothing free.
        held: Device and demand of each job.
    """

    def __init__(self, cluster: Cluster, held: Iterable[tuple[Device, Demand]]) -> None:
        self._memory = {device.name: device.memory for _, device in cluster if device.healthy}
        self._node = {device.name: node.name for node, device in cluster}
        self._cores = {node.name: float(node.cores) for node in cluster.nodes}
        for device, demand in held:
            self.take(device.name, demand.memory, demand.cores)

    def __contains__(self, device: str) -> bool:
        """Whether a device exists and is healthy."""
        return device in self._memory

    def memory(self, device: str) -> int:
        """Free bytes of a device; at most 0 if the cores of its node are overdrawn."""
        left = self._memory[device]
        return left if self._cores[self._node[device]] >= -ROUNDING else min(left, 0)

    def holds(self, device: str, memory: int, cores: float) -> bool:
        """Whether these amounts are free on a device and its node."""
        left = self._cores[self._node[device]]
        return memory <= self.memory(device) and cores <= left + ROUNDING

    def take(self, device: str, memory: int, cores: float = 0.0) -> None:
        """Take these amounts of a device and its node."""
        if device in self._memory:
            self._memory[device] -= memory
        self._cores[self._node[device]] -= cores


class _HostJob:
    """A running job that may admit arrays: first members join its arrays; after `settle`, further arrays are added.

    Args:
        job: The job with its current members.
        device: Device of the job.
        profiles: Profile of a key on a kind of device, or None.
        free: Free resources, shared by all hosts.
        amounts: Cache of `candidate`, shared by all hosts.
        alone: Numbers of trials that failed in a shared job.

    Attributes:
        profiles: Profile of each array, or None; the place of an array is its index in the job.
        open: Whether the job trains members, none of which failed in a shared job.
        known: Whether all its arrays have profiles.
        seconds: Expected seconds until its end: 0 if it profiles or has no members; inf if unknown.
        present: Its arrays, including added ones.
        streams: Sample streams of its arrays (`stream_of`), without arrays whose members are at several epochs.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        profiles: Profiles,
        free: FreeResources,
        amounts: dict[object, Amounts],
        alone: AbstractSet[int],
    ) -> None:
        self.job = job
        self.device = device
        self.profiles = [profiles(array.key, device.kind) for array in job.arrays]
        trains = job.purpose is Purpose.TRAIN and any(array.members for array in job.arrays)
        known = zip(job.arrays, self.profiles, strict=True)
        self.open = trains and not (alone and any(member.trial.number in alone for member in job.members))
        self.known = trains and all(profile is not None and x.members and not x.key.opaque for x, profile in known)
        self.seconds = inf if trains else 0.0
        self.present: list[Candidate] = []
        self.streams: frozenset[object] = frozenset()
        self._arrays = list(job.arrays)  # with the members that joined
        self._needs = [
            0 if profile is None else memory(profile, len(array.members))
            for array, profile in zip(job.arrays, self.profiles, strict=True)
        ]
        self._limit = limit_of(job.demand, device)
        self._demand: Demand | None = None
        self._profile_of = profiles
        self._free = free
        self._amounts = amounts

    def left(self, place: int) -> int:
        """Epochs until the last member of an array is done."""
        return max(self._arrays[place].epochs)

    def spots(self, place: int, profile: Profile, at_most: int) -> int:
        """Number of members that may join an array, by memory and the most efficient size."""
        present = len(self._arrays[place].members)
        available = memory(profile, present) + self._free.memory(self.device.name)
        if self._limit is not None:
            available = min(available, self._limit - (sum(self._needs) - self._needs[place]))
        fits = fitting(profile, available, present + at_most)
        return max(0, best_size(profile, fits) - present) if fits > present else 0

    def gain(self, place: int, profile: Profile, members: Sequence[Member]) -> float:
        """Device seconds saved if members join an array instead of training after it.

        The costs are a new start of the array, the loss of shared batches, and compiling the step again if compiled.
        """
        mine = self._arrays[place].epochs
        theirs = [member.epochs for member in members]
        if profile.mixing is None or not worth_mixing(profile, len(mine), len(theirs)):
            return 0.0
        shared = min(self.left(place), max(theirs))  # epochs that both train
        mixed = seconds(profile, [min(epochs, shared) for epochs in (*mine, *theirs)])
        together = seconds(profile, [*mine, *theirs]) + (profile.mixing - 1) * mixed
        start = fuse_seconds(profile, len(mine) + len(theirs))
        compiled = profile.compile_seconds if max(profile.compiled_gain.values(), default=1) > 1 else 0.0
        return seconds(profile, mine) + seconds(profile, theirs) - together - start - compiled

    def join(self, place: int, profile: Profile, members: Sequence[Member]) -> None:
        """Add members to an array."""
        self._free.take(self.device.name, len(members) * profile.member_memory)
        array = self._arrays[place]
        self._arrays[place] = replace(array, members=(*array.members, *members))
        self._needs[place] = memory(profile, len(self._arrays[place].members))

    def settle(self, joined: Sequence[Array]) -> None:
        """End joining. `joined` holds all joined members, which may be in another array of their key."""
        if self.known:
            arrays = add_members(self.job.arrays, joined)
            self.present = [self.candidate(array) for array in arrays]
            self.streams = frozenset(stream_of(x, self._profile(x)) for x in arrays if _level(x))
            self.seconds = seconds_abreast(self.present)

    @property
    def abreast(self) -> bool:
        """Whether arrays share samples only at the same position in the data."""
        return None not in self.streams

    def candidate(self, array: Array) -> Candidate:
        """The packing candidate of an array on this device."""
        return candidate(array, self._profile_of, [self.device], self._amounts)

    def may_have(self, array: Array, out_of_turn: bool) -> bool:
        """Whether an array may share samples with the arrays of the job; out of turn, only if it cannot wait."""
        profile = self._profile(array)
        if not (self.open and self.known) or profile is None or array.key.opaque:
            return False
        stream = stream_of(array, profile)
        if stream is None:
            return not out_of_turn
        return stream in self.streams and _level(array)

    def in_time(self, incoming: Candidate, free_in: float) -> bool:
        """Whether joining this job beats waiting `free_in` seconds for the next free device: the job ends before; or,
        if samples are shared only at the same position, the candidate ends here before it would end there.
        """
        if not self.abreast:
            return self.seconds <= free_in + START_SECONDS
        done = seconds_abreast([*self.present, incoming], max(incoming.array.epochs))
        return done <= free_in + START_SECONDS + incoming.seconds

    def admits(self, incoming: Candidate, grouping: Grouping) -> bool:
        """Admit a candidate if there is room and the packing agrees; returns whether it was admitted."""
        self._demand = before = self._demand or self._demand_of(self.present)
        after = self._demand_of([*self.present, incoming])
        more = after.memory - before.memory, max(0.0, after.cores - before.cores)
        if not self._free.holds(self.device.name, *more) or (self._limit is not None and after.memory > self._limit):
            return False
        if not grouping.suits(incoming, self.present, self.device):
            return False
        self._free.take(self.device.name, *more)
        self.present.append(incoming)
        self._demand, self.seconds = after, seconds_abreast(self.present)
        return True

    def _profile(self, array: Array) -> Profile | None:
        return self._profile_of(array.key, self.device.kind)

    def _demand_of(self, arrays: Sequence[Candidate]) -> Demand:
        """Predict the demand of measured arrays in one process."""
        known = [(profile, x.array.epochs) for x in arrays if (profile := self._profile(x.array)) is not None]
        return packed_demand(known, cores=self.device.cores)


def admitted(
    waiting: Sequence[Array],
    running: Sequence[tuple[Job, Device]],
    free: FreeResources,
    profiles: Profiles,
    grouping: Grouping,
    alone: AbstractSet[int] = frozenset(),
    fuse: bool = True,
) -> dict[str, tuple[Array, ...]]:
    """Admit arrays without a device to running jobs.

    First members join arrays of their key. Arrays of which no member joined may then be added as further arrays.

    Args:
        waiting: Arrays in the order of service.
        running: All jobs that hold devices and are to stay there, with their current members.
        free: Free resources; reduced by the admitted arrays.
        profiles: Profile of a key on a kind of device, or None.
        grouping: Packing that decides which arrays may share a process.
        alone: Numbers of trials that failed in a shared job: they join no job, and their jobs admit no arrays.
        fuse: Whether members may join arrays.

    Returns:
        Id of a job -> the members that join it, as arrays by key, and the further arrays.
    """
    if alone:
        waiting = [array for array in waiting if not any(member.trial.number in alone for member in array.members)]
    if not waiting:
        return {}
    amounts: dict[object, Amounts] = {}
    hosts = [_HostJob(job, device, profiles, free, amounts, alone) for job, device in running]
    joins = _joining(waiting, hosts) if fuse else {}
    joined = {member.trial.number for arrays in joins.values() for array in arrays for member in array.members}
    left = [x for x in waiting if not joined or not any(member.trial.number in joined for member in x.members)]
    for host in hosts if left else ():
        host.settle(joins.get(host.job.id, ()))
    for name, arrays in _beside(left, hosts, profiles, grouping).items():
        joins[name] = (*joins.get(name, ()), *arrays)
    return joins


def _joining(waiting: Sequence[Array], hosts: Sequence[_HostJob]) -> dict[str, tuple[Array, ...]]:
    """Let members join arrays of their key, where the saving is largest.

    While an array waits whose key no host has, no member joins that would hold a device for longer than the host does.
    """
    joins: dict[str, tuple[Array, ...]] = {}
    by_key: dict[FusionKey, list[tuple[_HostJob, int, Profile]]] = {}
    for host in hosts:
        for place, (array, profile) in enumerate(zip(host.job.arrays, host.profiles, strict=True)):
            if host.open and profile is not None:
                by_key.setdefault(array.key, []).append((host, place, profile))
    others_wait = any(array.key not in by_key for array in waiting)
    barren: set[tuple[FusionKey, tuple[int, ...]]] = set()  # members with these epochs join no array any more
    for array in waiting:
        left = sorted(array.members, key=lambda member: -member.epochs)  # the longest begins first
        while left:
            alike = (array.key, tuple(member.epochs for member in left))
            if alike in barren:
                break
            offers = [
                (host.gain(place, profile, some), some, host, place, profile)
                for host, place, profile in by_key.get(array.key, ())
                if (spots := host.spots(place, profile, len(left)))
                and (some := [x for x in left if x.epochs <= host.left(place)][:spots] if others_wait else left[:spots])
            ]
            if not offers or (best := max(offers, key=lambda offer: offer[0]))[0] <= 0:
                barren.add(alike)
                break
            _, some, host, place, profile = best
            host.join(place, profile, some)
            barren.clear()
            joins[host.job.id] = (*joins.get(host.job.id, ()), Array(array.key, tuple(some), profile))
            left = [x for x in left if x not in some]
    return joins


def _beside(
    waiting: Sequence[Array], hosts: Sequence[_HostJob], profiles: Profiles, grouping: Grouping
) -> dict[str, tuple[Array, ...]]:
    """Add waiting arrays to jobs as further arrays, the oldest first.

    An array is added to the suitable job that is expected to end first, but not to one that ends clearly later than
    the next suitable device is free, since that device would stay idle. The first refused array ends admission: a
    younger array must not hold a device for longer than an older one waits.

    If samples are shared only at the same position in the data, an array joins a job that is in the epoch at which the
    array begins, and catches up, unless it ends earlier on the next free device. This opportunity passes, so such an
    array may be admitted out of turn, although older arrays wait longer for the device. It stays separate from an array
    of its key: fusing them is only possible at the end of the epoch, and the array would stay behind.
    """
    taken: dict[str, tuple[Array, ...]] = {}
    refused = 0
    cannot_wait = any(host.open and host.known and host.abreast for host in hosts)
    for array in waiting:
        able = [host for host in hosts if host.may_have(array, out_of_turn=refused > 0)]
        ends = (host.seconds for host in hosts if able and _can_have(host.device, array, profiles))
        free_in = min(ends, default=inf)
        for host in sorted(able, key=lambda host: host.seconds):
            incoming = host.candidate(array)
            if host.in_time(incoming, free_in) and host.admits(incoming, grouping):
                joins = replace(array, profile=profiles(array.key, host.device.kind), separate=host.abreast)
                taken[host.job.id] = (*taken.get(host.job.id, ()), joins)
                break
        else:
            refused += 1
            if refused == MOST_REFUSED or not cannot_wait:
                break
    return taken


def _level(array: Array) -> bool:
    """Whether all members are at the same epoch."""
    return len({member.start for member in array.members}) == 1


def _can_have(device: Device, array: Array, profiles: Profiles) -> bool:
    """Whether an array fits on an empty device."""
    profile = profiles(array.key, device.kind)
    return profile is not None and memory(profile, len(array.members)) <= device.memory
