"""The set of devices of a study, with changes by the monitor and by users."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError, PolicyError
from shoal.core.resources import bytes_text
from shoal.host.monitor import Condition, DeviceProcess

__all__ = ["REMOVED", "Finder", "Fleet"]

Finder = Callable[[str | Sequence[str]], Cluster]
"""Function from the device names that a user wrote to these devices; raises DeviceError if one does not exist."""

REMOVED = "was removed by request"
"""Reason why a removed device gets no jobs."""

_ALL_GPUS = ("auto", "cuda", "mig")
"""Settings that stand for all GPUs or all instances of GPUs of the machine."""

_NAMED = 2
"""Maximum number of other programs that a waiting reason names."""


class Fleet:
    """The devices that jobs may use now, without the memory that other programs hold.

    A removed or lost device stays in the cluster as unhealthy, because jobs may still be on it and it may come back.

    Args:
        devices: Device names as the user wrote them.
        oversubscription: Factor by which the capacity of every device is raised (HyperSack: r), also of those that are
            added later; at least 1.

    Raises:
        PolicyError: `oversubscription` is not a number of at least 1.
    """

    def __init__(
        self, cluster: Cluster, devices: str | Sequence[str] = "auto", *, oversubscription: float = 1.0
    ) -> None:
        is_number = isinstance(oversubscription, (int, float)) and not isinstance(oversubscription, bool)
        if not is_number or not isfinite(oversubscription) or oversubscription < 1:
            raise PolicyError(f"`oversubscription` must be a number of at least 1, got {oversubscription!r}")
        self.oversubscription = float(oversubscription)
        self._devices = devices
        self._found = self._oversubscribed(cluster)
        self._added: list[str] = []
        self._removed: list[str] = []
        self._conditions: Mapping[str, Condition] = {}
        self._cluster: Cluster | None = None  # cache of `cluster`, None after a change

    @staticmethod
    def from_record(record: Mapping[str, Any], find: Finder, *, oversubscription: float = 1.0) -> "Fleet":
        """The fleet of a record, without removed devices that are gone; a DeviceError if another one is gone."""
        devices = record["devices"]
        fleet = Fleet(find(devices), devices, oversubscription=oversubscription)
        known = {device.name for _, device in fleet.found}
        if added := [name for name in record["added"] if name not in known]:
            fleet.add(added, find)
        fleet._removed = [name for name in record["removed"] if any(d.name == name for _, d in fleet.found)]
        return fleet

    @property
    def setting(self) -> str | Sequence[str]:
        """Device names as the user wrote them."""
        return self._devices

    @property
    def grows(self) -> bool:
        """Whether the study takes devices that are new.

        Its setting stands for all GPUs and it has some, or its setting is about every node of several, which may all be
        still to come.
        """
        names = [self._devices] if isinstance(self._devices, str) else self._devices
        if not self._found.nodes or any(device.node for _, device in self._found):
            return not any("/" in name for name in names)
        return any(name in _ALL_GPUS for name in names) and any(device.is_cuda for _, device in self._found)

    def record(self) -> dict[str, Any]:
        """The fleet as JSON values, for `from_record`."""
        devices = self._devices if isinstance(self._devices, str) else list(self._devices)
        return {"devices": devices, "added": list(self._added), "removed": list(self._removed)}

    @property
    def found(self) -> Cluster:
        """All devices as first discovered, including removed ones, with the oversubscription of the fleet."""
        return self._found

    @property
    def used(self) -> list[str]:
        """Names of the devices that users have not removed."""
        return [device.name for _, device in self._found if device.name not in self._removed]

    @property
    def cluster(self) -> Cluster:
        """All devices in their present condition."""
        if self._cluster is None:
            self._cluster = self._found.map(self._current)
        return self._cluster

    @property
    def with_held_memory(self) -> Cluster:
        """As `cluster`, but the memory of each device includes memory that other programs hold."""
        return self._found.map(lambda device: replace(self._current(device), memory=device.memory))

    @property
    def best_case(self) -> Cluster:
        """The cluster if all lost devices came back and other programs freed their memory."""
        return self._found.map(self._best_case)

    @property
    def unusable(self) -> frozenset[str]:
        """Names of the unhealthy devices, which no job may use."""
        return self.cluster.unhealthy

    @property
    def can_recover(self) -> bool:
        """Whether capacity may grow: a device is lost, other programs hold its memory, or all devices were removed."""
        return self.all_removed or self.cluster != self.best_case

    @property
    def any_removed(self) -> bool:
        """Whether users have removed devices."""
        return bool(self._removed)

    @property
    def all_removed(self) -> bool:
        """Whether all devices were removed."""
        return not self.used

    def is_lost(self, name: str) -> bool:
        """Whether a device does not answer; its jobs cannot save their trials then."""
        return name in self._conditions and not self._conditions[name].healthy

    def apply(self, conditions: Mapping[str, Condition]) -> None:
        """Apply the conditions that the monitor reports; devices without one are unchanged since discovery."""
        if self._conditions != conditions:
            self._conditions, self._cluster = dict(conditions), None

    def add(self, names: Sequence[str], find: Finder) -> None:
        """Add new devices, or devices that were removed before; on a DeviceError nothing is added."""
        self._check(names)
        known = [device.name for _, device in self._found]
        for name in names:
            if name in known and name not in self._removed:
                raise DeviceError(f"device {name!r} is one of the study's already; it has {self._used_text()}")
        new = [name for name in names if name not in known]
        if new:
            self._found = _merge(self._found, self._oversubscribed(_find_new(new, known, find)))
        self._added += new
        self._removed = [name for name in self._removed if name not in names]
        self._cluster = None

    def new_in(self, discovered: Cluster) -> list[str]:
        """Names of healthy devices of nodes that the study does not have, and of healthy new GPUs of the others.

        While a GPU of a node is missing, those after it have other names, so none of the node counts as new. A node
        that has CPU slots alone is not new in a study of other devices.
        """
        known = {node.name: node for node in self._found.nodes}
        slots = all(device.is_cpu for _, device in self._found)
        names: list[str] = []
        for node in discovered.nodes:
            if node.name in known:
                names += self._new_gpus(known[node.name], node)
            elif slots or not all(device.is_cpu for device in node.devices):
                names += [device.name for device in node.devices if device.healthy]
        return names

    def _new_gpus(self, known: Node, discovered: Node) -> list[str]:
        named = {device.name: device for device in discovered.devices if device.uuid}
        mine = {x.name: x.uuid for x in known.devices if x.uuid and x.name not in self._added}
        if any(name not in named or named[name].uuid != uuid for name, uuid in mine.items()):
            return []
        had = {each for device in known.devices for each in (device.name, device.uuid)}
        return [name for name, each in named.items() if each.healthy and had.isdisjoint((name, each.uuid))]

    def add_discovered(self, discovered: Cluster) -> tuple[Device, ...]:
        """Take in and return the devices that are new.

        They are not recorded as added: a resumed study finds them by its setting, or continues without them.
        """
        names = self.new_in(discovered)
        if names:
            new = discovered.select(lambda device: device.name in names)
            self._found, self._cluster = _merge(self._found, self._oversubscribed(new)), None
        return tuple(discovered.device(name) for name in names)

    def remove(self, names: Sequence[str]) -> None:
        """Remove devices, so that no job uses them; on a DeviceError nothing is removed."""
        self._check(names)
        known = [device.name for _, device in self._found]
        for name in names:
            if name not in known:
                raise DeviceError(f"device {name!r} is not one of the study's; it has {self._used_text()}")
            if name in self._removed:
                raise DeviceError(f"device {name!r} was removed before; the study has {self._used_text()}")
        self._removed += names
        self._cluster = None

    def _check(self, names: Sequence[str]) -> None:
        if not names:
            raise DeviceError(f"no device is named; the study has {self._used_text()}")
        for index, name in enumerate(names):
            if name in names[:index]:
                raise DeviceError(f"device {name!r} is named twice: {', '.join(names)}; name each once")

    def _used_text(self) -> str:
        return ", ".join(self.used) or "no device"

    def _oversubscribed(self, cluster: Cluster) -> Cluster:
        if self.oversubscription == 1:
            return cluster
        return cluster.map(lambda x: replace(x, oversubscription=x.oversubscription * self.oversubscription))

    def _current(self, device: Device) -> Device:
        condition = self._conditions.get(device.name)
        if device.name in self._removed:
            return replace(device, healthy=False, note=REMOVED)
        if condition is None:
            return device
        if not condition.healthy:
            return replace(device, healthy=False, note=f"is lost: {condition.reason or 'it does not answer'}")
        held = sum(process.memory or 0 for process in condition.processes)
        return replace(
            device, healthy=True, memory=max(0, device.memory - held), note=_processes_text(condition.processes)
        )

    def _best_case(self, device: Device) -> Device:
        if device.name in self._removed:
            return self._current(device)
        return replace(device, healthy=device.healthy or device.name in self._conditions, note="")


def _processes_text(processes: Sequence[DeviceProcess]) -> str:
    """A text on the programs that hold memory: "python (pid 4711) holds 70.0 GB"."""
    most = sorted(processes, key=lambda process: -(process.memory or 0))
    texts = [
        f"{x.name} (pid {x.pid}) holds {'some of it' if x.memory is None else bytes_text(x.memory)}"
        for x in most[:_NAMED]
    ]
    more = [f"{len(most) - _NAMED} more hold some"] if len(most) > _NAMED else []
    return ", ".join([*texts, *more])


def _find_new(new: Sequence[str], known: Sequence[str], find: Finder) -> Cluster:
    """The new devices, each with as many cores as if the study had been given all devices at once."""
    for name in new:
        if name.partition(":")[0] in ("auto", "cpu"):
            raise DeviceError(
                f"device {name!r} cannot be added: CPU slots divide the cores and the memory of a machine when a study "
                "begins or is resumed, so only one that was removed can come back; stop the study, then: shoal resume "
                "DIR --devices cpu:N"
            )
    find(new)  # a wrong name raises here, so that the error does not list the study's own devices
    found = find([*(name for name in known if not name.startswith("cpu:")), *new])
    return found.select(lambda device: device.name not in known)


def _merge(one: Cluster, other: Cluster) -> Cluster:
    """The devices of both clusters, with nodes of the same name merged."""
    nodes: dict[str, Node] = {node.name: node for node in one.nodes}
    for node in other.nodes:
        merged = nodes.get(node.name, replace(node, devices=()))
        nodes[node.name] = replace(merged, devices=(*merged.devices, *node.devices))
    return Cluster(tuple(nodes.values()))
