"""Best fit: full devices are filled up first."""

from typing import final

from shoal.schedule.bin_packing import DeviceOrder, JobOrder
from shoal.schedule.knapsack import Knapsack

__all__ = ["BestFit"]


@final
class BestFit(Knapsack):
    """The oldest job first, each on the fitting device with the least remaining compute.

    It keeps devices empty for jobs that ask for much, where worst fit evens the load out.
    """

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.BEST_FIT
