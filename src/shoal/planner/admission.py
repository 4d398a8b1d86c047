"""Arrays that found no device come into running jobs, where that is better than to wait for a device of their own."""

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
"""Arrays that come into no job, after which nobody is looked at any more in this turn of planning."""


class FreeResources:
    """Bytes of devices and cores of nodes that no job takes.

    Where jobs take more than there is, because more is expected of them by now than they were promised, nothing is left
    whatever is asked for.

    Args:
        cluster: as it is; devices that are not healthy have no room.
        held: of each job its device and what it takes.
    """

    def __init__(self, cluster: Cluster, held: Iterable[tuple[Device, Demand]]) -> None:
        self._memory = {device.name: device.memory for _, device in cluster if device.healthy}
        self._node = {device.name: node.name for node, device in cluster}
        self._cores = {node.name: float(node.cores) for node in cluster.nodes}
        for device, demand in held:
            self.take(device.name, demand.memory, demand.cores)

    def __contains__(self, device: str) -> bool:
        """Whether a device is there and healthy."""
        return device in self._memory

    def memory(self, device: str) -> int:
        """Bytes that are left of a device; at most 0 where the cores of its node are overdrawn."""
        left = self._memory[device]
        return left if self._cores[self._node[device]] >= -ROUNDING else min(left, 0)

    def holds(self, device: str, memory: int, cores: float) -> bool:
        """Whether so much more can be taken of a device and of the cores of its node."""
        left = self._cores[self._node[device]]
        return memory <= self.memory(device) and cores <= left + ROUNDING

    def take(self, device: str, memory: int, cores: float = 0.0) -> None:
        """Take so much."""
        if device in self._memory:
            self._memory[device] -= memory
        self._cores[self._node[device]] -= cores


