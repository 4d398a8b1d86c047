"""What a worker process has at hand for all arrays that it trains."""

from collections import Counter
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
        refusals: by key, how often members could not go on as they were trained; see `make_stepper`.
    """

    task: Task
    sets: DataSets
    paused: Paused
    device: torch.device
    directory: Path
    refusals: Counter[FusionKey] = field(default_factory=Counter)
