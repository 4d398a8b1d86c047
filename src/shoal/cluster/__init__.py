"""The machines of a study: discovery, health and sharing of their devices."""

from shoal.cluster.discover import Inventory, discover, take_inventory
from shoal.cluster.machine import Accelerator, Machine, ThisMachine
from shoal.cluster.monitor import Condition, DeviceProcess, Monitor
from shoal.cluster.nvml import Gpu, Listing, NvmlMonitor
from shoal.core.device import Cluster, Device, Node

__all__ = [
    "Accelerator",
    "Cluster",
    "Condition",
    "Device",
    "DeviceProcess",
    "Gpu",
    "Inventory",
    "Listing",
    "Machine",
    "Monitor",
    "Node",
    "NvmlMonitor",
    "ThisMachine",
    "discover",
    "take_inventory",
]
