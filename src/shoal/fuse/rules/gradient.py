"""Rules for autograd functions in user code: the gradient of a sum over members consists of the members' gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.fuse.rules.base import Rule
from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["RULES"]


def _for_all(func: Any, x: Any, *args: Any) -> Any:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("a tensor that all members share cannot have one gradient for each member")
    result = func(x.whole, *args)
    return x if result is x.whole else result


def _grad(func: Any, x: Stacked) -> Stacked | None:
    return None if x.whole.grad is None else Stacked(x.whole.grad)


def _set_grad(func: Any, x: Stacked, value: Any) -> None:
    x.whole.grad = value.whole if isinstance(value, Stacked) else value


def _hook(func: Any, x: Stacked, hook: Callable[[Tensor], Any]) -> Any:
    def of_all(grad: Tensor) -> Any:
        result = hook(Stacked(grad))
        return result.whole if isinstance(result, Stacked) else result

    return x.whole.register_hook(of_all)  # type: ignore[no-untyped-call]


def _initial_gradient(x: Tensor, gradient: Any) -> Any:
    """The gradient, [B, ...], with which the backward pass of all members starts."""
    if not isinstance(x, Stacked):
        raise NeedsMemberError("it starts a backward pass from a tensor that all members share")
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(x.whole)
    return gradient.whole if isinstance(gradient, Stacked) else gradient.expand_as(x.whole)


def _backward(
    func: Any,
    x: Stacked,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    wanted = None if inputs is None else [_whole(t) for t in _listed(inputs)]
    x.whole.backward(_initial_gradient(x, gradient), retain_graph, create_graph, wanted)  # type: ignore[no-untyped-call]


def _backward_of_several(
    func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any
) -> None:
    starts, given = _with_initial_gradients(tensors, grad_tensors)
    func(starts, given, *args, inputs=None if inputs is None else [_whole(t) for t in _listed(inputs)], **kwargs)


def _gradients(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("is_grads_batched"):
        raise NeedsMemberError("it computes gradients of a batch at once")
    starts, given = _with_initial_gradients(outputs, grad_outputs)
    results = func(starts, [_whole(x) for x in _listed(inputs)], given, *args, **kwargs)
    return tuple(None if result is None else Stacked(result) for result in results)


def _with_initial_gradients(outputs: Any, gradients: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The data of the outputs of a backward pass, and the initial gradient of each output."""
    starts = _listed(outputs)
    seeds = _listed(gradients) if gradients is not None else [None] * len(starts)
    given = [_initial_gradient(x, seed) for x, seed in zip(starts, seeds, strict=True)]
    return [x.whole for x in starts], given


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _whole(x: Any) -> Tensor:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("it computes a gradient of a tensor that all members share")
    return x.whole


RULES = (
    Rule.direct(
        _for_all,
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "_version")),
        *(Tensor.requires_grad_, Tensor.retain_grad, Tensor.detach_),
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    ),
    Rule.direct(_grad, Tensor.grad.__get__),  # type: ignore[union-attr]
    Rule.direct(_set_grad, Tensor.grad.__set__),  # type: ignore[union-attr]
    Rule.direct(_hook, Tensor.register_hook),
    Rule.direct(_backward, Tensor.backward),
    Rule.direct(_backward_of_several, torch.autograd.backward),
    Rule.direct(_gradients, torch.autograd.grad),
)
