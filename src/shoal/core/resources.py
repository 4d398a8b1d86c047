"""The ledger of what is free: compute and memory of devices, cores of nodes, and the shares that jobs hold of them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node

__all__ = ["ROUNDING", "Capacity", "Holder", "Ledger", "Share", "bytes_text", "no_device", "parse_bytes"]

ROUNDING = 1e-9
"""Sums of compute, widths and cores may exceed their limit by this, and times may miss it by this part."""


class Share(NamedTuple):
    """Share of one device that a job holds.

    Args:
        compute: Compute, in units of `Demand.compute`.
        memory: Bytes.
        cores: CPU cores of its node.
    """

    compute: float = 0.0
    memory: int = 0
    cores: float = 0.0


class Holder(Protocol):
    """A job as the ledger sees it: its demands, and its devices if it has any."""

    @property
    def id(self) -> str:
        """Id of the job."""

    @property
    def demand(self) -> Mapping[str, Demand]:
        """Device kind -> demand of the job there."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of its devices; empty if it holds none."""

    def compute(self, device: Device) -> float:
        """Return the compute of the job on a device."""


@dataclass(eq=False, slots=True)
class Capacity:
    """Free resources of one device.

    Args:
        compute: Free compute; below 0 if more is held than the device has.
        memory: Free bytes, likewise.
        holders: Id of each job on the device -> number of all its devices.
        multi_device_jobs: Number of its jobs that also hold other devices; such a device admits no other job.
    """

    device: Device
    node: Node
    position: int
    compute: float
    memory: int
    holders: dict[str, int] = field(default_factory=dict)
    multi_device_jobs: int = 0


class Ledger:
    """Free compute and memory of every device, free cores of every node, and who holds which share.

    A device's capacity is its oversubscription times its compute; memory and cores are hard. The ledger notes whatever
    is held, also beyond these limits.

    Args:
        jobs: Jobs; those with devices hold them, except devices that are not in the cluster.
        exclusive: Whether a device holds one job at a time.
    """

    def __init__(self, cluster: Cluster, jobs: Iterable[Holder] = (), *, exclusive: bool = False) -> None:
        self.cluster = cluster
        self.exclusive = exclusive
        self._all = {
            device.name: Capacity(device, node, position, device.capacity, device.memory)
            for position, (node, device) in enumerate(cluster)
        }
        self.capacities = tuple(each for each in self._all.values() if each.device.healthy)
        """The healthy devices, in order."""
        self._cores = {node.name: float(node.cores) for node in cluster.nodes}
        self._held: dict[str, list[tuple[Capacity, Share]]] = {}
        for job in jobs:
            self.hold(job)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __getitem__(self, name: str) -> Capacity:
        """Return what is free of a device, healthy or not; KeyError if it is not in the cluster."""
        return self._all[name]

    def cores(self, node: str) -> float:
        """Return the free CPU cores of a node."""
        return self._cores[node]

    def memory(self, capacity: Capacity) -> int:
        """Return the free bytes of a device; at most 0 if the cores of its node are overdrawn."""
        return capacity.memory if self._cores[capacity.node.name] >= -ROUNDING else min(capacity.memory, 0)

    def is_closed(self, capacity: Capacity) -> bool:
        """Return whether the jobs on a device exclude another one."""
        return capacity.multi_device_jobs > 0 or (self.exclusive and bool(capacity.holders))

    def has_room(self, capacity: Capacity, share: Share | Demand) -> bool:
        """Return whether a share of a device, or as much as a demand asks for, is free."""
        return (
            not self.is_closed(capacity)
            and share.compute <= capacity.compute + ROUNDING
            and share.memory <= capacity.memory
            and share.cores <= self._cores[capacity.node.name] + ROUNDING
        )

    def fits(self, job: Holder, capacity: Capacity) -> bool:
        """Return whether a job can start on a device now."""
        demand = job.demand.get(capacity.device.kind)
        return demand is not None and self.has_room(capacity, demand)

    def take(self, job: Holder, capacity: Capacity) -> None:
        """Let a job hold one device."""
        demand = job.demand[capacity.device.kind]
        self.add(job.id, capacity, Share(job.compute(capacity.device), demand.memory, demand.cores))

    def hold(self, job: Holder) -> None:
        """Let a job hold the devices that it names."""
        for name in job.devices:
            if name in self._all:
                capacity = self._all[name]
                demand = job.demand[capacity.device.kind]
                share = Share(job.compute(capacity.device), demand.memory, demand.cores)
                self.add(job.id, capacity, share, len(job.devices))

    def add(self, holder: str, capacity: Capacity, share: Share, devices: int = 1) -> None:
        """Add a share of a device to what a job holds."""
        capacity.compute -= share.compute
        capacity.memory -= share.memory
        if holder not in capacity.holders:
            capacity.holders[holder] = devices
            capacity.multi_device_jobs += devices > 1
        self._cores[capacity.node.name] -= share.cores
        self._held.setdefault(holder, []).append((capacity, share))

    def release(self, holder: str) -> None:
        """Free all that a job holds; nothing if it holds nothing."""
        for capacity, share in self._held.pop(holder, ()):
            capacity.compute += share.compute
            capacity.memory += share.memory
            if devices := capacity.holders.pop(holder, 0):
                capacity.multi_device_jobs -= devices > 1
            self._cores[capacity.node.name] += share.cores


def no_device(cluster: Cluster) -> str:
    """Return the reason of all jobs without a healthy device, with the note of each device."""
    notes = ", ".join(f"{device.name} {device.note}" for _, device in cluster if device.note)
    return f"no healthy device: {notes}" if notes else "no healthy device"


def bytes_text(count: int) -> str:
    """Return the bytes as text in gigabytes or megabytes: 9.1 GB, 350 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


_UNITS = {"": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}


def parse_bytes(text: str) -> int | None:
    """Return the bytes that a text such as "8GiB", "1.5 GB" or "4096" names; None if it names none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", text)
    if match is None or match.group(2) not in _UNITS:
        return None
    return int(float(match.group(1)) * _UNITS[match.group(2)])
