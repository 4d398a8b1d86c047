"""A few steps at several sizes: what a structure costs on a device (HyperSack's sampler, which drops the first)."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.cost.demand import Profile
from shoal.fuse.frozen import lend_frozen
from shoal.pack.batches import Batches, epoch_order
from shoal.planner.job import Array, Member
from shoal.task import Task
from shoal.worker.data import DataSets
from shoal.worker.learner import Learner, build, optimizers_in, side_by_side, wait
from shoal.worker.stepper import MixedEpochsError, Stepper, make_stepper

__all__ = ["UNNOTICED", "measure"]

ROUNDS, BURST = 3, 4
"""Training steps at each size: in every round so many, of which the first is dropped. It finds the caches as steps of
another size have left them, which those of a training do not."""

TURNS = 9
"""Steps at each size where samples are fetched for all who keep abreast, and none follows another of its own: training
then finds the caches as fetching, and others' steps, have left them. What fits them alone is no faster there."""

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

SMALLER, LARGER = 8, 32
"""Measured as well, if it is not too dear: the one if of `SIZES` the largest is not the best, else the other, for the
best may be beyond."""


def measure(
    task: Task, sets: DataSets, array: Array, device: torch.device, memory: int, unnoticed: float = UNNOTICED
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
    """
    config = array.members[0].trial.config
    train, valid = sets.of(config)
    size = array.key.batch_size
    first = next(_batches(train, array))
    unfilled = train.unfilled + valid.unfilled  # before the base is taken: on a GPU they are part of it
    base = _memory(device)
    began = time.perf_counter()
    steppers = {1: _stepper(task, array.members[:1], 1, device)}
    built = time.perf_counter() - began
    steppers[1].train_step([first], [0])
    member = max(_memory(device) - base, 4 * _bytes(steppers[1]))  # weights, gradients, two of optimizer state
    batches = list(_batches(train, array))
    times = _times()
    seconds = {1: _burst(steppers[1], 1, batches[:BURST], 0, device)}
    work = min(seconds[1]) * train.steps(size) * array.pending
    left = max(unnoticed, AFFORDABLE.get(device.type, AFFORDABLE_ON_GPU) * work)
    too_dear = False
    for members in sorted({min(size, len(array.members)) for size in SIZES} - {1}):
        price = members * DEAR * min(seconds[1])
        too_dear = too_dear or price > left
        if not too_dear and (members + sum(steppers)) * member < memory / 2:
            left -= price
            steppers[members] = _stepper(task, array.members, members, device)
            seconds[members] = []
    runs = [_Run(stepper, members, seconds[members]) for members, stepper in steppers.items()]
    together = steppers[max(steppers)].learners
    shares = Counter(type(learner.optimizer) for learner in together)
    others = {type(learner.optimizer): learner.member for learner in together}
    del others[type(steppers[1].learners[0].optimizer)]
    for other in others.values():  # what takes them longer alone is no price of training them together
        left -= DEAR * min(seconds[1])
        if left > 0 and (len(runs) + 1 + sum(steppers)) * member < memory / 2:
            runs.append(_Run(_stepper(task, [other], 1, device), 1, []))
    if train.abreast:
        seconds[1].clear()
        for tick, batch in enumerate(batches):
            for run in runs:
                run.seconds.append(_timed(run.stepper, [batch] * run.members, tick, device))
                run.stepper.watched = not run.stepper.watchable
    else:
        for tick in range(0, len(batches), BURST):
            for run in runs:
                run.seconds.extend(_burst(run.stepper, run.members, batches[tick : tick + BURST], tick, device))
    cpu, wall, delayed = (end - start for end, start in zip(_times(), times, strict=True))
    if {4, 16} <= steppers.keys():
        further = LARGER if min(seconds[16]) / 16 < min(seconds[4]) / 4 else SMALLER
        too_dear = further * DEAR * min(seconds[1]) > left
        if not too_dear and (further + sum(steppers)) * member < memory / 2:
            steppers[further] = _stepper(task, array.members, further, device)
            seconds[further] = _burst(steppers[further], further, batches, 0, device)
    gains = {members: stepper.gain for members, stepper in steppers.items() if stepper.gain is not None}
    weights, largest = _bytes(steppers[1]), max(steppers)
    state = [_state_bytes(learner) for learner in together]
    spare = max(2 * weights, *state) - int(fmean(state))  # for members whose optimizers keep more than these
    shortest = {members: min(times) for members, times in seconds.items()}
    alone = {type(run.stepper.learners[0].optimizer): min(run.seconds) for run in runs if run.members == 1}
    shortest[1] = fmean(alone.values(), [shares[kind] for kind in alone])
    del run, together  # so that nothing holds the memory of those that were timed
    steppers.clear()
    runs.clear()
    fuse_seconds, mixing = {1: built}, None
    if largest > 1:
        fuse_seconds[1] = _seconds_to_make(task, array, device)  # now that all is loaded
        anew, mixing = _mixed(task, train, array, largest, device)
        fuse_seconds[largest] = max(0.0, anew - shortest[largest])
    cores = cpu / max(wall - delayed, cpu / torch.get_num_threads())
    return Profile(
        step_seconds=shortest,
        epoch_steps=train.steps(size),
        validation_steps=valid.steps(size),
        base_memory=base + unfilled,
        member_memory=max((_memory(device) - base) // largest + spare, 4 * weights),
        compute=_utilisation(device, cores),
        cores=cores,
        fuse_seconds=fuse_seconds,
        mixing=None if mixing is None else mixing / shortest[largest],
        fused_gain=gains,
        fetch_seconds=train.fetch_seconds / max(1, train.fetched) * size,
        sharing=train.sharing,
        sample=len(array.members),
        pending=int(array.pending) if too_dear else None,
    )


def _seconds_to_make(task: Task, array: Array, device: torch.device) -> float:
    """What it takes to make one member ready to train."""
    began = time.perf_counter()
    _stepper(task, array.members, 1, device)
    return time.perf_counter() - began


def _mixed(task: Task, train: Batches, array: Array, members: int, device: torch.device) -> tuple[float, float | None]:
    """What it takes to make an array and do its first step, now that all is loaded and found out.

    Returns:
        These seconds, and those of a step in which every member has a batch of its own, None if that cannot be.
    """
    both = zip(_batches(train, array), _batches(train, array, epoch=1), strict=True)
    pairs = list(islice(both, BURST))  # enough to compare them with, and many members make them long
    began = time.perf_counter()
    stepper = _stepper(task, array.members, members, device)
    anew = time.perf_counter() - began + _timed(stepper, pairs[0][:1] * members, 0, device)
    for b, learner in enumerate(stepper.learners):
        learner.epoch = b % 2
    try:
        seconds = [
            _timed(stepper, [pair[b % 2] for b in range(members)], tick, device) for tick, pair in enumerate(pairs)
        ]
    except MixedEpochsError:
        return anew, None
    return anew, min(seconds[1:])


@dataclass(frozen=True)
class _Run:
    """Steps that are timed.

    Args:
        stepper: that takes them.
        members: it trains.
        seconds: of each.
    """

    stepper: Stepper
    members: int
    seconds: list[float]


def _stepper(task: Task, some: Sequence[Member], members: int, device: torch.device) -> Stepper:
    learners: list[Learner] = []
    for member in islice(cycle(some), members):
        learners.append(build(task, member, device))
        lend_frozen(learners[0].model, learners[-1].model)
    return make_stepper(task, side_by_side(learners))


def _batches(train: Batches, array: Array, epoch: int = 0) -> Iterator[Any]:
    """As many as there are steps, in the order of an epoch, which begins again if it is too short."""
    order = epoch_order(train.samples, array.members[0].trial.data_seed, epoch)
    steps = TURNS if train.abreast else ROUNDS * BURST
    passes = (train.walk(array.key.batch_size, order) for _ in range(steps))
    return islice(chain.from_iterable(passes), steps)


def _burst(stepper: Stepper, members: int, batches: Sequence[Any], first: int, device: torch.device) -> list[float]:
    """Seconds of some steps in a row but the first; of the batch that is at number `first` and those after it."""
    times = []
    for tick, batch in enumerate(batches, start=first):
        times.append(_timed(stepper, [batch] * members, tick, device))
        stepper.watched = not stepper.watchable  # as in training, if it draws nothing
    return times[1:]


def _timed(stepper: Stepper, batches: Sequence[Any], tick: int, device: torch.device) -> float:
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
    model = stepper.learners[0].model
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _state_bytes(learner: Learner) -> int:
    """Of the tensors in the state of its optimizer, or of several."""
    states = [dict(one.state) for one in optimizers_in(learner.optimizer)]
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
