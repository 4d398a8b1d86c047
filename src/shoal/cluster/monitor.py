"""What becomes of a study's devices while it runs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.core.device import Cluster

__all__ = ["Condition", "Holder", "Monitor"]


@dataclass(frozen=True)
class Holder:
    """A program that holds memory of a device.

    Args:
        pid: of its process, as the driver counts it: in a container that may be the host's number. 0 stands for all
            those that the driver does not name.
        name: of the program; "pid 1234" where the process cannot be seen from here.
        memory: bytes of the device; None where the driver does not say.
    """

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Condition:
    """A device at one moment.

    Args:
        healthy: whether it can take jobs.
        reason: why not: "has fallen off the bus", "compute mode prohibited".
        holders: programs of others on it, and the bytes they hold.
    """

    healthy: bool = True
    reason: str = ""
    holders: tuple[Holder, ...] = ()


class Monitor(Protocol):
    """What the engine asks every few seconds."""

    def watch(self, cluster: Cluster) -> None:
        """From now on look at these devices; none of the study's jobs runs on one that was not looked at before."""

    def look(self, own: Collection[int]) -> Mapping[str, Condition]:
        """The condition of every device by its name; a device that is lost is a condition, never an error.

        Args:
            own: process ids of the study's workers and of the engine; their children are the study's own, too.
        """
