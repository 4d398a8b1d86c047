"""The model of a trial with its trained weights."""

import copy
from pathlib import Path

import torch
from torch import nn

from shoal.core.errors import CheckpointError, UnusableTaskError
from shoal.core.trial import Trial
from shoal.fuse.frozen import base_fingerprint, load_own_state
from shoal.host.pickling import original_or_loaded, why_not_loaded
from shoal.host.tracebacks import user_traceback
from shoal.task import Task
from shoal.train.bases import Bases, check_base, move
from shoal.train.carried_state import CarriedState
from shoal.train.checkpoint import Weights, load_weights, mismatch_message
from shoal.train.trial_runtime import check_model

__all__ = ["trained_model"]


def trained_model(task: bytes, trial: Trial, directory: Path, best: int | None = None) -> tuple[nn.Module, Weights]:
    """Return a trial's model, on the CPU in evaluation mode, averaged by `Task.ema`, and the checkpoint of its weights.

    Args:
        best: Epoch with whose weights; None: those of the newest checkpoint.
    """
    weights = load_weights(directory, trial.number, best)
    try:
        owner: Task = original_or_loaded(task)
    except (Exception, SystemExit) as error:
        message = f"the task of the study in {directory} cannot be loaded: {why_not_loaded(error)}"
        raise UnusableTaskError(f"{message}\n\n{user_traceback(error)}") from error
    with torch.random.fork_rng(devices=[]):
        device = torch.device("cpu")
        model = move(check_model(Bases(owner, device).model(copy.deepcopy(dict(trial.config)))), device)
    check_base(base_fingerprint(model), weights)
    carried = CarriedState(owner, model, None, None, device)
    try:
        load_own_state(model, weights.model)
        carried.restore(weights.carried)
    except (RuntimeError, CheckpointError) as error:
        raise UnusableTaskError(mismatch_message("model", weights, error)) from error
    with torch.no_grad():
        for name, average in weights.average.items():  # a tied parameter is listed by one of its names
            model.get_parameter(name).copy_(average)
    return model.eval(), weights
