"""Admission of waiting arrays to running jobs, where that is faster than waiting for a free device."""

from bisect import insort
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from shoal.core.array import Array, FusionKey, Member, add_members
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.core.resources import Ledger, Share
from shoal.plan.array_packer import START_SECONDS, ArrayPacker, CandidateCosts, candidate, stream_of
from shoal.plan.cost.cost import Cost, packed_demand
from shoal.plan.cost.costs import Costs
from shoal.plan.packing.base import Candidate
from shoal.plan.packing.prediction import lockstep_seconds

__all__ = ["MAX_REFUSED", "admit"]

MAX_REFUSED = 16
"""Number of refused arrays after which admission ends for this turn of planning."""


class _HostJob:
    """A running job that may admit arrays: members join its arrays, then `finish_joining`, then arrays are added."""

    def __init__(
        self,
        job: Job,
        device: Device,
        costs: Costs,
        free: Ledger,
        amounts: dict[object, CandidateCosts],
        needs_own_job: AbstractSet[int],
    ) -> None:
        self.job = job
        self.device = device
        self.costs = [costs.of(array.key, device.kind) for array in job.arrays]
        trains = job.purpose is Purpose.TRAIN and any(array.members for array in job.arrays)
        known = zip(job.arrays, self.costs, strict=True)
        programs = any(array.key.opaque for array in job.arrays)
        self.is_open = (
            trains and not programs and not any(member.trial.number in needs_own_job for member in job.members)
        )
        self.all_measured = trains and not programs and all(cost is not None and x.members for x, cost in known)
        self.seconds = inf if trains else 0.0
        self.present: list[Candidate] = []
        self.streams: frozenset[object] = frozenset()
        self._arrays = list(job.arrays)  # with the members that joined
        self._demand: Demand | None = None
        self._costs = costs
        self._free = free
        self._amounts = amounts

    @property
    def free_memory(self) -> int:
        """Free bytes of its device."""
        return self._free.memory(self._free[self.device.name])

    def epochs(self, index: int) -> tuple[int, ...]:
        return self._arrays[index].epochs

    def epochs_left(self, index: int) -> int:
        return max(self._arrays[index].epochs)

    def free_slots(self, index: int, cost: Cost, max_members: int) -> int:
        """Number of members that may join an array, by memory and the most efficient size."""
        present = len(self._arrays[index].members)
        available = cost.memory(present) + self.free_memory
        fits = cost.largest_fitting(available, present + max_members)
        return max(0, cost.best_size(fits) - present) if fits > present else 0

    def gain(self, index: int, cost: Cost, members: Sequence[Member]) -> float:
        """Device seconds saved if members join an array instead of training after it."""
        return cost.joining_gain(self._arrays[index].epochs, [member.epochs for member in members])

    def end(self, index: int, cost: Cost, members: Sequence[Member]) -> float:
        return cost.seconds([*self._arrays[index].epochs, *(member.epochs for member in members)])

    def join(self, index: int, cost: Cost, members: Sequence[Member]) -> None:
        self._take(Share(memory=cost.memory(len(members)) - cost.memory(0)))
        array = self._arrays[index]
        self._arrays[index] = replace(array, members=(*array.members, *members))

    def finish_joining(self, joined: Sequence[Array]) -> None:
        """End joining. `joined` holds all joined members, which may be in another array of their key."""
        if self.all_measured:
            arrays = add_members(self.job.arrays, joined)
            self.present = [self.candidate(array) for array in arrays]
            self.streams = frozenset(stream_of(x, self._cost(x)) for x in arrays if _at_same_epoch(x))
            self.seconds = lockstep_seconds(self.present)

    @property
    def in_lockstep(self) -> bool:
        """Whether arrays share samples only at the same position in the data."""
        return None not in self.streams

    def candidate(self, array: Array) -> Candidate:
        return candidate(array, self._costs, [self.device], self._amounts)

    def is_eligible(self, array: Array, out_of_turn: bool) -> bool:
        """Return whether an array may share samples with the job; before older arrays, only if it cannot join later."""
        cost = self._cost(array)
        if not (self.is_open and self.all_measured) or cost is None or array.key.opaque:
            return False
        stream = stream_of(array, cost)
        if stream is None:
            return not out_of_turn
        return stream in self.streams and _at_same_epoch(array)

    def ends_sooner(self, incoming: Candidate, free_in: float) -> bool:
        """Return whether joining this job beats waiting `free_in` seconds for the next free device: the job ends
        before; or, if samples are shared only at the same position, the candidate ends here before it would end there.
        """
        if not self.in_lockstep:
            return self.seconds <= free_in + START_SECONDS
        done = lockstep_seconds([*self.present, incoming], max(incoming.array.epochs))
        return done <= free_in + START_SECONDS + incoming.seconds

    def admits(self, incoming: Candidate, packer: ArrayPacker) -> bool:
        """Admit a candidate if its demand is free and the packing agrees; return whether it was admitted."""
        self._demand = before = self._demand or self._demand_of(self.present)
        after = self._demand_of([*self.present, incoming])
        extra = Share(memory=after.memory - before.memory, cores=max(0.0, after.cores - before.cores))
        if not self._free.has_room(self._free[self.device.name], extra):
            return False
        if not packer.admits(incoming, self.present, self.device):
            return False
        self._take(extra)
        self.present.append(incoming)
        self._demand, self.seconds = after, lockstep_seconds(self.present)
        return True

    def _take(self, share: Share) -> None:
        self._free.add(self.job.id, self._free[self.device.name], share)

    def _cost(self, array: Array) -> Cost | None:
        return self._costs.of(array.key, self.device.kind)

    def _demand_of(self, arrays: Sequence[Candidate]) -> Demand:
        known = [(cost, x.array.epochs) for x in arrays if (cost := self._cost(x.array)) is not None]
        return packed_demand(known, cores=self.device.cores)


