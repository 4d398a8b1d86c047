"""Torch's own functions by name, also where another library, as torch_geometric, has put its own in their place."""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function

__all__ = ["has_overrides", "is_replacement", "torch_function"]

_NAMESPACES = (torch, Tensor, F)
_ORIGINALS = {torch: torch._C._VariableFunctions, Tensor: torch._C.TensorBase}
"""Namespace -> where torch keeps the functions that it copies to the namespace."""


def torch_function(namespace: Any, name: str) -> Any:
    """Torch's function of this name in `torch`, `Tensor`, or a module of torch; None if there is none."""
    found = getattr(namespace, name, None)
    return found if has_overrides(found) else getattr(_ORIGINALS.get(namespace), name, None)


def has_overrides(function: Any) -> bool:
    """Whether `__torch_function__` is asked when a function is called, unless it is a Python function without that."""
    if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
        return True
    return handle_torch_function.__name__ in function.__code__.co_names


def is_replacement(function: Any) -> bool:
    """Whether a function stands in one of torch's namespaces."""
    return any(function is held for namespace in _NAMESPACES for held in vars(namespace).values())
