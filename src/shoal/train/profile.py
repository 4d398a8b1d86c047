"""Measures the cost of a structure on a device with a few steps at several array sizes (HyperSack's sampler)."""

import logging
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

from shoal.core.array import Array, Member
from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.core.event import Outcome
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.frozen import is_lent, large_frozen, share_frozen
from shoal.fuse.model_copy import find_unbindable
from shoal.fuse.race import RaceRules, choose_fastest
from shoal.fuse.rows import bytes_of
from shoal.plan.cost.cost import MIN_WORK_TO_MEASURE
from shoal.train.bases import bases_of
from shoal.train.best_epoch import best_bytes
from shoal.train.data.batches import Batches
from shoal.train.failures import outcome_of
from shoal.train.make_stepper import make_stepper
from shoal.train.memory import MemoryMeter, fixed_bytes
from shoal.train.plain_copy import BuildSnapshot, copied_bytes, copy_trial
from shoal.train.step_settings import StepPlan, mixes_steps
from shoal.train.stepper import MixedEpochsError, Stepper, StepRefusedError
from shoal.train.trial_runtime import TrialRuntime, sort_by_optimizer, state_tensors, synchronize
from shoal.train.worker_state import WorkerState

__all__ = ["FREE_SECONDS", "PREVIEW_SECONDS", "measure"]

_log = logging.getLogger("shoal.train")

SINGLE_RULES = RaceRules(min_runs=3, max_runs=3)

INTERLEAVED_RULES = RaceRules(min_runs=3, max_runs=9, enough_seconds=1.0, drop_ratio=inf)
"""Rules for timing several sizes in turns, in bursts as in training. Of long steps, which vary little, 3 suffice."""

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
"""Time for building trials and measuring sizes, by device type, as a fraction of all expected epochs, one trial after
another; on a GPU none for less than `MIN_WORK_TO_MEASURE`. On a CPU fused members are seldom twice as fast, on a GPU
often many times. Sizes that are not measured here may be tried in training (`shoal.plan.cost.cost.Cost.is_untried`)."""

FIRST_SIZE = {"cpu": 8}
"""Most members of the first array, where they were only timed alone, by device type; else all that wait."""

FREE_SECONDS = 0.25
"""Seconds of a job on a CPU that may always be used for measuring sizes."""

PREVIEW_SECONDS = 15.0
"""The same for a GPU, in a study that only measures."""

MIXED_EPOCH_STEPS = 4
"""Number of timed steps with members at different epochs. The first one does not count."""

EXTRA_SMALL_SIZE, EXTRA_LARGE_SIZE = 8, 32
"""One extra size, if the budget allows: the large one if 16 members were faster each than 4, else the small one."""


def measure(
    state: WorkerState,
    array: Array,
    memory: int,
    free_seconds: float = FREE_SECONDS,
    on_refusal: Callable[[str], None] = lambda reason: None,
    meter: MemoryMeter | None = None,
) -> Profile:
    """Train copies of members of an array for a few steps at each of `SIZES`, in turns, and return the profile.

    The members that were built stay as they are, in `state.built`. Sizes are left out if building and measuring them
    would cost a large part of the time that they could save, beyond the `free_seconds`, or if all sizes together would
    take more than half of the device's `memory` in bytes. `on_refusal` gets the reason if the members cannot be one
    array. The steps may change what `state.outside` includes. `meter` counts bytes; by default those of the device.
    """
    train, valid = state.sets.of(array.members[0].trial.config)
    device = state.device
    bench = _ArrayBenchmark(state, train, valid, array, meter or MemoryMeter(device))
    first = next(bench.batches())
    pending_bytes = train.pending_bytes + valid.pending_bytes  # first, since it allocates the samples on a GPU
    bases_of(state.task, device).load(array.members[0].trial.config)
    base = bench.meter.used() - state.built.bytes
    while True:
        try:
            timed = _time_sizes(bench, first, memory, free_seconds)
            break
        except StepRefusedError as refused:  # in training, such trials fall back to plain steps in the same way
            bench = replace(bench, refusal=str(refused))
        except Exception as error:  # a task may know the model that it made, and not a copy of it
            if bench.failure or outcome_of(error) is not Outcome.RAISED:
                raise
            bench = replace(bench, failure=f"a step of a copy raised {type(error).__name__}: {error}")
    largest = max(timed.seconds)
    if timed.refusal:
        on_refusal(timed.refusal)
    fuse_seconds, mixing = {1: timed.build_seconds}, None
    if largest > 1:
        fuse_seconds[1] = bench.time_build()  # now that all code is loaded
        restart_seconds, mixing = bench.time_mixed_epochs(largest)
        fuse_seconds[largest] = max(0.0, restart_seconds - timed.seconds[largest])
    state.built.keep(bench.untouched())
    iteration = _Iteration.of(train, bench.plan.samples(0, 0), timed.seconds[largest], device)
    cores, batches = iteration.average(timed.cores), bench.plan.settings.accumulate
    return Profile(
        step_seconds={members: seconds / batches for members, seconds in timed.seconds.items()},
        epoch_steps=bench.plan.epoch_steps * batches,
        validation_steps=valid.steps(bench.plan.settings.eval_batch_size),
        base_memory=base + pending_bytes + timed.shared_memory,
        member_memory=timed.member_memory,
        compute=_utilisation(device, cores, [iteration.busy * load for load in timed.loads]),
        cores=cores,
        fuse_seconds=fuse_seconds,
        mixing=None if mixing is None else mixing / timed.seconds[largest],
        fused_gain=timed.gains,
        fetch_seconds=iteration.fetch_seconds / batches,
        sample_sharing=train.sample_sharing,
        measured_members=len(array.members),
        expected_epochs=int(array.expected_epochs) if timed.too_expensive else None,
        first_size=FIRST_SIZE.get(device.type),
    )


