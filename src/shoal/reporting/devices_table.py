"""The devices of a machine for the terminal, and as plain values for `--json`."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.cluster.discover import Inventory
from shoal.cluster.monitor import Holder
from shoal.cluster.nvml import Gpu
from shoal.core.device import Device
from shoal.schedule.ledger import bytes_text

__all__ = ["devices_json", "devices_table"]


def devices_table(found: Inventory) -> Table:
    """A line a device: what it is, what it has, who uses it, and whether it can take jobs.

    Args:
        found: the devices to show.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("device", no_wrap=True)
    table.add_column("kind", overflow="fold")
    for title in ("memory", "free", "cores", "busy"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("compute mode", overflow="fold")
    table.add_column("used by", overflow="fold")
    table.add_column("health", overflow="fold")
    for _, device in found.cluster:
        gpu = found.gpus.get(device.name)
        table.add_row(
            Text(device.name),
            Text(device.kind),
            bytes_text(device.memory) if device.memory else "–",
            bytes_text(gpu.free) if gpu and gpu.memory else "–",
            str(device.cores),
            "–" if gpu is None or gpu.utilisation is None else f"{gpu.utilisation}%",
            Text((gpu and gpu.compute_mode) or "–"),
            Text(", ".join(map(_holder_text, gpu.holders)) if gpu and gpu.holders else "–"),
            Text("ok", style="green") if device.healthy else Text(device.note, style="red"),
        )
    return table


def devices_json(found: Inventory) -> dict[str, Any]:
    """The same as plain values; what is not known is None.

    Args:
        found: the devices to show.
    """
    return {
        "nodes": [{"name": node.name, "cores": node.cores} for node in found.cluster.nodes],
        "devices": [
            {"node": node.name} | _device_json(device, found.gpus.get(device.name)) for node, device in found.cluster
        ],
        "no_gpu": found.absence or None,
    }


def _device_json(device: Device, gpu: Gpu | None) -> dict[str, Any]:
    return {
        "name": device.name,
        "kind": device.kind,
        "uuid": device.uuid or None,
        "memory": device.memory or None,
        "free": gpu.free if gpu and gpu.memory else None,
        "cores": device.cores,
        "compute_mode": (gpu and gpu.compute_mode) or None,
        "utilisation": gpu and gpu.utilisation,
        "used_by": [asdict(holder) for holder in gpu.holders] if gpu else [],
        "healthy": device.healthy,
        "reason": device.note or None,
    }


def _holder_text(holder: Holder) -> str:
    """ "python (pid 4711) 70.0 GB"; "pid 4711" of a process that cannot be seen."""
    name = holder.name if holder.name == f"pid {holder.pid}" else f"{holder.name} (pid {holder.pid})"
    return name if holder.memory is None else f"{name} {bytes_text(holder.memory)}"
