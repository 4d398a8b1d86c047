"""A job of the virtual back end, and its state between two events."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.job import Job
from shoal.plan.cost.cost import Cost

__all__ = ["Timeline", "VirtualArray", "VirtualJob"]

Timeline = Iterator[tuple[float, bool]]
"""Steps of a job: seconds until its next events, alone on its device, and whether other jobs slow it down meanwhile."""

_TOLERANCE = 1e-6
"""Largest difference of compute that counts as rounding."""


@dataclass(eq=False)
class VirtualArray:
    """An array in a job, with the finished epochs of each member."""

    key: FusionKey
    profile: Profile
    members: dict[int, Member] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class VirtualJob:
    """A job on a device; read-only for all but `Virtual`.

    Args:
        lanes: Its arrays, which take turns; the first one is next.
        last_checkpoint: Time of its last checkpoint, in seconds of the virtual clock.
        entry: Number of its valid entry in the heap; entries with other numbers are void.
        remaining: Seconds until its next events at `updated`, alone on its device.
        uses_compute: Whether other jobs on its device slow it down meanwhile.
        epoch_rest: Seconds of its epoch that remain after its next events.
        speed: Its speed as a fraction of that alone on one device.
        measured: Keys of its arrays, each with a number of devices that the study knows the time of.
    """

    job: Job
    device: Device
    lanes: deque[VirtualArray] = field(default_factory=deque)
    joining: list[Array] = field(default_factory=list)
    last_checkpoint: float = 0.0
    hangs: bool = False
    timeline: Timeline = field(default_factory=lambda: iter(()))
    entry: int = -1
    remaining: float = inf
    updated: float = 0.0
    uses_compute: bool = False
    epoch_rest: float = 0.0
    speed: float = 1.0
    team: frozenset[str] = frozenset()
    is_ready: bool = False
    measured: set[tuple[FusionKey, int]] = field(default_factory=set)

    @property
    def trials(self) -> set[int]:
        """Numbers of the trials in its arrays and of the joining ones."""
        joining = (member.trial.number for array in self.joining for member in array.members)
        return {number for lane in self.lanes for number in lane.members}.union(joining)

    def epochs(self, trials: Collection[int]) -> dict[int, int]:
        """The finished epochs by number, of the given trials in its arrays."""
        return {number: lane.epochs[number] for lane in self.lanes for number in lane.members.keys() & trials}

    def progress(self, now: float) -> dict[int, float]:
        """Return the finished part of the epoch for each member of the array in training; {} outside epochs."""
        lane = self.lanes[-1] if self.uses_compute and self.lanes else None
        epoch_seconds = (
            Cost(lane.profile).seconds([1] * len(lane.members)) if lane is not None and lane.members else 0.0
        )
        if lane is None or epoch_seconds <= 0:
            return {}
        remaining = self.remaining - (now - self.updated) * self.speed + self.epoch_rest
        return dict.fromkeys(lane.members, max(0.0, 1 - remaining / epoch_seconds))

    def team_gain(self, devices: int) -> float:
        """Return its speed on a number of devices as a multiple of that on one: the least of its arrays."""
        return min((1 / Cost(lane.profile).time_on(devices) for lane in self.lanes if lane.members), default=1.0)

    def new_team_times(self, lane: VirtualArray, devices: int) -> dict[int, float]:
        """Seconds of a step by number of devices, one and those of the job; {} without helpers or if asked before."""
        if devices == 1 or not lane.members or (lane.key, devices) in self.measured:
            return {}
        self.measured.add((lane.key, devices))
        step = lane.profile.step_seconds[min(lane.profile.step_seconds)]
        return {1: step, devices: step * Cost(lane.profile).time_on(devices)}

    @property
    def memory(self) -> int:
        """Bytes of the device that its arrays use in one process."""
        arrays = [lane for lane in self.lanes if lane.members]
        base = max((lane.profile.base_memory for lane in arrays), default=0)
        return base + sum(len(lane.members) * lane.profile.member_memory for lane in arrays)

    @property
    def compute_demand(self) -> float:
        """Compute that it needs: the maximum of its arrays, as they take turns."""
        known = ((array.profile, len(array.members)) for array in self.job.arrays if array.profile is not None)
        return max((Cost(profile).compute(members) for profile, members in known), default=1.0)

    @property
    def share(self) -> float | None:
        """Compute that the policy gave it; None if that is what it needs (see `JobView.share`)."""
        reserved = self.job.demand
        return (
            None if reserved is None or abs(reserved.compute - self.compute_demand) < _TOLERANCE else reserved.compute
        )
