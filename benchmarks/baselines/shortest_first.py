"""One job a device, the shortest first."""

from typing import final

from shoal.plan.schedule.knapsack import DeviceOrder, JobOrder, Knapsack

__all__ = ["ShortestFirst"]


@final
class ShortestFirst(Knapsack):
    """Place the shortest job first, each alone on the first idle device with room.

    On one device without arrivals this gives the least mean completion time (W. E. Smith, 1956).
    """

    jobs = JobOrder.SHORTEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True
