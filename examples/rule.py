"""An operator of one's own, and the rule by which an array runs it for all members at once.

python examples/rule.py
"""

import time

import torch
from torch import Tensor, nn

import shoal
from shoal.fuse import Rule
from shoal.testing import check_rule


@torch.library.custom_op("example::decayed_sum", mutates_args=())
def decayed_sum(x: Tensor, decay: Tensor) -> Tensor:
    """h_t = decay · h_(t-1) + x_t, step by step: [T, N] and [N] -> [T, N]."""
    sums = [x[0].clone()]
    for row in x[1:]:
        sums.append(decay * sums[-1] + row)
    return torch.stack(sums)


@decayed_sum.register_fake
def _(x: Tensor, decay: Tensor) -> Tensor:
    return torch.empty_like(x)


def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    decay, sums = ctx.saved_tensors
    of_x = decayed_sum(grad.flip(0), decay).flip(0)
    return of_x, (of_x[1:] * sums[:-1]).sum(0)


def setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], output)


decayed_sum.register_autograd(backward, setup_context=setup_context)


def joined(x: Tensor, decay: Tensor) -> Tensor:
    """All members, [B, T, N] and [B, N] -> [B, T, N]: B joins the axis N, so that there are T steps and not B·T."""
    sums = decayed_sum(x.transpose(0, 1).flatten(1), decay.flatten())
    return sums.unflatten(1, (len(x), -1)).transpose(0, 1)


def declines(x: Tensor, decay: Tensor) -> str | None:
    """Arguments that `joined` does not cover."""
    return None if decay.dim() == 1 else "a decay for each step"


rule = Rule((decayed_sum,), {"joined": joined}, declines=declines)


class Smoothed(nn.Module):
    """A model that uses the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.decay = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return decayed_sum(self.linear(x), self.decay.sigmoid())


def seconds(array: shoal.ModelArray, x: Tensor) -> float:
    """Of a training step of all members, the least of several."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        array(x).square().mean().backward()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    numbers = {"dtype": torch.float64}
    check_rule(rule, {"steps": lambda f: f(torch.randn(4, 3, **numbers), torch.rand(3, **numbers))})
    array = shoal.fuse([Smoothed() for _ in range(16)])
    x = torch.randn(64, 8)
    in_a_loop = seconds(array, x)
    shoal.fuse.register_rule(rule)
    print(f"16 members: {in_a_loop * 1e3:.1f} ms in a loop, {seconds(array, x) * 1e3:.1f} ms by the rule")
