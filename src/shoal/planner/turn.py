"""What one turn of planning knows about keys and devices."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from shoal.cluster.device import Cluster, Device
from shoal.cost.demand import Demand
from shoal.cost.estimate import job_demand
from shoal.planner.job import Array, ArrayKey, Job, Member, Purpose
from shoal.planner.partition import Profiles
from shoal.schedule.action import JobState
from shoal.schedule.base import JobView

__all__ = ["Turn"]

PROFILE_MEMBERS = 16
"""Members of the array that a profile job measures, at most."""


class Turn:
    """Answers what may run, what must be measured first, and what a job takes.

    Args:
        profiles: what is known of a key on a kind of device.
        cluster: as it is.
        alone: numbers of trials that failed in company.
        unmeasurable: (key, kind) that cannot be measured.
    """

    def __init__(
        self,
        profiles: Profiles,
        cluster: Cluster,
        alone: AbstractSet[int],
        unmeasurable: AbstractSet[tuple[ArrayKey, str]],
    ) -> None:
        self.cluster = cluster
        self.devices = [device for _, device in cluster if device.healthy]
        self._profiles = profiles
        self._alone = alone
        self._unmeasurable = unmeasurable

    def samples(
        self, waiting: Sequence[tuple[Member, ArrayKey]], running: Sequence[tuple[Job, Device]]
    ) -> list[tuple[Array, Device]]:
        """An array to measure for every idle device on whose kind a waiting key is unknown, oldest key first."""
        members: dict[ArrayKey, list[Member]] = {}
        for member, key in waiting:
            if member.trial.number not in self._alone:
                members.setdefault(key, []).append(member)
        measuring = {(job.arrays[0].key, device.kind) for job, device in running if job.purpose is Purpose.PROFILE}
        held = {device.name for _, device in running}
        samples: list[tuple[Array, Device]] = []
        for device in self.devices:
            if device.name in held:
                continue
            unknown = (key for key in members if self._unknown(key, device) and (key, device.kind) not in measuring)
            oldest = next(unknown, None)
            if oldest is not None:
                start = members[oldest][0].start
                sample = [member for member in members[oldest] if member.start == start][:PROFILE_MEMBERS]
                samples.append((Array(oldest, tuple(sample)), device))
                measuring.add((oldest, device.kind))
        return samples

    def ready(self, member: Member, key: ArrayKey) -> bool:
        """Whether a training job may hold the member: its key is known somewhere, or never will be."""
        if not self.devices:
            return False
        known = any(self._profiles(key, device.kind) is not None for device in self.devices)
        return known or member.trial.number in self._alone or not any(self._unknown(key, d) for d in self.devices)

    def reason(self, key: ArrayKey, held: Sequence[tuple[Job, Device]]) -> str:
        """Why a member that is not ready waits."""
        if not self.devices:
            return "no healthy device"
        if any(job.purpose is Purpose.PROFILE and job.arrays[0].key == key for job, _ in held):
            return "its model is being measured"
        return "its model has to be measured first, for which no device is idle"

    def demands(self, array: Array) -> dict[str, Demand]:
        """Of an array that waits: by the kinds on which it was measured, or a whole device of any kind."""
        known = [device for device in self.devices if self._profiles(array.key, device.kind) is not None]
        return {device.kind: self._demand(array, device) for device in known or self.devices}

    def running_view(self, job: Job, device: Device, started: float, now: float) -> JobView:
        """A job on its device, where it stays until it ends; what it demands is what its members still have to do.

        A profile job takes all of the device, else company would distort what it measures.
        """
        if job.purpose is Purpose.PROFILE:
            demand = _whole(device)
        else:
            (array,) = job.arrays
            demand = self._demand(array, device)
        where = (device.name,)
        return JobView(
            job.id,
            {device.kind: demand},
            JobState.RUNNING,
            where,
            since=started,
            ran=now - started,
            preemptible=False,
            home=device.name,
        )

    def memory(self, job: Job, device: Device) -> int:
        """Bytes that a job takes on its device, as far as that is known."""
        return 0 if job.purpose is Purpose.PROFILE else sum(self._demand(array, device).memory for array in job.arrays)

    def _unknown(self, key: ArrayKey, device: Device) -> bool:
        """Whether the key can be measured on that kind and was not yet."""
        return self._profiles(key, device.kind) is None and (key, device.kind) not in self._unmeasurable

    def _demand(self, array: Array, device: Device) -> Demand:
        profile = self._profiles(array.key, device.kind)
        if profile is None:
            return _whole(device)
        return job_demand(profile, [member.epochs for member in array.members], cores=device.cores)


def _whole(device: Device) -> Demand:
    """All of a device's compute; memory, cores and seconds are unknown and said to be 0."""
    return Demand(compute=device.capacity, memory=0, cores=0.0, seconds=0.0)
