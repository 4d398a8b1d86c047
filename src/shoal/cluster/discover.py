"""From what a user wrote for `devices` to a cluster."""

import re
from collections.abc import Sequence

from shoal.cluster.device import Cluster, Device, Node
from shoal.cluster.machine import Machine, ThisMachine
from shoal.cluster.nvml import Gpu
from shoal.errors import DeviceError

__all__ = ["discover"]


def discover(devices: str | Sequence[str] = "auto", machine: Machine | None = None) -> Cluster:
    """The devices of this machine that a study may use, as a cluster of one node.

    The kind of a CPU slot holds its number of cores ("cpu/2"): the same job is measured anew where it gets another
    number of threads. Memory is what the devices have in all; what other programs hold comes and goes.

    Args:
        devices: "auto" (all GPUs; without any, one CPU slot per core), "cpu" (one slot per core), "cpu:N" (N slots that
            share cores and memory evenly), "cuda" (all GPUs), "cuda:1", or a list such as ["cuda:0", "cuda:1"].
        machine: where to look.

    Raises:
        DeviceError: a device does not exist here, is named twice, or the name means nothing.
    """
    machine = machine if machine is not None else ThisMachine()
    names = [devices] if isinstance(devices, str) else list(devices)
    if not names:
        raise DeviceError("`devices` is empty; name at least one, such as 'cpu:2' or 'cuda:0', or say 'auto'")
    only = names[0] if len(names) == 1 else ""
    if only == "cpu" or only.startswith("cpu:"):
        return _cpu(only, machine)
    gpus = machine.gpus()
    if only == "auto" and not gpus:
        return _cpu("cpu", machine)
    if only in ("auto", "cuda") and gpus:
        return _cuda(range(len(gpus)), gpus, machine)
    return _cuda(_indices(names, gpus, machine), gpus, machine)


def _cpu(name: str, machine: Machine) -> Cluster:
    cores = machine.cores()
    count = name.removeprefix("cpu").removeprefix(":") or str(cores)
    if not count.isdecimal() or int(count) < 1:
        raise DeviceError(f"a number of CPU slots is written 'cpu:N' with N at least 1, got {name!r}")
    slots = int(count)
    threads = max(1, cores // slots)
    memory = machine.memory() // slots
    devices = tuple(
        Device(name=f"cpu:{index}", kind=f"cpu/{threads}", memory=memory, cores=threads) for index in range(slots)
    )
    return Cluster((Node(machine.name, cores=max(cores, slots), devices=devices),))


def _cuda(indices: Sequence[int], gpus: Sequence[Gpu], machine: Machine) -> Cluster:
    cores = machine.cores()
    threads = max(1, cores // len(indices))
    devices = tuple(
        Device(name=f"cuda:{index}", kind=gpus[index].model, memory=gpus[index].memory, cores=threads)
        for index in indices
    )
    return Cluster((Node(machine.name, cores=max(cores, len(devices)), devices=devices),))


def _indices(names: Sequence[str], gpus: Sequence[Gpu], machine: Machine) -> list[int]:
    """The GPUs that are named, in the order of their naming."""
    present = [f"cuda:{index}" for index in range(len(gpus))]
    for name in names:
        if name in present:
            continue
        if name == "cuda" or re.fullmatch(r"cuda:\d+", name):
            models = [f"{known} ({gpu.model})" for known, gpu in zip(present, gpus, strict=True)]
            there = ", ".join([*models, f"cpu ({machine.cores()} cores)"])
            raise DeviceError(f"device {name!r} is not there; this machine has {there}")
        raise DeviceError(
            f"device {name!r} is not understood; `devices` is 'auto', 'cpu', 'cpu:N', 'cuda', or a list of 'cuda:i'"
        )
    if len(set(names)) < len(names):
        raise DeviceError(f"`devices` names a device twice: {', '.join(names)}")
    return [present.index(name) for name in names]
