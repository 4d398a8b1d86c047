"""Checks a function with every combination of shared and stacked arguments against each member's own call."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from twins import close

from shoal.fuse.stacked import Stacked


def check_mixes(fn: Callable[..., Tensor], *columns: Tensor) -> None:
    """Compare results, gradients and what was written to.

    Args:
        fn: of one member's tensors.
        columns: its arguments for all members, [B, *shape]; those that are parameters get gradients.
    """
    for own in product((True, False), repeat=len(columns)):
        if any(own):
            _check_mix(fn, columns, own)


def _check_mix(fn: Callable[..., Tensor], columns: tuple[Tensor, ...], own: tuple[bool, ...]) -> None:
    what = f"own: {own}"
    members = len(columns[0])
    wholes = [_leaf(column, column if mine else column[0]) for column, mine in zip(columns, own, strict=True)]
    result = fn(*(Stacked(whole) if mine else whole for whole, mine in zip(wholes, own, strict=True)))
    total = [torch.zeros_like(whole) for whole in wholes]
    for b in range(members):
        values = [_leaf(column, column[b if mine else 0]) for column, mine in zip(columns, own, strict=True)]
        expected = fn(*values)
        close(result.whole[b], expected, f"result {b}, {what}", 1e-10)
        for i, grad in enumerate(_gradients(expected, values)):
            if grad is not None:
                target = total[i][b] if own[i] else total[i]
                target += grad
        for i, value in enumerate(values):
            close(
                (wholes[i][b] if own[i] else wholes[i]).detach(), value.detach(), f"argument {i} of {b}, {what}", 1e-10
            )
    for i, grad in enumerate(_gradients(result.whole, wholes)):
        if grad is not None:
            close(grad, total[i], f"gradient of argument {i}, {what}", 1e-10)


def _leaf(column: Tensor, value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(isinstance(column, nn.Parameter))


def _gradients(result: Any, inputs: list[Tensor]) -> list[Tensor | None]:
    asked = [i for i, value in enumerate(inputs) if value.requires_grad]
    grads: list[Tensor | None] = [None] * len(inputs)
    if asked and result.requires_grad:
        found = torch.autograd.grad(result.cos().sum(), [inputs[i] for i in asked], allow_unused=True)
        for i, grad in zip(asked, found, strict=True):
            grads[i] = grad
    return grads
