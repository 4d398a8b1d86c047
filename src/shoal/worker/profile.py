"""A few steps at several sizes: what a structure costs on a device (HyperSack's sampler, which drops the first)."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.array import Array, Member
from shoal.core.demand import Profile
from shoal.cost.race import RaceRules, choose_fastest
from shoal.data.batches import Batches, epoch_order
from shoal.data.datasets import DataSets
from shoal.fuse.frozen import lend_frozen
from shoal.task import Task
from shoal.worker.fused_stepper import make_stepper
from shoal.worker.stepper import MixedEpochsError, Stepper
from shoal.worker.trial_runtime import TrialRuntime, build, optimizers_in, side_by_side, wait

__all__ = ["UNNOTICED", "measure"]

FEW = RaceRules(rounds=3, most=3)
"""Steps at a size that is timed by itself."""

IN_TURNS = RaceRules(rounds=9, most=9, hopeless=inf)
"""Steps at sizes that are timed in turns, all of them. They come in bursts, as in a training: a step after one of
another size finds the caches as that has left them."""

ABREAST = replace(IN_TURNS, burst=1)
"""The same where samples are fetched for all who keep abreast, and no step follows another of its own: training then
finds the caches as fetching, and others' steps, have left them. What fits them alone is no faster there."""

BATCHES = 12
"""That are at hand for the steps, which begin with the first again."""

SIZES = (1, 4, 16)
"""Members that are trained together, where there are so many; and all of them."""

DEAR = 30
"""Lone steps' time that measuring takes for each member of a size: its steps, also at different epochs, and the races
between ways to compute them."""

AFFORDABLE = {"cpu": 0.05}
AFFORDABLE_ON_GPU = 0.25
"""Share of the time that all who wait would take one after another for which sizes are measured, by the type of the
device. On a CPU members trained together are seldom twice as fast, on a GPU often many times."""

UNNOTICED = 0.25
"""Seconds of a job for which sizes are measured however little waits."""

MIXED = 4
"""Steps of members at different epochs, of which the first does not count."""

SMALLER, LARGER = 8, 32
"""Measured as well, if it is not too dear: the one if of `SIZES` the largest is not the best, else the other, for the
best may be beyond."""


def measure(
    task: Task,
    sets: DataSets,
    array: Array,
    device: torch.device,
    memory: int,
    unnoticed: float = UNNOTICED,
    say: Callable[[str], None] = lambda note: None,
) -> Profile:
    """Train members of an array for a few steps at each of `SIZES` that it may come to, in turns; nothing is kept.

    Sizes that would take a large part of what they could save are left out.

    Args:
        task: the user's.
        sets: of the task, on `device`.
        array: what to measure.
        device: where.
        memory: bytes of the device; sizes that would take half of it, together, are left out.
        unnoticed: seconds for which sizes are measured however little waits.
        say: told why the members cannot be one array, if that is so.
    """
    train, valid = sets.of(array.members[0].trial.config)
    bench = _Bench(task, train, array, device)
    first = next(bench.batches())
    unfilled = train.unfilled + valid.unfilled  # before the base is taken: on a GPU they are part of it
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
        epoch_steps=train.steps(array.key.batch_size),
        validation_steps=valid.steps(array.key.batch_size),
        base_memory=base + unfilled,
        member_memory=max((_memory(device) - base) // largest + timed.spare, 4 * timed.weights),
        compute=_utilisation(device, timed.cores),
        cores=timed.cores,
        fuse_seconds=fuse_seconds,
        mixing=None if mixing is None else mixing / timed.seconds[largest],
        fused_gain=timed.gains,
        fetch_seconds=train.fetch_seconds / max(1, train.fetched) * array.key.batch_size,
        sharing=train.sharing,
        sample=len(array.members),
        pending=int(array.pending) if timed.too_dear else None,
    )


