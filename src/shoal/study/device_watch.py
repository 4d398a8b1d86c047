"""When the devices of a running study are looked at."""

import os
from collections.abc import Callable

from shoal.cluster.monitor import Monitor
from shoal.core.device import Cluster
from shoal.study.devices import DevicesSeen
from shoal.study.fleet import Fleet

__all__ = ["DeviceWatch"]

MONITOR_SECONDS = 3.0
"""Between two looks at the devices."""


class DeviceWatch:
    """Has a monitor look at the devices every few seconds, and at once where there are others than before.

    Args:
        fleet: the devices.
        make_monitor: makes what looks at them; None: nobody does.
        clock: seconds, never going back.
    """

    def __init__(
        self, fleet: Fleet, make_monitor: Callable[[Cluster], Monitor] | None, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._given = fleet.given
        self._monitor = make_monitor(self._given) if make_monitor is not None else None
        self._clock = clock
        self._due = clock()

    def look(self, *, at_once: bool = False) -> DevicesSeen | None:
        """What is seen; None where it is not time to look."""
        if self._monitor is None:
            return None
        if self._given is not self._fleet.given:
            self._given, at_once = self._fleet.given, True
            self._monitor.watch(self._given)
        if not at_once and self._clock() < self._due:
            return None
        self._due = self._clock() + MONITOR_SECONDS
        return DevicesSeen(self._monitor.look({os.getpid()}))
