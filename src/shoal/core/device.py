"""Frozen views of the machines a study may use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Cluster", "Device", "Node"]


@dataclass(frozen=True)
class Device:
    """A GPU, or a slot of a node's CPU.

    Args:
        name: unique in the cluster: "cuda:0", "mig:2" (an instance of a GPU), "cpu:1", "mps:0", "xpu:0".
        kind: devices of one kind share measurements: "NVIDIA H200", "cpu".
        memory: bytes that jobs may use.
        cores: CPU cores that a job on it may use as threads.
        compute: capacity in units of a job's `Demand.compute`.
        oversubscription: how many times its compute may be promised (HyperSack: r).
        healthy: a device that is not gets no jobs.
        uuid: by which a process is bound to a GPU or an instance of one ("GPU-...", "MIG-..."); "" of all others.
        note: what is the matter with it: why it is not healthy, or who else holds how much of it, which is no longer
            part of `memory`; "" if nothing is.
    """

    name: str
    kind: str
    memory: int
    cores: int = 1
    compute: float = 1.0
    oversubscription: float = 1.0
    healthy: bool = True
    uuid: str = ""
    note: str = ""

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU of this machine or an instance of one."""
        return self.name.startswith(("cuda:", "mig:"))

    @property
    def torch_name(self) -> str:
        """What torch calls it in a process that sees all devices; of instances of GPUs a process sees but one."""
        if self.is_cuda:
            return self.name if self.name.startswith("cuda:") else "cuda:0"
        if self.name.startswith("mps:"):  # there is but one
            return "mps"
        return self.name if self.name.startswith("xpu:") else "cpu"

    @property
    def capacity(self) -> float:
        """Compute that may be promised to jobs: oversubscription times compute."""
        return self.oversubscription * self.compute


@dataclass(frozen=True)
class Node:
    """A machine: its CPU cores are shared by the jobs on all its devices."""

    name: str
    cores: float
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Cluster:
    """All nodes, as they were at one moment."""

    nodes: tuple[Node, ...]

    def __iter__(self) -> Iterator[tuple[Node, Device]]:
        """Every device with its node, in order."""
        return iter(self._pairs)

    @cached_property
    def _pairs(self) -> tuple[tuple[Node, Device], ...]:
        return tuple((node, device) for node in self.nodes for device in node.devices)

    def device(self, name: str) -> Device:
        """The device of that name; KeyError if there is none."""
        return self.places[name][1]

    @cached_property
    def places(self) -> Mapping[str, tuple[Node, Device]]:
        """Name of each device -> its node and itself."""
        return {place[1].name: place for place in self}
