"""State of a worker process that outlives a job: the task, its data sets, and trials kept in memory."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.core.array import FusionKey, Member
from shoal.data.datasets import DataSets
from shoal.fuse.frozen import is_shared
from shoal.task import Task
from shoal.worker.files import checkpoints
from shoal.worker.trial_runtime import TrialRuntime, optimizers_in

__all__ = ["TrialCache", "WorkerState"]

KEPT_BYTES, MOVED_BYTES = 256 << 20, 2 << 30
"""Most bytes of parameters, buffers and optimizer state in the cache, for trials of a CPU and of a GPU. The cache is
for small models, which take as long to load as to train. Larger ones go on from their checkpoints."""


@dataclass(frozen=True)
class _CachedTrial:
    """A trial, its tensors with their devices, and their bytes."""

    runtime: TrialRuntime
    places: tuple[tuple[Tensor, torch.device], ...]
    bytes: int


class TrialCache:
    """Keeps paused and suspended trials in host memory, so that they need not be built and loaded again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _CachedTrial] = OrderedDict()
        self._bytes = 0

    def keep(self, runtime: TrialRuntime) -> None:
        """Keep a trial that has just been saved; the oldest ones are dropped if there is no room."""
        tensors = _tensors(runtime)
        size = sum(tensor.nbytes for tensor in tensors)
        room = KEPT_BYTES if runtime.device.type == "cpu" else MOVED_BYTES
        if size > room:
            return
        places = tuple((tensor, tensor.device) for tensor in tensors)
        for parameter in runtime.model.parameters():  # as after loading a checkpoint, which has no gradients
            parameter.grad = None
        for tensor in tensors:  # a view would keep the memory of the whole array
            if tensor.device.type != "cpu":
                tensor.data = tensor.data.to("cpu")
            elif not is_shared(tensor):
                tensor.data = tensor.data.clone()
        self._drop(runtime.trial.number)
        self._kept[runtime.trial.number] = _CachedTrial(runtime, places, size)
        self._bytes += size
        while self._bytes > room:
            self._drop(next(iter(self._kept)))

    def take(self, member: Member, directory: Path) -> TrialRuntime | None:
        """Remove and return the trial of a member, if it is here and its newest checkpoint is the same."""
        if member.trial.number not in self._kept:
            return None
        kept = self._kept[member.trial.number]
        runtime = kept.runtime
        self._drop(member.trial.number)
        epoch, step = runtime.saved
        newest = next(iter(checkpoints(directory, member.trial.number)), None)
        if runtime.trial != member.trial or newest is None or not newest.name.startswith(f"{epoch:06d}-{step:06d}-"):
            return None
        for tensor, device in kept.places:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
        return replace(runtime, member=member)

    def _drop(self, number: int) -> None:
        if number in self._kept:
            self._bytes -= self._kept.pop(number).bytes


@dataclass(frozen=True)
class WorkerState:
    """State that all arrays of a process share.

    Args:
        task: Task of the study.
        sets: Data sets of the task, on `device`.
        paused: Cache of paused trials.
        device: Device to train on.
        directory: Directory of the study, for checkpoints.
        refused: Keys whose members cannot train fused; see `make_stepper`.
        unkeyed: Numbers of trials that cannot draw their own random numbers; see `PlainStepper`.
    """

    task: Task
    sets: DataSets
    paused: TrialCache
    device: torch.device
    directory: Path
    refused: set[FusionKey] = field(default_factory=set)
    unkeyed: set[int] = field(default_factory=set)


def _tensors(runtime: TrialRuntime) -> list[Tensor]:
    states = (state for one in optimizers_in(runtime.optimizer) for state in one.state.values())
    held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [*runtime.model.parameters(), *runtime.model.buffers(), *held, *runtime.average.values()]
