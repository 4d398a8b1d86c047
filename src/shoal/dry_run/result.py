"""The jobs that a search would make of some configurations, and what an epoch of them takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.array import Array
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.cost.estimate import memory, step_seconds

__all__ = ["PLANS", "DryRun", "Failed", "PlannedArray", "percent"]

PLANS = {
    "apart": "one after another",
    "packed": "packed, none fused",
    "fused": "fused, none packed",
    "chosen": "Shoal's choice",
}
"""What can be done with trials, and how a person reads it."""

WORTH = 0.05
"""Part of the time that sharing must save to be said to pay."""


@dataclass(frozen=True)
class PlannedArray:
    """An array of trials in a job of the plan.

    Args:
        array: the trials that are fused, perhaps one, with the profile of their structure.
        job: number of the job, from 1 on.
        packed_with: places in the plan of the other arrays of the job.
        seconds: of an epoch of the whole job, starting it included.
        apart: of an epoch of each trial of the array as a job of its own.
        decided: what becomes of it, and why.
    """

    array: Array
    job: int
    packed_with: tuple[int, ...]
    seconds: float
    apart: float
    decided: str

    @property
    def profile(self) -> Profile:
        """Of its structure."""
        assert self.array.profile is not None, "only what was measured is planned"
        return self.array.profile

    @property
    def members(self) -> int:
        """How many trials are one."""
        return len(self.array.members)

    @property
    def step_alone(self) -> float:
        """Seconds of a step of one trial by itself."""
        return step_seconds(self.profile, 1)

    @property
    def step_fused(self) -> float:
        """Seconds of a step of all at once, for each of them."""
        return step_seconds(self.profile, self.members) / self.members

    @property
    def gain(self) -> float:
        """How many times as fast a trial steps among the others."""
        return self.step_alone / self.step_fused

    @property
    def memory(self) -> int:
        """Bytes at the peak of a process with all of them."""
        return memory(self.profile, self.members)

    @property
    def memory_alone(self) -> int:
        """Bytes at the peak of a process with one of the trials."""
        return memory(self.profile, 1)

    @property
    def preprocessing(self) -> float:
        """Part of the time of a trial by itself in which samples are fetched and prepared, where they are not kept."""
        return self.profile.fetch_seconds / (self.profile.fetch_seconds + self.step_alone)


@dataclass(frozen=True)
class Failed:
    """Trials that cannot be trained, or not measured, or not placed, and why."""

    trials: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class DryRun:
    """What a search would do with a few configurations on a device.

    Args:
        device: on which all was measured.
        arrays: as a search would fuse them, job by job.
        totals: name of each of `PLANS` -> seconds of one epoch of each trial.
        failed: trials that are in no array.
    """

    device: Device
    arrays: tuple[PlannedArray, ...]
    totals: Mapping[str, float]
    failed: tuple[Failed, ...]

    @property
    def trials(self) -> int:
        """How many are planned."""
        return sum(each.members for each in self.arrays)

    def saves(self, name: str) -> float:
        """Part of the time that a plan saves, against every trial by itself; IMPV of Pack."""
        apart = self.totals["apart"]
        return (apart - self.totals[name]) / apart if apart else 0.0

    @property
    def pays(self) -> bool:
        """Whether a search that shares is clearly faster than one that does not."""
        return self.saves("chosen") >= WORTH


def percent(part: float) -> str:
    """0.31 as 31 %."""
    return f"{round(100 * part)} %"
