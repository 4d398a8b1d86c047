"""Rules for functions along axes (reductions, softmax, cumulative functions): a member's axis `d` becomes `d + 1`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.base import Rule, functions_named
from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "axis", "axis_of"]


def axis(x: Stacked, dim: int) -> int:
    """Axis of the stacked tensor that corresponds to a member's axis; torch's IndexError if there is none."""
    return axis_of(dim, max(x.dim(), 1))


def axis_of(dim: int, rank: int) -> int:
    """As `axis`, for a member's tensor of rank `rank`."""
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return dim % rank + 1


def _along_axes(func: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Apply a function along one axis, several axes, or all axes."""
    if not isinstance(x, Stacked) or any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    data = x.whole
    if isinstance(dim, int) and not isinstance(dim, bool) and x.dim() > 0:
        result = func(data, axis(x, dim), *args, **kwargs)
    elif isinstance(dim, (tuple, list)) and dim and x.dim() > 0:
        result = func(data, tuple(axis(x, d) for d in dim), *args, **kwargs)
    elif dim is None and not args and func in _WHOLE and not kwargs.keys() - {"dtype"}:
        result = func(data.reshape(len(data), -1), 1, **kwargs)
        if isinstance(result, tuple):  # over all axes, max and min return no indices
            result = result[0]
    else:
        return NotImplemented
    if isinstance(result, tuple):
        return type(result)(Stacked(part) for part in result)
    return Stacked(result)


def _softmax(func: Any, x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return NotImplemented if dim is None else _along_axes(func, x, dim, dtype=dtype)


_WHOLE = dict.fromkeys(functions_named("sum mean prod amax amin max min argmax argmin all any"))
"""Reductions that can run over all axes; a dict, because the order of a set differs between processes."""

_ALONG = "std var logsumexp nansum median softmax log_softmax cumsum cumprod cummax cummin logcumsumexp"
RULES = (
    Rule.direct(_along_axes, *_WHOLE, *functions_named(_ALONG)),
    Rule.direct(_softmax, F.softmax, F.log_softmax, F.softmin),
)
