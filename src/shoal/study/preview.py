"""What a search would do with its first trials: planned jobs, seconds of an epoch, and the reasons of the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from shoal.core.array import Array
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Purpose
from shoal.core.resources import bytes_text
from shoal.plan.array_packer import ArrayPacker, candidate
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.costs import Costs
from shoal.plan.packing.base import Candidate, NoPacking, PackingContext
from shoal.plan.packing.packs import memory_needed
from shoal.plan.packing.prediction import predicted
from shoal.plan.plan_input import PlanInput
from shoal.plan.planner import plan
from shoal.plan.schedule.base import JobState, JobView, Plan, Policy, Refusal
from shoal.plan.schedule.knapsack import Fifo
from shoal.study.state import StudyState

__all__ = ["PLANS", "TOO_FEW_STEPS", "Failed", "MeasureOnly", "PlannedArray", "Preview", "percent", "preview"]

PLANS = {
    "apart": "one after another",
    "packed": "packed, none fused",
    "fused": "fused, none packed",
    "chosen": "Shoal's choice",
}
"""Plans that are compared, with their titles for display."""

TOO_FEW_STEPS = "not fused: one epoch has too few steps to try"
"""Reason of trials whose structure was only timed alone."""

MIN_SAVED_PART = 0.05
"""Least saved part of the time from which sharing pays."""


@final
class MeasureOnly(Policy):
    """Starts no training, so that a study only finds signatures and profiles."""

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Refuse all jobs."""
        return Plan((), tuple(Refusal(job.id, "is only measured") for job in jobs if job.state is not JobState.RUNNING))


