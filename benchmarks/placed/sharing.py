"""What studies show of jobs that share a slot: how many did at a time, what that cost, and what kept others out."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from shoal.core.demand import Profile
from shoal.core.device import Cluster
from shoal.core.job import Purpose
from shoal.core.rows import JobRow
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.history import records

__all__ = ["busy_seconds", "demand_text", "profiles", "side_by_side", "why_alone"]


def side_by_side(jobs: Sequence[JobRow]) -> int:
    """Return the largest number of trainings that a device held at a time; 0 without any."""
    return max((held for held, _ in _stretches(jobs)), default=0)


def busy_seconds(jobs: Sequence[JobRow]) -> float:
    """Return the seconds of all devices in which they held a training."""
    return sum(seconds for held, seconds in _stretches(jobs) if held)


def _stretches(jobs: Sequence[JobRow]) -> Iterator[tuple[int, float]]:
    """Yield how many trainings a device held, and for how many seconds, between any two changes; of jobs that have
    ended.
    """
    changes: dict[str, list[tuple[float, int]]] = {}
    for job in jobs:
        if job.purpose is Purpose.TRAIN and job.ended is not None:
            changes.setdefault(job.device, []).extend([(job.started, 1), (job.ended, -1)])
    for of_device in changes.values():
        held = 0
        for (at, change), (until, _) in pairwise(sorted(of_device)):  # at the same time, ends come first
            held += change
            yield held, until - at


def profiles(history: Path, parameter: str = "") -> dict[str, Profile]:
    """Return the profiles of a job history by name.

    Args:
        history: File of the history.
        parameter: Parameter of the trials whose value is the name; without one, the name is the structure, which is
            "opaque" for a program.
    """
    found: dict[str, Profile] = {}
    for record in records(history):
        if record.profile is not None:
            values = [str(common[parameter]) for common in record.tasks.values() if parameter in common]
            found[values[0] if values else record.structure.split()[0]] = record.profile
    return found


def demand_text(profile: Profile) -> str:
    """Return the demand of a job, and its times beside others, in words."""
    beside = ", ".join(f"{factor:.2f} times as long with {jobs}" for jobs, factor in sorted(profile.crowding.items()))
    return (
        f"compute {Cost(profile).compute():.2f} of a slot, {profile.cores:.2f} cores; epochs on a shared slot: "
        f"{beside or 'not measured'}"
    )


def why_alone(profile: Profile, cluster: Cluster) -> str:
    """Return the reason for which no other job fits while each slot has one of these; "" if one would fit."""
    cores = min(profile.cores, *(device.cores for _, device in cluster))
    slots, node = len(list(cluster)), cluster.nodes[0].cores
    if (slots + 1) * cores <= node:
        return ""
    reason = f"{slots} jobs of {cores:.2f} cores each leave no room for another one on {node:g} cores, a hard limit"
    if profile.sample_sharing == "resident":
        return reason
    return f"{reason}; the cores of a task are those of its steps, without the wait for its samples"
