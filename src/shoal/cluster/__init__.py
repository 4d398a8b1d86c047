"""The machines of a study: discovery, health and sharing of their devices."""

from shoal.cluster.discover import Inventory, discover, take_inventory
from shoal.cluster.machine import Accelerator, Machine, ThisMachine
from shoal.cluster.monitor import Condition, Holder, Monitor
from shoal.cluster.nvml import Gpu, Listing
from shoal.cluster.nvml_monitor import NvmlMonitor
from shoal.core.device import Cluster, Device, Node

__all__ = [
    "Accelerator",
    "Cluster",
    "Condition",
    "Device",
    "Gpu",
    "Holder",
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
