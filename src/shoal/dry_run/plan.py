"""A plan of jobs: what an epoch of them takes, and in words why each array is fused and packed as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.array import Array
from shoal.core.device import Device
from shoal.cost.estimate import first_fetching, memory
from shoal.dry_run.result import PlannedArray, percent
from shoal.planner.candidates import candidate
from shoal.planner.grouping import Grouping
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.groups import needed
from shoal.planner.packing.prediction import predicted
from shoal.planner.partition import Profiles
from shoal.schedule.ledger import bytes_text

__all__ = ["DryRunPlan", "planned"]


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
                    sum(predicted([each], context).together for each in plan.candidates(_members_apart(array))),
                    f"{fused}; {company}" if fused else company,
                )
            )
        place += len(group)
    return tuple(found)


def _members_apart(array: Array) -> list[Array]:
    return [Array(array.key, (member,)) for member in array.members]


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
