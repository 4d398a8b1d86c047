"""Measures the cost of a structure on a device with a few steps at several array sizes (HyperSack's sampler)."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, cycle, islice
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from shoal.cluster.processes import own_memory
from shoal.core.array import Array, Member
from shoal.core.demand import Profile
from shoal.cost.race import RaceRules, choose_fastest
from shoal.data.batches import Batches
from shoal.data.datasets import DataSets
from shoal.fuse.frozen import share_frozen
from shoal.fuse.rows import bytes_of
from shoal.task import Task
from shoal.worker.fused_stepper import make_stepper
from shoal.worker.outside import OutsideState
from shoal.worker.step_plan import StepPlan
from shoal.worker.stepper import MixedEpochsError, Stepper, StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime, build, sort_by_optimizer, state_tensors, synchronize

__all__ = ["FREE_SECONDS", "measure"]

SINGLE_RULES = RaceRules(min_runs=3, max_runs=3)

INTERLEAVED_RULES = RaceRules(min_runs=9, max_runs=9, drop_ratio=inf)
"""Rules for timing several sizes in turns. All sizes take all steps, in bursts as in training, since the first step
after one of another size finds cold caches."""

LOCKSTEP_RULES = replace(INTERLEAVED_RULES, burst=1)
"""Rules for data that lanes share in lockstep. In training, no step follows another one of its own lane, so each finds
caches used by the fetching of samples and by other lanes."""

BATCH_COUNT = 12

SIZES = (1, 4, 16)
"""Array sizes to time. If the array has fewer members, their number is the largest size."""

STEPS_PER_MEMBER = 30
"""Cost of measuring a size, per member, in steps of a single member. It covers the steps of the size, steps at
different epochs, and the choice of the step mode."""

MEASURING_SHARE = {"cpu": 0.005}
GPU_MEASURING_SHARE = 0.25
"""Time for measuring sizes, by device type, as a fraction of an epoch of all waiting trials one after another. On a CPU
fused members are seldom twice as fast, on a GPU often many times. Sizes that are not measured here are tried in
training (`shoal.cost.estimate.size_to_try`)."""

FREE_SECONDS = 0.25
"""Seconds of a job that may always be used for measuring sizes."""

MIXED_EPOCH_STEPS = 4
"""Number of timed steps with members at different epochs. The first one does not count."""

EXTRA_SMALL_SIZE, EXTRA_LARGE_SIZE = 8, 32
"""One extra size, if the budget allows: the large one if the largest of `SIZES` was the fastest per member, else the
small one."""


def measure(
    task: Task,
    sets: DataSets,
    array: Array,
    device: torch.device,
    memory: int,
    free_seconds: float = FREE_SECONDS,
    on_refusal: Callable[[str], None] = lambda reason: None,
    outside: OutsideState | None = None,
) -> Profile:
    """Train members of an array for a few steps at each of `SIZES`, in turns, and return the profile.

    Sizes are left out if measuring them would cost a large part of the time that they could save, beyond the
    `free_seconds`, or if all sizes together would take more than half of the device's `memory` in bytes. `on_refusal`
    gets the reason if the members cannot be one array. The steps may change what `outside` includes.
    """
    train, valid = sets.of(array.members[0].trial.config)
    bench = _ArrayBenchmark(task, train, valid, array, device, outside or OutsideState(task, sets))
    first = next(bench.batches())
    pending_bytes = train.pending_bytes + valid.pending_bytes  # first, since it allocates the samples on a GPU
    base = _memory_used(device)
    try:
        timed = _time_sizes(bench, first, base, memory, free_seconds)
    except StepRefusedError as refused:  # in training, such trials fall back to plain steps in the same way
        bench = replace(bench, refusal=str(refused))
        timed = _time_sizes(bench, first, base, memory, free_seconds)
    largest = max(timed.seconds)
    if timed.refusal:
        on_refusal(timed.refusal)
    fuse_seconds, mixing = {1: timed.build_seconds}, None
    if largest > 1:
        fuse_seconds[1] = bench.time_build()  # now that all code is loaded
        restart_seconds, mixing = bench.time_mixed_epochs(largest)
        fuse_seconds[largest] = max(0.0, restart_seconds - timed.seconds[largest])
    iteration = _Iteration.of(train, bench.plan.samples(0, 0), timed.seconds[largest], device)
    cores = iteration.average(timed.cores)
    return Profile(
        step_seconds=timed.seconds,
        epoch_steps=bench.plan.epoch_steps,
        validation_steps=valid.steps(bench.plan.settings.eval_batch_size),
        base_memory=base + pending_bytes,
        member_memory=max((_memory_used(device) - base) // largest + timed.extra_state, 4 * timed.weights),
        compute=_utilisation(device, cores, [iteration.busy * load for load in timed.loads]),
        cores=cores,
        fuse_seconds=fuse_seconds,
        mixing=None if mixing is None else mixing / timed.seconds[largest],
        fused_gain=timed.gains,
        fetch_seconds=iteration.fetch_seconds,
        sharing=train.sharing,
        sample=len(array.members),
        pending=int(array.pending) if timed.too_expensive else None,
    )


@dataclass(frozen=True)
class _ArrayBenchmark:
    task: Task
    train: Batches
    valid: Batches
    array: Array
    device: torch.device
    outside: OutsideState
    refusal: str = ""

    @cached_property
    def plan(self) -> StepPlan:
        return StepPlan.of(self.task, self.array.members[0].trial.config, self.train, self.valid)

    def stepper(self, members: int, some: Sequence[Member] | None = None) -> Stepper:
        """Return a stepper of `members` members, taken in a cycle from all members or from `some`."""
        runtimes: list[TrialRuntime] = []
        for member in islice(cycle(some or self.array.members), members):
            with self.outside.building():
                runtimes.append(build(self.task, member, self.device, saved=False))
            self.outside.include(runtimes[-1].model)
            share_frozen(runtimes[0].model, runtimes[-1].model)
        self.outside.restore_first()  # what the steps of other sizes have changed
        if not self.refusal:
            return make_stepper(self.task, sort_by_optimizer(runtimes))
        numbers = frozenset(member.trial.number for member in self.array.members)
        return make_stepper(self.task, sort_by_optimizer(runtimes), plain=True, global_rng=numbers)

    def batches(self, other: int = 0) -> Iterator[Any]:
        """Return `BATCH_COUNT` batches of the first epoch, which is repeated if it is too short."""
        seed = self.array.members[0].trial.data_seed + other
        iterators = (self.plan.step_batches(0, 0, seed) for _ in range(BATCH_COUNT))
        return islice(chain.from_iterable(iterators), BATCH_COUNT)

    def time_build(self) -> float:
        began = time.perf_counter()
        self.stepper(1)
        return time.perf_counter() - began

    def time_mixed_epochs(self, members: int) -> tuple[float, float | None]:
        """Time the start of an array whose code is loaded and tuned, and steps with members at different epochs."""
        both = zip(self.batches(), self.batches(other=1), strict=True)
        pairs = list(islice(both, MIXED_EPOCH_STEPS))  # few, since with many members they take long
        began = time.perf_counter()
        stepper = self.stepper(members)
        restart_seconds = time.perf_counter() - began + _step_seconds(stepper, pairs[0][:1] * members, 0)
        for b, runtime in enumerate(stepper.runtimes):
            runtime.epoch = b % 2
        try:
            seconds = [
                _step_seconds(stepper, [pair[b % 2] for b in range(members)], tick) for tick, pair in enumerate(pairs)
            ]
        except MixedEpochsError:
            return restart_seconds, None
        return restart_seconds, min(seconds[1:])


@dataclass(frozen=True)
class _Iteration:
    """A step and the fetching of its batch, over which the use of a device is averaged (HyperSack, Sampler)."""

    fetch_seconds: float
    busy: float
    fetching: float

    @classmethod
    def of(cls, train: Batches, samples: int, step: float, device: torch.device) -> "_Iteration":
        """Return the iteration with a step of so many seconds and a batch of so many samples."""
        batch = samples / max(1, train.fetched)
        fetch = batch * train.fetch_seconds
        if train.sharing in ("resident", "kept"):
            return cls(fetch, 1.0, 0.0)
        wall = max(step, fetch) if device.type == "cuda" else step + fetch
        return cls(fetch, step / wall, batch * train.fetch_cpu_seconds / wall)

    def average(self, cores: float) -> float:
        """Return the CPU seconds per second of the iteration, given those of the step."""
        return cores * self.busy + self.fetching


@dataclass(frozen=True)
class _StepTimes:
    """Times of steps by number of members, and what the steps use.

    Args:
        weights: Bytes of a member's parameters and buffers.
        extra_state: Bytes by which the optimizer state of other members may exceed that of the timed members.
        cores: CPU seconds per second.
        loads: Fractions of the GPU in use after each step of the largest size but its first; empty on other devices.
    """

    seconds: dict[int, float]
    gains: dict[int, float]
    build_seconds: float
    weights: int
    extra_state: int
    cores: float
    loads: Sequence[float]
    too_expensive: bool
    refusal: str


def _time_sizes(bench: _ArrayBenchmark, first: Any, base: int, memory: int, free_seconds: float) -> _StepTimes:
    """Time steps of a single member, of several, and of one for each other class of optimizer; then free memory."""
    began = time.perf_counter()
    single = _TimedSteps(bench.stepper(1), [first])
    build_seconds = time.perf_counter() - began
    single.step()
    weights = _model_bytes(single.stepper)
    member = max(_memory_used(bench.device) - base, 4 * weights)  # weights, gradients, two of optimizer state
    batches = list(bench.batches())
    times = _clock_times()
    single = _TimedSteps(single.stepper, batches)
    price = STEPS_PER_MEMBER * choose_fastest({1: single.step}, SINGLE_RULES).seconds[1]
    work = price / STEPS_PER_MEMBER * bench.plan.epoch_steps * bench.array.pending
    seconds = max(free_seconds, MEASURING_SHARE.get(bench.device.type, GPU_MEASURING_SHARE) * work)
    budget = _MeasuringBudget(price, member, seconds, memory / 2 - member)
    runs, too_expensive = {1: single}, False
    for members in sorted({min(size, len(bench.array.members)) for size in SIZES} - {1}):
        if budget.spend(members):
            runs[members] = _TimedSteps(bench.stepper(members), batches)
        else:
            too_expensive = too_expensive or budget.too_expensive(members)
    together = runs[max(runs)].stepper.runtimes
    optimizer_class = type(single.stepper.runtimes[0].optimizer)
    others = _single_members(bench, together, optimizer_class, budget, batches)
    steps = {each: run.step for each, run in (*runs.items(), *others.items())}
    taken = choose_fastest(steps, LOCKSTEP_RULES if bench.train.lockstep else INTERLEAVED_RULES).seconds
    cpu, wall, delayed = (end - start for end, start in zip(_clock_times(), times, strict=True))
    if {4, 16} <= runs.keys():
        further = EXTRA_LARGE_SIZE if taken[16] / 16 < taken[4] / 4 else EXTRA_SMALL_SIZE
        too_expensive = budget.too_expensive(further)
        if budget.spend(further):
            runs[further] = _TimedSteps(bench.stepper(further), batches)
            taken[further] = choose_fastest({further: runs[further].step}, SINGLE_RULES).seconds[further]
    shares = Counter(type(runtime.optimizer) for runtime in together)
    alone = {optimizer_class: taken[1], **{other: taken[other] for other in others}}
    shortest = {members: taken[members] for members in runs}
    shortest[1] = fmean(alone.values(), [shares[each] for each in alone])
    state = [_state_bytes(runtime) for runtime in together]
    return _StepTimes(
        seconds=shortest,
        gains={members: run.stepper.gain for members, run in runs.items() if run.stepper.gain is not None},
        build_seconds=build_seconds,
        weights=weights,
        extra_state=max(2 * weights, *state) - int(fmean(state)),
        cores=cpu / max(wall - delayed, cpu / torch.get_num_threads()),
        loads=runs[max(runs)].loads,
        too_expensive=too_expensive,
        refusal=bench.refusal
        or next((run.stepper.refusal for size, run in runs.items() if size > 1 and run.stepper.refusal), ""),
    )


@dataclass
class _MeasuringBudget:
    price: float
    member: int
    seconds: float
    memory: float

    def too_expensive(self, members: int) -> bool:
        """Return whether the remaining time is too short for a size of `members`."""
        return members * self.price > self.seconds

    def spend(self, members: int) -> bool:
        """Subtract the cost of a size of `members` if time and memory suffice; return whether they do."""
        if self.too_expensive(members) or members * self.member >= self.memory:
            return False
        self.seconds -= members * self.price
        self.memory -= members * self.member
        return True


@dataclass
class _TimedSteps:
    stepper: Stepper
    batches: Sequence[Any]
    taken: int = 0
    loads: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Take one step; return its seconds."""
        batch, tick = self.batches[self.taken % len(self.batches)], self.taken
        self.taken += 1
        seconds = _step_seconds(self.stepper, [batch] * len(self.stepper.runtimes), tick)
        if tick and _counts_load(device := self.stepper.runtimes[0].device):
            self.loads.append(torch.cuda.utilization(device) / 100)
        return seconds


