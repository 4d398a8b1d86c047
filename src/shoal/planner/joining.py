"""Trials that join an array that is running, where that is cheaper than to wait for a device of their own."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from shoal.cluster.device import Device
from shoal.cost.demand import Profile
from shoal.cost.estimate import best_size, fitting, fuse_seconds, seconds
from shoal.planner.job import Array, Job, Member, Purpose
from shoal.planner.partition import Profiles, worth_mixing

__all__ = ["Host", "hosts", "joined"]


@dataclass
class Host:
    """A running array that may take in others.

    Args:
        job: that trains it.
        array: its members as they are now.
        profile: of its key where it runs.
        memory: bytes that the job may use: what no other job on its device does.
    """

    job: str
    array: Array
    profile: Profile
    memory: int

    def room(self, at_most: int) -> int:
        """Members that memory and the most efficient size allow to join."""
        present = len(self.array.members)
        fits = fitting(self.profile, self.memory, present + at_most)
        return max(0, best_size(self.profile, fits) - present) if fits > present else 0

    def gain(self, members: Sequence[Member]) -> float:
        """Seconds of the device that are saved if members join instead of having it to themselves afterwards.

        It costs the array a new start, and a compiled step is compiled anew.
        """
        mine = [member.epochs for member in self.array.members]
        theirs = [member.epochs for member in members]
        if not worth_mixing(self.profile, len(mine), len(theirs)):
            return 0.0
        more = seconds(self.profile, [*mine, *theirs]) - seconds(self.profile, mine)
        start = fuse_seconds(self.profile, len(mine) + len(theirs)) - fuse_seconds(self.profile, len(theirs))
        compiled = self.profile.compile_seconds if max(self.profile.compiled_gain.values(), default=1) > 1 else 0.0
        return seconds(self.profile, theirs) - more - start - compiled

    def take(self, members: Sequence[Member]) -> None:
        """Let them in."""
        self.array = Array(self.array.key, (*self.array.members, *members), self.array.profile)


def hosts(
    running: Sequence[tuple[Job, Device]],
    held: Mapping[str, int],
    profiles: Profiles,
    alone: AbstractSet[int],
) -> list[Host]:
    """The running arrays that may take in others: those with members left, of which none failed in company.

    Args:
        running: training jobs with the members that they have now, and other jobs.
        held: id of a job -> bytes that it takes on its device.
        profiles: what is known of a key on a kind of device.
        alone: numbers of trials that failed in company.
    """
    found: list[Host] = []
    for job, device in running:
        if job.purpose is not Purpose.TRAIN or not job.members or any(m.trial.number in alone for m in job.members):
            continue
        (array,) = job.arrays
        profile = profiles(array.key, device.kind)
        if profile is not None:
            others = sum(held[other.id] for other, where in running if where.name == device.name and other is not job)
            found.append(Host(job.id, array, profile, device.memory - others))
    return found


def joined(arrays: Sequence[Array], hosts: Sequence[Host]) -> dict[str, tuple[Member, ...]]:
    """Let members of arrays that found no device join where that saves most; the hosts are changed.

    Args:
        arrays: those that wait, in the order in which they are to be served.
        hosts: the running arrays.

    Returns:
        Id of a job -> who joins it.
    """
    joins: dict[str, tuple[Member, ...]] = {}
    for array in arrays:
        left = array.members
        while left:
            offers = [
                (host.gain(left[:room]), room, host)
                for host in hosts
                if host.array.key == array.key and (room := host.room(len(left)))
            ]
            gain, room, host = max(offers, key=lambda offer: offer[0], default=(0.0, 0, None))
            if host is None or gain <= 0:
                break
            host.take(left[:room])
            joins[host.job] = (*joins.get(host.job, ()), *left[:room])
            left = left[room:]
    return joins