@dataclass(frozen=True)
class PlannedArray:
    """An array of trials in a job of the plan.

    Args:
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
    def cost(self) -> Cost:
        """Cost of the structure."""
        assert self.array.profile is not None, "a planned array has a profile"
        return Cost(self.array.profile)

    @property
    def members(self) -> int:
        """Number of fused trials."""
        return len(self.array.members)

    @property
    def step_alone(self) -> float:
        """Seconds of a step of one trial alone."""
        return self.cost.step_seconds(1)

    @property
    def step_fused(self) -> float:
        """Seconds of a fused step, per trial."""
        return self.cost.step_seconds(self.members) / self.members

    @property
    def gain(self) -> float:
        """Speed-up of a trial by fusing."""
        return self.step_alone / self.step_fused

    @property
    def memory(self) -> int:
        """Peak bytes of a process with all trials of the array."""
        return self.cost.memory(self.members)

    @property
    def memory_alone(self) -> int:
        """Peak bytes of a process with one of the trials."""
        return self.cost.memory(1)

    @property
    def preprocessing(self) -> float:
        """Part of the time of a trial alone for fetching and preparing samples, if these are not kept."""
        return self.cost.fetch_seconds / (self.cost.fetch_seconds + self.step_alone)


@dataclass(frozen=True)
class Failed:
    """Trials that cannot be measured or placed, with the reason."""

    trials: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Preview:
    """Plan of a search on a device; `totals` has the seconds of one epoch of all trials by name in `PLANS`."""

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


def preview(state: StudyState) -> Preview:
    """Plan the trials of a study, which has ended with the policy `MeasureOnly`, for one epoch on its first device."""
    signatures, config = state.signatures, state.config
    node, device = next(iter(state.fleet.cluster))
    failed: dict[str, list[int]] = {}
    for record in state.trials.waiting():
        if record.key is None or state.costs.of(record.key, device.kind) is None:
            reason = "was not measured"
            if record.key is not None:
                reason = signatures.reasons.get(record.key, reason)
            failed.setdefault(reason, []).append(record.number)
    waiting = [x for x in state.trials.classes(0.0) if state.costs.of(x.key, device.kind) is not None]
    apart = ArrayPacker(NoPacking(), config.history.relative_times)

    def planned(packer: ArrayPacker, fuse: bool) -> _Jobs:
        cluster = Cluster((Node(node.name, node.cores, (device,)),))
        jobs, left = _Jobs(device, state.costs, packer, fuse), waiting
        given = PlanInput(
            Fifo(),
            jobs.costs,
            cluster,
            packer=packer,
            fuse=fuse,
            max_concurrent=config.spec.max_concurrent,
            elastic=False,
            unmeasurable=signatures.unmeasurable,
        )
        while left:
            placement = plan(replace(given, waiting=left))
            started = [job.arrays for job, _ in placement.starts if job.purpose is Purpose.TRAIN]
            done = {member.trial.number for arrays in started for array in arrays for member in array.members}
            if not started:  # a plan has no reasons of trials behind those that fit nowhere
                jobs.refused |= placement.refusals
                done = set(placement.refusals)
            if not done:
                break
            jobs.packs += started
            rest = [(x, tuple([m for m in x.members if m.trial.number not in done])) for x in left]
            left = [replace(x, members=members) for x, members in rest if members]
        return jobs

    plans = {
        "apart": planned(apart, False),
        "packed": planned(config.packer, False),
        "fused": planned(apart, config.spec.fuse),
        "chosen": planned(config.packer, config.spec.fuse),
    }
    for number, reason in plans["chosen"].refused.items():
        failed.setdefault(reason, []).append(number)
    return Preview(
        device,
        plans["chosen"].arrays(),
        {name: plan.seconds(shared=name != "apart") for name, plan in plans.items()},
        tuple(Failed(tuple(numbers), reason) for reason, numbers in failed.items()),
    )


@dataclass
class _Jobs:
    """Jobs that the planner starts one after another on one device; `packs` has the arrays of each."""

    device: Device
    costs: Costs
    packer: ArrayPacker
    fuse: bool
    packs: list[tuple[Array, ...]] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)

    def candidates(self, arrays: Sequence[Array]) -> list[Candidate]:
        return [candidate(array, self.costs, [self.device]) for array in arrays]

    def context(self) -> PackingContext:
        return self.packer.context(self.candidates([array for pack in self.packs for array in pack]), [self.device], {})

    def seconds(self, shared: bool) -> float:
        """Seconds of one epoch of all jobs; kept samples are fetched once for all if `shared`, else once per job."""
        context = self.context()
        kept: dict[str, list[float]] = {}
        for array in (array for pack in self.packs for array in pack):
            cost = self.costs.of(array.key, self.device.kind)
            if cost is not None and cost.sample_sharing == "kept":
                kept.setdefault(array.key.data, []).append(cost.first_fetching)
        fetching = sum(max(each) if shared else sum(each) for each in kept.values())
        return fetching + sum(predicted(self.candidates(pack), context).together for pack in self.packs)

    def arrays(self) -> tuple[PlannedArray, ...]:
        """All arrays, job by job, with the reasons for fusing and packing."""
        context, found = self.context(), list[PlannedArray]()
        for number, pack in enumerate(self.packs, start=1):
            saved = predicted(self.candidates(pack), context)
            places = range(len(found), len(found) + len(pack))
            for index, array in zip(places, pack, strict=True):
                others = tuple(other for other in places if other != index)
                names = ", ".join(str(other + 1) for other in others)
                packing = f"packed with {names}: saves {percent(saved.impv)}" if others else self._why_single(array)
                lone = self.candidates([Array(array.key, (member,)) for member in array.members])
                separate = sum(predicted([each], context).together for each in lone)
                decision = "; ".join(filter(None, [self._fusion(array), packing]))
                found.append(PlannedArray(array, number, others, saved.together, separate, decision))
        return tuple(found)

    def _fusion(self, array: Array) -> str:
        """Whether the trials of an array are fused, and why not; "" if no other trial has its key."""
        if len(array.members) > 1:
            return f"{len(array.members)} trials fused"
        if sum(other.key == array.key for pack in self.packs for other in pack) == 1:
            return ""
        cost = self.costs.of(array.key, self.device.kind)
        if self.fuse and cost is not None and cost.memory(2) > self.device.memory:
            return f"not fused: two take {bytes_text(cost.memory(2))}, {self._memory}"
        if not self.fuse:
            return "not fused: fuse=False"
        return TOO_FEW_STEPS if cost is not None and cost.is_untried else "not fused: together no faster"

    def _why_single(self, array: Array) -> str:
        same_data = [x for pack in self.packs for x in pack if x is not array and x.key.data == array.key.data]
        if not same_data:
            return "by itself: no other array has its data"
        (own,), context = self.candidates([array]), self.context()
        pairs = [[own, other] for other in self.candidates(same_data)]
        fitting = [predicted(pair, context).impv for pair in pairs if memory_needed(pair) <= self.device.memory]
        if not fitting:
            return f"by itself: needs {bytes_text(min(map(memory_needed, pairs)))} with another array, {self._memory}"
        return f"by itself: sharing would save up to {percent(max(fitting))}"

    @property
    def _memory(self) -> str:
        return f"{self.device.name} has {bytes_text(self.device.memory)}"
