"""What makes a fresh worker process quick to its first step."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch._compile
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

__all__ = ["postpone_compiler"]


def postpone_compiler() -> None:
    """Let optimizers be made, and step, without an import of `torch._dynamo`, which takes as long as that of torch.

    Torch imports it at the first call of an optimizer's method only to keep it from tracing that method, and in `step`
    to break its graph there. Until something else imports it there is nothing to be kept from; then torch's own way is
    taken again.
    """
    for method in vars(Optimizer).values():
        if getattr(method, "__globals__", None) is vars(torch._compile) and not hasattr(method.__wrapped__, _MARK):
            setattr(method.__wrapped__, _MARK, _undecorated(method))
    for sort in vars(torch.optim).values():
        if isinstance(sort, type) and issubclass(sort, Optimizer) and getattr(sort.step, "__code__", None) is _BREAKS:
            sort.step = _unbroken(sort.step)  # type: ignore[method-assign]


_MARK = "__dynamo_disable"
"""Where torch keeps the method as the compiler's `disable` has made it."""
_BREAKS = _use_grad_for_differentiable(lambda optimizer: None).__code__
"""What torch's optimizers call for `step`; an optimizer that was made before in this process has it within a hook."""


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    inner = method.__wrapped__  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return inner(*args, **kwargs)
        vars(inner).pop(_MARK, None)  # another thread may have done so
        return method(*args, **kwargs)

    return run


def _unbroken(step: Callable[..., Any]) -> Callable[..., Any]:
    inner = step.__wrapped__  # type: ignore[attr-defined]

    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner(optimizer, *args, **kwargs)

    return run
