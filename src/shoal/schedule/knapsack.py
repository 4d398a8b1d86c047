"""Knapsack policies: greedy packing of jobs onto devices (HyperSack, section 3), and one job per device in order."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import ClassVar, final

from shoal.core.device import Cluster
from shoal.schedule.base import Changes, JobState, JobView, Plan, Policy, Resume, Session, Start
from shoal.schedule.bin_packing import BinPacking, Charge, DeviceOrder, JobOrder, Numbered, Placed
from shoal.schedule.ledger import Refusals

__all__ = ["FF", "FFD", "WF", "WFD", "BestFit", "Fifo", "Knapsack", "ShortestFirst"]


class Knapsack(Policy):
    """Places jobs one after another on a device with room; a subclass sets the order of jobs and devices.

    Compute may be committed up to the capacity of a device; its memory and the cores of its node are hard limits. A job
    that fits nowhere waits, and does not block later jobs. Running jobs stay where they are; a suspended job
    is placed like a waiting one.
    """

    jobs: ClassVar[JobOrder]
    """Order of jobs: by expected seconds on the fastest kind of device, or by age; the older job wins a tie."""
    devices: ClassVar[DeviceOrder]
    """Order of devices: by remaining compute, or as in the cluster; the first device wins a tie."""
    exclusive: ClassVar[bool] = False
    """Whether a device holds one job at a time."""

    @final
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        packing = self.bin_packing(cluster)
        packing.load(zip(count(0, -1), jobs, strict=False))
        return self.make_plan(packing.decide(), packing.waiting, lambda: jobs, cluster)

    @final
    def session(self, cluster: Cluster) -> Session:
        """Begin with a cluster and no jobs; a decision after one event costs far less than `plan`."""
        return _KnapsackSession(self, cluster)

    def bin_packing(self, cluster: Cluster) -> BinPacking:
        """Return an empty cluster, with the job and device order of this policy."""
        return BinPacking(cluster, self.jobs, self.devices, exclusive=self.exclusive)

    def make_plan(
        self, placed: Iterable[Placed], waiting: int, jobs: Callable[[], Sequence[JobView]], cluster: Cluster
    ) -> Plan:
        """Return the plan that starts or resumes the placed jobs.

        Args:
            placed: Placed jobs in order.
            waiting: Number of jobs that are not placed.
            jobs: Source of all jobs, oldest first; called on access to the refusals.
            cluster: The current cluster.
        """
        suspended = JobState.SUSPENDED
        actions = tuple(
            [
                (Resume if job.state is suspended else Start)(job.id, device_bin.devices)
                for (_, job), device_bin, _ in placed
            ]
        )
        return Plan(actions, Refusals(waiting, jobs, actions, cluster, exclusive=self.exclusive))


@final
class FF(Knapsack):
    """First fit: place the oldest job first, each on the first device with room."""

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.FIRST_FIT


@final
class FFD(Knapsack):
    """First fit decreasing: place the longest job first, each on the first device with room."""

    jobs = JobOrder.LONGEST
    devices = DeviceOrder.FIRST_FIT


@final
class WF(Knapsack):
    """Worst fit: place the oldest job first, each on the device with the most remaining compute."""

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.WORST_FIT


@final
class WFD(Knapsack):
    """Worst fit decreasing: place the longest job first, each on the device with the most remaining compute."""

    jobs = JobOrder.LONGEST
    devices = DeviceOrder.WORST_FIT


@final
class Fifo(Knapsack):
    """First in, first out: place the oldest job first, each alone on the first idle device with room.

    This is the baseline of HyperSack, without sharing. A job that fits no idle device does not block later jobs,
    since trials do not depend on each other.
    """

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True


@final
class ShortestFirst(Knapsack):
    """Place the shortest job first, each alone on the first idle device with room.

    On one device without arrivals this gives the least mean completion time (W. E. Smith, 1956).
    """

    jobs = JobOrder.SHORTEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True


@final
class BestFit(Knapsack):
    """Best fit: place the oldest job first, each on the device with room and the least remaining compute.

    It keeps devices empty for large jobs, while worst fit balances the load.
    """

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.BEST_FIT


class _KnapsackSession(Session):
    """Session that keeps the remaining resources between decisions.

    A plan charges its jobs at once. If the next changes show a job running as planned, the charge stays; else it is
    undone.
    """

    def __init__(self, policy: Knapsack, cluster: Cluster) -> None:
        self._policy = policy
        self._cluster = cluster
        self._packing = policy.bin_packing(cluster)
        self._numbers = count(0, -1)
        self._jobs: dict[str, Numbered] = {}
        self._held: dict[str, tuple[Charge, ...]] = {}
        self._placed: dict[str, Placed] = {}

    def plan(self, changes: Changes, now: float) -> Plan:
        if changes.cluster is not None or not self._jobs:
            self._rebuild(changes)
        else:
            self._update(changes)
        placed = self._packing.decide()
        self._packing.settle()
        self._placed = {job[0][1].id: job for job in placed}
        return self._policy.make_plan(placed, self._packing.waiting, self._views, self._cluster)

    def _views(self) -> list[JobView]:
        return [job for _, job in self._jobs.values()]

    def _rebuild(self, changes: Changes) -> None:
        """Charge all jobs to an empty cluster."""
        for job in changes.jobs:
            self._number(job)
        for name in changes.ended:
            del self._jobs[name]
        self._cluster = changes.cluster or self._cluster
        self._packing = self._policy.bin_packing(self._cluster)
        self._packing.load(self._jobs.values())
        self._placed = {}
        self._held = {job.id: self._packing.charges(job) for _, job in self._jobs.values() if job.devices}

    def _update(self, changes: Changes) -> None:
        for job in changes.jobs:
            self._update_job(job)
        for name in changes.ended:
            self._release(name)
            del self._jobs[name]
        for placed in self._placed.values():
            self._packing.free(self._packing.charge(placed))
            self._packing.join(placed[0])

    def _update_job(self, job: JobView) -> None:
        charges = self._packing.charges(job)
        placed = self._placed.get(job.id)
        if placed is not None and charges == (self._packing.charge(placed),):
            del self._placed[job.id]
            self._number(job)
        else:
            if job.id in self._jobs:
                self._release(job.id)
            numbered = self._number(job)
            for charge in charges:
                self._packing.take(charge)
            if job.state is not JobState.RUNNING:
                self._packing.join(numbered)
        if charges:
            self._held[job.id] = charges

    def _number(self, job: JobView) -> Numbered:
        """Store the new view of a job under its number."""
        known = self._jobs.get(job.id)
        numbered = self._jobs[job.id] = (next(self._numbers) if known is None else known[0], job)
        return numbered

    def _release(self, name: str) -> None:
        """Free the resources of a running or placed job, or remove a waiting job from its queue."""
        numbered = self._jobs[name]
        if (placed := self._placed.pop(name, None)) is not None:
            self._packing.free(self._packing.charge(placed))
        elif numbered[1].state is not JobState.RUNNING:
            self._packing.leave(numbered)
        for charge in self._held.pop(name, ()):
            self._packing.free(charge)
