"""Measures the cost of a structure on a device by a few steps at several sizes (HyperSack's sampler)."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, cycle, islice
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.cluster.processes import own_memory
from shoal.core.array import Array, Member
from shoal.core.demand import Profile
from shoal.cost.race import RaceRules, choose_fastest
from shoal.data.batches import Batches
from shoal.data.datasets import DataSets
from shoal.fuse.frozen import share_frozen
from shoal.task import Task
from shoal.worker.fused_stepper import make_stepper
from shoal.worker.step_plan import StepPlan
from shoal.worker.stepper import MixedEpochsError, Stepper
from shoal.worker.trial_runtime import TrialRuntime, build, optimizers_in, side_by_side, wait

__all__ = ["UNNOTICED", "measure"]

FEW = RaceRules(min_runs=3, max_runs=3)
"""Rules for a size that is timed by itself."""

IN_TURNS = RaceRules(min_runs=9, max_runs=9, drop_ratio=inf)
"""Rules for sizes that are timed in turns. All sizes take all steps, in bursts as in training: the first step after one
of another size finds cold caches."""

ABREAST = replace(IN_TURNS, burst=1)
"""Rules for lanes that keep abreast. There, no step follows another of its own lane: training finds the caches as the
fetching of samples and other lanes' steps have left them."""

BATCHES = 12
"""Batches for the steps, used in a cycle."""

SIZES = (1, 4, 16)
"""Numbers of members to time. If the array has fewer members, their number is the largest size."""

DEAR = 30
"""Price of measuring a size, for each of its members, in lone steps. It covers the steps of the size, steps at
different epochs, and the races between step modes."""

AFFORDABLE = {"cpu": 0.005}
AFFORDABLE_ON_GPU = 0.25
"""Share of an epoch of all waiting trials, one after another, that measuring sizes may take, by type of device. On a
CPU members that train together are seldom twice as fast, on a GPU often many times. Sizes that are not measured here
are tried in training (`shoal.cost.estimate.size_to_try`)."""

UNNOTICED = 0.25
"""Seconds of a job that measuring sizes may always take."""

MIXED = 4
"""Number of steps with members at different epochs. The first does not count."""

SMALLER, LARGER = 8, 32
"""One further size, if the budget allows: the larger one if the largest of `SIZES` was the fastest for each member,
else the smaller one."""