@dataclass(frozen=True)
class _Bench:
    """Where members of an array take steps that nothing is kept of.

    Args:
        task: the user's.
        train: the samples.
        array: whose members.
        device: where.
    """

    task: Task
    train: Batches
    array: Array
    device: torch.device

    @property
    def epoch_steps(self) -> int:
        return self.train.steps(self.array.key.batch_size)

    def stepper(self, members: int, some: Sequence[Member] | None = None) -> Stepper:
        """Of so many members, of all or of `some`, who come again if there are too few."""
        runtimes: list[TrialRuntime] = []
        for member in islice(cycle(some or self.array.members), members):
            runtimes.append(build(self.task, member, self.device))
            lend_frozen(runtimes[0].model, runtimes[-1].model)
        return make_stepper(self.task, side_by_side(runtimes))

    def batches(self, epoch: int = 0) -> Iterator[Any]:
        """Some batches, in the order of an epoch, which begins again if it is too short."""
        order = epoch_order(self.train.samples, self.array.members[0].trial.data_seed, epoch)
        passes = (self.train.walk(self.array.key.batch_size, order) for _ in range(BATCHES))
        return islice(chain.from_iterable(passes), BATCHES)

    def seconds_to_make(self) -> float:
        """What it takes to make one member ready to train."""
        began = time.perf_counter()
        self.stepper(1)
        return time.perf_counter() - began

    def mixed(self, members: int) -> tuple[float, float | None]:
        """What it takes to make an array and do its first step, now that all is loaded and found out.

        Returns:
            These seconds, and those of a step in which every member has a batch of its own, None if that cannot be.
        """
        both = zip(self.batches(), self.batches(epoch=1), strict=True)
        pairs = list(islice(both, MIXED))  # enough to compare them with, and many members make them long
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
    """What steps at several sizes showed.

    Args:
        seconds: of the shortest step, by members.
        gains: by members, see `Profile.fused_gain`.
        built: seconds that it took to make the first member ready to train.
        weights: bytes of a member's parameters and buffers.
        spare: bytes that the optimizers of other members may keep beside what those that were timed do.
        cores: CPU seconds per second.
        too_dear: a size was left out for its price.
        refusal: why several members are no array; "" if they are one.
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
    """Steps of a lone member, of several together, and of a lone one of each other class of optimizer among these.

    Nothing that was made for it is left, so that what is made next has the memory.

    Args:
        bench: where.
        first: a batch.
        base: bytes that are taken on the device while there is no member.
        memory: see `measure`.
        unnoticed: see there.
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
    work = price / DEAR * bench.epoch_steps * bench.array.pending
    seconds = max(unnoticed, AFFORDABLE.get(bench.device.type, AFFORDABLE_ON_GPU) * work)
    means = _MeasuringBudget(price, member, seconds, memory / 2 - member)
    runs, too_dear = {1: lone}, False
    for members in sorted({min(size, len(bench.array.members)) for size in SIZES} - {1}):
        if means.spend(members):
            runs[members] = _TimedSteps(bench.stepper(members), batches)
        else:
            too_dear = too_dear or means.too_dear(members)
    together = runs[max(runs)].stepper.runtimes
    classes = {type(runtime.optimizer): runtime.member for runtime in together}
    kind = type(lone.stepper.runtimes[0].optimizer)
    del classes[kind]
    others = {}
    for other, one in classes.items():  # what takes them longer alone is no price of training them together
        if means.spend(1):
            others[other] = _TimedSteps(bench.stepper(1, [one]), batches)
    steps = {each: run.step for each, run in (*runs.items(), *others.items())}
    taken = choose_fastest(steps, ABREAST if bench.train.abreast else IN_TURNS).seconds
    cpu, wall, delayed = (end - start for end, start in zip(_times(), times, strict=True))
    if {4, 16} <= runs.keys():
        further = LARGER if taken[16] / 16 < taken[4] / 4 else SMALLER
        too_dear = means.too_dear(further)
        if means.spend(further):
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
    """What may yet be spent on measuring.

    Args:
        price: seconds for each member of a size.
        member: bytes that one takes.
        seconds: of time.
        memory: bytes.
    """

    price: float
    member: int
    seconds: float
    memory: float

    def too_dear(self, members: int) -> bool:
        """Whether there is no time for so many members."""
        return members * self.price > self.seconds

    def spend(self, members: int) -> bool:
        """Pay for so many members; false where that cannot be."""
        if self.too_dear(members) or members * self.member >= self.memory:
            return False
        self.seconds -= members * self.price
        self.memory -= members * self.member
        return True


@dataclass
class _TimedSteps:
    """Steps that are timed.

    Args:
        stepper: that takes them.
        batches: for one step after the other.
        taken: steps so far.
    """

    stepper: Stepper
    batches: Sequence[Any]
    taken: int = 0

    def step(self) -> float:
        """Take one; returns its seconds."""
        batch, tick = self.batches[self.taken % len(self.batches)], self.taken
        self.taken += 1
        return _timed(self.stepper, [batch] * len(self.stepper.runtimes), tick)


def _timed(stepper: Stepper, batches: Sequence[Any], tick: int) -> float:
    """Seconds of a step of several members, of the batch of each."""
    device = stepper.runtimes[0].device
    wait(device)
    began = time.perf_counter()
    stepper.train_step(batches, [tick] * len(batches))
    wait(device)
    return time.perf_counter() - began


def _times() -> tuple[float, float, float]:
    """CPU and wall seconds, and those the process wanted to run but other programs had the core (known on Linux)."""
    try:
        delayed = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        delayed = 0.0
    return time.process_time(), time.perf_counter(), delayed


def _memory(device: torch.device) -> int:
    """Bytes this process holds on the device: of the CPU its resident set, of a GPU the most torch has taken since."""
    if device.type == "cuda":
        taken = int(torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        return taken
    return int(psutil.Process().memory_info().rss)


def _bytes(stepper: Stepper) -> int:
    """Of the first model's parameters and buffers."""
    model = stepper.runtimes[0].model
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _state_bytes(runtime: TrialRuntime) -> int:
    """Of the tensors in the state of its optimizer, or of several."""
    states = [dict(one.state) for one in optimizers_in(runtime.optimizer)]
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor))


def _utilisation(device: torch.device, cores: float) -> float:
    """Fraction of the device in use. Of a GPU it is NVML's figure, an upper bound: the time any kernel ran.

    Of an instance that MIG made NVML has none.
    """
    if device.type == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return 1.0
    if device.type == "cuda":
        return min(1.0, max(0.01, torch.cuda.utilization(device) / 100))
    return min(1.0, max(0.01, cores / torch.get_num_threads()))
