"""Rules for tensor metadata, memory layout and Python values: shape, dtype, device, contiguity, `item`, `tolist`.

User code sees a tensor without the axis B. If B is adjacent to an axis of the member in memory, as in [N, B*C, ...],
the strides of the stacked tensor contain gaps that one member's tensor would not have.
"""

from typing import Any

import torch
from torch import Tensor

from shoal.fuse.aliasing import record_copy
from shoal.fuse.rules.base import Rule, functions_named
from shoal.fuse.rules.elementwise import like
from shoal.fuse.stacked import NeedsMemberError, Stacked, agreed_value

__all__ = ["RULES"]

_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_sparse", "is_quantized",
               "is_meta", "is_nested", "is_mkldnn", "itemsize", "nbytes", "is_xpu")  # fmt: skip
_METHODS = """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed __len__ get_device type
"""
_MEMORY = "numpy __array__ data_ptr untyped_storage storage __dlpack__ share_memory_ set_"
_RESHAPING = """
    resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_
"""


def _of_one_member(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if func is Tensor.type and (args or kwargs):
        return Stacked(x.whole.type(*args, **kwargs)) if isinstance(x, Stacked) else NotImplemented
    return func(x, *args, **kwargs)


def _stride(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    return x.whole[0].stride(*args, **kwargs)


def _refuse_memory_access(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    raise NeedsMemberError(f"{func.__name__} asks for the memory of one member's tensor")


def _refuse_reshape(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse functions that change a tensor's shape in place, since the shape of a `Stacked` is fixed."""
    raise NeedsMemberError(f"{func.__name__} changes the shape of one member's tensor")


def _data(func: Any, x: Stacked) -> Stacked:
    return type(x)(x.whole.detach(), x.floats)


def _set_data(func: Any, x: Stacked, value: Any) -> None:
    if x.shape != value.shape:
        raise NeedsMemberError("a tensor is given data of another shape")
    x.whole.detach().copy_(value.whole if isinstance(value, Stacked) else value)


def agreed_item(x: Any) -> Any:
    """The value of a one-element tensor whose values are equal in all members."""
    if not isinstance(x, Stacked):
        return x.tolist()
    if x.numel() != 1:
        raise RuntimeError(f"a Tensor with {x.numel()} elements cannot be converted to Scalar")
    return agreed_value(x.whole.reshape(len(x.whole)).tolist() if x.floats is None else list(x.floats))


def _number(kind: type) -> Any:
    return lambda func, x: kind(agreed_item(x))


def _list(func: Any, x: Stacked) -> Any:
    return agreed_value(x.whole.tolist())


def _format(func: Any, x: Stacked, spec: str) -> str:
    """Format the numbers of all members in a list, as for a message."""
    if x.dim() > 0:
        return format(repr(x), spec)
    return f"[{', '.join(format(value, spec) for value in x.whole.tolist())}]"


def _predicate(func: Any, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    members = next(len(t.whole) for t in (x, y) if isinstance(t, Stacked))
    xs = x.whole if isinstance(x, Stacked) else [x] * members
    ys = y.whole if isinstance(y, Stacked) else [y] * members
    return bool(agreed_value([func(a, b, *args, **kwargs) for a, b in zip(xs, ys, strict=True)]))


_FOR_ONE_MEMBER = (
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    *functions_named(_METHODS, Tensor),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
)


def _is_contiguous_for_one(data: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Result of `is_contiguous` for one member of [B, *shape], whose strides do not contain the factor B."""
    members, step = data.shape[0], data.stride(0)
    strides = [
        stride // members if 0 < step < stride and stride % members == 0 else stride for stride in data.stride()[1:]
    ]
    return torch.empty_strided(data.shape[1:], strides, device="meta").is_contiguous(*args, **kwargs)


def _is_contiguous(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> bool:
    return _is_contiguous_for_one(x.whole, *args, **kwargs)


def _contiguous(func: Any, x: Stacked, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """Run `contiguous`; return the tensor itself if torch would do so for one member."""
    data = x.whole
    if memory_format is torch.contiguous_format:
        if data.is_contiguous() or _is_contiguous_for_one(data):
            return x
        copied = data.contiguous()
        record_copy(data, copied)
        return Stacked(copied)
    if x.dim() != _RANKS.get(memory_format):
        return NotImplemented
    if _is_contiguous_for_one(data, memory_format=memory_format):
        return x
    return Stacked(data.movedim(2, -1).contiguous().movedim(-1, 2))


def _to(func: Any, x: Any, *args: Any, memory_format: Any = torch.preserve_format, **kwargs: Any) -> Any:
    result = like(func, x, *args, **kwargs)
    if result is not x or not isinstance(x, Stacked) or memory_format is torch.preserve_format:
        return result
    return _contiguous(func, x, memory_format)


_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


RULES = (
    Rule.direct(_of_one_member, *_FOR_ONE_MEMBER),
    Rule.direct(_refuse_memory_access, *functions_named(_MEMORY, Tensor)),
    Rule.direct(_refuse_reshape, *functions_named(_RESHAPING)),
    Rule.direct(_predicate, *functions_named("equal allclose")),
    Rule.direct(_number(bool), *functions_named("is_nonzero"), Tensor.__bool__),
    Rule.direct(_number(int), Tensor.__int__, Tensor.__index__),
    Rule.direct(_number(float), Tensor.__float__),
    Rule.direct(lambda func, x: agreed_item(x), Tensor.item),
    Rule.direct(_list, Tensor.tolist),
    Rule.direct(_format, Tensor.__format__),
    Rule.direct(_stride, Tensor.stride),
    Rule.direct(_data, Tensor.data.__get__),  # type: ignore[attr-defined]
    Rule.direct(_set_data, Tensor.data.__set__),  # type: ignore[attr-defined]
    Rule.direct(_is_contiguous, Tensor.is_contiguous),
    Rule.direct(_contiguous, Tensor.contiguous),
    Rule.direct(_to, Tensor.to),
)