@dataclass(frozen=True)
class _ArrayBenchmark:
    state: WorkerState
    train: Batches
    valid: Batches
    array: Array
    meter: MemoryMeter
    refusal: str = ""
    failure: str = ""
    """Reason for which no copies take the steps."""
    built: dict[int, tuple[TrialRuntime, BuildSnapshot]] = field(default_factory=dict)
    """Trials as they were built, with their snapshots: only copies take steps, so none that cannot be copied."""
    build_times: list[float] = field(default_factory=list)  # in seconds

    @cached_property
    def plan(self) -> StepPlan:
        return StepPlan.of(self.state.task, self.array.members[0].trial.config, self.train, self.valid)

    @property
    def build_seconds(self) -> float:
        """Seconds to build a trial: those of the fastest build, since the first ones load code."""
        return min(self.build_times)

    def seconds_to_build(self, members: int) -> float:
        """Return the seconds to build those of the first members that are not there."""
        return self.build_seconds * len(self._missing(members))

    def build(self, members: int) -> None:
        """Build those of the first members that are not there, each as a training job would."""
        missing = self._missing(members)
        if missing:
            self.state.outside.restore_first()  # what the steps of other sizes have changed
        for member in missing:
            runtime = self._build(member)
            if self.built and large_frozen(runtime.model):
                share_frozen(next(iter(self.built.values()))[0].model, runtime.model)
            self.built[member.trial.number] = runtime, BuildSnapshot(runtime)

    def _missing(self, members: int) -> list[Member]:
        return [each for each in self.array.members[:members] if each.trial.number not in self.built]

    def _build(self, member: Member) -> TrialRuntime:
        began = time.perf_counter()
        runtime = self.state.build(member)
        self.build_times.append(time.perf_counter() - began)
        self.state.outside.include(runtime.model)
        return runtime

    @property
    def shared_bytes(self) -> int:
        """Bytes of large frozen parameters that the trials of a process share, but those of a base."""
        models = [runtime.model for runtime, _ in self.built.values()]
        return bytes_of(each for model in models[:1] for each in large_frozen(model) if not is_lent(each))

    def untouched(self) -> list[TrialRuntime]:
        """Return the trials that were built; none if a step has changed one."""
        if any(snapshot.changed() for _, snapshot in self.built.values()):
            return []
        return [runtime for runtime, _ in self.built.values()]

    def trials(self, members: int, some: Sequence[Member] | None = None) -> list[TrialRuntime]:
        """Return copies of `members` trials, taken in a cycle from all or from `some`, with the first state outside."""
        self.state.outside.restore_first()
        found: list[TrialRuntime] = []
        for member in islice(cycle(some or self.array.members), members):
            found.append(self._copy(member))
            if large_frozen(found[0].model):
                share_frozen(found[0].model, found[-1].model)
        return found

    def _copy(self, member: Member) -> TrialRuntime:
        """Return a copy of a trial, or a new build of one that cannot be copied."""
        known = self.built.get(member.trial.number)
        runtime = self._build(member) if known is None else known[0]
        try:
            if self.failure or (path := find_unbindable(runtime.model)) is not None:
                raise FusionError(self.failure or f"`{path}` refers to a part of the model as no copy can")
            return copy_trial(runtime)
        except FusionError as reason:
            _log.info("trial %d is built for each measurement, and again to train: %s", member.trial.number, reason)
            self.built.pop(member.trial.number, None)
            return runtime

    def fuse(self, runtimes: Sequence[TrialRuntime]) -> Stepper:
        """Return a stepper that takes eager and plain steps: no step is left for which to capture or compile one."""
        task, ordered = self.state.task, sort_by_optimizer(runtimes)
        if not self.refusal:
            return make_stepper(task, ordered, compiling=CaptureDecision(None, len(ordered), steps=0))
        numbers = frozenset(member.trial.number for member in self.array.members)
        return make_stepper(task, ordered, plain=True, global_rng=numbers)

    def batches(self, other: int = 0) -> Iterator[Any]:
        """Return `BATCH_COUNT` batches of the first epoch, which is repeated if it is too short."""
        seed = self.array.members[0].trial.data_seed + other
        iterators = (self.plan.step_batches(0, 0, seed) for _ in range(BATCH_COUNT))
        return islice(chain.from_iterable(iterators), BATCH_COUNT)

    def time_build(self) -> float:
        """Return the seconds to build a single trial, as it is trained alone."""
        trials = self.trials(1)
        began = time.perf_counter()
        self.fuse(trials)
        return self.build_seconds + time.perf_counter() - began

    def time_mixed_epochs(self, members: int) -> tuple[float, float | None]:
        """Time the start of an array whose code is loaded and tuned, and steps with members at different epochs."""
        both = zip(self.batches(), self.batches(other=1), strict=True)
        pairs = list(islice(both, MIXED_EPOCH_STEPS))  # few, since with many members they take long
        trials = self.trials(members)
        began = time.perf_counter()
        stepper = self.fuse(trials)
        restart_seconds = members * self.build_seconds + time.perf_counter() - began
        restart_seconds += _step_seconds(stepper, pairs[0][:1] * members, 0)
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
        if train.sample_sharing in ("resident", "kept"):
            return cls(fetch, 1.0, 0.0)
        wall = max(step, fetch) if device.type == "cuda" else step + fetch
        return cls(fetch, step / wall, batch * train.fetch_cpu_seconds / wall)

    def average(self, cores: float) -> float:
        """Return the CPU seconds per second of the iteration, given those of the step."""
        return cores * self.busy + self.fetching


