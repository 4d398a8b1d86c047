"""The convergence policy: time-sharing, the fastest convergence first (Hermes)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import final

from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.core.event import TurnStats
from shoal.core.resources import Ledger
from shoal.plan.schedule.base import JobState, JobView, Refusal
from shoal.plan.schedule.refusals import fits_empty_device, refusal
from shoal.plan.schedule.time_sharing import TimeSharing, middle_loss

__all__ = ["Convergence", "convergence"]


@final
@dataclass(frozen=True)
class Convergence(TimeSharing):
    """On each device, the job whose loss fell fastest in its last quantum runs (Hermes, Algorithms 1 to 3).

    Global placement: the oldest job first, each into the queue of the device with the fewest jobs, if it has fewer than
    G_thres; the rest waits. A job stays in its queue, since its state is on that device, unless the device is lost.
    Node scheduling: see `TimeSharing`, with C_j(i) as the priority.

    The slope favours trials that start badly: on real curves this policy is often slower than `fifo`. It is kept as
    published; see `ExpectedFinish`.

    The turns of a job become longer, since its loss falls ever more slowly (section 3.3: with milestones; section
    4.1.2: with preemptions). Hermes says neither how much longer nor which milestones; these defaults are ours.

    Args:
        quantum: Seconds of the first turn.
        jobs_per_device: G_thres.
        per_second: Whether C_j is per second instead of per iteration, for jobs with different iteration times.
        milestones: Rising fractions of the size of the first loss. For each one by which the loss has fallen, the turns
            of the job are one quantum longer. A loss that began at 0 reaches none.
        growth: Part of the quantum by which the turns of a job are longer for each of its preemptions.

    Raises:
        PolicyError: A setting is out of range.
    """

    jobs_per_device: int = 4
    per_second: bool = False
    milestones: tuple[float, ...] = (0.25, 0.5, 0.75)
    growth: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.jobs_per_device, int) or self.jobs_per_device < 1:
            raise PolicyError(f"`jobs_per_device` must be an integer of at least 1, got {self.jobs_per_device!r}")
        rising = all(a < b for a, b in zip((0.0, *self.milestones), (*self.milestones, 1.0), strict=True))
        if self.milestones and not rising:
            raise PolicyError(f"`milestones` must rise and lie between 0 and 1, got {self.milestones!r}")
        if not (self.growth >= 0 and isfinite(self.growth)):
            raise PolicyError(f"`growth` must be at least 0 and finite, got {self.growth!r}")

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Return C_j of the newest quantum."""
        return [convergence(job.quanta, per_second=self.per_second) for job in jobs]

    def turn(self, job: JobView) -> float:
        """Return one quantum, plus one for each milestone that the loss has reached, plus the growth."""
        losses = [loss for quantum in job.quanta if isfinite(loss := middle_loss(quantum))]
        fall = losses[0] - min(losses) if losses else 0.0
        reached = sum(fall >= part * abs(losses[0]) > 0 for part in self.milestones) if losses else 0
        return self.quantum * (1 + reached + self.growth * job.preemptions)

    def homes(self, jobs: Sequence[JobView], cluster: Cluster) -> Mapping[str, str]:
        """Return the device of the queue of each job (Algorithms 1 and 2; the first device wins a tie)."""
        healthy = {device.name: (node, device) for node, device in cluster if device.healthy}
        count = dict.fromkeys(healthy, 0)
        homes: dict[str, str] = {}
        without_home: list[JobView] = []
        for job in jobs:
            for name in job.devices:
                if name in count:
                    count[name] += 1
            if job.state is JobState.RUNNING:
                continue
            home = job.home
            if job.state is JobState.SUSPENDED and home in healthy and fits_empty_device(*healthy[home], job):
                homes[job.id] = home
                count[home] += 1
            else:
                without_home.append(job)
        for job in without_home:
            allowed = [
                name
                for name in healthy
                if count[name] < self.jobs_per_device and fits_empty_device(*healthy[name], job)
            ]
            if allowed:
                homes[job.id] = min(allowed, key=count.__getitem__)
                count[homes[job.id]] += 1
        return homes

    def refusal(self, job: JobView, home: str | None, ledger: Ledger) -> Refusal:
        """Return the reason: the job waits for its turn or for a place in a queue, or cannot run."""
        if home is not None or job.devices:
            return Refusal(job.id, f"waits for its turn on {home or job.devices[0]}")
        if any(fits_empty_device(capacity.node, capacity.device, job) for capacity in ledger.capacities):
            return Refusal(job.id, f"waits for a device with fewer than {self.jobs_per_device} jobs")
        return refusal(job, ledger)


def convergence(quanta: Sequence[TurnStats], *, per_second: bool = False) -> float:
    """Return C_j(i) of the newest quantum i (Hermes, section 3.3).

    C_j(0) = (max L_j(0) - min L_j(0)) / |L_j(0)|, and C_j(i) = (loss_j(i-1) - loss_j(i)) / |L_j(i)| after that, with
    loss_j(i) = (max L_j(i) + min L_j(i)) / 2. Quanta without a finite loss are left out; if the newest is one, the
    result is NaN.
    """
    *earlier, newest = quanta
    if not isfinite(newest.highest):
        return nan
    before = next((middle_loss(quantum) for quantum in reversed(earlier) if isfinite(quantum.highest)), None)
    loss_fall = newest.highest - newest.lowest if before is None else before - middle_loss(newest)
    return loss_fall / (newest.seconds if per_second else newest.steps)
