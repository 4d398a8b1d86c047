"""Arrays that come into a job that is running, where that is better than to wait for a device of their own."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import inf

from shoal.cluster.mps_limits import limit_of
from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.cost.estimate import memory, packed_demand
from shoal.planner.candidates import Amounts, candidate, stream_of
from shoal.planner.grouping import START_SECONDS, Grouping
from shoal.planner.packing.base import Candidate
from shoal.planner.packing.prediction import seconds_abreast
from shoal.planner.partition import Profiles
from shoal.planner.room import Room

__all__ = ["MOST_REFUSED", "taken_in"]

MOST_REFUSED = 16
"""Arrays that come into no job, after which nobody is looked at any more in this turn of planning."""


@dataclass
class _Host:
    """A running job that may take others in.

    Args:
        job: with the members that it has now.
        device: that it is on.
        present: the arrays in it, to which newcomers are added.
        streams: of these, as `stream_of` tells them; of one whose members are at several epochs none.
        demand: what they take; None: not found yet.
        seconds: expected until it ends.
    """

    job: Job
    device: Device
    present: list[Candidate]
    streams: frozenset[object]
    demand: Demand | None = None
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = seconds_abreast(self.present)

    @property
    def abreast(self) -> bool:
        """Whether samples are shared only at the same place in the data."""
        return None not in self.streams

    def take(self, newcomer: Candidate, demand: Demand) -> None:
        """Let an array in; with it the job takes so much."""
        self.present.append(newcomer)
        self.demand, self.seconds = demand, seconds_abreast(self.present)


def taken_in(
    waiting: Sequence[Array],
    running: Sequence[tuple[Job, Device]],
    grouping: Grouping,
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
        grouping: whose strategy decides who suits whom.
        profiles: what is known of a key on a kind of device.
        free: what no job takes; less what those take that come in.
        alone: numbers of trials that failed in company.

    Returns:
        Id of a job -> the arrays that come into it.
    """
    if not waiting:
        return {}
    amounts: dict[object, Amounts] = {}
    hosts, others = _hosts(running, profiles, alone, amounts)
    taken: dict[str, tuple[Array, ...]] = {}
    refused = 0
    for array in waiting:
        able = [host for host in hosts if _may_come(array, host, profiles, out_of_turn=refused > 0)]
        ends = [*others, *((host.device, host.seconds) for host in hosts)] if able else []
        free_in = min((end for device, end in ends if _can_have(device, array, profiles)), default=inf)
        for host in sorted(able, key=lambda host: host.seconds):
            newcomer = candidate(array, profiles, [host.device], amounts)
            if newcomer.memory > free.memory(host.device.name):
                continue
            if _in_time(newcomer, host, free_in) and _fits(newcomer, host, grouping, profiles, free):
                joins = replace(array, profile=profiles(array.key, host.device.kind), apart=host.abreast)
                taken[host.job.id] = (*taken.get(host.job.id, ()), joins)
                break
        else:
            refused += 1
            if refused == MOST_REFUSED or not any(host.abreast for host in hosts):
                break
    return taken


def _fits(newcomer: Candidate, host: _Host, grouping: Grouping, profiles: Profiles, free: Room) -> bool:
    """Whether there is room for a newcomer, who then comes in, and the strategy agrees."""
    device, present = host.device, host.present
    if not grouping.suits(newcomer, present, device):
        return False
    before = host.demand or _demand(present, profiles, device)
    after = _demand([*present, newcomer], profiles, device)
    more = after.memory - before.memory, max(0.0, after.cores - before.cores)
    limit = limit_of(host.job.demand, device)
    if not free.holds(device.name, *more) or (limit is not None and after.memory > limit):
        return False
    free.take(device.name, *more)
    host.take(newcomer, after)
    return True


def _hosts(
    running: Sequence[tuple[Job, Device]],
    profiles: Profiles,
    alone: AbstractSet[int],
    amounts: dict[object, Amounts],
) -> tuple[list[_Host], list[tuple[Device, float]]]:
    """The running jobs that may take others in; and of the other ones for which that is known the device, and seconds
    until they end: none for those that measure, and those that all members have left.
    """
    hosts: list[_Host] = []
    others: list[tuple[Device, float]] = []
    for job, device in running:
        known = [x for x in job.arrays if profiles(x.key, device.kind) is not None and x.members and not x.key.opaque]
        present = [candidate(array, profiles, [device], amounts) for array in known]
        if job.purpose is not Purpose.TRAIN or not any(array.members for array in job.arrays):
            others.append((device, 0.0))
        elif len(known) == len(job.arrays):
            if alone and any(member.trial.number in alone for member in job.members):
                others.append((device, seconds_abreast(present)))
            else:
                level = [array for array in known if _level(array)]
                streams = frozenset(stream_of(array, profiles(array.key, device.kind)) for array in level)
                hosts.append(_Host(job, device, present, streams))
    return hosts, others


def _may_come(array: Array, host: _Host, profiles: Profiles, out_of_turn: bool) -> bool:
    """Whether an array may share samples with a running job of the same data; out of turn, only if it cannot wait."""
    profile = profiles(array.key, host.device.kind)
    if profile is None or array.key.opaque:
        return False
    stream = stream_of(array, profile)
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
