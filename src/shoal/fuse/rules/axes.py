"""Functions along axes: the member's axis `d` is axis `d + 1` of all."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "axis"]


def axis(x: Stacked, dim: int) -> int:
    """Axis of all for a member's axis; IndexError as torch raises it."""
    return axis_of(dim, max(x.dim(), 1))


def axis_of(dim: int, rank: int) -> int:
    """The same for a member of any rank."""
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return dim % rank + 1


def _over(func: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Reductions and softmax: one axis, several, or all of them."""
    if not isinstance(x, Stacked) or any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    data = x.whole
    if isinstance(dim, int) and not isinstance(dim, bool) and x.dim() > 0:
        result = func(data, axis(x, dim), *args, **kwargs)
    elif isinstance(dim, (tuple, list)) and dim and x.dim() > 0:
        result = func(data, tuple(axis(x, d) for d in dim), *args, **kwargs)
    elif dim is None and not args and func in _WHOLE and not kwargs.keys() - {"dtype"}:
        result = func(data.reshape(len(data), -1), 1, **kwargs)
        if isinstance(result, tuple):  # max and min give indices along an axis, and none over all
            result = result[0]
    else:
        return NotImplemented
    return _wrapped(result)


def _wrapped(result: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)(Stacked(part) for part in result)
    return Stacked(result)


def _with_default(dim: int) -> Any:
    """The axis has a default."""

    def rule(func: Any, x: Any, dim: int = dim, *args: Any, **kwargs: Any) -> Any:
        return _over(func, x, dim, *args, **kwargs)

    return rule


def _softmax(func: Any, x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return NotImplemented if dim is None else _over(func, x, dim, dtype=dtype)


def _topk(func: Any, x: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Stacked) or not x.dim():
        return NotImplemented
    return _wrapped(func(x.whole, k, axis(x, dim), *args, **kwargs))


def _flip(func: Any, x: Any, *dims: Any) -> Any:
    axes = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return Stacked(x.whole.flip([axis(x, dim) for dim in axes]))


def _of_matrix(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions of the last two axes."""
    return Stacked(func(x.whole, *args, **kwargs)) if x.dim() >= 2 else NotImplemented


def _roll(func: Any, x: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is None or dims == ():
        return Stacked(x.whole.reshape(len(x.whole), -1).roll(shifts, 1).view(x.whole.shape))
    return Stacked(x.whole.roll(shifts, [axis(x, dim) for dim in ((dims,) if isinstance(dims, int) else dims)]))


def _diagonal(func: Any, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return Stacked(x.whole.diagonal(offset, axis(x, dim1), axis(x, dim2)))


def _windows(func: Any, x: Any, dimension: int, size: int, step: int) -> Any:
    return Stacked(x.whole.unfold(axis(x, dimension), size, step)) if x.dim() else NotImplemented


def _names(text: str, rule: Any, *homes: Any) -> dict[Any, Any]:
    pairs = [(home, name) for home in homes or (torch, Tensor) for name in text.split()]
    return {getattr(home, name): rule for home, name in pairs if hasattr(home, name)}


_WHOLE = set(_names("sum mean prod amax amin max min argmax argmin all any", None))
"""Reductions that may run over all axes at once."""

RULES: dict[Any, Any] = {
    **_names("sum mean prod amax amin max min argmax argmin std var all any logsumexp nansum median", _over),
    **_names("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp", _over),
    **_names("argsort sort", _with_default(-1)),
    **_names("glu", _with_default(-1), F),
    **_names("softmax log_softmax softmin", _softmax, F),
    **_names("topk", _topk),
    **_names("flip", _flip),
    **_names("tril triu", _of_matrix),
    **_names("roll", _roll),
    **_names("diagonal", _diagonal),
    **_names("unfold", _windows, Tensor),
}
