"""State of a worker process that outlives a job: the task, its data sets, and a cache of trials."""

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.core.array import FusionKey, Member
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.fuse.frozen import is_lent, is_shared
from shoal.fuse.rows import bytes_of
from shoal.task import Task
from shoal.train.checkpoint import CheckpointWriter
from shoal.train.checkpoint_paths import checkpoint_files
from shoal.train.data.datasets import DataSets
from shoal.train.host_copies import host_copies
from shoal.train.outside import OutsideState
from shoal.train.proof import ProofCost, ProofRecord
from shoal.train.step_threads import JobThreads
from shoal.train.trial_runtime import TrialRuntime, build, state_tensors

__all__ = ["BuiltTrials", "TrialCache", "WorkerState"]

CPU_CACHE_BYTES, GPU_CACHE_BYTES = 256 << 20, 2 << 30
"""Maximum bytes of parameters, buffers and optimizer state in the cache, for trials of a CPU and of a GPU. The cache is
for small models, which take as long to load as to train. Larger models are restored from their checkpoints."""


@dataclass(frozen=True)
class _CachedTrial:
    runtime: TrialRuntime
    devices: tuple[tuple[Tensor, torch.device], ...]
    bytes: int


class TrialCache:
    """Cache of paused and suspended trials in host memory, so that they need not be built and loaded again."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, _CachedTrial] = OrderedDict()
        self._bytes = 0

    def put(self, runtime: TrialRuntime) -> None:
        """Add a trial that has just been saved, and drop the oldest trials if the cache exceeds its limit."""
        if runtime.device.type != "cpu" and any(map(is_lent, runtime.model.parameters())):
            return  # its base would stay on the device
        runtime.gradients.set(runtime.gradients.read())  # as after loading a checkpoint
        tensors = _tensors(runtime)
        size = bytes_of(tensors)
        limit = _limit(runtime.device)
        if size > limit:
            return
        devices = tuple((tensor, tensor.device) for tensor in tensors)
        moved = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        for tensor, copy in zip(moved, host_copies(moved, pinned=False)[0], strict=True):
            tensor.data = copy
        for tensor, device in devices:
            if device.type == "cpu" and not is_shared(tensor):
                tensor.data = tensor.data.clone()  # a view would keep the memory of the whole array alive
        self._drop(runtime.trial.number)
        self._cached[runtime.trial.number] = _CachedTrial(runtime, devices, size)
        self._bytes += size
        while self._bytes > limit:
            self._drop(next(iter(self._cached)))

    def take(self, member: Member, directory: Path) -> TrialRuntime | None:
        """Remove and return the trial of a member, if it is cached in the state of its newest checkpoint; else None."""
        if member.trial.number not in self._cached:
            return None
        kept = self._cached[member.trial.number]
        runtime = kept.runtime
        self._drop(member.trial.number)
        epoch, step = runtime.saved
        newest = next(iter(checkpoint_files(directory, member.trial.number)), None)
        if runtime.trial != member.trial or newest is None or not newest.name.startswith(f"{epoch:06d}-{step:06d}-"):
            return None
        for tensor, device in kept.devices:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
        return replace(runtime, member=member)

    def _drop(self, number: int) -> None:
        if number in self._cached:
            self._bytes -= self._cached.pop(number).bytes


class BuiltTrials:
    """Trials that a profile has built and left untouched, until the next training job of this process takes them.

    They stay on their device. The oldest ones are dropped if their own memory exceeds the limit of the cache, and those
    that are left at the end of the job, since they may train elsewhere.
    """

    def __init__(self) -> None:
        self._built: dict[int, tuple[TrialRuntime, int]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of their tensors, without memory that they share with other trials."""
        return sum(size for _, size in self._built.values())

    def keep(self, runtimes: Iterable[TrialRuntime], limit: float | None = None) -> None:
        """Add trials that were just built, up to a limit in bytes, by default that of the cache."""
        for runtime in runtimes:
            limit = _limit(runtime.device) if limit is None else limit
            size = bytes_of(tensor for tensor in _tensors(runtime) if not is_shared(tensor))
            self._built[runtime.trial.number] = runtime, size
            while self.bytes > limit:
                del self._built[next(iter(self._built))]

    def take(self, member: Member) -> TrialRuntime | None:
        """Remove and return the trial of a member as it was built; None if it is not there."""
        runtime, _ = self._built.pop(member.trial.number, (None, 0))
        return None if runtime is None or runtime.trial != member.trial else replace(runtime, member=member)

    def drop(self) -> None:
        """Drop all trials."""
        self._built.clear()


@dataclass(frozen=True)
class WorkerState:
    """State that all arrays of a process share; `global_rng` is for `PlainStepper`.

    Args:
        of_best: As in `WorkerContext`.
        plain_keys: Key of trials that train in plain PyTorch, because a step of an array was refused -> the reason.
    """

    task: Task
    sets: DataSets
    trial_cache: TrialCache
    device: torch.device
    directory: Path
    of_best: EpochOrder = LAST_EPOCHS
    plain_keys: dict[FusionKey, str] = field(default_factory=dict)
    proofs: dict[FusionKey, ProofRecord] = field(default_factory=dict)
    proof_cost: ProofCost = field(default_factory=lambda: ProofCost(time.perf_counter()))
    global_rng: set[int] = field(default_factory=set)
    built: BuiltTrials = field(default_factory=BuiltTrials)
    threads: JobThreads = field(default_factory=JobThreads)
    outside: OutsideState = field(init=False)
    writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "writer", CheckpointWriter(self.directory))
        object.__setattr__(self, "outside", OutsideState(self.task, self.sets))

    def build(self, member: Member) -> TrialRuntime:
        """Return a trial at its start: one of `built`, or a new one."""
        if (runtime := self.built.take(member)) is None:
            with self.outside.building():
                runtime = build(self.task, member, self.device)
        return runtime


def _tensors(runtime: TrialRuntime) -> list[Tensor]:
    held = state_tensors(runtime.optimizer)
    registered = [*(each for each in runtime.model.parameters() if not is_lent(each)), *runtime.model.buffers()]
    return [*registered, *held, *runtime.average.values(), *runtime.gradients.read().values()]


def _limit(device: torch.device) -> int:
    """Bytes of trials that a process keeps on a device."""
    return CPU_CACHE_BYTES if device.type == "cpu" else GPU_CACHE_BYTES
