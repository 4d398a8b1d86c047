"""State of one turn of planning: ready trials, arrays to profile, demands, and reservations of running jobs."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import MappingProxyType

from shoal.core.array import Array, FusionKey
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.core.resources import no_device
from shoal.plan.cache import PlanCache
from shoal.plan.cost.cost import packed_demand
from shoal.plan.plan_input import PlanInput
from shoal.plan.waiting import WaitingClass, round_robin

__all__ = ["PROFILE_MEMBERS", "PlanningContext", "reservations"]

PROFILE_MEMBERS = 16
"""Largest number of members that a profile job measures in one array, where members are fused."""

SHARES_WORTH_SECONDS = 600.0
"""Expected work of a key from which its speed on parts of a device is measured. Each measurement starts a process and
takes some steps, some ten seconds on a GPU."""


class PlanningContext:
    """Decides for one turn which members may run, which keys are profiled first, and the demand of a job.

    As many more epochs of a key are expected as its trials have trained. Shares of devices count if processes are
    limited to them.
    """

    def __init__(self, given: PlanInput, cache: PlanCache) -> None:
        self.cluster = given.cluster
        self.devices = [device for _, device in given.cluster if device.healthy]
        self._can_limit_compute = given.can_limit_compute
        self._costs = given.costs
        self._unmeasurable = given.unmeasurable
        self._oom_limits = given.oom_limits
        self._max_members = min(PROFILE_MEMBERS, given.max_concurrent or PROFILE_MEMBERS) if given.fuse else 1
        self._trained_epochs = given.trained_epochs
        self._device_of_kind = {device.kind: device for device in self.devices}  # by kind
        self._ready: dict[FusionKey, bool] = {}
        self._demands: dict[object, Mapping[str, Demand]] = cache.table("demands")
        self._device_demands: dict[object, Demand] = cache.table("demands on devices")

    def to_profile(
        self, waiting: Sequence[WaitingClass], running: Sequence[tuple[Job, Device]]
    ) -> list[tuple[tuple[Array, ...], Device, float | None]]:
        """The arrays to profile on each idle device, and the part of the device that they may use, or None.

        A device gets its part of the keys without a profile on its kind, oldest first; busy devices count in the
        division, since they get theirs once they are idle. A device without such a key measures an array on a part of
        it, if there is much work and processes can be limited to parts.
        """
        measuring = {
            (array.key, device.kind)
            for job, device in running
            if job.purpose is Purpose.PROFILE
            for array in job.arrays
        }
        held = {device.name for _, device in running}
        idle = [device for device in self.devices if device.name not in held]
        arrays = self._arrays_to_profile(waiting) if idle else []
        by_device: dict[str, list[Array]] = {device.name: [] for device in idle}
        for kind in dict.fromkeys(device.kind for device in idle):
            unknown = [x for x in arrays if self._needs_profile(x, kind) and (x.key, kind) not in measuring]
            of_kind = [by_device[device.name] for device in idle if device.kind == kind]
            per_device = -(-len(unknown) // sum(device.kind == kind for device in self.devices))
            for position, array in enumerate(unknown[: per_device * len(of_kind)]):
                of_kind[position % len(of_kind)].append(array)
        profiled = [(tuple(by_device[device.name]), device, None) for device in idle if by_device[device.name]]
        return [*profiled, *self._on_shares(arrays, [x for x in idle if not by_device[x.name]], measuring)]

    def _arrays_to_profile(self, waiting: Sequence[WaitingClass]) -> list[Array]:
        """Return an array to profile of each key: members of all its structures in turn, which start at one epoch."""
        classes: dict[FusionKey, list[WaitingClass]] = {}
        for each in waiting:
            if not each.own_job and not each.key.opaque:
                classes.setdefault(each.fused_key, []).append(each)
        arrays: list[Array] = []
        for key, some in classes.items():
            start = some[0].start
            alike = round_robin([each for each in some if each.start == start], self._max_members)
            expected = sum(each.remaining_epochs for each in some) + self._trained_epochs(key)
            arrays.append(Array(key, tuple(alike), expected_epochs=expected))
        return arrays

    def _on_shares(
        self, arrays: Sequence[Array], idle: Sequence[Device], measuring: AbstractSet[tuple[FusionKey, str]]
    ) -> list[tuple[tuple[Array, ...], Device, float | None]]:
        """Return an array to measure on a part of each idle device, with the part; see `to_profile`."""
        found: list[tuple[tuple[Array, ...], Device, float | None]] = []
        begun = set(measuring)
        for device in idle if arrays else ():
            if not self._can_limit_compute(device):
                continue
            for array in arrays:
                pair = (array.key, device.kind)
                cost = None if pair in begun or pair in self._unmeasurable else self._costs.of(*pair)
                if cost is None or array.key.opaque or cost.work(array.expected_epochs) < SHARES_WORTH_SECONDS:
                    continue
                if (share := cost.share_to_measure()) is not None:
                    found.append(((array,), device, share))
                    begun.add(pair)
                    break
        return found

    def ready(self, waiting: WaitingClass) -> bool:
        """Whether a training job may hold these trials: their key has a profile, or cannot get one."""
        if not self.devices:
            return False
        key = waiting.fused_key
        if key not in self._ready:
            known = any(self._costs.of(key, kind) is not None for kind in self._device_of_kind)
            self._ready[key] = known or not any(self._can_be_profiled(key, kind) for kind in self._device_of_kind)
        return self._ready[key] or waiting.own_job

    def reason(self, key: FusionKey, held: Sequence[tuple[Job, Device]]) -> str:
        """Return the reason for which a member of this key, which is not ready, waits."""
        if not self.devices:
            return no_device(self.cluster)
        if any(job.purpose is Purpose.PROFILE and any(array.key == key for array in job.arrays) for job, _ in held):
            return "its model is being measured"
        return "its model has to be measured first, for which no device is idle"

    def demands(self, arrays: Sequence[Array]) -> Mapping[str, Demand]:
        """Demands of a waiting job on each kind of device that has its profiles, else a whole device of any kind.

        Equal jobs, of which there may be thousands, share one mapping.
        """
        cache_key = None if self._limited(arrays) else tuple((x.key, x.epochs) for x in arrays)
        if cache_key in self._demands:
            return self._demands[cache_key]
        known = [kind for kind in self._device_of_kind if all(self._costs.of(x.key, kind) for x in arrays)]
        demands = {kind: self._demand(arrays, self._device_of_kind[kind]) for kind in known or self._device_of_kind}
        if cache_key is not None:
            self._demands[cache_key] = demands
        return demands

    def demand(self, arrays: Sequence[Array], device: Device, share: float | None) -> Demand:
        """Reservation of a job of these arrays on a device, with the share of its compute if the policy names one."""
        demand = self._demand(arrays, device)
        return demand if share is None else replace(demand, compute=share)

    def running_demand(self, job: Job, device: Device) -> Demand:
        """Return the demand of a running job, by the epochs that its members have left.

        A profile job takes the whole device, since other jobs would distort its measurements; so does a helper, which
        would delay its leader. A job without members is about to end, but still holds its memory.
        """
        if job.purpose is Purpose.PROFILE:
            return _whole_device(device)
        if (job.purpose is Purpose.ASSIST or not job.arrays) and job.demand is not None:
            return replace(_whole_device(device), memory=job.demand.memory, cores=job.demand.cores)
        return self._demand(job.arrays, device)

    def _can_be_profiled(self, key: FusionKey, kind: str) -> bool:
        return self._costs.of(key, kind) is None and not key.opaque and (key, kind) not in self._unmeasurable

    def _needs_profile(self, array: Array, kind: str) -> bool:
        """Return whether the key was not measured, or with far fewer members or epochs than the array has."""
        cost = self._costs.of(array.key, kind)
        if cost is None:
            return self._can_be_profiled(array.key, kind)
        is_outgrown = cost.is_outgrown(len(array.members), array.expected_epochs)
        return is_outgrown and (array.key, kind) not in self._unmeasurable

    def _limited(self, arrays: Sequence[Array]) -> bool:
        return bool(self._oom_limits) and any(m.trial.number in self._oom_limits for x in arrays for m in x.members)

    def _demand(self, arrays: Sequence[Array], device: Device) -> Demand:
        """Return the demand of arrays on a device, cached for equal arrays on equal devices."""
        if self._limited(arrays):
            return self._computed_demand(arrays, device)
        cache_key = (device.kind, device.capacity, device.cores, *((x.key, x.epochs) for x in arrays))
        if cache_key not in self._device_demands:
            self._device_demands[cache_key] = self._computed_demand(arrays, device)
        return self._device_demands[cache_key]

    def _computed_demand(self, arrays: Sequence[Array], device: Device) -> Demand:
        measured = [(self._costs.of(x.key, device.kind), x.epochs) for x in arrays]
        known = [(cost, epochs) for cost, epochs in measured if cost is not None and epochs]
        unknown = not arrays or len(known) < len(arrays)
        demand = _whole_device(device) if unknown else packed_demand(known, cores=device.cores)
        min_memory = self._min_memory(arrays, device)
        return demand if min_memory <= demand.memory else replace(demand, memory=min_memory)

    def _min_memory(self, arrays: Sequence[Array], device: Device) -> int:
        """Least reservation in bytes: for arrays that must be alone, all of the smallest device that suffices."""
        limits = [self._oom_limits.get(member.trial.number) for array in arrays for member in array.members]
        limits_bytes = [limit.memory for limit in limits if limit is not None and limit.memory is not None]
        if not limits_bytes:
            return 0
        memories = [other.memory for other in self.devices if other.kind == device.kind]
        return min([memory for memory in memories if memory >= max(limits_bytes)], default=max(limits_bytes))


def _whole_device(device: Device) -> Demand:
    """Return the demand of a job without a profile: all compute; 0 for unknown memory, cores and seconds."""
    return Demand(compute=device.capacity, memory=0, cores=0.0, seconds=0.0)


def reservations(
    running: Sequence[tuple[Job, Device]],
    joins: Mapping[str, Sequence[Array]],
    planning: PlanningContext,
    shares: Mapping[str, float | None] = MappingProxyType({}),
) -> dict[str, Demand]:
    """Changed reservations of running jobs, after members have left and others join.

    Reservations grow only on join; a low estimate never enlarges them. A job keeps the compute that it began with until
    it needs less, or the policy gives it another share.
    """
    changed: dict[str, Demand] = {}
    for job, device in running:
        joining = joins.get(job.id, ())
        if job.purpose is not Purpose.TRAIN or not (job.arrays or joining):
            continue
        demand = planning.demand([*job.arrays, *joining], device, shares.get(job.id))
        before = job.demand
        if before is not None:
            compute = demand.compute if job.id in shares else min(before.compute, demand.compute)
            memory, cores = (demand.memory, demand.cores) if joining else _smaller(before, demand)
            if (compute, memory, cores) == (before.compute, before.memory, before.cores):
                continue
            demand = Demand(compute, memory, cores, before.seconds)
        if demand != before:
            changed[job.id] = demand
    return changed


def _smaller(before: Demand, now: Demand) -> tuple[int, float]:
    """Return the smaller memory and the smaller cores of two demands; 0 means unknown."""
    memory = min(filter(None, (before.memory, now.memory)), default=0)
    return memory, min(filter(None, (before.cores, now.cores)), default=0.0)