def admit(
    waiting: Sequence[Array],
    running: Sequence[tuple[Job, Device]],
    free: Ledger,
    costs: Costs,
    packer: ArrayPacker,
    needs_own_job: AbstractSet[int] = frozenset(),
    fuse: bool = True,
    behind: Sequence[tuple[Array, float]] = (),
) -> dict[str, tuple[Array, ...]]:
    """Admit arrays without a device to running jobs.

    First members join arrays of their key. Arrays of which no member joined may then be added as further arrays.

    Args:
        free: What is free of memory and cores; reduced by the admitted arrays.
        needs_own_job: Numbers of trials that failed in a shared job: they join no job, and their jobs admit no arrays.
        behind: Arrays that wait behind these, as in `CutArrays`; they join no job, but the devices will train them.

    Returns:
        Id of a job -> the members that join it, as arrays by key, and the further arrays.
    """
    if needs_own_job:
        waiting = [
            array for array in waiting if not any(member.trial.number in needs_own_job for member in array.members)
        ]
    if not waiting:
        return {}
    amounts: dict[object, CandidateCosts] = {}
    hosts = [_HostJob(job, device, costs, free, amounts, needs_own_job) for job, device in running]
    joins = _join_members(waiting, behind, hosts) if fuse else {}
    joined = {member.trial.number for arrays in joins.values() for array in arrays for member in array.members}
    left = [x for x in waiting if not joined or not any(member.trial.number in joined for member in x.members)]
    for host in hosts if left else ():
        host.finish_joining(joins.get(host.job.id, ()))
    for name, arrays in _add_arrays(left, hosts, costs, packer).items():
        joins[name] = (*joins.get(name, ()), *arrays)
    return joins


class _Opening(NamedTuple):
    """An array of a running job that members may join, in the order of `position`."""

    position: int
    host: _HostJob
    array: int
    cost: Cost

    @property
    def offer(self) -> object:
        """Value that decides whether members join: equal offers are worth the same."""
        return self.host.device.kind, self.host.epochs(self.array), self.host.free_memory


class _Openings:
    """All openings of running jobs, with those that offer the same in one place."""

    def __init__(self, hosts: Sequence[_HostJob]) -> None:
        self.by_key: dict[FusionKey, list[_Opening]] = {}
        self._alike: dict[FusionKey, dict[object, list[_Opening]]] = {}
        self._on_device: dict[str, list[tuple[_Opening, object]]] = {}
        for host in hosts:
            seen: set[FusionKey] = set()
            for index, (array, cost) in enumerate(zip(host.job.arrays, host.costs, strict=True)):
                if host.is_open and cost is not None and array.key not in seen:  # members join the first of a key
                    seen.add(array.key)
                    some = self.by_key.setdefault(array.key, [])
                    some.append(opening := _Opening(len(some), host, index, cost))
                    self._on_device.setdefault(host.device.name, []).append((opening, None))
        for name in self._on_device:
            self.refresh(name)

    def different(self, key: FusionKey) -> list[_Opening]:
        """Return the first opening for a key of each offer, in their order."""
        return sorted((some[0] for some in self._alike.get(key, {}).values()), key=attrgetter("position"))

    def refresh(self, device: str) -> None:
        """Take note of new members on a device."""
        for place, (opening, before) in enumerate(self._on_device[device]):
            alike = self._alike.setdefault(opening.host.job.arrays[opening.array].key, {})
            if (offer := opening.offer) == before:
                continue
            if before is not None:
                alike[before].remove(opening)
                if not alike[before]:
                    del alike[before]
            insort(alike.setdefault(offer, []), opening, key=attrgetter("position"))
            self._on_device[device][place] = opening, offer


