"""What a simulation shows an oversubscription tuner: how fast jobs run that share a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.backend.simulated_life import Life
from shoal.core.device import Cluster, Device
from shoal.schedule.oversubscription import OversubscriptionTuner

__all__ = ["Stay", "Watch"]

_ROUNDING = 1e-6
"""Seconds, and compute; what is less is due to rounding."""


@dataclass(eq=False)
class Stay:
    """The same jobs on a device for a while.

    Args:
        device: with the ratio that is in force.
        jobs: compute promised to each, as a fraction of the device's, and its speed as a fraction of that alone.
        epoch: seconds in which each of them runs an epoch at least; inf: one of them stands still.
        since: when all of them have been started, or when they were last looked at, in seconds.
    """

    device: Device
    jobs: tuple[tuple[float, float], ...]
    epoch: float
    since: float

    @property
    def due(self) -> float:
        """When to look at them again, in seconds."""
        return self.since + self.epoch


@final
class Watch:
    """Takes the observations that a live system can take: of each device, what its jobs ran at since the last one.

    A device is observed whenever all its jobs have run an epoch, for trials report at the end of each, and when its
    jobs change. The time in which one of them is still being started does not count. The tuner is not told of a device

    - while no job waits: it may have room left at any ratio;
    - that holds more than the ratio in force allows, because that has fallen and its jobs are left to end;
    - that holds a job with a share, or one of several devices: what they have was given them regardless of the ratio.

    Args:
        tuner: is told, and keeps the ratios.
    """

    def __init__(self, tuner: OversubscriptionTuner) -> None:
        self._tuner = tuner
        self._ratios = tuner.ratios  # in force
        self._stays: dict[str, Stay] = {}

    def begin(self, device: Device, lives: Sequence[Life], speeds: Sequence[float], now: float) -> Stay | None:
        """From now on these jobs are on a device, at these speeds; None: there is nothing to be learnt of them."""
        epoch = max(_epoch(life) for life in lives)
        if not (epoch and device.compute) or any(life.share is not None or len(life.devices) > 1 for life in lives):
            return None
        promised = [life.compute[device.name] / device.compute for life in lives]
        started = max(life.updated + life.overhead for life in lives)
        jobs = tuple(zip(promised, speeds, strict=True))
        stay = Stay(device, jobs, epoch, max(now, started))
        self._stays[device.name] = stay
        return stay

    def end(self, name: str, now: float, *, waiting: bool) -> None:
        """Other jobs are on a device from now on, or none; `waiting` says whether jobs wait for a device."""
        stay = self._stays.pop(name, None)
        if stay is not None and now > stay.since + _ROUNDING:
            self._tell(stay, waiting)

    def look(self, stay: Stay, now: float, *, waiting: bool) -> bool:
        """Observe a device, if that is due; whether its jobs are still the same, and have to be looked at again."""
        if self._stays.get(stay.device.name) is not stay:
            return False
        if now >= stay.due:
            self._tell(stay, waiting)
            stay.since = now
        return True

    def _tell(self, stay: Stay, waiting: bool) -> None:
        kind, ratio = stay.device.kind, stay.device.oversubscription
        fits = sum(promised for promised, _ in stay.jobs) <= ratio + _ROUNDING
        if waiting and fits and ratio == self._tuner.ratio(kind):
            self._tuner.observe(kind, stay.jobs)

    def retuned(self, cluster: Cluster, now: float) -> Cluster | None:
        """The cluster with the ratios that the tuner wants now; None if it has them already."""
        before, self._ratios = self._ratios, self._tuner.ratios
        if all(ratio == before.get(kind, 1.0) for kind, ratio in self._ratios.items()):
            return None
        tuned = self._tuner.apply(cluster)
        for _, device in tuned:
            stay = self._stays.get(device.name)
            if stay is not None and stay.device != device:
                stay.device, stay.since = device, max(now, stay.since)
        return tuned


def _epoch(life: Life) -> float:
    """Seconds of an epoch at its present speed; of a job without a budget, of all of it."""
    job = life.job
    return life.pace if job.budget is None else life.pace / max(1, job.budget - job.epoch)
