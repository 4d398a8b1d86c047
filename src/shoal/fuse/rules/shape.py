"""Functions that rearrange or reduce along axes: the member's axis `d` is axis `d + 1` of all."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.elementwise import align, raise_rank
from shoal.fuse.stacked import NeedsMemberError, Stacked, count

__all__ = ["RULES"]


def axis(x: Stacked, dim: int) -> int:
    """Axis of all for a member's axis; IndexError as torch raises it."""
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return dim % rank + 1


def _sizes(sizes: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The `*sizes` of view or permute, given apart or as one sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        sizes = tuple(sizes[0])
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _reshape(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    shape = _sizes(args or tuple(kwargs.values()))
    if shape is None or not isinstance(x, Stacked):
        return NotImplemented
    if -1 in shape:
        known = -math.prod(shape)
        shape = tuple(x.numel() // known if size == -1 and known else size for size in shape)
    return Stacked(x.all.reshape(len(x.all), *shape))


def _flatten(func: Any, x: Stacked, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() == 0:
        return Stacked(x.all.unsqueeze(1))
    return Stacked(x.all.flatten(axis(x, start_dim), axis(x, end_dim)))


def _transpose(func: Any, x: Stacked, dim0: int, dim1: int) -> Any:
    return Stacked(x.all.transpose(axis(x, dim0), axis(x, dim1)))


def _turn(func: Any, x: Stacked) -> Any:
    return Stacked(x.all.transpose(-1, -2)) if x.dim() == 2 or (x.dim() > 2 and func in _MATRIX_TURNS) else NotImplemented


def _permute(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    dims = _sizes(args or tuple(kwargs.values()))
    if dims is None or len(dims) != x.dim():
        return NotImplemented
    return Stacked(x.all.permute(0, *(axis(x, dim) for dim in dims)))


def _unsqueeze(func: Any, x: Stacked, dim: int) -> Any:
    rank = x.dim() + 1
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return Stacked(x.all.unsqueeze(dim % rank + 1))


def _squeeze(func: Any, x: Stacked, dim: int | None = None) -> Any:
    if not isinstance(dim, int):
        return NotImplemented
    return Stacked(x.all.squeeze(axis(x, dim)))


def _expand(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    shape = _sizes(args or tuple(kwargs.values()))
    if shape is None or not isinstance(x, Stacked):
        return NotImplemented
    return Stacked(raise_rank(x, len(shape)).expand(len(x.all), *shape))


def _over_dim(func: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Reductions and softmax: one axis, several, or all of them."""
    if not isinstance(x, Stacked) or any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    data = x.all
    if isinstance(dim, int) and not isinstance(dim, bool) and x.dim() > 0:
        result = func(data, axis(x, dim), *args, **kwargs)
    elif isinstance(dim, (tuple, list)) and dim and x.dim() > 0:
        result = func(data, tuple(axis(x, d) for d in dim), *args, **kwargs)
    elif dim is None and not args and func in _REDUCTIONS and not kwargs.keys() - {"dtype"}:
        result = func(data.reshape(len(data), -1), 1, **kwargs)
        if isinstance(result, tuple):  # max and min give indices along an axis, and none over all
            result = result[0]
    else:
        return NotImplemented
    if isinstance(result, tuple):
        return type(result)(tuple(Stacked(part) for part in result))  # type: ignore[call-arg]
    return Stacked(result)


def _join(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or not isinstance(tensors, (tuple, list)):
        return NotImplemented
    members = count(tensors)
    whole = [t.all if isinstance(t, Stacked) else t.unsqueeze(0).expand(members, *t.shape) for t in tensors]
    rank = whole[0].dim() - (0 if func is torch.stack else 1)
    return Stacked(func(whole, dim % rank + 1))


def _pieces(func: Any, x: Stacked, size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or size is None:
        return NotImplemented
    return tuple(Stacked(piece) for piece in func(x.all, size, axis(x, dim)))


def _unbind(func: Any, x: Stacked, dim: int = 0) -> Any:
    return tuple(Stacked(piece) for piece in x.all.unbind(axis(x, dim)))


def _iterate(func: Any, x: Stacked) -> Any:
    return iter(_unbind(func, x))


_BASIC = (int, slice, type(None), type(Ellipsis))


def _index(x: Any, key: Any) -> tuple[Any, ...] | None:
    keys = key if isinstance(key, tuple) else (key,)
    if not isinstance(x, Stacked) or any(isinstance(k, bool) or not isinstance(k, _BASIC) for k in keys):
        return None
    return (slice(None), *keys)


def _get(func: Any, x: Any, key: Any) -> Any:
    index = _index(x, key)
    return NotImplemented if index is None else Stacked(x.all[index])


def _set(func: Any, x: Any, key: Any, value: Any) -> Any:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("an assignment to a part of a tensor that all members share")
    index = _index(x, key)
    if index is None:
        return NotImplemented
    target = Stacked(x.all[index])
    data = align((target, value))
    if data is None:
        return NotImplemented
    target.all.copy_(data[1]) if isinstance(value, Tensor) else target.all.fill_(value)
    return None


def _select(func: Any, x: Stacked, dim: int, index: Any) -> Any:
    return Stacked(x.all.select(axis(x, dim), index)) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, x: Stacked, dim: int, start: Any, length: int) -> Any:
    return Stacked(x.all.narrow(axis(x, dim), start, length)) if isinstance(start, int) else NotImplemented


def _make() -> dict[Any, Any]:
    rules: dict[Any, Any] = {
        Tensor.view: _reshape,
        Tensor.reshape: _reshape,
        torch.reshape: _reshape,
        Tensor.__getitem__: _get,
        Tensor.__setitem__: _set,
        Tensor.__iter__: _iterate,
        Tensor.expand: _expand,
        **dict.fromkeys(_MATRIX_TURNS, _turn),
        Tensor.T.__get__: _turn,  # type: ignore[attr-defined]
    }
    named = {
        "flatten": _flatten,
        "transpose": _transpose,
        "swapaxes": _transpose,
        "t": _turn,
        "permute": _permute,
        "unsqueeze": _unsqueeze,
        "squeeze": _squeeze,
        "cat": _join,
        "concat": _join,
        "stack": _join,
        "chunk": _pieces,
        "split": _pieces,
        "unbind": _unbind,
        "select": _select,
        "narrow": _narrow,
        **dict.fromkeys("softmax log_softmax cumsum cumprod".split(), _over_dim),
        **dict.fromkeys(_REDUCTION_NAMES, _over_dim),
    }
    for name, rule in named.items():
        for home in (torch, Tensor):
            func = getattr(home, name, None)
            if func is not None:
                rules[func] = rule
    rules[F.softmax] = rules[F.log_softmax] = _f_softmax
    return rules


def _f_softmax(func: Any, x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return NotImplemented if dim is None else _over_dim(func, x, dim, dtype=dtype)


_MATRIX_TURNS = (Tensor.mT.__get__,)  # type: ignore[attr-defined]
_REDUCTION_NAMES = "sum mean prod amax amin max min argmax argmin std var all any logsumexp".split()
_REDUCTIONS = {
    getattr(home, name)
    for name in "sum mean prod amax amin max min argmax argmin all any".split()
    for home in (torch, Tensor)
    if hasattr(home, name)
}
RULES = _make()
