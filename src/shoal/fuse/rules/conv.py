"""Convolutions of all members: one with B·C outputs where the input is shared, one of B groups, or a loop.

With members' own inputs the grouped form wants the channel-major layout [N, B*C, ...]; its result keeps that order in
memory, and so do elementwise functions, norms and pooling on it, so a chain of convolutions transposes nothing. On a
CPU oneDNN's kernels hold blocks of 8 channels, and groups that do not fill them take twice the time of the members one
after another; there the convolutions run in a loop.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "merge_channels", "split_channels"]


def merge_channels(data: Tensor) -> Tensor:
    """[B, N, C, ...] -> [N, B*C, ...]; a view where the memory is channel-major already."""
    return data.transpose(0, 1).flatten(1, 2)


def split_channels(data: Tensor, members: int) -> Tensor:
    """[N, B*C, ...] -> [B, N, C, ...], a view."""
    shape = (data.shape[0], members, data.shape[1] // members, *data.shape[2:])
    return data.view(shape).transpose(0, 1)


def _conv(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not isinstance(weight, Stacked) or (bias is not None and not isinstance(bias, Stacked)):
        return NotImplemented
    if input.dim() != weight.dim():  # without the axis N
        return NotImplemented
    members = len(weight.whole)
    options = (stride, padding, dilation)
    flat_bias = None if bias is None else bias.whole.flatten()
    if not isinstance(input, Stacked) and groups == 1:
        return Stacked(split_channels(func(input, weight.whole.flatten(0, 1), flat_bias, *options), members))
    x = input.whole if isinstance(input, Stacked) else input.expand(members, *input.shape)
    if x.device.type == "cpu" and (weight.shape[0] % 8 or weight.shape[1] % 8):
        biases = [None] * members if bias is None else bias.whole.unbind(0)
        columns = zip(x.unbind(0), weight.whole.unbind(0), biases, strict=True)
        own = [func(x_b, w_b, b_b, *options, groups) for x_b, w_b, b_b in columns]
        return Stacked(torch.stack(own, 1).transpose(0, 1))
    out = func(merge_channels(x), weight.whole.flatten(0, 1), flat_bias, *options, groups * members)
    return Stacked(split_channels(out, members))


RULES: dict[Any, Any] = {F.conv1d: _conv, F.conv2d: _conv, F.conv3d: _conv}
