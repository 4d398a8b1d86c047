"""Linear maps by oneDNN, which torch leaves to another library in float32 although it often is the faster one."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["linear", "usable"]

_AVAILABLE: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def usable(*tensors: Tensor | None) -> bool:
    """Whether oneDNN computes on such tensors as exactly as torch does: in float32 on a CPU, as they are."""
    if not (_AVAILABLE and torch._C._get_mkldnn_enabled()) or torch.is_autocast_enabled("cpu"):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(t is None or (t.dtype == torch.float32 and t.device.type == "cpu" and t.numel() > 0) for t in tensors)


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Each member's linear map.

    Args:
        x: inputs, [B, N, F].
        w: weights, [B, O, F].
        b: biases, [B, O], or None.

    Returns:
        [B, N, O].
    """
    return _Linear.apply(x, w, b)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("shoal::linear", mutates_args=(), device_types="cpu")
def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """One member after another: a product fills the cores. One operator of our own, since Inductor wants `w` fixed."""
    biases = [None] * len(w) if b is None else b.unbind(0)
    product = torch.ops.mkldnn._linear_pointwise
    return torch.stack([product(*own, "none", [], "") for own in zip(x.unbind(0), w.unbind(0), biases, strict=True)])


@_linear.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty(len(w), x.shape[1], w.shape[1])


class _Linear(torch.autograd.Function):
    """The gradient of the inputs is a linear map again; that of the weights is faster as a batched product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.shift = b is not None
        out: Tensor = _linear(x, w, b)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of differentiable functions, so that it has a gradient itself."""
        x, w = ctx.saved_tensors
        of_x = linear(grad, w.transpose(1, 2), None) if ctx.needs_input_grad[0] else None
        of_w = grad.transpose(1, 2) @ x if ctx.needs_input_grad[1] else None
        return of_x, of_w, grad.sum(1) if ctx.shift and ctx.needs_input_grad[2] else None
