"""Which LightningModules can train as arrays, and the refusal of others by the name of what they use."""

import dis
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from torch import nn

from shoal.core.errors import TaskError

__all__ = ["BATCHES", "EPOCH_END", "REMEDY", "check_class", "check_module", "parameters_of", "uses"]

BATCHES = "_shoal_batches"
"""Buffer of a module: training batches of its trial so far, int64, not in its state dict."""

EPOCH_END = "on_validation_epoch_end"
"""Hook of a module that is called for the metrics of torchmetrics that it holds, so only if it holds any."""

REMEDY = (
    "Train it as a function instead: shoal.tune(train, ...), where train(config) calls Trainer.fit with a "
    "ReportCheckpointCallback"
)

_HOOKS = (
    *("backward", "clip_gradients", "configure_callbacks", "configure_gradient_clipping", "configure_model"),
    *("configure_sharded_model", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "prepare_data"),
    *("setup", "teardown", "train_dataloader", "transfer_batch_to_device", "val_dataloader"),
)
_LIBRARIES = ("lightning", "pytorch_lightning")
_ELSEWHERE = ("on_test_", "on_predict_")


def check_class(module: Any) -> None:
    """Check that a class is a LightningModule whose methods have equals in a task."""
    bases = module.__mro__ if isinstance(module, type) else ()
    base = next(
        (x for x in bases if x.__name__ == "LightningModule" and x.__module__.split(".")[0] in _LIBRARIES), None
    )
    if base is None:
        raise TaskError(f"`module` must be a subclass of LightningModule, not an object of it, got {module!r}")
    hooks = [name for name in dir(base) if name.startswith("on_") and callable(getattr(base, name))]
    names = [name for name in (*hooks, *_HOOKS) if not name.startswith(_ELSEWHERE) and name != EPOCH_END]
    if wrong := sorted(name for name in names if _overrides(module, base, name)):
        raise TaskError(f"{module.__name__} defines {', '.join(wrong)}, which arrays do not call. {REMEDY}")
    for name in ("training_step", "validation_step", "configure_optimizers"):
        if not _overrides(module, base, name):
            raise TaskError(f"{module.__name__} must define `{name}`")
    if uses(module, "validation_step", "batch_idx"):
        raise TaskError(
            f"{module.__name__}.validation_step uses batch_idx, which arrays do not count in validation; do without "
            f"it. {REMEDY}"
        )


def _overrides(module: type, base: type, name: str) -> bool:
    return getattr(module, name, None) is not getattr(base, name, None)


def check_module(model: Any, has_metrics: bool) -> None:
    """Refuse a new module that optimizes manually, or ends validation without metrics or with a call of `super`."""
    if not model.automatic_optimization:
        raise TaskError(
            f"{type(model).__name__} sets automatic_optimization = False; manual optimization cannot be an array. "
            f"{REMEDY}; or write a shoal.Task with a `step` of your own, in which several optimizers are fused"
        )
    end = inspect.unwrap(getattr(type(model), EPOCH_END))
    if not has_metrics and end.__module__.split(".")[0] not in _LIBRARIES:
        raise TaskError(
            f"{type(model).__name__} defines {EPOCH_END} and holds no metrics of torchmetrics, of which alone arrays "
            f"keep a state in validation; log means in validation_step, or use such metrics. {REMEDY}"
        )
    if "__class__" in getattr(getattr(end, "__code__", None), "co_freevars", ()):
        raise TaskError(
            f"{type(model).__name__}.{EPOCH_END} calls super(), and is called without a module; leave the call out if "
            f"it is that of LightningModule, which does nothing. {REMEDY}"
        )


def parameters_of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of the arguments of a function or class, and whether it takes others by `**`."""
    parameters = inspect.signature(function).parameters.values()
    fixed = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY)
    return [x.name for x in parameters if x.kind not in fixed], any(x.kind == Parameter.VAR_KEYWORD for x in parameters)


def uses(module: type[nn.Module], method: str, default_name: str) -> bool:
    """Whether a step may use its second argument, the number of the batch.

    Args:
        default_name: Name of the argument, which it has if the step takes any number of arguments.
    """
    function = inspect.unwrap(getattr(module, method))
    names = [x for x in parameters_of(function)[0] if x != "self"]
    if not inspect.isfunction(function) or len(names) < 2:
        return default_name in names
    code = function.__code__
    loads = (each for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return names[1] in code.co_cellvars or any(_names(each.argval, names[1]) for each in loads)


def _names(argument: Any, name: str) -> bool:
    """Whether the argument of an instruction is a name, or several with it."""
    return argument == name or (isinstance(argument, tuple) and name in argument)
