"""What does not compute: shapes, devices, and Python values made of tensors."""

from typing import Any

import torch
from torch import Tensor

from shoal.fuse.stacked import NeedsMemberError, Stacked, agree

__all__ = ["RULES"]

_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_sparse", "is_quantized",
               "is_meta", "is_nested", "is_mkldnn", "itemsize", "nbytes", "is_xpu")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "is_signed", "__len__", "get_device", "type")  # fmt: skip
_MEMORY = ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_", "set_")


def _of_one_member(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if func is Tensor.type and (args or kwargs):
        return Stacked(x.whole.type(*args, **kwargs)) if isinstance(x, Stacked) else NotImplemented
    return func(x, *args, **kwargs)


def _stride(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    return x.whole[0].stride(*args, **kwargs)


def _memory(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    raise NeedsMemberError(f"{func.__name__} asks for the memory of one member's tensor")


def _data(func: Any, x: Stacked) -> Stacked:
    return type(x)(x.whole.detach(), x.numbers)


def _set_data(func: Any, x: Stacked, value: Any) -> None:
    if x.shape != value.shape:
        raise NeedsMemberError("a tensor is given data of another shape")
    x.whole.detach().copy_(value.whole if isinstance(value, Stacked) else value)


def agreed(x: Any) -> Any:
    """The number that all members hold.

    Raises:
        NeedsMemberError: they hold different ones.
    """
    if not isinstance(x, Stacked):
        return x.tolist()
    if x.numel() != 1:
        raise RuntimeError(f"a Tensor with {x.numel()} elements cannot be converted to Scalar")
    return agree(x.whole.reshape(len(x.whole)).tolist() if x.numbers is None else list(x.numbers))


def _number(kind: type) -> Any:
    return lambda func, x: kind(agreed(x))


def _list(func: Any, x: Stacked) -> Any:
    return agree(x.whole.tolist())


def _format(func: Any, x: Stacked, spec: str) -> str:
    """In a message, all members' numbers."""
    if x.dim() > 0:
        return format(repr(x), spec)
    return f"[{', '.join(format(value, spec) for value in x.whole.tolist())}]"


def _predicate(func: Any, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    members = next(len(t.whole) for t in (x, y) if isinstance(t, Stacked))
    xs = x.whole if isinstance(x, Stacked) else [x] * members
    ys = y.whole if isinstance(y, Stacked) else [y] * members
    return bool(agree([func(a, b, *args, **kwargs) for a, b in zip(xs, ys, strict=True)]))


def _make() -> dict[Any, Any]:
    properties = [getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)]
    methods = [getattr(Tensor, name) for name in _METHODS]
    rules: dict[Any, Any] = dict.fromkeys([*properties, *methods], _of_one_member)
    rules.update(dict.fromkeys((torch.is_floating_point, torch.is_complex, torch.numel), _of_one_member))
    rules.update(dict.fromkeys((getattr(Tensor, name) for name in _MEMORY), _memory))
    rules.update(dict.fromkeys((torch.equal, Tensor.equal, torch.allclose, Tensor.allclose), _predicate))
    for name, kind in {"__bool__": bool, "__int__": int, "__float__": float, "__index__": int}.items():
        rules[getattr(Tensor, name)] = _number(kind)
    rules[torch.is_nonzero] = rules[Tensor.is_nonzero] = _number(bool)
    rules[Tensor.item] = lambda func, x: agreed(x)
    rules[Tensor.tolist] = _list
    rules[Tensor.__format__] = _format
    rules[Tensor.stride] = _stride
    rules[Tensor.data.__get__] = _data  # type: ignore[attr-defined]
    rules[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]
    return rules


RULES = _make()