@dataclass(frozen=True)
class _SizeTimes:
    """Times of steps by number of members, and what the steps use.

    Args:
        member_memory: Bytes that each member of the array adds; more if other members' optimizers may hold more.
        shared_memory: Bytes of all members: large frozen parameters, what the first step leaves, and `fixed_bytes`.
        cores: CPU seconds per second.
        loads: Fractions of the GPU in use after each step of the largest size but its first; empty on other devices.
    """

    seconds: dict[int, float]
    gains: dict[int, float]
    build_seconds: float
    member_memory: int
    shared_memory: int
    cores: float
    loads: Sequence[float]
    too_expensive: bool
    refusal: str


def _time_sizes(bench: _ArrayBenchmark, first: Any, memory: int, free_seconds: float) -> _SizeTimes:
    """Time steps of a single member, of several, and of one for each other class of optimizer; then free memory."""
    device, single = bench.state.device, _TimedSteps.of(bench, 1, [first])
    build_seconds = bench.build_seconds + single.fuse_seconds
    single.step()
    lone = single.stepper.runtimes[0]
    member = max(single.bytes, copied_bytes(lone))
    single.batches = batches = list(bench.batches())
    times = _clock_times()
    taken: dict[Any, float] = {**choose_fastest({1: single.step}, SINGLE_RULES).seconds}
    price = STEPS_PER_MEMBER * taken[1]
    work = taken[1] * bench.plan.epoch_steps * bench.array.expected_epochs
    budget = _MeasuringBudget(price, member, max(free_seconds, _affordable(device, work)), memory / 2 - member)
    runs, too_expensive = {1: single}, False
    sizes = sorted({min(size, len(bench.array.members)) for size in SIZES} - {1})
    if sizes and not budget.too_expensive(sizes[0]):
        bench.build(2)  # since the first build may have loaded code
    for members in sizes:
        if budget.spend(members, bench.seconds_to_build(members)):
            runs[members] = _TimedSteps.of(bench, members, batches)
        else:
            too_expensive = too_expensive or budget.too_expensive(members, bench.seconds_to_build(members))
    together, optimizer_class = runs[max(runs)].stepper.runtimes, type(lone.optimizer)
    others = _single_members(bench, together, optimizer_class, budget, batches)
    steps = {each: run.step for each, run in (*runs.items(), *others.items())}
    if len(steps) > 1:
        taken |= choose_fastest(steps, LOCKSTEP_RULES if bench.train.lockstep else INTERLEAVED_RULES).seconds
    cpu, wall, delayed = (end - start for end, start in zip(_clock_times(), times, strict=True))
    if {4, 16} <= runs.keys():
        further = EXTRA_LARGE_SIZE if taken[16] / 16 < taken[4] / 4 else EXTRA_SMALL_SIZE
        too_expensive = budget.too_expensive(further, bench.seconds_to_build(further))
        if budget.spend(further, bench.seconds_to_build(further)):
            runs[further] = _TimedSteps.of(bench, further, batches)
            taken[further] = choose_fastest({further: runs[further].step}, SINGLE_RULES).seconds[further]
    shares = Counter(type(runtime.optimizer) for runtime in together)
    alone = {optimizer_class: taken[1], **{other: taken[other] for other in others}}
    shortest = {members: taken[members] for members in runs}
    shortest[1] = fmean(alone.values(), [shares[each] for each in alone])
    members, largest = max((size, run) for size, run in runs.items() if size <= len(bench.array.members))
    left = max(0, single.held - largest.held // members)
    fixed = fixed_bytes(single.bytes - left, largest.bytes, members)
    return _SizeTimes(
        seconds=shortest,
        gains={members: run.stepper.gain for members, run in runs.items() if run.stepper.gain is not None},
        build_seconds=build_seconds,
        member_memory=largest.member_memory(fixed) + best_bytes(lone.model, bench.state.of_best),
        shared_memory=bench.shared_bytes + left + fixed,
        cores=cpu / max(wall - delayed, cpu / torch.get_num_threads()),
        loads=largest.loads,
        too_expensive=too_expensive,
        refusal=bench.refusal
        or next((run.stepper.refusal for size, run in runs.items() if size > 1 and run.stepper.refusal), ""),
    )


def _affordable(device: torch.device, work: float) -> float:
    """Return the seconds that measuring sizes may take, of the seconds of all expected epochs."""
    if device.type in MEASURING_SHARE:
        return MEASURING_SHARE[device.type] * work
    return GPU_MEASURING_SHARE * work if work >= MIN_WORK_TO_MEASURE else 0.0


@dataclass
class _MeasuringBudget:
    price: float
    member: int
    seconds: float
    memory: float

    def too_expensive(self, members: int, build_seconds: float = 0.0) -> bool:
        """Return whether the remaining time is too short for a size of `members`, and for building some of them."""
        return members * self.price + build_seconds > self.seconds

    def spend(self, members: int, build_seconds: float = 0.0) -> bool:
        """Subtract the cost of a size of `members` if time and memory suffice; return whether they do."""
        if self.too_expensive(members, build_seconds) or members * self.member >= self.memory:
            return False
        self.seconds -= members * self.price + build_seconds
        self.memory -= members * self.member
        return True


@dataclass
class _TimedSteps:
    """Takes steps of trials, whose fusing took so many seconds; `held` bytes between steps, `bytes` at the peak."""

    stepper: Stepper
    batches: Sequence[Any]
    meter: MemoryMeter
    held: int
    fuse_seconds: float
    bytes: int = 0
    taken: int = 0
    loads: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, bench: _ArrayBenchmark, members: int, batches: Sequence[Any], some: Sequence[Member] | None = None
    ) -> "_TimedSteps":
        """Copy and fuse trials, which are first built where they are missing."""
        bench.build(members)
        before = bench.meter.used()
        trials = bench.trials(members, some)
        began = time.perf_counter()
        stepper = bench.fuse(trials)
        fuse_seconds = time.perf_counter() - began
        return cls(stepper, batches, bench.meter, bench.meter.used() - before, fuse_seconds)

    def member_memory(self, fixed: int) -> int:
        """Bytes of each member at the peak without `fixed`, where its optimizer holds as much as any other's may."""
        runtimes = self.stepper.runtimes
        trained = [bytes_of(each for each in one.model.parameters() if each.requires_grad) for one in runtimes]
        state = [bytes_of(state_tensors(one.optimizer)) for one in runtimes]
        shares = [of_state / max(1, of_model) for of_state, of_model in zip(state, trained, strict=True)]
        largest = max(2.0, *shares)
        kept = float(any(one.settings.accumulate > 1 for one in runtimes))  # gradients, between the batches of a step
        if mixes_steps(one.settings for one in runtimes):  # an update of some members keeps copies of all
            kept += 1 + largest
        more = int((largest + kept) * fmean(trained) - fmean(state))
        return max((self.bytes - fixed) // len(runtimes) + more, copied_bytes(runtimes[0]))

    def step(self) -> float:
        """Take one step; return its seconds."""
        stepper, tick = self.stepper, self.taken
        batches = [self.batches[tick % len(self.batches)]] * len(stepper.runtimes)
        before = self.meter.used()
        self.taken += 1
        seconds, added = self.meter.during(lambda: _step_seconds(stepper, batches, tick))
        grown = self.meter.used() - before
        self.bytes = max(self.bytes if tick > 1 else 0, self.held + added)  # the first peak has no optimizer state yet
        self.held += grown
        if tick and _counts_load(device := stepper.runtimes[0].device):
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
            others[other] = _TimedSteps.of(bench, 1, batches, [member])
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
