"""The devices of a running study: those it was given, as a monitor sees them and as its user changes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.cluster.monitor import Condition, Holder
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.schedule.ledger import bytes_text

__all__ = ["REMOVED", "Finder", "Fleet"]

Finder = Callable[[str | Sequence[str]], Cluster]
"""What a user wrote -> the devices that it means on this machine; DeviceError if there are none such."""

REMOVED = "was removed by request"
"""Why a device that its user took away gets no jobs."""

_NAMED = 2
"""Programs that are named in a reason, those that hold the most."""


class Fleet:
    """Keeps which devices jobs may use now.

    A device that was removed, or that the monitor finds lost, stays in the cluster, unhealthy, as jobs may still be on
    it and it may come back. What programs of others hold of a device is no part of its memory.

    Args:
        cluster: as the study was given it.
        devices: what its user wrote for that.
    """

    def __init__(self, cluster: Cluster, devices: str | Sequence[str] = "auto") -> None:
        self._devices = devices
        self._given = cluster
        self._added: list[str] = []
        self._removed: list[str] = []
        self._conditions: Mapping[str, Condition] = {}
        self._cluster: Cluster | None = None  # as it is now, unless something has changed since it was asked for

    @staticmethod
    def again(record: Mapping[str, Any], find: Finder) -> "Fleet":
        """As it was when it made a record of itself, so far as the devices are still there.

        Raises:
            DeviceError: one is not there, so others have to be named.
        """
        devices = record["devices"]
        fleet = Fleet(find(devices), devices)
        known = {device.name for _, device in fleet.given}
        if added := [name for name in record["added"] if name not in known]:
            fleet.add(added, find)
        fleet._removed = [name for name in record["removed"] if any(d.name == name for _, d in fleet.given)]
        return fleet

    def record(self) -> dict[str, Any]:
        """What `again` needs, in JSON values."""
        devices = self._devices if isinstance(self._devices, str) else list(self._devices)
        return {"devices": devices, "added": list(self._added), "removed": list(self._removed)}

    @property
    def given(self) -> Cluster:
        """All devices, as they were found."""
        return self._given

    @property
    def used(self) -> list[str]:
        """Names of the devices that were not removed."""
        return [device.name for _, device in self._given if device.name not in self._removed]

    @property
    def cluster(self) -> Cluster:
        """As it is now."""
        if self._cluster is None:
            self._cluster = self._each(self._now)
        return self._cluster

    @property
    def whole(self) -> Cluster:
        """As it is now, what programs of others hold included."""
        return self._each(lambda device: replace(self._now(device), memory=device.memory))

    @property
    def hopeful(self) -> Cluster:
        """As it would be if all that are lost came back, and programs of others held nothing."""
        return self._each(self._at_best)

    @property
    def gone(self) -> frozenset[str]:
        """Names of devices that no job may be on."""
        return frozenset(device.name for _, device in self.cluster if not device.healthy)

    @property
    def diminished(self) -> bool:
        """Whether there may be more of it later: a device is lost, or held by others, or its user took all away."""
        return self.emptied or self.cluster != self.hopeful

    @property
    def reduced(self) -> bool:
        """Whether its user took devices away, which may be given back."""
        return bool(self._removed)

    @property
    def emptied(self) -> bool:
        """Whether all devices were removed."""
        return not self.used

    def is_lost(self, name: str) -> bool:
        """Whether nothing works on a device, so that its jobs cannot even save their trials."""
        return name in self._conditions and not self._conditions[name].healthy

    def see(self, conditions: Mapping[str, Condition]) -> None:
        """Take over what a monitor sees; a device that it says nothing of is as it was found."""
        if self._conditions != conditions:
            self._conditions, self._cluster = dict(conditions), None

    def add(self, names: Sequence[str], find: Finder) -> None:
        """Let jobs use devices that were removed, or that are new.

        Args:
            names: of the devices.
            find: finds those that are new.

        Raises:
            DeviceError: one is named twice, used already, or not there; then nothing is added.
        """
        self._check(names)
        known = [device.name for _, device in self._given]
        for name in names:
            if name in known and name not in self._removed:
                raise DeviceError(f"device {name!r} is one of the study's already; it has {self._used()}")
        new = [name for name in names if name not in known]
        if new:
            self._given = _joined(self._given, _only(new, known, find))
        self._added += new
        self._removed = [name for name in self._removed if name not in names]
        self._cluster = None

    def remove(self, names: Sequence[str]) -> None:
        """Let no job use devices any more.

        Raises:
            DeviceError: one is named twice, or is none of the study's; then nothing is removed.
        """
        self._check(names)
        known = [device.name for _, device in self._given]
        for name in names:
            if name not in known:
                raise DeviceError(f"device {name!r} is none of the study's; it has {self._used()}")
            if name in self._removed:
                raise DeviceError(f"device {name!r} was removed before; the study has {self._used()}")
        self._removed += names
        self._cluster = None

    def _check(self, names: Sequence[str]) -> None:
        if not names:
            raise DeviceError(f"no device is named; the study has {self._used()}")
        for place, name in enumerate(names):
            if name in names[:place]:
                raise DeviceError(f"device {name!r} is named twice: {', '.join(names)}; name each once")

    def _used(self) -> str:
        return ", ".join(self.used) or "no device"

    def _each(self, seen: Callable[[Device], Device]) -> Cluster:
        nodes = self._given.nodes
        return Cluster(tuple(replace(node, devices=tuple(map(seen, node.devices))) for node in nodes))

    def _now(self, device: Device) -> Device:
        condition = self._conditions.get(device.name)
        if device.name in self._removed:
            return replace(device, healthy=False, note=REMOVED)
        if condition is None:
            return device
        if not condition.healthy:
            return replace(device, healthy=False, note=f"is lost: {condition.reason or 'it does not answer'}")
        held = sum(holder.memory or 0 for holder in condition.holders)
        return replace(device, healthy=True, memory=max(0, device.memory - held), note=_held(condition.holders))

    def _at_best(self, device: Device) -> Device:
        if device.name in self._removed:
            return self._now(device)
        return replace(device, healthy=device.healthy or device.name in self._conditions, note="")


def _held(holders: Sequence[Holder]) -> str:
    """Whose programs hold how much: "python (pid 4711) holds 70.0 GB"."""
    most = sorted(holders, key=lambda holder: -(holder.memory or 0))
    texts = [
        f"{x.name} (pid {x.pid}) holds {'some of it' if x.memory is None else bytes_text(x.memory)}"
        for x in most[:_NAMED]
    ]
    more = [f"{len(most) - _NAMED} more hold some"] if len(most) > _NAMED else []
    return ", ".join([*texts, *more])


def _only(new: Sequence[str], known: Sequence[str], find: Finder) -> Cluster:
    """The devices of these names, each with as many cores as if the study had been given all of them at once.

    Raises:
        DeviceError: one of them is not there, or is a CPU slot: these are all cut at once.
    """
    for name in new:
        if name.partition(":")[0] in ("auto", "cpu"):
            raise DeviceError(
                f"device {name!r} cannot be added: CPU slots divide the cores and the memory of a machine when a study "
                "begins or is resumed, so only one that was removed can come back; stop the study, then: shoal resume "
                "DIR --devices cpu:N"
            )
    find(new)  # so that a wrong name is told of, and not the study's own
    found = find([*(name for name in known if not name.startswith("cpu:")), *new])
    nodes = (replace(node, devices=tuple(d for d in node.devices if d.name not in known)) for node in found.nodes)
    return Cluster(tuple(node for node in nodes if node.devices))


def _joined(one: Cluster, other: Cluster) -> Cluster:
    """The devices of both; those of nodes of the same name together."""
    nodes: dict[str, Node] = {node.name: node for node in one.nodes}
    for node in other.nodes:
        mine = nodes.get(node.name, replace(node, devices=()))
        nodes[node.name] = replace(mine, devices=(*mine.devices, *node.devices))
    return Cluster(tuple(nodes.values()))
