"""What a worker process has at hand for all arrays that it trains."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from shoal.core.array import FusionKey
from shoal.task import Task
from shoal.worker.data import DataSets
from shoal.worker.paused import Paused

__all__ = ["Workshop"]


@dataclass(frozen=True)
class Workshop:
    """What all lanes of a process use.

    Args:
        task: the user's.
        sets: of the task, on `device`.
        paused: learners of the task that have paused in this process.
        device: where to train.
        directory: of the study; checkpoints are written there.
        drawing: keys of arrays that have begun to draw random numbers after steps that drew none.
    """

    task: Task
    sets: DataSets
    paused: Paused
    device: torch.device
    directory: Path
    drawing: set[FusionKey] = field(default_factory=set)
