"""Devices as text, tables and plain values, for `shoal status` (of a study) and `shoal devices` (of the machine)."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.core.device import Device
from shoal.core.event import EpochProgress
from shoal.core.job import Purpose
from shoal.core.resources import bytes_text
from shoal.host.discover import Inventory
from shoal.host.monitor import DeviceProcess
from shoal.host.nvml import Gpu
from shoal.look.snapshot import DeviceUse, JobUse
from shoal.look.text import progress_text, rate_text, trials_text

__all__ = ["device_json", "device_lines", "devices_json", "devices_table"]

_PURPOSE_VERBS = {
    Purpose.SIGNATURE: "compares the models of",
    Purpose.PROFILE: "measures",
    Purpose.TRAIN: "trains",
    Purpose.ASSIST: "helps {} with",
}
_MAX_JOBS = 8
"""Most jobs shown for a device, one line each, the oldest first."""


def device_lines(use: DeviceUse, unit: str) -> list[str]:
    """A device's kind, reserved share and jobs; several jobs stand on lines below. For `unit` see `Snapshot`."""
    jobs = [_job_text(job, unit) for job in use.jobs]
    if others := use.jobs[_MAX_JOBS:]:
        jobs[_MAX_JOBS:] = [f"{len(others)} more jobs, with {trials_text(sum(job.members for job in others))}"]
    head = f"{use.device.kind}, {_state(use)}"
    return [f"{head}: {jobs[0]}"] if len(jobs) == 1 else [head, *jobs]


def device_json(use: DeviceUse) -> dict[str, Any]:
    """Return a device with its jobs as plain values; None for unknown values."""
    device = use.device
    return {
        "device": device.name,
        "kind": device.kind,
        "node": device.node,
        "healthy": device.healthy,
        "reason": device.reason,
        "memory": device.memory,
        "reserved": use.reserved,
        "occupancy": use.occupancy,
        "jobs": [
            {
                "job": job.job,
                "purpose": str(job.purpose),
                "members": job.members,
                "compute": job.compute,
                "memory": job.memory,
                "cores": job.cores,
                "epochs_per_second": job.rate,
                "assists": job.assists or None,
                "progress": [progress_json(each) for each in job.progress],
            }
            for job in use.jobs
        ],
    }


def progress_json(found: EpochProgress) -> dict[str, Any]:
    """Return the progress of an array within its epoch as plain values, with its text."""
    return {**asdict(found), "trials": list(found.trials), "text": progress_text(found)}


def devices_table(inventory: Inventory) -> Table:
    """Return a row for each device: kind, capacity, users, and whether it can take jobs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("device", no_wrap=True)
    table.add_column("kind", overflow="fold")
    for title in ("memory", "free", "cores", "busy"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("compute mode", overflow="fold")
    table.add_column("used by", overflow="fold")
    table.add_column("health", overflow="fold")
    for _, device in inventory.cluster:
        gpu = inventory.gpus.get(device.name)
        table.add_row(
            Text(device.name),
            Text(device.kind),
            bytes_text(device.memory) if device.memory else "–",
            bytes_text(gpu.free) if gpu and gpu.memory else "–",
            str(device.cores),
            "–" if gpu is None or gpu.utilisation is None else f"{gpu.utilisation}%",
            Text((gpu and gpu.compute_mode) or "–"),
            Text(", ".join(map(_process_text, gpu.processes)) if gpu and gpu.processes else "–"),
            Text("ok", style="green") if device.healthy else Text(device.note, style="red"),
        )
    return table


def devices_json(inventory: Inventory) -> dict[str, Any]:
    """Return the devices as plain values; None for unknown values."""
    return {
        "nodes": [{"name": node.name, "cores": node.cores} for node in inventory.cluster.nodes],
        "devices": [
            {"node": node.name} | _inventory_device_json(device, inventory.gpus.get(device.name))
            for node, device in inventory.cluster
        ],
        "no_gpu": inventory.absence_reason or None,
    }


def _state(use: DeviceUse) -> str:
    if not use.device.healthy:
        return f"not in use ({use.device.reason or 'not healthy'})"
    if not use.jobs:
        return "idle"
    memory = "" if use.reserved is None else f" and {bytes_text(use.reserved)} of {bytes_text(use.device.memory)}"
    return f"{use.occupancy:.0%} of it{memory} reserved"


def _job_text(job: JobUse, unit: str) -> str:
    rate = "" if job.rate is None else f", {rate_text(job.rate, unit)}"
    verb = _PURPOSE_VERBS[job.purpose].format(job.assists)
    return f"{job.job} {verb} {trials_text(job.members)}{rate}"


def _inventory_device_json(device: Device, gpu: Gpu | None) -> dict[str, Any]:
    return {
        "name": device.name,
        "kind": device.kind,
        "uuid": device.uuid or None,
        "memory": device.memory or None,
        "free": gpu.free if gpu and gpu.memory else None,
        "cores": device.cores,
        "compute_mode": (gpu and gpu.compute_mode) or None,
        "utilisation": gpu and gpu.utilisation,
        "used_by": [asdict(process) for process in gpu.processes] if gpu else [],
        "healthy": device.healthy,
        "reason": device.note or None,
    }


def _process_text(holder: DeviceProcess) -> str:
    """Return the name of a process: "python (pid 4711) 70.0 GB"; "pid 4711" for an invisible process."""
    name = holder.name if holder.name == f"pid {holder.pid}" else f"{holder.name} (pid {holder.pid})"
    return name if holder.memory is None else f"{name} {bytes_text(holder.memory)}"
