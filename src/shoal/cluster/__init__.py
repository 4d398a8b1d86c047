"""The machines of a study: discovery, health and sharing of their devices."""

from shoal.cluster.discover import Inventory, discover, take_inventory
from shoal.cluster.machine import Accelerator, Machine, ThisMachine
from shoal.cluster.monitor import Condition, DeviceProcess, Monitor
from shoal.cluster.nvml import Gpu, Listing, NvmlMonitor

__all__ = [
    "Accelerator",
    "Condition",
    "DeviceProcess",
    "Gpu",
    "Inventory",
    "Listing",
    "Machine",
    "Monitor",
    "NvmlMonitor",
    "ThisMachine",
    "discover",
    "take_inventory",
]
