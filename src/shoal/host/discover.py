"""Device discovery: from the argument `devices` of a user to a cluster."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.host.machine import Accelerator, Machine, ThisMachine
from shoal.host.nvml import Gpu, Listing, by_device_name

__all__ = ["Inventory", "discover", "take_inventory"]

_log = logging.getLogger("shoal.host")

_NVIDIA = ("cuda", "mig")
_TORCH_TYPES = ("mps", "xpu")
_NAME = re.compile(rf"({'|'.join((*_NVIDIA, *_TORCH_TYPES))})(:\d+)?")
_FORMS = "'auto', 'cpu', 'cpu:N', 'cuda', 'mig', 'mps', 'xpu', or a list of 'cuda:i', 'mig:i', 'xpu:i'"


@dataclass(frozen=True)
class Inventory:
    """The requested devices, whether or not they can take jobs.

    Args:
        gpus: NVML's data of the NVIDIA GPUs, by device name.
        absence_reason: Reason why no GPU was found; "" if one was found, or none was requested.
        driver_fails: Whether a driver is installed and fails.
    """

    cluster: Cluster
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    absence_reason: str = ""
    driver_fails: bool = False


def discover(devices: str | Sequence[str] = "auto", machine: Machine | None = None) -> Cluster:
    """Find the devices of this machine that a study may use, as a cluster of one node.

    The kind of a CPU slot contains the number of threads of a job there ("cpu/2"): its cores, unless `OMP_NUM_THREADS`
    allows fewer. So a job is measured again with another number of threads. Memory is the total of a device, including
    the memory of other programs, which varies. Some of the devices may be unhealthy.

    Args:
        devices: "auto" (all GPUs and MIG instances; else Apple's; else one CPU slot per core), "cpu" (one slot per
            core), "cpu:N" (N slots that share cores and memory evenly), "cuda" (all GPUs), "cuda:1", "mig" (all MIG
            instances), "mig:0", "mps", "xpu", or a list such as ["cuda:0", "mig:2"].
        machine: The machine; by default this one.

    Raises:
        DeviceError: A device does not exist, is named twice, has an invalid name, or no device is healthy.
    """
    found = take_inventory(devices, machine)
    if found.driver_fails:
        _log.warning("no GPU is used: %s", found.absence_reason)
    if not any(device.healthy for _, device in found.cluster):
        faults = ", ".join(f"{device.name} ({device.kind}): {device.note}" for _, device in found.cluster)
        raise DeviceError(
            f"no device can be used: {faults}; look at nvidia-smi and shoal devices, or use devices='cpu'"
        )
    return found.cluster


def take_inventory(devices: str | Sequence[str] = "auto", machine: Machine | None = None) -> Inventory:
    """Find devices as `discover` does, with NVML's data of GPUs; no device need be healthy."""
    machine = machine if machine is not None else ThisMachine()
    names = [devices] if isinstance(devices, str) else list(devices)
    if not names:
        raise DeviceError("`devices` is empty; name at least one, such as 'cpu:2' or 'cuda:0', or say 'auto'")
    only = names[0] if len(names) == 1 else ""
    if only == "cpu" or only.startswith("cpu:"):
        return Inventory(_cpu_cluster(only, machine))
    if only == "auto":
        return _all_devices(machine)
    return _named_devices(names, machine)


def _all_devices(machine: Machine) -> Inventory:
    listing = machine.gpus()
    if listing.gpus:
        gpus = by_device_name(listing.gpus)
        return Inventory(_cluster([_gpu_device(name, gpu) for name, gpu in gpus.items()], machine), gpus)
    accelerators = machine.accelerators("mps")
    cluster = (
        _cluster([_accelerator_device(each) for each in accelerators], machine)
        if accelerators
        else _cpu_cluster("cpu", machine)
    )
    return Inventory(cluster, absence_reason=listing.absence_reason, driver_fails=listing.driver_fails)


def _named_devices(names: Sequence[str], machine: Machine) -> Inventory:
    for name in names:
        if name == "cpu" or name.startswith("cpu:"):
            raise DeviceError(
                f"device {name!r} is not understood in a list; a study has either CPU slots or other devices, and CPU "
                "slots are requested by their number, as in 'cpu:2'"
            )
        if not _NAME.fullmatch(name):
            raise DeviceError(f"device {name!r} is not understood; `devices` is {_FORMS}")
    types = list(dict.fromkeys(name.partition(":")[0] for name in names))
    listing = machine.gpus() if not set(types).isdisjoint(_NVIDIA) else Listing()
    gpus = by_device_name(listing.gpus)
    present = {name: _gpu_device(name, gpu) for name, gpu in gpus.items()}
    for name_type in types:
        if name_type in _TORCH_TYPES:
            present |= {each.name: _accelerator_device(each) for each in machine.accelerators(name_type)}
    chosen: list[Device] = []
    for name in names:
        match = [device for device in present.values() if name in (device.name, device.name.partition(":")[0])]
        if not match:
            present_text = ", ".join(f"{device.name} ({device.kind})" for device in present.values())
            present_text = ", ".join(filter(None, [present_text, f"cpu ({machine.cores()} cores)"]))
            why = f"; {listing.absence_reason}" if listing.absence_reason else ""
            raise DeviceError(f"device {name!r} is not there; this machine has {present_text}{why}")
        chosen.extend(match)
    if len({device.name for device in chosen}) < len(chosen):
        raise DeviceError(f"`devices` names a device twice: {', '.join(names)}")
    return Inventory(_cluster(chosen, machine), gpus, listing.absence_reason)


def _cpu_cluster(name: str, machine: Machine) -> Cluster:
    cores = machine.cores()
    count = name.removeprefix("cpu").removeprefix(":") or str(cores)
    if not count.isdecimal() or int(count) < 1:
        raise DeviceError(f"a number of CPU slots is written 'cpu:N' with N at least 1, got {name!r}")
    slots = int(count)
    each = max(1, cores // slots)
    kind = f"cpu/{machine.threads(each)}"
    memory = machine.memory() // slots
    devices = tuple(Device(name=f"cpu:{index}", kind=kind, memory=memory, cores=each) for index in range(slots))
    return Cluster((Node(machine.name, cores=max(cores, slots), devices=devices),))


def _gpu_device(name: str, gpu: Gpu) -> Device:
    return Device(name, gpu.model, gpu.memory, healthy=not gpu.reason, uuid=gpu.uuid, note=gpu.reason)


def _accelerator_device(accelerator: Accelerator) -> Device:
    return Device(accelerator.name, accelerator.model, accelerator.memory)


def _cluster(devices: Sequence[Device], machine: Machine) -> Cluster:
    """Return the machine with these devices, and its cores divided evenly among them."""
    cores = machine.cores()
    threads = max(1, cores // len(devices))
    return Cluster(
        (Node(machine.name, max(cores, len(devices)), tuple(replace(each, cores=threads) for each in devices)),)
    )
