"""Audit of a journal: moments at which a study reserved more than its devices have, and jobs on several devices."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

from shoal.core.device import Cluster
from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.rows import Reservation
from shoal.journal.view import JournalView

__all__ = ["Overcommitment", "faults_of_teams", "overcommitments"]

_SLACK = 1e-9
"""Relative excess over a limit that is attributed to floating-point rounding."""

_Change = tuple[float, str, float]
"""Time, job id, and the amount reserved from then on."""


@dataclass(frozen=True)
class Overcommitment:
    """A moment at which reservations exceeded the capacity.

    Args:
        place: Name of the device or node.
        what: "bytes" of a device, or "cores" of a node.
        time: Begin of the excess, in seconds since 1970.
        reserved: Sum of the reservations.
        limit: Capacity of the device or node.
        jobs: Ids of the jobs with reservations there.
    """

    place: str
    what: Literal["bytes", "cores"]
    time: float
    reserved: float
    limit: float
    jobs: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.place}: {self.reserved:g} of {self.limit:g} {self.what} were reserved at {self.time:.3f} to "
            f"{', '.join(self.jobs)}"
        )


def overcommitments(journal: JournalView, cluster: Cluster) -> list[Overcommitment]:
    """Find each time at which jobs reserved more memory than their device has, or more cores than their node has.

    Unknown demands count as 0. Each result is the time of a change that increased the excess.

    Args:
        journal: Journal of the study, which may be running.
        cluster: All devices that the study ever had.

    Raises:
        JournalError: a job ran on another device.
    """
    nodes = {device.name: node for node, device in cluster}
    memory: dict[str, list[_Change]] = {device.name: [] for _, device in cluster}
    cores: dict[str, list[_Change]] = {node.name: [] for node in cluster.nodes}
    reservations = journal.reservations()
    for job in journal.jobs():
        if job.device not in nodes:
            raise JournalError(f"{job.id} ran on {job.device}, which is not among the devices: {', '.join(nodes)}")
        given = reservations[job.id]
        ends = [] if job.ended is None else [Reservation(job.ended)]
        for reservation in (*given, *ends):
            memory[job.device].append((reservation.time, job.id, reservation.memory or 0))
            cores[nodes[job.device].name].append((reservation.time, job.id, reservation.cores or 0.0))
    found: list[Overcommitment] = []
    for _, device in cluster:
        found += _swept(device.name, "bytes", memory[device.name], device.memory)
    for node in cluster.nodes:
        found += _swept(node.name, "cores", cores[node.name], node.cores)
    return sorted(found, key=lambda violation: violation.time)


def _swept(
    place: str, what: Literal["bytes", "cores"], changes: Iterable[_Change], limit: float
) -> Iterable[Overcommitment]:
    """Yield each increase of the excess; changes at the same time count as one."""
    held: dict[str, float] = {}
    before = 0.0
    for time, at_once in groupby(sorted(changes, key=itemgetter(0)), key=itemgetter(0)):
        held |= {job: amount for _, job, amount in at_once}
        held = {job: amount for job, amount in held.items() if amount}
        total = sum(held.values())
        if total > limit * (1 + _SLACK) and total > before:
            yield Overcommitment(place, what, time, total, limit, tuple(held))
        before = total


def faults_of_teams(journal: JournalView) -> list[str]:
    """Return a text for each helper that never ended, or that shared a device.

    A helper assists a training job on another device, and has its own device to itself.

    Args:
        journal: Journal of a study that has ended.
    """
    jobs = {job.id: job for job in journal.jobs()}
    faults: list[str] = []
    for helper in (job for job in jobs.values() if job.purpose is Purpose.ASSIST):
        leader = jobs.get(helper.assists)
        if leader is None or leader.purpose is not Purpose.TRAIN or leader.device == helper.device:
            faults.append(
                f"{helper.id} on {helper.device} assists {helper.assists!r}, no training job of another device"
            )
        if helper.ended is None:
            faults.append(f"{helper.id} on {helper.device} has not ended")
            continue
        faults += (
            f"{helper.id} and {other.id} were on {helper.device} at the same time"
            for other in jobs.values()
            if other.device == helper.device
            and other is not helper
            and other.started < helper.ended
            and (other.ended is None or helper.started < other.ended)
        )
    return faults
