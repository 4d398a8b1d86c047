"""The machines a study may use: nodes, their devices, and how they are found."""

from shoal.cluster.device import Cluster, Device, Node
from shoal.cluster.discover import discover
from shoal.cluster.machine import Machine, ThisMachine
from shoal.cluster.nvml import Gpu

__all__ = ["Cluster", "Device", "Gpu", "Machine", "Node", "ThisMachine", "discover"]
