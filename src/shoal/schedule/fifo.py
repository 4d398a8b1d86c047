"""First in, first out: one job a device."""

from typing import final

from shoal.schedule.bin_packing import DeviceOrder, JobOrder
from shoal.schedule.knapsack import Knapsack

__all__ = ["Fifo"]


@final
class Fifo(Knapsack):
    """Each job that waits or is suspended, oldest first, gets the first idle device that it fits on.

    This is the baseline of HyperSack: devices are not shared. A job that fits no idle device does not hold up those
    behind it: trials do not depend on each other, and an idle device helps none of them.
    """

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True
