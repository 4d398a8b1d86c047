"""A trained model out of its trial's checkpoint."""

from pathlib import Path

import torch
from torch import nn

from shoal.core.errors import CheckpointError, UnusableTaskError
from shoal.core.trial import Trial
from shoal.pickling import recalled, why_not_loaded
from shoal.task import Task, call
from shoal.worker.checkpoint import load_newest, unfit
from shoal.worker.failures import user_traceback
from shoal.worker.trial_runtime import new_model

__all__ = ["trained_model"]


def trained_model(task: bytes, trial: Trial, directory: Path) -> nn.Module:
    """The model of a trial as its newest checkpoint has it, on the CPU and in evaluation mode.

    Args:
        task: the user's, pickled by cloudpickle.
        trial: of the study.
        directory: of the study.

    Raises:
        CheckpointError: there is none, or none is intact.
        UnusableTaskError: the task cannot be loaded, or its model is another than that was.
    """
    checkpoint = load_newest(directory, trial.number)
    if checkpoint is None:
        raise CheckpointError(f"trial {trial.number} has no intact checkpoint below {directory / 'checkpoints'}")
    try:
        owner: Task = recalled(task)
    except (Exception, SystemExit) as error:
        message = f"the task of the study in {directory} cannot be loaded: {why_not_loaded(error)}"
        raise UnusableTaskError(f"{message}\n\n{user_traceback(error)}") from error
    with torch.random.fork_rng(devices=[]):
        model = new_model(call(owner, "model", config=trial.config))
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise UnusableTaskError(unfit("model", checkpoint, error)) from error
    return model.eval()
