"""Which devices MPS can share, and how much memory of one the process of a job may take there."""

import math

from shoal.core.demand import Demand
from shoal.core.device import Device

__all__ = ["CONTEXT_BYTES", "MEMORY_SLACK", "can_share", "growth_limit", "limit_of", "pinned_limit"]

MEMORY_SLACK = 1.25
"""How many times the memory it was promised a job may take before the limit stops it: a promise is an estimate."""

CONTEXT_BYTES = 512 * 2**20
"""For the CUDA context of its process, 300 to 500 MB, which a promise may leave out."""

_STEP_BYTES = 256 * 2**20
"""Limits are multiples of this, so that jobs of about the same size have the same one and can share a process."""


def can_share(device: Device) -> bool:
    """Whether a device can have a daemon: a whole GPU of NVIDIA's. Its MIG instances are shared without MPS here."""
    return device.uuid.startswith("GPU-")


def growth_limit(demand: Demand) -> int:
    """The bytes that a job may come to need, by the estimates that it was promised memory by."""
    return int(demand.memory * MEMORY_SLACK)


def limit_of(demand: Demand | None, device: Device) -> int | None:
    """The bytes that a job may come to need on a device, as its process may have been started with a limit.

    Args:
        demand: what it was promised; None: nothing.
        device: where it runs.

    Returns:
        None where there is no limit.
    """
    return growth_limit(demand) if demand is not None and can_share(device) else None


def pinned_limit(demand: Demand, device: Device) -> int:
    """The bytes of a GPU that the process of a job may take, its CUDA context included."""
    wanted = growth_limit(demand) + CONTEXT_BYTES
    return min(device.memory, math.ceil(wanted / _STEP_BYTES) * _STEP_BYTES)
