"""Convolutions of all members: one with B·C outputs where the input is shared, one of B groups, or a loop.

With members' own inputs the grouped form wants the channel-major layout [N, B*C, ...]; its result keeps that order in
memory, and so do elementwise functions, norms and pooling on it, so a chain of convolutions transposes nothing. On a
CPU the libraries' grouped convolutions are slower than one after another, so the members' convolutions run in a loop there.
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
    return data.unflatten(1, (members, -1)).transpose(0, 1)


def _conv(
    func: Any,
    input: Any,  # noqa: A002
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
    members = len(weight.all)
    options = (stride, padding, dilation)
    if not isinstance(input, Stacked) and groups == 1:
        flat_bias = None if bias is None else bias.all.flatten()
        return Stacked(split_channels(func(input, weight.all.flatten(0, 1), flat_bias, *options), members))
    x = input.all if isinstance(input, Stacked) else input.expand(members, *input.shape)
    if x.device.type == "cpu":
        biases = [None] * members if bias is None else bias.all.unbind(0)
        columns = zip(x.unbind(0), weight.all.unbind(0), biases, strict=True)
        return Stacked(torch.stack([func(x_b, w_b, b_b, *options, groups) for x_b, w_b, b_b in columns]))
    flat_bias = None if bias is None else bias.all.flatten()
    out = func(merge_channels(x), weight.all.flatten(0, 1), flat_bias, *options, groups * members)
    return Stacked(split_channels(out, members))


RULES = {F.conv1d: _conv, F.conv2d: _conv}