def _join_members(
    waiting: Sequence[Array], behind: Sequence[tuple[Array, float]], hosts: Sequence[_HostJob]
) -> dict[str, tuple[Array, ...]]:
    """Let members join arrays of their key, where the saving is largest; on devices of several kinds where they save
    time and the array is expected to end first, within the mean load of a job.

    If a waiting array has a key that no host has, a member joins an array only if it ends no later than that array.
    """
    joins: dict[str, tuple[Array, ...]] = {}
    several_kinds = len({host.device.kind for host in hosts}) > 1
    openings = _Openings(hosts)
    other_keys_wait = any(array.key not in openings.by_key for array in waiting)
    everyone = [*((array, 1.0) for array in waiting), *behind]
    longest = _mean_load(everyone, openings.by_key, hosts) if several_kinds else inf
    cannot_join: set[tuple[FusionKey, tuple[int, ...]]] = set()  # members with these epochs join no array any more
    for array in waiting:
        left = sorted(array.members, key=lambda member: -member.epochs)  # the longest begins first
        while left:
            epochs_key = (array.key, tuple(member.epochs for member in left))
            if epochs_key in cannot_join:
                break
            options = [
                (host.gain(index, cost, chosen), chosen, host, index, cost)
                for _, host, index, cost in openings.different(array.key)
                if (free_slots := host.free_slots(index, cost, len(left)))
                and (
                    chosen := [x for x in left if x.epochs <= host.epochs_left(index)][:free_slots]
                    if other_keys_wait
                    else left[:free_slots]
                )
            ]
            if several_kinds:  # the greatest saving is on the slowest device: the earliest end counts
                ends = [host.end(index, cost, chosen) for _, chosen, host, index, cost in options]
                pairs = [(end, x) for end, x in zip(ends, options, strict=True) if end <= longest and x[0] > 0]
                options = [min(pairs, key=lambda pair: pair[0])[1]] if pairs else []
            if not options or (best := max(options, key=lambda offer: offer[0]))[0] <= 0:
                cannot_join.add(epochs_key)
                break
            _, chosen, host, index, cost = best
            host.join(index, cost, chosen)
            openings.refresh(host.device.name)
            cannot_join.clear()
            joins[host.job.id] = (*joins.get(host.job.id, ()), Array(array.key, tuple(chosen), cost.profile))
            left = [x for x in left if x not in chosen]
    return joins


def _mean_load(
    waiting: Sequence[tuple[Array, float]],
    by_key: "Mapping[FusionKey, Sequence[_Opening]]",
    hosts: Sequence[_HostJob],
) -> float:
    """Mean expected seconds of a job until its end, if the waiting arrays, of which there are so many, trained one
    after another.
    """
    costs = {key: {x.host.device.kind: x.cost for x in openings} for key, openings in by_key.items()}
    running = sum(
        host.end(index, cost, ())
        for host in hosts
        if host.is_open
        for index, cost in enumerate(host.costs)
        if cost is not None
    )
    coming = (
        count * min(cost.seconds(x.epochs) for cost in costs[x.key].values()) for x, count in waiting if x.key in costs
    )
    return (running + sum(coming)) / len(hosts)


def _add_arrays(
    waiting: Sequence[Array], hosts: Sequence[_HostJob], costs: Costs, packer: ArrayPacker
) -> dict[str, tuple[Array, ...]]:
    """Add waiting arrays to jobs as further arrays, the oldest first.

    An array is added to the eligible job that is expected to end first. It is refused if every eligible job ends
    clearly after the next suitable device is free, since that device would stay idle. The first refused array ends
    admission, so that no younger array prolongs the wait of an older one.

    If samples are shared only at the same position in the data, an array joins a job that is in the epoch at which the
    array begins, and catches up, unless it ends earlier on the next free device. Since it can join only in that
    epoch, it may be admitted before older arrays.

    An added array stays apart from an array of its key in the job, which members join before if that pays.
    """
    added: dict[str, tuple[Array, ...]] = {}
    refused = 0
    cannot_wait = any(host.is_open and host.all_measured and host.in_lockstep for host in hosts)
    for array in waiting:
        eligible = [host for host in hosts if host.is_eligible(array, out_of_turn=refused > 0)]
        ends = (host.seconds for host in hosts if eligible and _fits_empty_device(host.device, array, costs))
        free_in = min(ends, default=inf)
        for host in sorted(eligible, key=lambda host: host.seconds):
            incoming = host.candidate(array)
            if host.ends_sooner(incoming, free_in) and host.admits(incoming, packer):
                joins = replace(array, profile=costs.profile(array.key, host.device.kind), separate=True)
                added[host.job.id] = (*added.get(host.job.id, ()), joins)
                break
        else:
            refused += 1
            if refused == MAX_REFUSED or not cannot_wait:
                break
    return added


def _at_same_epoch(array: Array) -> bool:
    return len({member.start for member in array.members}) == 1


def _fits_empty_device(device: Device, array: Array, costs: Costs) -> bool:
    cost = costs.of(array.key, device.kind)
    return cost is not None and cost.memory(len(array.members)) <= device.memory
