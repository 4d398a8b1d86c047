"""Monitoring of a study's devices: their health, and other programs on them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal.core.device import Cluster

__all__ = ["Condition", "DeviceProcess", "Monitor"]


@dataclass(frozen=True)
class DeviceProcess:
    """A program that holds memory of a device.

    Args:
        pid: Process id of the driver, which may be the host's in a container; 0 for programs without names.
        name: Name of the program; "pid 1234" if the process is not visible.
        memory: Memory on the device, in bytes; None if the driver does not report it.
    """

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Condition:
    """The condition of a device at one moment.

    Args:
        reason: Reason if not: "has fallen off the bus", "compute mode prohibited".
        processes: Programs on it that are not the study's.
        utilisation: Percent of the last sampling period with a running kernel; None if unknown. Conditions that differ
            only in use are equal.
        memory_used: Bytes in use by all programs; None if unknown.
    """

    healthy: bool = True
    reason: str = ""
    processes: tuple[DeviceProcess, ...] = ()
    utilisation: int | None = field(default=None, compare=False)
    memory_used: int | None = field(default=None, compare=False)


class Monitor(Protocol):
    """Reports the conditions of devices; the engine calls it every few seconds."""

    def watch(self, cluster: Cluster) -> None:
        """Monitor these devices from now on; no job of the study runs yet on a device that is new."""

    def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
        """Return the condition of every device by name; a lost device is a condition, never an error.

        Descendants of the processes in `own`, those of the study's workers and of the engine, are the study's, too.
        """
