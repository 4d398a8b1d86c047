"""What Shoal predicts of the memory of an array before it starts."""

import gc
import tempfile
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch
from models.peft_llama import Adapter, Base
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from rivals.memory import peak_of_step
from rivals.rival import Cell, rate
from shoal.core.array import Array, FusionKey, Member
from shoal.core.trial import Trial
from shoal.train.data.datasets import DataSets
from shoal.train.memory import MemoryMeter
from shoal.train.profile import measure
from shoal.train.worker_state import TrialCache, WorkerState

__all__ = ["TensorMeter", "predicted_bytes"]

T = TypeVar("T")


class TensorMeter(MemoryMeter):
    """Counts the bytes of tensors on a CPU, and nothing else of the process."""

    def used(self) -> int:
        """Bytes of all live tensors."""
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        found += [each.grad for each in found if each.is_leaf and each.grad is not None]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())

    def during(self, step: Callable[[], T]) -> tuple[T, int]:
        """The result of a step, and the bytes of the tensors that it adds at its peak."""
        results: list[T] = []
        added = peak_of_step(lambda: results.append(step()), [], self._device)
        return results[0], added


class CellTask(shoal.Task):
    """The members of a cell as trials, each with its number as `member`."""

    def __init__(self, cell: Cell, base: Base, adapters: Sequence[Adapter]) -> None:
        self.cell, self.frozen, self.adapters = cell, base, adapters
        self.batch_sizes = cell.workload.batch_sizes or (cell.workload.samples,)
        self.micro_batch_size = min(self.batch_sizes)

    def data(self, config: Any) -> Any:
        rows = TensorDataset(*(each.cpu() for each in self.cell.batch()))
        return rows, rows

    def batch_size(self, config: Any) -> int:
        return self.batch_sizes[config["member"] % len(self.batch_sizes)]

    def base(self, config: Any) -> nn.Module:
        return self.frozen()

    def model(self, config: Any, base: nn.Module) -> nn.Module:
        return self.adapters[config["member"] % len(self.adapters)].put_on(base)

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return self.cell.workload.phases[0].optimizer(model, rate(config["member"]))

    def loss(self, model: Any, batch: Any) -> Tensor:
        return self.cell.loss(0)(model, tuple(batch))


def predicted_bytes(cell: Cell, base: Base, adapters: Sequence[Adapter]) -> int:
    """The peak of the tensors of an array of a cell's members, as predicted by a worker that has trained no array."""
    meter = MemoryMeter(cell.device) if cell.device.type == "cuda" else TensorMeter(cell.device)
    task = CellTask(cell, base, adapters)
    members = tuple(
        Member(Trial(b, {"member": b}, seed=b, data_seed=0), start=0, target=1) for b in range(cell.members)
    )
    gc.collect()
    gc.freeze()  # what lives already, which need not be looked through for tensors
    try:
        before = meter.used()
        with tempfile.TemporaryDirectory() as directory:
            state = WorkerState(task, DataSets(task, cell.device), TrialCache(), cell.device, Path(directory))
            profile = measure(
                state, Array(FusionKey("", "", task.micro_batch_size), members), 1 << 60, free_seconds=inf, meter=meter
            )
        return profile.base_memory + cell.members * profile.member_memory - before
    finally:
        gc.unfreeze()
