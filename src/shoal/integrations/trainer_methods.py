"""What a study has in place of methods of `Trainer`."""

import copy
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory

from shoal.core.errors import TaskError

__all__ = ["FUNCTION", "keep_embeddings_whole", "optimizer_class"]

FUNCTION = "`shoal.tune` a function that runs `Trainer` with a ReportCheckpointCallback"


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
