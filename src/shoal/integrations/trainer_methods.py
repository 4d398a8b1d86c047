"""Methods of `Trainer` in a study: refusals of a subclass that overrides them, and equals of some of them."""

import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_utils import denumpify_detensorize

from shoal.core.errors import TaskError
from shoal.worker.kept_gradients import uncleared

__all__ = ["FUNCTION", "check_methods", "check_trained", "keep_embeddings_whole", "optimizer_class", "reported"]

_log = logging.getLogger("shoal.worker")

FUNCTION = "`shoal.tune` a function that runs `Trainer` with a ReportCheckpointCallback"

_IN_PLACE = {
    "compute_loss": "`loss`",
    "compute_loss_context_manager": "`loss`",
    "autocast_smart_context_manager": "`precision`",
    "training_step": "`loss`, or `step` for all of a training step",
    "create_optimizer": "`optimizer`",
    "get_optimizer_cls_and_kwargs": "`optimizer`",
    "get_decay_parameter_names": "`optimizer`",
    "create_scheduler": "`scheduler`",
    "create_optimizer_and_scheduler": "`optimizer` and `scheduler`",
    "call_model_init": "`model`",
    "get_train_dataloader": "`data`",
    "get_eval_dataloader": "`data`",
    "_get_train_sampler": "`data`, with a DataLoader that has the sampler",
    "_get_eval_sampler": "`data`, with a DataLoader that has the sampler",
    "get_batch_samples": "`collate`",
    "_prepare_inputs": "`collate`",
    "prediction_step": "`outputs`",
    "evaluation_loop": "`evaluate`",
    "log": "`metrics`",
}
"""Methods of `Trainer` with what `TrainerTask` has in their place; of the private ones, those that are overridden."""

_LOSSES = ("loss", "valid_loss")

_left_out: set[str] = set()
"""Names of metrics of which this process has said that they are left out."""


def check_methods(task: type, base: type) -> None:
    """Refuse a subclass with methods of `Trainer` that its base, `TrainerTask`, does not have and no study calls."""
    names = {*_IN_PLACE, *(name for name in dir(Trainer) if not name.startswith("_"))}
    if wrong := sorted(name for name in names if not hasattr(base, name) and callable(getattr(task, name, None))):
        instead = [f"`{name}`" + (f" (write {_IN_PLACE[name]})" if name in _IN_PLACE else "") for name in wrong]
        raise TaskError(
            f"{task.__name__} defines methods of `Trainer` that a study does not call: {', '.join(instead)}. Override "
            f"methods of TrainerTask instead; or give {FUNCTION}. Helpers of your own need other names"
        )


def optimizer_class(args: TrainingArguments, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The class of optimizer that `Trainer` takes for `optim`, with its settings.

    Raises:
        TaskError: Its package is not installed, or a study cannot step it.
    """
    name = getattr(args.optim, "value", args.optim)
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, cast("Any", model))
    except (ImportError, ValueError) as error:
        raise TaskError(f"optim={name!r} of TrainingArguments: {error}") from error
    if is_optimizer_factory(kind) or {"params", "model", "optimizer_dict"} & set(settings) or hasattr(kind, "train"):
        raise TaskError(
            f"optim={name!r} of TrainingArguments is not an optimizer that a study can step; choose another; or "
            f"subclass TrainerTask and override `optimizer`; or give {FUNCTION}"
        )
    return kind, settings


def keep_embeddings_whole(optimizer: Any, model: nn.Module) -> None:
    """Keep the states of embeddings in 32 bits, as `Trainer.create_optimizer` does for optimizers of bitsandbytes.

    Each optimizer has its own manager of overrides, which are by place in its groups; `Trainer` has one for all.
    """
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    manager = optimizer.mng = copy.copy(optimizer.mng)
    manager.index2config = {
        (row, column): {"optim_bits": 32}
        for row, group in enumerate(optimizer.param_groups)
        for column, parameter in enumerate(group["params"])
        if id(parameter) in embeddings
    }


def check_trained(model: nn.Module, optimizer: Any, max_norm: float | None) -> None:
    """Refuse to clip gradients some of which no optimizer zeroes: they add up, and `Trainer` zeroes the whole model's.

    Raises:
        TaskError: The optimizer lacks a parameter that is not frozen.
    """
    if name := uncleared(model, [optimizer], max_norm):
        raise TaskError(
            f"`optimizer` leaves out {name!r}, whose gradients would add up from step to step in the norm that "
            "max_grad_norm of TrainingArguments limits; freeze it by requires_grad_(False) in `model`; or give it "
            "to the optimizer in a group with lr=0, to count in the norm as by Trainer; or set max_grad_norm=0"
        )


def reported(found: Any, asked: Collection[str]) -> dict[str, float]:
    """The numbers that `compute_metrics` returned, by name without the prefix `"eval_"`; others are left out.

    Args:
        found: What it returned.
        asked: Names of the metrics by which the study compares trials.

    Raises:
        TaskError: It is no mapping of names, one of them is that of the loss, or a metric of the study is no number.
    """
    found = denumpify_detensorize(found)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TaskError(f"`compute_metrics` must return a dict of names and numbers, got {found!r}")
    numbers = {}
    for key, value in found.items():
        name = key.removeprefix("eval_")
        if name in _LOSSES:
            raise TaskError(
                f"`compute_metrics` returns {key!r}, and a study reports the loss of the model, the eval_loss of "
                "`Trainer`, as 'valid_loss'; give the metric another name"
            )
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, (int, float)):
            numbers[name] = value
        elif name in asked:
            raise TaskError(
                f"`compute_metrics` returns {key!r} as {type(value).__name__}, and the study compares trials by it; "
                "return one number under this name, NaN where there is none, or pass another metric to shoal.tune"
            )
        elif key not in _left_out:
            _left_out.add(key)
            _log.warning(
                "`compute_metrics` returns %r as %s, which is no number: it is not reported", key, type(value).__name__
            )
    return numbers
