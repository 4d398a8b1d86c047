"""How fast jobs run that share a device, as far as their reports tell."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from shoal.cluster.device import Cluster, Device
from shoal.cost.estimate import job_demand
from shoal.planner.event import Reported
from shoal.planner.job import Job
from shoal.schedule.oversubscription import OversubscriptionTuner

__all__ = ["Speeds"]

_ROUNDING = 1e-6
"""Compute; what is less is due to rounding."""


@dataclass
class _Tenant:
    """A job on a device.

    Args:
        job: which.
        settled: whether it has been through its first epoch, in which it is started and may be compiled.
        seen: compute promised to it, and its speed as a fraction of that alone, in its newest epoch that counts.
    """

    job: Job
    settled: bool = False
    seen: tuple[float, float] | None = None


@dataclass
class _Company:
    """The jobs on a device.

    Args:
        kind: of the device.
        since: an epoch counts if it began at that time or later, in seconds.
        tenants: job -> where it stands.
    """

    kind: str
    since: float
    tenants: dict[str, _Tenant] = field(default_factory=dict)

    def begin_anew(self, now: float) -> None:
        self.since = now
        for tenant in self.tenants.values():
            tenant.seen = None


@final
class Speeds:
    """Takes from reports what an oversubscription tuner wants to know of jobs that share a device.

    A device is observed when each of its jobs has had an epoch that counts: one that began after all of them had been
    through their first, and under the ratio that is in force. Its speed is the seconds that its profile expects of it
    alone by those that it took. As in a simulation, the tuner is not told of a device while no trial waits, or while it
    holds more than the ratio allows because that has fallen.

    Args:
        tuner: is told, and keeps the ratios; jobs on kinds of devices that it leaves alone are not looked at.
    """

    def __init__(self, tuner: OversubscriptionTuner) -> None:
        self._tuner = tuner
        self._companies: dict[str, _Company] = {}
        self._place: dict[str, str] = {}

    def cluster(self, cluster: Cluster) -> Cluster:
        """With the ratios to use now."""
        return self._tuner.apply(cluster)

    def begin(self, job: Job, device: Device, now: float) -> None:
        """A job is on a device from now (seconds) on."""
        if not self._tuner.tunes(device.kind):
            return
        company = self._companies.setdefault(device.name, _Company(device.kind, now))
        company.begin_anew(now)
        company.tenants[job.id] = _Tenant(job)
        self._place[job.id] = device.name

    def end(self, job: str, now: float) -> None:
        """A job has left its device."""
        if (name := self._place.pop(job, None)) is not None:
            company = self._companies[name]
            del company.tenants[job]
            company.begin_anew(now)

    def epoch(self, event: Reported, now: float, has_waiting: Callable[[], bool]) -> None:
        """Members of a job have finished an epoch together.

        Args:
            event: their reports.
            now: seconds.
            has_waiting: whether trials wait for a device.
        """
        if (name := self._place.get(event.job)) is None:
            return
        company = self._companies[name]
        tenant = company.tenants[event.job]
        if not tenant.settled:
            tenant.settled = True
            company.begin_anew(now)
            return
        seconds = sum(report.seconds for report in event.reports)
        profile = tenant.job.arrays[0].profile
        if profile is None or not 0 < seconds <= now - company.since:
            return
        alone = job_demand(profile, len(event.reports), 1)
        tenant.seen = alone.compute, alone.seconds / seconds
        seen = [each.seen for each in company.tenants.values() if each.seen is not None]
        if len(seen) == len(company.tenants):
            self._tell(company, seen, now, has_waiting)

    def _tell(
        self, company: _Company, seen: list[tuple[float, float]], now: float, has_waiting: Callable[[], bool]
    ) -> None:
        ratio = self._tuner.ratio(company.kind)
        for tenant in company.tenants.values():
            tenant.seen = None
        if sum(promised for promised, _ in seen) > ratio + _ROUNDING or not has_waiting():
            return
        self._tuner.observe(company.kind, seen)
        if self._tuner.ratio(company.kind) != ratio:
            for each in self._companies.values():
                if each.kind == company.kind:
                    each.begin_anew(now)
