"""Rules for linear layers and matrix products: batched products over B, or one product if an operand is shared."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from shoal.fuse.autotune import fastest
from shoal.fuse.rules.base import Rule, functions_named, stacked_data
from shoal.fuse.rules.elementwise import raise_rank
from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "batched_linear", "shared_input_linear", "transformed"]

_Lowerings = dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]]
"""Name -> function of (input, weight [B, O, F], bias [B, O] or None), which returns [B, N, O]."""

_LARGE = 2**22
"""Number of multiplications of all members below which looking up the fastest lowering costs more than it saves."""

_COPIED = 2**17
"""Number of weights of all members below which a transposed copy of their gradient takes less than `_Linear` adds."""

_HALF = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""Half precision -> torch's name of the function that returns whether the CPU multiplies matrices of it."""


def batched_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[B, N, F], [B, O, F] and [B, O] -> [B, N, O]."""
    if w.requires_grad and w.numel() >= _COPIED and torch.is_grad_enabled() and not transformed(x):
        result: Tensor = _Linear.apply(x, w, b)  # type: ignore[no-untyped-call]
        return result
    return _product(x, w, b)


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    transposed = w.transpose(1, 2)
    return torch.bmm(x, transposed) if b is None else torch.baddbmm(b.unsqueeze(1), x, transposed)


class _Linear(torch.autograd.Function):
    """`_product` whose gradient of the weights has their layout.

    Autograd computes the transposed gradient, which is then copied, as a parameter and its gradient have one layout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w if ctx.needs_input_grad[0] else None)
        return _product(x, w, b)

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        of_x, of_w, of_b = ctx.needs_input_grad
        return (
            torch.bmm(of_output, w.conj()) if of_x else None,
            torch.bmm(of_output.transpose(1, 2), x.conj()) if of_w else None,
            of_output.sum(1) if of_b else None,
        )


def transformed(x: Tensor) -> bool:
    """Whether a custom backward pass would not be used as it is: under autocast, in `torch.func`, in forward mode."""
    kind = x.device.type
    if (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)) or forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def _loop(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    biases = [None] * len(w) if b is None else b.unbind(0)
    return torch.stack([F.linear(*own) for own in zip(x.unbind(0), w.unbind(0), biases, strict=True)])


def shared_input_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[N, F], [B, O, F] and [B, O] -> [B, N, O], as one product of an input that all members share."""
    out = F.linear(x, w.flatten(0, 1), None if b is None else b.flatten())
    return out.view(len(x), len(w), -1).transpose(0, 1)


_OWN: _Lowerings = {"baddbmm": batched_linear, "loop": _loop}
_SHARED: _Lowerings = {
    "baddbmm": lambda x, w, b: batched_linear(x.expand(len(w), *x.shape), w, b),
    "one": shared_input_linear,
    "loop": lambda x, w, b: _loop(x.expand(len(w), *x.shape), w, b),
}


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, Stacked):
        return _under_shared_weight(input, weight, bias)
    w = weight.whole
    members, outputs, features = w.shape if w.dim() == 3 else (0, 0, 0)
    shape = input.shape
    if not members or shape[-1] != features:
        return NotImplemented
    if bias is None:
        b = None
    else:
        b = stacked_data(bias, members)
        if b.shape != (members, outputs):
            return NotImplemented
    flat = len(shape) == 2
    if not isinstance(input, Stacked):
        x = input if flat else input.reshape(-1, features)
        out = fastest("linear", _SHARED, (x, w, b))
    else:
        x = input.whole if flat else input.whole.reshape(members, -1, features)
        out = batched_linear(x, w, b) if x.numel() * outputs < _LARGE else fastest("linear", _OWN, (x, w, b))
    return Stacked(out if flat else out.view(members, *shape[:-1], outputs))


def _under_shared_weight(input: Any, weight: Tensor, bias: Any) -> Any:
    """Run a linear layer with a shared weight, as one product with all members' inputs."""
    x = input.whole if isinstance(input, Stacked) else input
    product = _WidenedLinear.apply if _is_slow(x, weight, bias) else F.linear
    if not isinstance(bias, Stacked):
        return Stacked(product(x, weight, bias))
    if weight.dim() != 2 or bias.shape != weight.shape[:1]:
        return NotImplemented
    out = product(x if isinstance(input, Stacked) else x.unsqueeze(0), weight, None)
    return Stacked(out + raise_rank(bias, input.dim()).to(out.dtype))


def _is_slow(x: Tensor, w: Tensor, b: Any) -> bool:
    """Whether torch multiplies matrices of half precision one number at a time, as the CPU has no instructions for it.

    Widening them is many times faster then, but for single rows, and no less exact: torch, too, adds up in float32.
    """
    if x.device.type != "cpu" or x.dtype not in _HALF or w.dim() != 2 or transformed(x):
        return False
    shared = [w] if b is None or isinstance(b, Stacked) else [w, b]
    if any(type(each) not in (Tensor, nn.Parameter) or each.dtype != x.dtype for each in shared):
        return False
    return torch._C._has_mkldnn and not getattr(torch.ops.mkldnn, _HALF[x.dtype])()


class _WidenedLinear(torch.autograd.Function):
    """`F.linear` in half precision, with products in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        of_x, of_w, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_w else None, w if of_x else None)
        ctx.bias_shape = None if b is None else b.shape
        return F.linear(x.float(), w.float(), None if b is None else b.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dtype, wide, rows = of_output.dtype, of_output.float(), list(range(of_output.dim() - 1))
        of_x, of_w, of_b = ctx.needs_input_grad
        return (
            torch.matmul(wide, w.float()).to(dtype) if of_x else None,
            torch.tensordot(wide, x.float(), (rows, rows)).to(dtype) if of_w else None,
            wide.sum_to_size(ctx.bias_shape).to(dtype) if of_b else None,
        )


def _matmul(func: Any, a: Any, b: Any) -> Any:
    exact = _RANKS.get(func)
    if a.dim() < 2 or b.dim() < 2 or (exact is not None and not a.dim() == b.dim() == exact):
        return NotImplemented
    rank = max(a.dim(), b.dim())
    return Stacked(torch.matmul(*(raise_rank(t, rank) if isinstance(t, Stacked) else t for t in (a, b))))


def _addmm(func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Run a batched product, or one product of all members' rows if `mat2` is shared, as frozen weights are."""
    if not input.dim() <= mat1.dim() == mat2.dim() == 2 or isinstance(beta, Tensor) or isinstance(alpha, Tensor):
        return NotImplemented
    if input.dim() < 2 and not isinstance(input, Stacked) and not isinstance(mat2, Stacked):
        rows = torch.addmm(input, mat1.whole.flatten(0, 1), mat2, beta=beta, alpha=alpha)
        return Stacked(torch.unflatten(rows, 0, mat1.whole.shape[:2]))
    members = next(len(t.whole) for t in (mat1, mat2, input) if isinstance(t, Stacked))
    a, b = (stacked_data(t, members) for t in (mat1, mat2))
    added = raise_rank(input, 2) if isinstance(input, Stacked) else input
    return Stacked(torch.baddbmm(added, a, b, beta=beta, alpha=alpha))


_RANKS = {torch.mm: 2, Tensor.mm: 2, torch.bmm: 3, Tensor.bmm: 3}
RULES = (
    Rule((F.linear,), _SHARED, run=_linear),
    Rule.direct(_matmul, *functions_named("matmul"), Tensor.__matmul__, *_RANKS),
    Rule.direct(_addmm, *functions_named("addmm")),
)
