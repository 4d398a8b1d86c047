"""What does not compute: shapes, devices, gradients, and Python numbers made of tensors."""

from typing import Any

import torch
from torch import Tensor

from shoal.fuse.stacked import NeedsMemberError, Stacked, stack

__all__ = ["RULES"]

_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_sparse", "is_quantized",
               "is_meta", "is_nested", "is_mkldnn", "itemsize")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "is_signed", "__len__", "get_device", "type")  # fmt: skip


def _of_one_member(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if func is Tensor.type and (args or kwargs):
        return Stacked(x.all.type(*args, **kwargs)) if isinstance(x, Stacked) else NotImplemented
    return func(x, *args, **kwargs)


def _of_all(func: Any, x: Stacked, *args: Any) -> Any:
    return func(x.all, *args)


def _grad(func: Any, x: Stacked) -> Stacked | None:
    return None if x.all.grad is None else Stacked(x.all.grad)


def _set_grad(func: Any, x: Stacked, value: Any) -> None:
    x.all.grad = value.all if isinstance(value, Stacked) else value


def _data(func: Any, x: Stacked) -> Stacked:
    return Stacked(x.all.detach(), x.number)


def _contiguous(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> bool:
    return bool(x.all[0].is_contiguous(*args, **kwargs))


def _backward(
    func: Any,
    x: Stacked,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Members do not touch each other's parameters, so the gradient of the sum is each member's own."""
    if gradient is None and x.dim() > 0 and x.numel() != 1:
        raise RuntimeError(f"grad can be implicitly created only for scalar outputs, got shape {tuple(x.shape)}")
    if isinstance(gradient, Stacked):
        gradient = gradient.all
    if gradient is None:
        gradient = torch.ones_like(x.all)
    x.all.backward(gradient.expand_as(x.all), retain_graph, create_graph, inputs)


def agreed(x: Tensor) -> Any:
    """The number that all members hold.

    Raises:
        NeedsMemberError: they hold different ones.
    """
    if not isinstance(x, Stacked):
        return x.tolist()
    if x.numel() != 1:
        raise RuntimeError(f"a tensor with {x.numel()} elements cannot be converted to a number")
    first, *others = x.all.reshape(len(x.all)).tolist()
    if any(value != first for value in others):
        raise NeedsMemberError(f"a number is asked for, and the members hold {first!r} and others")
    return first


def _number(kind: type) -> Any:
    return lambda func, x: kind(agreed(x))


def _list(func: Any, x: Stacked) -> Any:
    return stack_equal([func(member) for member in x.all.unbind(0)])


def _predicate(func: Any, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    members = len(x.all) if isinstance(x, Stacked) else len(y.all) if isinstance(y, Stacked) else 1
    xs = x.all if isinstance(x, Stacked) else [x] * members
    ys = y.all if isinstance(y, Stacked) else [y] * members
    return bool(stack_equal([func(a, b, *args, **kwargs) for a, b in zip(xs, ys, strict=True)]))


def stack_equal(values: list[Any]) -> Any:
    """The plain value that all members agree on."""
    return stack(values)


def _make() -> dict[Any, Any]:
    rules: dict[Any, Any] = {getattr(Tensor, name).__get__: _of_one_member for name in _PROPERTIES if hasattr(Tensor, name)}
    rules.update({getattr(Tensor, name): _of_one_member for name in _METHODS})
    rules.update({getattr(Tensor, name).__get__: _of_all for name in ("requires_grad", "is_leaf", "grad_fn")})
    rules.update({getattr(Tensor, name): _of_all for name in ("requires_grad_", "retain_grad")})
    rules[Tensor._version.__get__] = _of_all  # type: ignore[attr-defined]
    rules[Tensor.requires_grad.__set__] = _of_all  # type: ignore[attr-defined]
    rules[Tensor.grad.__get__] = _grad  # type: ignore[attr-defined]
    rules[Tensor.grad.__set__] = _set_grad  # type: ignore[attr-defined]
    rules[Tensor.data.__get__] = _data  # type: ignore[attr-defined]
    rules[Tensor.is_contiguous] = _contiguous
    rules[Tensor.backward] = _backward
    for name, kind in {"__bool__": bool, "__int__": int, "__float__": float, "__index__": int}.items():
        rules[getattr(Tensor, name)] = _number(kind)
    rules[Tensor.item] = lambda func, x: agreed(x)
    rules[torch.is_nonzero] = _number(bool)
    rules[Tensor.tolist] = _list
    rules[torch.equal] = rules[Tensor.equal] = rules[torch.allclose] = rules[Tensor.allclose] = _predicate
    for func in (torch.is_floating_point, torch.is_complex, torch.numel):
        rules[func] = _of_one_member
    return rules


RULES = _make()
