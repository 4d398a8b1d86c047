"""Functions that torch wrote in Python: their own code runs, and its parts have rules."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["by_parts"]


def by_parts(func: Any) -> Callable[..., Any]:
    """A rule that runs the code of a function of `torch.nn.functional` without its question for overrides."""
    parts = FunctionType(
        func.__code__, {**F.__dict__, "has_torch_function_variadic": _never}, func.__name__, func.__defaults__
    )
    parts.__kwdefaults__ = func.__kwdefaults__

    def rule(_: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return parts(*args, **kwargs)

    return rule


def _never(*tensors: Any) -> bool:
    return False