class _HostJob:
    """A running job. If it is open members may join its arrays, and then, once it is settled, others come in beside.

    Args:
        job: with the members that it has now.
        device: that it is on.
        profiles: what is known of a key on a kind of device.
        free: what no job takes; of all hosts together.
        amounts: of candidates, as `candidate` shares them.
        alone: numbers of trials that failed in company.

    Attributes:
        profiles: of its arrays, None of those unknown; the place of an array is its index in the job.
        open: whether it trains members of which none failed in company.
        known: whether it was measured how long all of its arrays take.
        seconds: expected until it ends: none where it measures, or all have left; inf where that is not known.
        present: the arrays in it, to which those that come in are added.
        streams: of its own, as `stream_of` tells them; of one whose members are at several epochs none.
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
        self._arrays = list(job.arrays)  # each with the members that joined it
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
        """Members that memory and the most efficient size allow to join an array."""
        present = len(self._arrays[place].members)
        available = memory(profile, present) + self._free.memory(self.device.name)
        if self._limit is not None:
            available = min(available, self._limit - (sum(self._needs) - self._needs[place]))
        fits = fitting(profile, available, present + at_most)
        return max(0, best_size(profile, fits) - present) if fits > present else 0

    def gain(self, place: int, profile: Profile, members: Sequence[Member]) -> float:
        """Seconds of the device that are saved if members join an array instead of having it to themselves afterwards.

        It costs the array a new start, its batches, and a compiled step, which is compiled anew.
        """
        mine = self._arrays[place].epochs
        theirs = [member.epochs for member in members]
        if profile.mixing is None or not worth_mixing(profile, len(mine), len(theirs)):
            return 0.0
        shared = min(self.left(place), max(theirs))  # epochs that they are together
        mixed = seconds(profile, [min(epochs, shared) for epochs in (*mine, *theirs)])
        together = seconds(profile, [*mine, *theirs]) + (profile.mixing - 1) * mixed
        start = fuse_seconds(profile, len(mine) + len(theirs))
        compiled = profile.compile_seconds if max(profile.compiled_gain.values(), default=1) > 1 else 0.0
        return seconds(profile, mine) + seconds(profile, theirs) - together - start - compiled

    def join(self, place: int, profile: Profile, members: Sequence[Member]) -> None:
        """Let members into an array."""
        self._free.take(self.device.name, len(members) * profile.member_memory)
        array = self._arrays[place]
        self._arrays[place] = replace(array, members=(*array.members, *members))
        self._needs[place] = memory(profile, len(self._arrays[place].members))

    def settle(self, joined: Sequence[Array]) -> None:
        """Nobody joins any more; all that did are given, for they may be in another array of their key."""
        if self.known:
            arrays = add_members(self.job.arrays, joined)
            self.present = [self.candidate(array) for array in arrays]
            self.streams = frozenset(stream_of(x, self._profile(x)) for x in arrays if _level(x))
            self.seconds = seconds_abreast(self.present)

    @property
    def abreast(self) -> bool:
        """Whether samples are shared only at the same place in the data."""
        return None not in self.streams

    def candidate(self, array: Array) -> Candidate:
        """An array as a strategy sees it that is to run here."""
        return candidate(array, self._profile_of, [self.device], self._amounts)

    def may_have(self, array: Array, out_of_turn: bool) -> bool:
        """Whether an array may share samples with those in it; out of turn, only if it cannot wait."""
        profile = self._profile(array)
        if not (self.open and self.known) or profile is None or array.key.opaque:
            return False
        stream = stream_of(array, profile)
        if stream is None:
            return not out_of_turn
        return stream in self.streams and _level(array)

    def in_time(self, incoming: Candidate, free_in: float) -> bool:
        """Whether it is right not to wait for the device that is free next: the job ends before, or, where samples are
        shared at the same place alone, the incoming candidate is done in it before it would be there.
        """
        if not self.abreast:
            return self.seconds <= free_in + START_SECONDS
        done = seconds_abreast([*self.present, incoming], max(incoming.array.epochs))
        return done <= free_in + START_SECONDS + incoming.seconds

    def admits(self, incoming: Candidate, grouping: Grouping) -> bool:
        """Whether there is room for a incoming candidate, who then comes in, and the strategy agrees."""
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
    """Who of the arrays that found no device comes into which running job.

    First members join arrays of their key. Arrays of which nobody joined may then come in as arrays of their own.

    Args:
        waiting: in the order in which they are to be served.
        running: all jobs that hold devices and are to stay there, with the members that they have now.
        free: what no job takes; less what those take that come in.
        profiles: what is known of a key on a kind of device.
        grouping: whose strategy decides who suits whom.
        alone: numbers of trials that failed in company: they come into no job, and nobody into theirs.
        fuse: whether members may join arrays.

    Returns:
        Id of a job -> who joins it, by key, and the arrays that come in beside.
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
    """Let members join arrays of their key where that saves most.

    While an array waits that no host can take in, nobody joins who would keep a device from it for longer.
    """
    joins: dict[str, tuple[Array, ...]] = {}
    by_key: dict[FusionKey, list[tuple[_HostJob, int, Profile]]] = {}
    for host in hosts:
        for place, (array, profile) in enumerate(zip(host.job.arrays, host.profiles, strict=True)):
            if host.open and profile is not None:
                by_key.setdefault(array.key, []).append((host, place, profile))
    others_wait = any(array.key not in by_key for array in waiting)
    barren: set[tuple[FusionKey, tuple[int, ...]]] = set()  # of members that train so long nobody joins any more
    for array in waiting:
        left = sorted(array.members, key=lambda member: -member.epochs)  # who takes longest is to begin first
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
    """Let arrays come into jobs that they suit, the oldest first.

    Each comes into the job that is expected to end first, of those that it suits; into none that ends clearly later
    than another device is free that could have it, for that one would be left idle. The first that comes into none
    is the last that is looked at: nobody is to keep a device from those that came before.

    Where samples are shared only at the same place in the data, an array comes into a job that is in the epoch that
    it is to begin with, and catches up, unless it is done earlier on the device that is free next. That cannot
    wait: it may come out of turn, though it keeps the device for longer from those that came before. It stays apart
    from an array of its key, which it could be fused with at the end of the epoch only, and would stay behind.
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
                joins = replace(array, profile=profiles(array.key, host.device.kind), apart=host.abreast)
                taken[host.job.id] = (*taken.get(host.job.id, ()), joins)
                break
        else:
            refused += 1
            if refused == MOST_REFUSED or not cannot_wait:
                break
    return taken


def _level(array: Array) -> bool:
    """Whether all members are at one epoch."""
    return len({member.start for member in array.members}) == 1


def _can_have(device: Device, array: Array, profiles: Profiles) -> bool:
    """Whether an array could run on a device by itself."""
    profile = profiles(array.key, device.kind)
    return profile is not None and memory(profile, len(array.members)) <= device.memory
