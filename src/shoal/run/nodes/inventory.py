"""Checks of the nodes of a cluster: their devices and versions, and whether they share the directory of a study."""

import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.core.version import VERSION
from shoal.host.discover import discover
from shoal.host.machine import ThisMachine, cpu_model

__all__ = [
    "PROBE_SECONDS",
    "NodeInventory",
    "agent_probe_fault",
    "check_nodes",
    "cluster_of",
    "devices_on",
    "first_gpus",
    "names_nodes",
    "on_node",
    "remove_probes",
    "take_node_inventory",
    "version_fault",
    "versions",
    "write_probe",
]

PROBE_SECONDS = 30.0
"""Longest wait for a file of another machine; NFS shows new files after up to this time."""

_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class NodeInventory:
    """The devices of a node that a study may use, by their names there, or why there is none; and the versions."""

    cluster: Cluster
    absence_reason: str
    versions: Mapping[str, str]


def versions() -> dict[str, str]:
    """Versions that must be equal on all nodes, by name; "none" where a package is not installed."""
    found = {"Python": platform.python_version(), "torch": "none", "Ray": "none", "Shoal": VERSION}
    for name in ("torch", "Ray"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def version_fault(node: str, found: Mapping[str, str], wanted: Mapping[str, str] | None = None) -> str:
    """How the versions of a node, as of `versions`, differ from those of the engine; "" if they are equal.

    `wanted` are the versions of the engine; None: this process is the engine.
    """
    own = versions() if wanted is None else wanted
    wrong = [f"{name} {found.get(name, 'none')}" for name in own if found.get(name) != own[name]]
    right = [f"{name} {own[name]}" for name in own if found.get(name) != own[name]]
    if not wrong:
        return ""
    return (
        f"node {node} has {', '.join(wrong)}, and the engine has {', '.join(right)}; install the same versions of "
        "Python, torch, Ray and Shoal on all nodes"
    )


def take_node_inventory(devices: str | Sequence[str], cores: int | None, gpus: int | None = None) -> NodeInventory:
    """Find devices of this node. The kind of a CPU slot names the model of the CPU, too: "cpu/2 AMD EPYC 7763".

    `cores` is the number of CPU cores that the study may use here, `gpus` that of GPUs, the first of those requested;
    None: all.
    """
    try:
        found = discover(devices, ThisMachine(most_cores=cores))
    except DeviceError as error:
        return NodeInventory(Cluster(()), str(error), versions())
    if gpus is not None:
        found = first_gpus(found, gpus)
    if not found.nodes:
        return NodeInventory(
            found, "the cluster may give away none of its GPUs; see `ray start --num-gpus`", versions()
        )
    model = cpu_model()
    return NodeInventory(found.map(lambda x: _with_model(x, model)), "", versions())


def names_nodes(devices: str | Sequence[str]) -> bool:
    """Return whether a study's setting names devices of nodes, as in "ash/cuda:0"."""
    return any("/" in name for name in ([devices] if isinstance(devices, str) else devices))


def check_nodes(nodes: Collection[str], devices: str | Sequence[str]) -> None:
    """Check that the devices of a setting are of nodes that are there; the DeviceError names those that are."""
    for name in [devices] if isinstance(devices, str) else devices:
        node, slash, _ = name.partition("/")
        if slash and node not in nodes:
            there = ", ".join(sorted(nodes)) or "none"
            raise DeviceError(f"device {name!r} is of no node of the cluster, whose nodes are: {there}")


def devices_on(node: str, devices: str | Sequence[str]) -> str | Sequence[str]:
    """Return the part of a study's setting that is about a node, with the names that devices have there.

    Args:
        devices: "auto", "cpu:2", "cuda", ["cuda:0", "cuda:1"] for what each node has; or devices of nodes:
            ["ash/cuda:0", "beech/cuda:1"].
    """
    if not names_nodes(devices):
        return devices
    names = [devices] if isinstance(devices, str) else list(devices)
    mine = [name.partition("/")[2] for name in names if name.partition("/")[0] == node]
    slots = [name.removeprefix("cpu:") for name in mine if name.startswith("cpu:")]
    if wrong := [slot for slot in slots if not slot.isdecimal()]:
        raise DeviceError(
            f"device '{node}/cpu:{wrong[0]}' is not understood; the CPU slots of a node are '{node}/cpu:0', "
            f"'{node}/cpu:1' and so on"
        )
    return f"cpu:{max(map(int, slots)) + 1}" if slots else mine


def on_node(device: Device, node: str) -> Device:
    """The device with its name in the cluster: "ash/cuda:0"."""
    return replace(device, name=f"{node}/{device.name}")


def cluster_of(found: Mapping[str, NodeInventory], devices: str | Sequence[str]) -> Cluster:
    """The cluster of several nodes; DeviceError if no node has a requested device, or versions differ.

    With "auto", nodes without a GPU are left out if others have GPUs, as slots of CPUs go with no other devices.
    """
    for node, inventory in found.items():
        if fault := version_fault(node, inventory.versions):
            raise DeviceError(fault)
    nodes = [
        Node(name, each.cores, tuple(on_node(device, name) for device in each.devices))
        for name, inventory in found.items()
        for each in inventory.cluster.nodes
    ]
    if devices == "auto" and not all(device.is_cpu for node in nodes for device in node.devices):
        nodes = [node for node in nodes if not any(device.is_cpu for device in node.devices)]
    names = [devices] if isinstance(devices, str) else list(devices)
    if wanted := {name for name in names if "/" in name}:
        cluster = Cluster(tuple(nodes)).select(lambda device: device.name in wanted)
        missing = sorted(wanted - {device.name for _, device in cluster})
        if missing or len(wanted) < len(names):
            wrong = missing[0] if missing else next(name for name in names if "/" not in name)
            raise DeviceError(f"device {wrong!r} is not there; the cluster has {_names(nodes)}{_reasons(found)}")
        return cluster
    if not nodes:
        raise DeviceError(f"no node has devices={devices!r}{_reasons(found)}")
    return Cluster(tuple(nodes))


def first_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """A node's devices without the GPUs after the first ones, and its cores divided among those that are left."""
    left = [device.name for _, device in cluster if device.is_cuda][:gpus]
    kept = cluster.select(lambda device: not device.is_cuda or device.name in left)
    if kept == cluster or not kept.nodes:
        return kept
    (node,) = kept.nodes
    return kept.map(lambda device: replace(device, cores=max(1, int(node.cores) // len(node.devices))))


def write_probe(directory: Path, name: str) -> None:
    """Write the file of the engine or of an agent, whose name is unique in all runs."""
    folder = directory / "agents"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())


def agent_probe_fault(directory: Path, node: str, probe: str, seconds: float = PROBE_SECONDS) -> str:
    """Look on a node for the engine's file, and write one beside it; return a fault in words, or "".

    A run's file has a name of its own, so a node that has it has the engine's directory, and the engine sees what the
    node writes there.
    """
    if not directory.is_dir():  # an agent makes no directory, since the engine's study would not be in it
        return _not_shared(directory, f"node {node} does not have it")
    if not _appears(directory / "agents" / probe, seconds):
        missing = f"agents/{probe}"
        return _not_shared(directory, f"node {node} has a directory of that name without the engine's file {missing}")
    try:
        write_probe(directory, f"{probe}-{node}")
    except OSError as error:
        return f"node {node} cannot write to the directory {directory} of the study: {error}; let its user write there"
    return ""


def remove_probes(directory: Path, probe: str) -> None:
    """Remove the files of a run."""
    for path in (directory / "agents").glob(f"{probe}*"):
        path.unlink(missing_ok=True)


def _with_model(device: Device, model: str) -> Device:
    return replace(device, kind=f"{device.kind} {model}") if device.is_cpu and model else device


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(device.name for node in nodes for device in node.devices) or "none of that kind"


def _reasons(found: Mapping[str, NodeInventory]) -> str:
    return "".join(f"; {node}: {each.absence_reason}" for node, each in found.items() if each.absence_reason)


def _not_shared(directory: Path, why: str) -> str:
    return (
        f"the directory {directory} of the study is not shared by all nodes: {why}; choose one on a file system that "
        "all nodes mount at the same path, with directory=... or --directory"
    )


def _appears(path: Path, seconds: float) -> bool:
    """Return whether a file is there within some seconds; listing its folder makes NFS look again."""
    deadline = time.monotonic() + seconds
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
