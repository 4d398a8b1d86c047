"""Optimizers of torch without the import of its compiler."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch._compile
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

__all__ = ["postpone_compiler"]

_DYNAMO_DISABLED = "__dynamo_disable"
"""Attribute in which torch stores the wrapper of a method by `torch._dynamo.disable`."""

_GRAPH_BREAK_CODE = _use_grad_for_differentiable(lambda optimizer: None).__code__
"""Code of torch's wrapper around `step` of its optimizers, unless the hook of an earlier optimizer has wrapped it
again."""


def postpone_compiler() -> None:
    """Patch optimizers so that they do not import `torch._dynamo`, which takes as long as the import of torch.

    Torch needs it only to exclude their methods from tracing, so its own methods run once other code imported it.
    """
    for method in vars(Optimizer).values():
        if getattr(method, "__globals__", None) is vars(torch._compile) and not hasattr(
            method.__wrapped__, _DYNAMO_DISABLED
        ):
            setattr(method.__wrapped__, _DYNAMO_DISABLED, _without_dynamo(method))
    for optimizer_class in vars(torch.optim).values():
        if (
            isinstance(optimizer_class, type)
            and issubclass(optimizer_class, Optimizer)
            and getattr(optimizer_class.step, "__code__", None) is _GRAPH_BREAK_CODE
        ):
            optimizer_class.step = _without_graph_break(optimizer_class.step)  # type: ignore[method-assign]


def _without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    inner = method.__wrapped__  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return inner(*args, **kwargs)
        vars(inner).pop(_DYNAMO_DISABLED, None)  # another thread may have done so
        return method(*args, **kwargs)

    return run


def _without_graph_break(step: Callable[..., Any]) -> Callable[..., Any]:
    inner = step.__wrapped__  # type: ignore[attr-defined]

    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner(optimizer, *args, **kwargs)

    return run
