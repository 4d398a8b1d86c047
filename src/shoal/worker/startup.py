"""What makes a fresh worker process quick to its first step."""

import sys
from collections.abc import Callable
from typing import Any

import torch._compile
from torch.optim import Optimizer

__all__ = ["postpone_compiler"]


def postpone_compiler() -> None:
    """Let optimizers be made without an import of `torch._dynamo`, which takes as long as that of torch itself.

    Torch imports it at the first call of an optimizer's method only to keep it from tracing that method. Until
    something else imports it there is nothing to be kept from; then torch's own way is taken again.
    """
    for method in vars(Optimizer).values():
        if getattr(method, "__globals__", None) is vars(torch._compile) and not hasattr(method.__wrapped__, _MARK):
            setattr(method.__wrapped__, _MARK, _undecorated(method))


_MARK = "__dynamo_disable"
"""Where torch keeps the method as the compiler's `disable` has made it."""


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    inner = method.__wrapped__  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return inner(*args, **kwargs)
        vars(inner).pop(_MARK, None)  # another thread may have done so
        return method(*args, **kwargs)

    return run