def _single_members(
    bench: _ArrayBenchmark,
    together: Sequence[TrialRuntime],
    optimizer_class: type,
    budget: _MeasuringBudget,
    batches: Sequence[Any],
) -> dict[type, _TimedSteps]:
    """Return a single member per other class of optimizer, so that slow ones are no cost of training together."""
    others = {}
    for other, member in {type(runtime.optimizer): runtime.member for runtime in together}.items():
        if other is not optimizer_class and budget.spend(1):
            others[other] = _TimedSteps(bench.stepper(1, [member]), batches)
    return others


def _step_seconds(stepper: Stepper, batches: Sequence[Any], tick: int) -> float:
    device = stepper.runtimes[0].device
    synchronize(device)
    began = time.perf_counter()
    stepper.train_step(batches, [tick] * len(batches))
    synchronize(device)
    return time.perf_counter() - began


def _clock_times() -> tuple[float, float, float]:
    """Return CPU seconds, wall seconds, and `_delayed_seconds`."""
    return time.process_time(), time.perf_counter(), _delayed_seconds()


def _delayed_seconds() -> float:
    """Return the seconds that this thread has waited for a core so far; 0 except on Linux."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _memory_used(device: torch.device) -> int:
    """Return the bytes that this process uses: `own_memory`, or on a GPU torch's peak since the last call."""
    if device.type == "cuda":
        taken = int(torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        return taken
    return own_memory()


def _model_bytes(stepper: Stepper) -> int:
    model = stepper.runtimes[0].model
    return bytes_of((*model.parameters(), *model.buffers()))


def _state_bytes(runtime: TrialRuntime) -> int:
    """Return the bytes of the tensors in the state of a trial's optimizers."""
    return bytes_of(state_tensors(runtime.optimizer))


def _counts_load(device: torch.device) -> bool:
    """Return whether NVML has the load of a device: of GPUs, but not of MIG instances."""
    return device.type == "cuda" and not os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")


def _utilisation(device: torch.device, cores: float, loads: Sequence[float]) -> float:
    """Return the fraction of the device in use, averaged over the timed steps (HyperSack, Sampler).

    On a GPU it is NVML's fraction of time with any kernel, an upper bound; MIG instances have none, and count as full.
    """
    if device.type == "cuda":
        return min(1.0, max(0.01, fmean(loads))) if loads else 1.0
    return min(1.0, max(0.01, cores / torch.get_num_threads()))
