"""Activations with slopes of the members' own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.elementwise import same_element
from shoal.fuse.stacked import Stacked, count

__all__ = ["RULES"]


def _prelu(func: Any, input: Any, weight: Any) -> Any:
    """x where positive, w·x elsewhere: w is [1] or [C] and belongs to axis 1."""
    members = count((input, weight)) or 1
    data = input.whole if isinstance(input, Stacked) else input.expand(members, *input.shape)
    slopes = weight.whole if isinstance(weight, Stacked) else weight.unsqueeze(0)
    wanted = input.shape[1] if input.dim() > 1 else 1
    if weight.numel() not in (1, wanted):
        return NotImplemented
    lead, trail = min(input.dim(), 1), max(input.dim() - 2, 0)
    shape = (len(slopes), *[1] * lead, *([weight.numel()] if input.dim() > 1 else []), *[1] * trail)
    return Stacked(torch._prelu_kernel(data, slopes.reshape(shape)))


def _leaky_relu(func: Any, input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    if not isinstance(negative_slope, Stacked) or not isinstance(input, Stacked) or inplace:
        return same_element(func, input, negative_slope, inplace)
    slopes = torch.tensor(negative_slope.numbers, dtype=input.dtype, device=input.device)
    return Stacked(torch._prelu_kernel(input.whole, slopes.view(-1, *[1] * input.dim())))


def _rrelu(
    func: Any,
    input: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Slopes are drawn while training, in a loop; else they are the mean."""
    return NotImplemented if training else same_element(func, input, lower, upper, False, inplace)


RULES: dict[Any, Any] = {
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), _prelu),
    F.leaky_relu: _leaky_relu,
    F.rrelu: _rrelu,
}
