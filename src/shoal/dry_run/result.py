"""Result of a dry run: planned jobs, seconds of an epoch of each plan, and the reasons for fusing and packing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.array import Array
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.cost.estimate import first_fetching, memory, step_seconds
from shoal.planner.grouping import Grouping, candidate
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.groups import memory_needed
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
"""Plans that are compared, with their titles for display."""

MIN_SAVED_PART = 0.05
"""Least saved part of the time from which sharing pays."""


@dataclass(frozen=True)
class PlannedArray:
    """An array of trials in a job of the plan.

    Args:
        array: One or more fused trials, with the profile of their structure.
        job: Number of the job, from 1 on.
        packed_with: Places in the plan of the other arrays of the job.
        seconds: Seconds of an epoch of the whole job, including its start.
        separate_seconds: Seconds of an epoch of each trial of the array as a job of its own.
        decision: Decision on fusing and packing, with its reason.
    """

    array: Array
    job: int
    packed_with: tuple[int, ...]
    seconds: float
    separate_seconds: float
    decision: str

    @property
    def profile(self) -> Profile:
        """Profile of the structure."""
        assert self.array.profile is not None, "a planned array has a profile"
        return self.array.profile

    @property
    def members(self) -> int:
        """Number of fused trials."""
        return len(self.array.members)

    @property
    def step_alone(self) -> float:
        """Seconds of a step of one trial alone."""
        return step_seconds(self.profile, 1)

    @property
    def step_fused(self) -> float:
        """Seconds of a fused step, per trial."""
        return step_seconds(self.profile, self.members) / self.members

    @property
    def gain(self) -> float:
        """Speed-up of a trial by fusing."""
        return self.step_alone / self.step_fused

    @property
    def memory(self) -> int:
        """Peak bytes of a process with all trials of the array."""
        return memory(self.profile, self.members)

    @property
    def memory_alone(self) -> int:
        """Peak bytes of a process with one of the trials."""
        return memory(self.profile, 1)

    @property
    def preprocessing(self) -> float:
        """Part of the time of a trial alone for fetching and preparing samples, if these are not kept."""
        return self.profile.fetch_seconds / (self.profile.fetch_seconds + self.step_alone)


@dataclass(frozen=True)
class Failed:
    """Trials that cannot be trained, measured or placed, with the reason."""

    trials: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class DryRun:
    """Plan of a search for a few configurations on a device.

    Args:
        device: Device of the measurements.
        arrays: Arrays as a search would fuse them, job by job.
        totals: Name in `PLANS` -> seconds of one epoch of all trials.
        failed: Trials that are in no array.
    """

    device: Device
    arrays: tuple[PlannedArray, ...]
    totals: Mapping[str, float]
    failed: tuple[Failed, ...]

    @property
    def trials(self) -> int:
        """Number of planned trials."""
        return sum(each.members for each in self.arrays)

    def saves(self, name: str) -> float:
        """Return the part of the time that a plan saves over one job per trial; IMPV of Pack."""
        separate_seconds = self.totals["apart"]
        return (separate_seconds - self.totals[name]) / separate_seconds if separate_seconds else 0.0

    @property
    def pays(self) -> bool:
        """Whether the chosen plan is clearly faster than one job per trial."""
        return self.saves("chosen") >= MIN_SAVED_PART


def percent(part: float) -> str:
    """Return a fraction as text: 0.31 is "31 %"."""
    return f"{round(100 * part)} %"


@dataclass
class DryRunPlan:
    """Jobs that the planner starts one after another on one device.

    Args:
        device: The device.
        profiles: Profile of a key on a kind of device, or None.
        grouping: Source of the packing context.
        jobs: Arrays of each job.
        refused: Trials that cannot start, with the reason.
    """

    device: Device
    profiles: Profiles
    grouping: Grouping
    jobs: list[tuple[Array, ...]] = field(default_factory=list)
    refused: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def candidates(self, arrays: Sequence[Array]) -> list[Candidate]:
        """Return the packing candidates of arrays."""
        return [candidate(array, self.profiles, [self.device]) for array in arrays]

    def context(self) -> PackingContext:
        """Return the packing context of all arrays."""
        candidates = self.candidates([array for group in self.jobs for array in group])
        return self.grouping.context(candidates, [self.device], {})

    def seconds(self, shared: bool) -> float:
        """Return the seconds of one epoch of all jobs, including the fetching of kept samples.

        Args:
            shared: Whether kept samples are fetched once for all jobs, else once per job.
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
    """Return the arrays of a plan, job by job, with the reasons for fusing and packing.

    Args:
        plan: The plan.
        packing: The packing of the plan.
        fuse: Whether trials may be fused.
        failures: Reason why arrays could not share a process -> numbers of the trials of each of these arrays.
    """
    context, arrays, next_index = plan.context(), [], 0
    for number, group in enumerate(plan.jobs, start=1):
        saved = predicted(plan.candidates(group), context)
        places = range(next_index, next_index + len(group))
        for index, array in zip(places, group, strict=True):
            others = tuple(other for other in places if other != index)
            if others:
                names = ", ".join(str(other + 1) for other in others)
                pack_text = f"packed with {names}: saves {percent(saved.impv)}"
            else:
                pack_text = f"by itself: {_why_single(array, plan, context, packing, failures)}"
            fusion_text = _fusion_text(array, plan, fuse)
            arrays.append(
                PlannedArray(
                    array,
                    number,
                    others,
                    saved.together,
                    sum(
                        predicted([each], context).together
                        for each in plan.candidates([Array(array.key, (x,)) for x in array.members])
                    ),
                    f"{fusion_text}; {pack_text}" if fusion_text else pack_text,
                )
            )
        next_index += len(group)
    return tuple(arrays)


def _fusion_text(array: Array, plan: DryRunPlan, fuse: bool) -> str:
    """Return the text on whether the trials of the array are fused, and why not; "" if no other trial has its key."""
    if len(array.members) > 1:
        return f"{len(array.members)} trials fused"
    same_key = [other for group in plan.jobs for other in group if other.key == array.key]
    if len(same_key) == 1:
        return ""
    if not fuse:
        return "not fused: fuse=False"
    profile = plan.profiles(array.key, plan.device.kind)
    if profile is not None and memory(profile, 2) > plan.device.memory:
        return f"not fused: two take {bytes_text(memory(profile, 2))}, {_memory_text(plan.device)}"
    return "not fused: together no faster"


def _why_single(
    array: Array,
    plan: DryRunPlan,
    context: PackingContext,
    packing: Packing,
    failures: Mapping[str, Sequence[Sequence[int]]],
) -> str:
    """Return the reason why an array has a job of its own."""
    number = array.members[0].trial.number
    for reason, lanes in failures.items():
        if any(number in lane for lane in lanes):
            return f"measuring it with others failed: {reason}"
    same_data = [x for group in plan.jobs for x in group if x is not array and x.key.data == array.key.data]
    if not same_data:
        return "no other array has its data"
    (candidate_,) = plan.candidates([array])
    pairs = [[candidate_, other] for other in plan.candidates(same_data)]
    fitting = [predicted(pair, context).impv for pair in pairs if memory_needed(pair) <= plan.device.memory]
    if not fitting:
        return f"needs {bytes_text(min(map(memory_needed, pairs)))} with another array, {_memory_text(plan.device)}"
    threshold = f", at least {percent(packing.worth)} is asked" if isinstance(packing, Cost) else f", {packing} decides"
    return f"sharing would save up to {percent(max(fitting))}{threshold}"


def _memory_text(device: Device) -> str:
    return f"{device.name} has {bytes_text(device.memory)}"