def measure(
    task: Task,
    sets: DataSets,
    array: Array,
    device: torch.device,
    memory: int,
    unnoticed: float = UNNOTICED,
    say: Callable[[str], None] = lambda note: None,
) -> Profile:
    """Train members of an array for a few steps at each of `SIZES`, in turns, and keep nothing but the profile.

    Sizes whose measurement would cost a large part of what they could save are left out.

    Args:
        task: Task of the study.
        sets: Data sets of the task, on `device`.
        array: Array to measure.
        device: Device to measure on.
        memory: Bytes of the device. Sizes that would take more than half of it together are left out.
        unnoticed: Seconds that measuring sizes may always take.
        say: Function that gets the reason if the members cannot be one array.
    """
    train, valid = sets.of(array.members[0].trial.config)
    bench = _Bench(task, train, valid, array, device)
    first = next(bench.batches())
    unfilled = train.unfilled + valid.unfilled  # before the base is measured: on a GPU it includes them
    base = _memory(device)
    timed = _time_sizes(bench, first, base, memory, unnoticed)
    largest = max(timed.seconds)
    if timed.refusal:
        number = array.members[0].trial.number
        say(f"trial {number}: its structure cannot be one array, and trains in plain PyTorch: {timed.refusal}")
    fuse_seconds, mixing = {1: timed.built}, None
    if largest > 1:
        fuse_seconds[1] = bench.seconds_to_make()  # now that all is loaded
        anew, mixing = bench.mixed(largest)
        fuse_seconds[largest] = max(0.0, anew - timed.seconds[largest])
    return Profile(
        step_seconds=timed.seconds,
        epoch_steps=bench.plan.epoch_steps,
        validation_steps=valid.steps(bench.plan.settings.eval_batch_size),
        base_memory=base + unfilled,
        member_memory=max((_memory(device) - base) // largest + timed.spare, 4 * timed.weights),
        compute=_utilisation(device, timed.cores),
        cores=timed.cores,
        fuse_seconds=fuse_seconds,
        mixing=None if mixing is None else mixing / timed.seconds[largest],
        fused_gain=timed.gains,
        fetch_seconds=train.fetch_seconds / max(1, train.fetched) * bench.plan.samples(0, 0),
        sharing=train.sharing,
        sample=len(array.members),
        pending=int(array.pending) if timed.too_dear else None,
    )


@dataclass(frozen=True)
class _Bench:
    """Makes steppers and batches for the members of an array.

    Args:
        task: Task of the study.
        train: Training set.
        valid: Validation set.
        array: Array to measure.
        device: Device to measure on.
    """

    task: Task
    train: Batches
    valid: Batches
    array: Array
    device: torch.device

    @cached_property
    def plan(self) -> StepPlan:
        return StepPlan.of(self.task, self.array.members[0].trial.config, self.train, self.valid)

    def stepper(self, members: int, some: Sequence[Member] | None = None) -> Stepper:
        """A stepper of `members` members, taken in a cycle from all or from `some`."""
        runtimes: list[TrialRuntime] = []
        for member in islice(cycle(some or self.array.members), members):
            runtimes.append(build(self.task, member, self.device))
            share_frozen(runtimes[0].model, runtimes[-1].model)
        return make_stepper(self.task, side_by_side(runtimes))

    def batches(self, other: int = 0) -> Iterator[Any]:
        """`BATCHES` batches of the first epoch, which starts again if it is too short.

        Args:
            other: Number of a further data seed. Its first epoch takes the place of a later one of the same data seed,
                which may be far within an iterable data set.
        """
        seed = self.array.members[0].trial.data_seed + other
        walks = (self.plan.walk(0, 0, seed) for _ in range(BATCHES))
        return islice(chain.from_iterable(walks), BATCHES)

    def seconds_to_make(self) -> float:
        """Seconds to make one member ready to train."""
        began = time.perf_counter()
        self.stepper(1)
        return time.perf_counter() - began

    def mixed(self, members: int) -> tuple[float, float | None]:
        """Time an array whose code is loaded and tuned: its start, and steps with members at different epochs.

        Returns:
            Seconds to make the array and take its first step. Seconds of a step in which members have batches of
            different epochs; None if they cannot be one array then.
        """
        both = zip(self.batches(), self.batches(other=1), strict=True)
        pairs = list(islice(both, MIXED))  # few, since with many members they take long
        began = time.perf_counter()
        stepper = self.stepper(members)
        anew = time.perf_counter() - began + _timed(stepper, pairs[0][:1] * members, 0)
        for b, runtime in enumerate(stepper.runtimes):
            runtime.epoch = b % 2
        try:
            seconds = [_timed(stepper, [pair[b % 2] for b in range(members)], tick) for tick, pair in enumerate(pairs)]
        except MixedEpochsError:
            return anew, None
        return anew, min(seconds[1:])


@dataclass(frozen=True)
class _StepTimes:
    """Times and sizes of members, from steps at several sizes.

    Args:
        seconds: Number of members -> seconds of the shortest step.
        gains: Number of members -> gain, see `Profile.fused_gain`.
        built: Seconds to make the first member ready to train.
        weights: Bytes of a member's parameters and buffers.
        spare: Bytes that optimizers of other members may keep beyond those that were timed.
        cores: CPU seconds per second.
        too_dear: Whether a size was left out for its price.
        refusal: Why several members cannot be an array; "" if they can.
    """

    seconds: dict[int, float]
    gains: dict[int, float]
    built: float
    weights: int
    spare: int
    cores: float
    too_dear: bool
    refusal: str


def _time_sizes(bench: _Bench, first: Any, base: int, memory: int, unnoticed: float) -> _StepTimes:
    """Time steps of a lone member, of several together, and of a lone one for each other class of optimizer.

    All steppers are freed at the end, so that the next ones have the memory.

    Args:
        bench: Array to time.
        first: A batch.
        base: Bytes in use on the device without members.
        memory: See `measure`.
        unnoticed: See `measure`.
    """
    began = time.perf_counter()
    lone = _TimedSteps(bench.stepper(1), [first])
    built = time.perf_counter() - began
    lone.step()
    weights = _bytes(lone.stepper)
    member = max(_memory(bench.device) - base, 4 * weights)  # weights, gradients, two of optimizer state
    batches = list(bench.batches())
    times = _times()
    lone = _TimedSteps(lone.stepper, batches)
    price = DEAR * choose_fastest({1: lone.step}, FEW).seconds[1]
    work = price / DEAR * bench.plan.epoch_steps * bench.array.pending
    seconds = max(unnoticed, AFFORDABLE.get(bench.device.type, AFFORDABLE_ON_GPU) * work)
    budget = _MeasuringBudget(price, member, seconds, memory / 2 - member)
    runs, too_dear = {1: lone}, False
    for members in sorted({min(size, len(bench.array.members)) for size in SIZES} - {1}):
        if budget.spend(members):
            runs[members] = _TimedSteps(bench.stepper(members), batches)
        else:
            too_dear = too_dear or budget.too_dear(members)
    together = runs[max(runs)].stepper.runtimes
    kind = type(lone.stepper.runtimes[0].optimizer)
    others = _lone_others(bench, together, kind, budget, batches)
    steps = {each: run.step for each, run in (*runs.items(), *others.items())}
    taken = choose_fastest(steps, ABREAST if bench.train.abreast else IN_TURNS).seconds
    cpu, wall, delayed = (end - start for end, start in zip(_times(), times, strict=True))
    if {4, 16} <= runs.keys():
        further = LARGER if taken[16] / 16 < taken[4] / 4 else SMALLER
        too_dear = budget.too_dear(further)
        if budget.spend(further):
            runs[further] = _TimedSteps(bench.stepper(further), batches)
            taken[further] = choose_fastest({further: runs[further].step}, FEW).seconds[further]
    shares = Counter(type(runtime.optimizer) for runtime in together)
    alone = {kind: taken[1], **{other: taken[other] for other in others}}
    shortest = {members: taken[members] for members in runs}
    shortest[1] = fmean(alone.values(), [shares[each] for each in alone])
    state = [_state_bytes(runtime) for runtime in together]
    return _StepTimes(
        seconds=shortest,
        gains={members: run.stepper.gain for members, run in runs.items() if run.stepper.gain is not None},
        built=built,
        weights=weights,
        spare=max(2 * weights, *state) - int(fmean(state)),
        cores=cpu / max(wall - delayed, cpu / torch.get_num_threads()),
        too_dear=too_dear,
        refusal=next((run.stepper.refusal for size, run in runs.items() if size > 1 and run.stepper.refusal), ""),
    )


@dataclass
class _MeasuringBudget:
    """Time and memory left for measuring.

    Args:
        price: Seconds for each member of a size.
        member: Bytes of a member.
        seconds: Seconds left.
        memory: Bytes left.
    """

    price: float
    member: int
    seconds: float
    memory: float

    def too_dear(self, members: int) -> bool:
        """Whether the time left is too short for a size of so many members."""
        return members * self.price > self.seconds

    def spend(self, members: int) -> bool:
        """Pay for a size of so many members; returns whether time and memory suffice."""
        if self.too_dear(members) or members * self.member >= self.memory:
            return False
        self.seconds -= members * self.price
        self.memory -= members * self.member
        return True


@dataclass
class _TimedSteps:
    """Takes steps and times them.

    Args:
        stepper: Stepper to time.
        batches: Batches for the steps, used in a cycle.
        taken: Number of steps so far.
    """

    stepper: Stepper
    batches: Sequence[Any]
    taken: int = 0

    def step(self) -> float:
        """Take one step; returns its seconds."""
        batch, tick = self.batches[self.taken % len(self.batches)], self.taken
        self.taken += 1
        return _timed(self.stepper, [batch] * len(self.stepper.runtimes), tick)


def _lone_others(
    bench: _Bench, together: Sequence[TrialRuntime], kind: type, budget: _MeasuringBudget, batches: Sequence[Any]
) -> dict[type, _TimedSteps]:
    """A lone member for each class of optimizer but one, so that a slow optimizer is no price of training together.

    Args:
        bench: Array to time.
        together: Trials with all classes of optimizers.
        kind: Class of optimizer to leave out.
        budget: Budget that pays for the members.
        batches: Batches for the steps.
    """
    others = {}
    for other, member in {type(runtime.optimizer): runtime.member for runtime in together}.items():
        if other is not kind and budget.spend(1):
            others[other] = _TimedSteps(bench.stepper(1, [member]), batches)
    return others


def _timed(stepper: Stepper, batches: Sequence[Any], tick: int) -> float:
    """Seconds of one step, with a batch for each member."""
    device = stepper.runtimes[0].device
    wait(device)
    began = time.perf_counter()
    stepper.train_step(batches, [tick] * len(batches))
    wait(device)
    return time.perf_counter() - began


def _times() -> tuple[float, float, float]:
    """CPU seconds, wall seconds, and seconds that this thread waited for a core (0 if not on Linux)."""
    try:
        delayed = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        delayed = 0.0
    return time.process_time(), time.perf_counter(), delayed


def _memory(device: torch.device) -> int:
    """Bytes of this process on the device: as of `own_memory`, or on a GPU torch's peak since the last call."""
    if device.type == "cuda":
        taken = int(torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        return taken
    return own_memory()


def _bytes(stepper: Stepper) -> int:
    """Bytes of the first model's parameters and buffers."""
    model = stepper.runtimes[0].model
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _state_bytes(runtime: TrialRuntime) -> int:
    """Bytes of the tensors in the state of a trial's optimizers."""
    states = [dict(one.state) for one in optimizers_in(runtime.optimizer)]
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor))


def _utilisation(device: torch.device, cores: float) -> float:
    """Fraction of the device in use. On a GPU it is NVML's share of time with any kernel, an upper bound.

    NVML has no figure for MIG instances, which count as fully used.
    """
    if device.type == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return 1.0
    if device.type == "cuda":
        return min(1.0, max(0.01, torch.cuda.utilization(device) / 100))
    return min(1.0, max(0.01, cores / torch.get_num_threads()))
