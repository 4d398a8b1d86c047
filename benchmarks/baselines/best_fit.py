"""Best fit: the rival of worst fit."""

from typing import final

from shoal.plan.schedule.knapsack import DeviceOrder, JobOrder, Knapsack

__all__ = ["BestFit"]


@final
class BestFit(Knapsack):
    """Best fit: place the oldest job first, each on the device with room and the least remaining compute.

    It keeps devices empty for large jobs, while worst fit balances the load.
    """

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.BEST_FIT
