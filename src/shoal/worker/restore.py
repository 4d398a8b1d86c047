"""A trained model out of its trial's checkpoint."""

from pathlib import Path

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.pickling import recalled
from shoal.task import Task
from shoal.trial import Trial
from shoal.worker.checkpoint import load_newest

__all__ = ["trained_model"]


def trained_model(task: bytes, trial: Trial, directory: Path) -> nn.Module:
    """The model of a trial as its newest checkpoint has it, on the CPU and in evaluation mode.

    Args:
        task: the user's, pickled by cloudpickle.
        trial: of the study.
        directory: of the study.

    Raises:
        CheckpointError: there is none, or none is intact.
    """
    checkpoint = load_newest(directory, trial.number)
    if checkpoint is None:
        raise CheckpointError(f"trial {trial.number} has no intact checkpoint below {directory / 'checkpoints'}")
    owner: Task = recalled(task)
    with torch.random.fork_rng(devices=[]):
        model = owner.model(trial.config)
    model.load_state_dict(checkpoint.model)
    return model.eval()
