"""Linear maps as a grouped convolution, which on CPUs oneDNN computes: often the faster library for float32.

torch computes products of matrices in float32 by the library it was built with (MKL), and convolutions by oneDNN. B
linear maps are one convolution of kernel size 1 and B groups over an "image" of N pixels and B·F channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = ["lay_out", "linear", "usable"]

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
        [B, N, O], whose layout in memory is [N, B, O]. Inputs of such a layout are not copied.
    """
    return _Linear.apply(x, w, b)  # type: ignore[no-any-return, no-untyped-call]


def lay_out(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs that are not copied."""
    return x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(x.requires_grad), w, b


def _convolved(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[N, B, F] and [B, O, F] -> [N, B, O]."""
    members, outputs, features = w.shape
    image = x.view(1, len(x), members * features).transpose(1, 2).unsqueeze(2)  # [1, B*F, 1, N], channels last
    kernel = w.view(members * outputs, features, 1, 1)
    out = F.conv2d(image, kernel, None if b is None else b.flatten(), groups=members)
    return out.squeeze(2).transpose(1, 2).reshape(len(x), members, outputs)


_traced = torch.library.custom_op("shoal::linear", _convolved, mutates_args=(), device_types="cpu")
"""The same as an operator, since Inductor errs in the layouts within; its first call imports the compiler."""


@_traced.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(w), w.shape[1])


class _Linear(torch.autograd.Function):
    """The gradient of the inputs is a linear map again; that of the weights is faster as a batched product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.shift = b is not None
        compute = _convolved if _get_current_dispatch_mode() is None else _traced
        out: Tensor = compute(x.transpose(0, 1).contiguous(), w.contiguous(), b)
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of differentiable functions, so that it has a gradient itself."""
        x, w = ctx.saved_tensors
        of_x = linear(grad, w.transpose(1, 2), None) if ctx.needs_input_grad[0] else None
        of_w = grad.transpose(1, 2) @ x if ctx.needs_input_grad[1] else None
        return of_x, of_w, grad.sum(1) if ctx.shift and ctx.needs_input_grad[2] else None
