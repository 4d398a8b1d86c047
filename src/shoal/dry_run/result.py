"""The jobs that a search would make of some configurations, and what an epoch of them takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.array import Array
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.cost.estimate import first_fetching, memory, step_seconds
from shoal.planner.grouping import Grouping, candidate
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.groups import needed
from shoal.planner.packing.prediction import predicted
from shoal.planner.partition import Profiles
from shoal.schedule.ledger import bytes_text

__all__ = ["PLANS", "DryRun", "DryRunPlan", "Failed", "PlannedArray", "percent", "planned"]

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


@dataclass
class DryRunPlan:
    """Jobs that the planner starts one after another.

    Args:
        device: on which.
        profiles: what is known of a key on a kind of device.
        grouping: says what the packing strategy is told.
        jobs: the arrays of each.
        refused: trials that cannot start, and why.
    """

    device: Device
    profiles: Profiles
    grouping: Grouping
    jobs: list[tuple[Array, ...]] = field(default_factory=list)
    refused: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def candidates(self, arrays: Sequence[Array]) -> list[Candidate]:
        """Arrays as the strategy sees them."""
        return [candidate(array, self.profiles, [self.device]) for array in arrays]

    def context(self) -> PackingContext:
        """The packing context of all arrays."""
        everyone = self.candidates([array for group in self.jobs for array in group])
        return self.grouping.context(everyone, [self.device], {})

    def seconds(self, shared: bool) -> float:
        """Of one epoch of all jobs. Samples that are kept are fetched once for all jobs of a process, which are counted
        here; if no process is shared, for every job.
        """
        context = self.context()
        kept: dict[str, list[float]] = {}
        for array in (array for group in self.jobs for array in group):
            profile = self.profiles(array.key, self.device.kind)
            if profile is not None and profile.sharing == "kept":
                kept.setdefault(array.key.data, []).append(first_fetching(profile))
        fetching = sum(max(each) if shared else sum(each) for each in kept.values())
        return fetching + sum(predicted(self.candidates(group), context).together for group in self.jobs)


def planned(
    plan: DryRunPlan, packing: Packing, fuse: bool, failures: Mapping[str, Sequence[Sequence[int]]]
) -> tuple[PlannedArray, ...]:
    """The arrays of a plan, job by job, and what decided.

    Args:
        plan: which.
        packing: the strategy.
        fuse: whether trials may be fused at all.
        failures: why some could not share a process -> numbers of the trials of each of these arrays.
    """
    context, found, place = plan.context(), [], 0
    for number, group in enumerate(plan.jobs, start=1):
        saved = predicted(plan.candidates(group), context)
        places = range(place, place + len(group))
        for index, array in zip(places, group, strict=True):
            others = tuple(other for other in places if other != index)
            if others:
                names = ", ".join(str(other + 1) for other in others)
                company = f"packed with {names}: saves {percent(saved.impv)}"
            else:
                company = f"by itself: {_why_single(array, plan, context, packing, failures)}"
            fused = _fused(array, plan, fuse)
            found.append(
                PlannedArray(
                    array,
                    number,
                    others,
                    saved.together,
                    sum(
                        predicted([each], context).together
                        for each in plan.candidates([Array(array.key, (x,)) for x in array.members])
                    ),
                    f"{fused}; {company}" if fused else company,
                )
            )
        place += len(group)
    return tuple(found)


def _fused(array: Array, plan: DryRunPlan, fuse: bool) -> str:
    """Whether its trials are fused, or why not; "" where there is but one."""
    if len(array.members) > 1:
        return f"{len(array.members)} trials fused"
    alike = [other for group in plan.jobs for other in group if other.key == array.key]
    if len(alike) == 1:
        return ""
    if not fuse:
        return "not fused: fuse=False"
    profile = plan.profiles(array.key, plan.device.kind)
    if profile is not None and memory(profile, 2) > plan.device.memory:
        return f"not fused: two take {bytes_text(memory(profile, 2))}, {_limit(plan.device)}"
    return "not fused: together no faster"


def _why_single(
    array: Array,
    plan: DryRunPlan,
    context: PackingContext,
    packing: Packing,
    failures: Mapping[str, Sequence[Sequence[int]]],
) -> str:
    number = array.members[0].trial.number
    for reason, lanes in failures.items():
        if any(number in lane for lane in lanes):
            return f"with others it could not be measured: {reason}"
    near = [x for group in plan.jobs for x in group if x is not array and x.key.data == array.key.data]
    if not near:
        return "no other array has its data"
    (own,) = plan.candidates([array])
    pairs = [[own, other] for other in plan.candidates(near)]
    fitting = [predicted(pair, context).impv for pair in pairs if needed(pair) <= plan.device.memory]
    if not fitting:
        return f"with another {bytes_text(min(map(needed, pairs)))}, {_limit(plan.device)}"
    asked = f", at least {percent(packing.worth)} is asked" if isinstance(packing, Cost) else f", {packing} has it so"
    return f"sharing would save up to {percent(max(fitting))}{asked}"


def _limit(device: Device) -> str:
    return f"{device.name} has {bytes_text(device.memory)}"
