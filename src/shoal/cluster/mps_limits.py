"""Devices that MPS can share, and memory limits of jobs on them."""

import math

from shoal.core.demand import Demand
from shoal.core.device import Device

__all__ = ["CONTEXT_BYTES", "MEMORY_SLACK", "can_share", "job_memory_limit", "memory_limit", "pinned_limit"]

MEMORY_SLACK = 1.25
"""Memory limit of a job as a multiple of its demand, which is an estimate."""

CONTEXT_BYTES = 512 * 2**20
"""Allowance for the CUDA context of a process, 300 to 500 MB, which a demand may leave out."""

_STEP_BYTES = 256 * 2**20
"""Unit of limits, so that jobs of similar size have the same limit and can use the same process."""


def can_share(device: Device) -> bool:
    """Return whether a device can have an MPS daemon: a whole NVIDIA GPU. MIG instances are shared without MPS."""
    return device.uuid.startswith("GPU-")


def memory_limit(demand: Demand) -> int:
    """Return the bytes that a job may come to use, from its demand."""
    return int(demand.memory * MEMORY_SLACK)


def job_memory_limit(demand: Demand | None, device: Device) -> int | None:
    """Return the bytes that a running job may come to use on a device, as its process may have a limit; None without
    one.
    """
    return memory_limit(demand) if demand is not None and can_share(device) else None


def pinned_limit(demand: Demand, device: Device) -> int:
    """Return the bytes of a GPU that the process of a job may use, including its CUDA context."""
    wanted = memory_limit(demand) + CONTEXT_BYTES
    return min(device.memory, math.ceil(wanted / _STEP_BYTES) * _STEP_BYTES)
