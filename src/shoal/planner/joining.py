"""Trials that join an array that is running, where that is cheaper than to wait for a device of their own."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from shoal.cluster.mps_limits import limit_of
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.cost.estimate import best_size, fitting, fuse_seconds, memory, seconds
from shoal.planner.partition import Profiles, worth_mixing
from shoal.planner.room import Room

__all__ = ["Host", "hosts", "joined"]


@dataclass
class Host:
    """A running array that may take in others.

    Args:
        job: that trains it.
        array: its members as they are now, at least one.
        profile: of its key where it runs.
        device: name of its device.
        free: what no job takes; of all hosts together.
        limit: bytes that its job leaves it, whatever is free; None: no such limit.
    """

    job: str
    array: Array
    profile: Profile
    device: str
    free: Room
    limit: int | None = None

    def room(self, at_most: int) -> int:
        """Members that memory and the most efficient size allow to join."""
        present = len(self.array.members)
        available = memory(self.profile, present) + self.free.memory(self.device)
        if self.limit is not None:
            available = min(available, self.limit)
        fits = fitting(self.profile, available, present + at_most)
        return max(0, best_size(self.profile, fits) - present) if fits > present else 0

    def gain(self, members: Sequence[Member]) -> float:
        """Seconds of the device that are saved if members join instead of having it to themselves afterwards.

        It costs the array a new start, its batches, and a compiled step, which is compiled anew.
        """
        mine = self.array.epochs
        theirs = [member.epochs for member in members]
        if self.profile.mixing is None or not worth_mixing(self.profile, len(mine), len(theirs)):
            return 0.0
        shared = min(self.left, max(theirs))  # epochs that they are together
        mixed = seconds(self.profile, [min(epochs, shared) for epochs in (*mine, *theirs)])
        together = seconds(self.profile, [*mine, *theirs]) + (self.profile.mixing - 1) * mixed
        start = fuse_seconds(self.profile, len(mine) + len(theirs))
        compiled = self.profile.compile_seconds if max(self.profile.compiled_gain.values(), default=1) > 1 else 0.0
        return seconds(self.profile, mine) + seconds(self.profile, theirs) - together - start - compiled

    @property
    def left(self) -> int:
        """Epochs until its last member is done."""
        return max(self.array.epochs)

    def take(self, members: Sequence[Member]) -> None:
        """Let them in."""
        self.free.take(self.device, len(members) * self.profile.member_memory)
        self.array = Array(self.array.key, (*self.array.members, *members), self.array.profile)


def hosts(
    running: Sequence[tuple[Job, Device]],
    free: Room,
    profiles: Profiles,
    alone: AbstractSet[int],
) -> list[Host]:
    """The running arrays that may take in others: those with members left, of which none failed in company.

    Args:
        running: all jobs that hold devices, those that train with the members that they have now.
        free: what no job takes.
        profiles: what is known of a key on a kind of device.
        alone: numbers of trials that failed in company.
    """
    found: list[Host] = []
    for job, device in running:
        if (
            job.purpose is not Purpose.TRAIN
            or not any(array.members for array in job.arrays)
            or (alone and any(m.trial.number in alone for m in job.members))
        ):
            continue
        known = [(array, profiles(array.key, device.kind)) for array in job.arrays]
        needs = [memory(profile, len(array.members)) if profile is not None else 0 for array, profile in known]
        limit = limit_of(job.demand, device)
        for (array, profile), need in zip(known, needs, strict=True):
            if profile is not None:
                rest = None if limit is None else limit - (sum(needs) - need)
                found.append(Host(job.id, array, profile, device.name, free, rest))
    return found


def joined(arrays: Sequence[Array], hosts: Sequence[Host]) -> dict[str, tuple[Array, ...]]:
    """Let members of arrays that found no device join where that saves most; the hosts are changed.

    While an array waits that no host can take in, nobody joins who would keep a device from it for longer.

    Args:
        arrays: those that wait, in the order in which they are to be served.
        hosts: the running arrays.

    Returns:
        Id of a job -> who joins it, by key.
    """
    joins: dict[str, tuple[Array, ...]] = {}
    by_key: dict[FusionKey, list[Host]] = {}
    for host in hosts:
        by_key.setdefault(host.array.key, []).append(host)
    others_wait = any(array.key not in by_key for array in arrays)
    barren: set[tuple[FusionKey, tuple[int, ...]]] = set()  # of members that train so long nobody joins any more
    for array in arrays:
        left = sorted(array.members, key=lambda member: -member.epochs)  # who takes longest is to begin first
        while left:
            alike = (array.key, tuple(member.epochs for member in left))
            if alike in barren:
                break
            offers: list[tuple[float, list[Member], Host]] = [
                (host.gain(some), some, host)
                for host in by_key.get(array.key, ())
                if (room := host.room(len(left)))
                and (some := [x for x in left if x.epochs <= host.left][:room] if others_wait else left[:room])
            ]
            if not offers or (best := max(offers, key=lambda offer: offer[0]))[0] <= 0:
                barren.add(alike)
                break
            _, some, host = best
            host.take(some)
            barren.clear()
            joins[host.job] = (*joins.get(host.job, ()), Array(array.key, tuple(some), host.profile))
            left = [x for x in left if x not in some]
    return joins
