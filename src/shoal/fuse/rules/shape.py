"""Rules for functions that rearrange axes, join, split and index; indexing by tensors has none, and runs by vmap."""

from collections.abc import Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from shoal.fuse.aliasing import record_copy
from shoal.fuse.rules.axes import axis, axis_of
from shoal.fuse.rules.base import Rule, functions_named, stacked_data
from shoal.fuse.rules.elementwise import align, elementwise, raise_rank
from shoal.fuse.rules.meta import agreed_item
from shoal.fuse.stacked import NeedsMemberError, Stacked, member_count

__all__ = ["RULES"]
_BASIC = {int, slice, NoneType, EllipsisType}


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The `*sizes` of `view` or `permute`, from separate arguments or one sequence; None if they are not integers."""
    sizes = args or tuple(kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    for size in sizes:
        if not isinstance(size, int):
            return None
    return sizes


def _reshape(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], torch.dtype) and isinstance(x, Stacked) and x.dim():
        return Stacked(x.whole.view(args[0]))
    shape = _sizes(args, kwargs)
    if shape is None or not isinstance(x, Stacked):
        return NotImplemented
    return _to_shape(x, shape)


def _to_shape(x: Stacked, shape: Sequence[int]) -> Stacked:
    data = x.whole
    result = data.reshape(data.shape[0], *shape)
    return Stacked(result if data.is_contiguous() else _with_recorded_copy(data, result))


def _with_recorded_copy(data: Tensor, result: Tensor) -> Tensor:
    record_copy(data, result)
    return result


def _reshape_as(func: Any, x: Any, other: Tensor) -> Any:
    return _to_shape(x, other.shape) if isinstance(x, Stacked) else x.reshape(other.shape)


def _flatten(func: Any, x: Stacked, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() == 0:
        return Stacked(x.whole.unsqueeze(1))
    return Stacked(_with_recorded_copy(x.whole, x.whole.flatten(axis(x, start_dim), axis(x, end_dim))))


def _transpose(func: Any, x: Stacked, dim0: int, dim1: int) -> Any:
    return Stacked(x.whole.transpose(axis(x, dim0), axis(x, dim1)))


def _transpose_matrix(func: Any, x: Stacked) -> Any:
    matrices = x.dim() == 2 or (x.dim() > 2 and func == _MATRIX_TRANSPOSE)
    return Stacked(x.whole.transpose(-1, -2)) if matrices else NotImplemented


def _permute(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    dims = _sizes(args, kwargs)
    if dims is None or len(dims) != x.dim():
        return NotImplemented
    return Stacked(x.whole.permute(0, *(axis(x, dim) for dim in dims)))


def _unsqueeze(func: Any, x: Stacked, dim: int) -> Any:
    return Stacked(x.whole.unsqueeze(axis_of(dim, x.dim() + 1)))


def _squeeze(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    dims = _sizes(args, kwargs) if args or kwargs else tuple(range(x.dim()))
    if dims is None:
        return NotImplemented
    return Stacked(x.whole.squeeze([axis(x, d) for d in dims])) if x.dim() else x


def _expand(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    shape = _sizes(args, kwargs)
    if shape is None or not isinstance(x, Stacked) or len(shape) < x.dim():
        return NotImplemented
    return Stacked(raise_rank(x, len(shape)).expand(len(x.whole), *shape))


def _repeat(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    times = _sizes(args, kwargs)
    if times is None or len(times) < x.dim():
        return NotImplemented
    return Stacked(raise_rank(x, len(times)).repeat(1, *times))


def _join(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or not isinstance(tensors, (tuple, list)):
        return NotImplemented
    members = member_count(tensors) or 1
    if func is not torch.stack:
        full = [t for t in tensors if t.shape != (0,)]  # torch ignores empty tensors of shape (0,)
        tensors = full if full and {t.dtype for t in full} == {t.dtype for t in tensors} else tensors
    stacked = [stacked_data(t, members) for t in tensors]
    rank = stacked[0].dim() - (0 if func is torch.stack else 1)
    return Stacked(func(stacked, axis_of(dim, rank)))


def _split(func: Any, x: Stacked, size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or size is None:
        return NotImplemented
    return tuple(Stacked(piece) for piece in func(x.whole, size, axis(x, dim)))


def _unbind(func: Any, x: Stacked, dim: int = 0) -> Any:
    if x.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return tuple(Stacked(piece) for piece in x.whole.unbind(axis(x, dim)))


def _iterate(func: Any, x: Stacked) -> Any:
    return iter(_unbind(func, x))


def _basic_index(key: Any) -> tuple[Any, ...] | None:
    """An index that consists of numbers, slices, None and an ellipsis, else None; tensors in slices become numbers."""
    parts = tuple(map(_without_tensor_ends, key)) if type(key) is tuple else (_without_tensor_ends(key),)
    return parts if all(type(part) in _BASIC for part in parts) else None


def _without_tensor_ends(part: Any) -> Any:
    """Replace tensors in a slice by the number in which all members agree."""
    if type(part) is slice:
        ends = (part.start, part.stop, part.step)
        if any(isinstance(end, Tensor) for end in ends):
            return slice(*(agreed_item(end) if isinstance(end, Tensor) else end for end in ends))
    return part


def _get(func: Any, x: Any, key: Any) -> Any:
    basic = _basic_index(key)
    if basic is None:
        return NotImplemented
    return Stacked(x.whole[(slice(None), *basic)]) if isinstance(x, Stacked) else x[basic]


def _set(func: Any, x: Any, key: Any, value: Any) -> Any:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("it assigns to a part of a tensor that all members share")
    if isinstance(key, Tensor) and key.dtype == torch.bool and key.dim() and not isinstance(value, Tensor):
        mask = key.whole if isinstance(key, Stacked) else key.unsqueeze(0)
        x.whole.masked_fill_(mask.reshape(*mask.shape, *[1] * (x.dim() - key.dim())), value)
        return None
    basic = _basic_index(key)
    if basic is None:
        return NotImplemented
    part = x.whole[(slice(None), *basic)]
    data = align((Stacked(part), value))
    if data is None or data[0].dim() != part.dim():
        return NotImplemented
    part.copy_(data[1]) if isinstance(value, Tensor) else part.fill_(value)
    return None


def _select(func: Any, x: Stacked, dim: int, index: Any) -> Any:
    return Stacked(x.whole.select(axis(x, dim), index)) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, x: Stacked, dim: int, start: Any, length: int) -> Any:
    return Stacked(x.whole.narrow(axis(x, dim), start, length)) if isinstance(start, int) else NotImplemented


def _where(func: Any, condition: Any, input: Any = None, other: Any = None) -> Any:
    """Run `where` with three arguments; with one it returns indices, whose number may differ between members."""
    return NotImplemented if input is None else elementwise(func, condition, input, other)


_MATRIX_TRANSPOSE = Tensor.mT.__get__  # type: ignore[attr-defined]
RULES = (
    Rule.direct(_reshape, *functions_named("view reshape")),
    Rule.direct(_reshape_as, *functions_named("view_as reshape_as")),
    Rule.direct(_flatten, *functions_named("flatten ravel")),
    Rule.direct(_transpose, *functions_named("transpose swapaxes swapdims")),
    Rule.direct(_transpose_matrix, *functions_named("t"), _MATRIX_TRANSPOSE, Tensor.T.__get__),  # type: ignore[attr-defined]
    Rule.direct(_permute, *functions_named("permute")),
    Rule.direct(_unsqueeze, *functions_named("unsqueeze")),
    Rule.direct(_squeeze, *functions_named("squeeze")),
    Rule.direct(_expand, *functions_named("expand broadcast_to")),
    Rule.direct(_repeat, *functions_named("repeat")),
    Rule.direct(_join, *functions_named("cat concat concatenate stack")),
    Rule.direct(_split, *functions_named("chunk split")),
    Rule.direct(_unbind, *functions_named("unbind")),
    Rule.direct(_iterate, Tensor.__iter__),
    Rule.direct(_get, Tensor.__getitem__),
    Rule.direct(_set, Tensor.__setitem__),
    Rule.direct(_select, *functions_named("select")),
    Rule.direct(_narrow, *functions_named("narrow")),
    Rule.direct(_where, *functions_named("where")),
)
