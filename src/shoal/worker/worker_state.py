"""What a worker process has at hand for all arrays that it trains."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from shoal.core.array import FusionKey
from shoal.data.datasets import DataSets
from shoal.task import Task
from shoal.worker.trial_cache import TrialCache

__all__ = ["WorkerState"]


@dataclass(frozen=True)
class WorkerState:
    """What all lanes of a process use.

    Args:
        task: the user's.
        sets: of the task, on `device`.
        paused: runtimes of the task that have paused in this process.
        device: where to train.
        directory: of the study; checkpoints are written there.
        refused: keys of which members could not go on as they were trained; see `make_stepper`.
        unkeyed: numbers of trials that cannot draw numbers of their own; see `PlainStepper`.
    """

    task: Task
    sets: DataSets
    paused: TrialCache
    device: torch.device
    directory: Path
    refused: set[FusionKey] = field(default_factory=set)
    unkeyed: set[int] = field(default_factory=set)
