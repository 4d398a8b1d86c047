"""All steps of an LSTM's direction for all members, with a backward pass that gathers what the steps have in common.

Autograd would compute and add the gradient of the weights at each step. Here this is one product of all steps, and the
factors that do not depend on later steps are computed for all steps in one call, as cuDNN and oneDNN do for one member.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["lstm_sequence", "lstm_step"]

_Gradients = tuple[Tensor | None, ...]


def lstm_sequence(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Run all steps of one direction of a layer without projection.

    Args:
        gates: Input part of the gates, with both biases, [B, T, N, 4H]; in torch's order i, f, g, o.
        h: h before the first step, [B, N, H].
        c: c before the first step, [B, N, H].
        weight: Weights of h, [B, 4H, H].
        reverse: Whether to run from the last step to the first.

    Returns:
        h of every step, [B, T, N, H], and c after the last step, [B, N, H].
    """
    tensors = (gates, h, c, weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not _transformed(gates):
        result: tuple[Tensor, Tensor] = _Sequence.apply(*tensors, reverse)  # type: ignore[no-untyped-call]
        return result
    return _unrolled(*tensors, reverse)


def _transformed(gates: Tensor) -> bool:
    """Whether a custom backward pass would not be used as it is: under autocast, in `torch.func`, in forward mode."""
    if torch.is_autocast_enabled(gates.device.type) or forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def _unrolled(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """`lstm_sequence` with autograd's own backward pass."""
    outputs = []
    last = c
    for output, last, *_ in _steps(gates, h, c, weight, reverse):  # noqa: B007
        outputs.append(output)
    return _in_time(outputs, reverse), last


def lstm_step(before: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """c' = f c + i g and h' = o tanh(c'); Hochreiter and Schmidhuber (1997), in torch's variant.

    Args:
        before: Gates i, f, g, o before their activations, [..., 4H].
        c: [..., H].

    Returns:
        h', c', (i, f) as one tensor, g, o and tanh(c').
    """
    units = c.shape[-1]
    i_f = torch.sigmoid(before[..., : 2 * units])
    g = torch.tanh(before[..., 2 * units : 3 * units])
    o = torch.sigmoid(before[..., 3 * units :])
    i, f = i_f.chunk(2, -1)
    c = torch.addcmul(f * c, i, g)
    tanh_c = torch.tanh(c)
    return o * tanh_c, c, i_f, g, o, tanh_c


def _steps(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield what `lstm_step` returns for each step."""
    transposed = weight.transpose(1, 2)
    for part in _ordered(gates.unbind(1), reverse):
        h, c, *others = lstm_step(torch.baddbmm(part, h, transposed), c)
        yield h, c, *others


def _ordered(steps: Iterable[Tensor], reverse: bool) -> list[Tensor]:
    """Steps from time order to the order of computation, or back."""
    found = list(steps)
    return found[::-1] if reverse else found


def _in_time(steps: list[Tensor], reverse: bool) -> Tensor:
    """Stack what was computed at each step, [B, ...] -> [B, T, ...]."""
    return torch.stack(_ordered(steps, reverse), 1)


class _Sequence(torch.autograd.Function):
    """`lstm_sequence` with one product for the gradient of the weights, and few functions at each step backward."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        columns = zip(*_steps(gates, h, c, weight, reverse), strict=True)
        outputs, cells, i_f, g, o, tanh_c = (list(column) for column in columns)
        ctx.reverse = reverse
        # In the order of computation. The output is not among them, since an in-place function may change it.
        ctx.save_for_backward(
            gates, h, c, weight, *(torch.stack(steps) for steps in ([c, *cells[:-1]], i_f, g, o, tanh_c))
        )
        return _in_time(outputs, reverse), cells[-1]

    @staticmethod
    def backward(ctx: Any, of_output: Tensor, of_c: Tensor) -> _Gradients:
        gates, h, c, weight, *steps = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient may be taken
            found = _unrolled(gates, h, c, weight, ctx.reverse)
            wanted = [t for t, needed in zip((gates, h, c, weight), ctx.needs_input_grad, strict=False) if needed]
            taken = iter(torch.autograd.grad(found, wanted, (of_output, of_c), create_graph=True))
            return *(next(taken) if needed else None for needed in ctx.needs_input_grad[:4]), None
        of_gates, of_h, of_c = _backward_steps(_ordered(of_output.unbind(1), ctx.reverse), of_c, weight, *steps)
        *_, o, tanh_c = steps
        before = _in_time([h, *(o[:-1] * tanh_c[:-1]).unbind()], ctx.reverse)
        of_all = _in_time(of_gates, ctx.reverse)
        of_weight = torch.bmm(of_all.flatten(1, 2).transpose(1, 2), before.flatten(1, 2))
        return of_all, of_h, of_c, of_weight, None


def _backward_steps(
    of_outputs: list[Tensor], of_c: Tensor, weight: Tensor, c: Tensor, i_f: Tensor, g: Tensor, o: Tensor, tanh_c: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Go backward through the steps."""
    i, f = i_f.chunk(2, -1)
    of_i_f_g = torch.cat([g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)], -1)
    by_c = torch.unflatten(of_i_f_g, -1, (3, -1)).unbind()
    by_h, to_c, forgotten = (tanh_c * o * (1 - o)).unbind(), (o * (1 - tanh_c * tanh_c)).unbind(), f.unbind()
    of_gates: list[Tensor] = []
    of_h = of_outputs[-1]
    for t in reversed(range(len(of_outputs))):
        of_c = torch.addcmul(of_c, of_h, to_c[t])
        others = torch.mul(by_c[t], of_c.unsqueeze(-2)).flatten(-2)
        of_gates.append(torch.cat([others, of_h * by_h[t]], -1))
        of_c = of_c * forgotten[t]
        of_h = torch.baddbmm(of_outputs[t - 1], of_gates[-1], weight) if t else torch.bmm(of_gates[-1], weight)
    return of_gates[::-1], of_h, of_c
