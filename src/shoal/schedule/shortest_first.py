"""Shortest job first: one job a device."""

from typing import final

from shoal.schedule.bin_packing import DeviceOrder, JobOrder
from shoal.schedule.knapsack import Knapsack

__all__ = ["ShortestFirst"]


@final
class ShortestFirst(Knapsack):
    """The job of least expected seconds first, each on the first idle device that it fits on.

    On one device, without arrivals, this gives the least mean completion time (W. E. Smith, 1956).
    """

    jobs = JobOrder.SHORTEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True
