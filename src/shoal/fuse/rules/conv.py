"""Convolutions of all members: one of B groups, batched matrix products, or a loop, whichever is the fastest here.

With members' own inputs the grouped form wants the channel-major layout [N, B*C, ...]; its result keeps that order in
memory, and so do elementwise functions, norms and pooling on it, so a chain of convolutions transposes nothing. The
other ways keep the layout of their input. An input that all members share takes one convolution of B·C outputs; under
a weight that all share, B is folded into the batch.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.autotune import fastest
from shoal.fuse.rules.base import Layout, Rule, merge_channels, split_channels
from shoal.fuse.rules.im2col import ConvWindow, samples_lead
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]

_Run = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""A convolution by (input, weight, bias, groups), with all other options given."""

_Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""All members' convolutions: [B, N, C, ...], [B, *weight] and [B, O] -> [B, N, O, ...]."""

_SMALL = 2**20
"""Multiplications of a member, about."""


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
    if input.dim() != weight.dim():  # without the axis N
        return NotImplemented

    def run(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
        return func(x, w, b, stride, padding, dilation, groups)  # type: ignore[no-any-return]

    window = ConvWindow.of(weight.shape[2:], stride, padding, dilation) if groups == 1 else None
    columns = window.convolve if window is not None and window.small(_elements(input, weight)) else None
    settings = (*map(_fixed, (stride, padding, dilation)), groups)
    return _all(func.__name__, run, input, weight, bias, settings, columns, _outputs_first)


def _conv_transposed(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if input.dim() != weight.dim():
        return NotImplemented

    def run(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
        return func(x, w, b, stride, padding, output_padding, groups, dilation)  # type: ignore[no-any-return]

    settings = (*map(_fixed, (stride, padding, output_padding, dilation)), groups)
    return _all(func.__name__, run, input, weight, bias, settings, None, _outputs_second)


def _all(
    name: str,
    run: _Run,
    input: Any,
    weight: Any,
    bias: Any,
    settings: tuple[Any, ...],
    columns: _Way | None,
    merge_weights: Callable[[Tensor], Tensor],
) -> Any:
    """A convolution of all members, whichever arguments they share; its groups are the last of the settings."""
    groups = settings[-1]
    if not isinstance(weight, Stacked):
        return _under_shared_weight(run, groups, input, weight, bias)
    w = weight.whole
    b = None if bias is None else bias.whole if isinstance(bias, Stacked) else bias.expand(len(w), *bias.shape)
    if not isinstance(input, Stacked) and groups == 1:
        shared: dict[str, _Way] = {
            "one": partial(_of_shared_input, run, merge_weights),
            "loop": lambda x, w, b: _loop(run, groups, x.expand(len(w), *x.shape), w, b),
        }
        return Stacked(fastest(name, shared, (input, w, b), settings))
    x = input.whole if isinstance(input, Stacked) else input.expand(len(w), *input.shape)
    ways: dict[str, _Way] = {"grouped": partial(_grouped, run, groups)}
    if columns is not None:
        ways["bmm"] = columns
    loop = partial(_loop, run, groups)
    ways = {"loop": loop, **ways} if _uneven(x, w, groups) else {**ways, "loop": loop}
    return Stacked(fastest(name, ways, (x, w, b), settings))


def _uneven(x: Tensor, w: Tensor, groups: int) -> bool:
    """Does the loop seem best, unless it is measured?

    On a CPU oneDNN's kernels hold blocks of 8 channels, and groups that do not fill them take up to twice the time,
    which tells in all but small convolutions.
    """
    if x.device.type != "cpu" or groups > 1 or not (w.shape[1] % 8 or w.shape[2] % 8):
        return False
    return x[0].numel() * w[0].numel() > _SMALL * x.shape[2]


def _grouped(run: _Run, groups: int, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    members = len(w)
    out = run(merge_channels(x), w.flatten(0, 1), None if b is None else b.flatten(), groups * members)
    return split_channels(out, members)


def _loop(run: _Run, groups: int, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    biases = [None] * len(w) if b is None else b.unbind(0)
    own = [run(*row, groups) for row in zip(x.unbind(0), w.unbind(0), biases, strict=True)]
    if samples_lead(x):
        return torch.stack(own, 1).transpose(0, 1)
    if own[0].is_contiguous():
        return torch.stack(own)
    return torch.stack([out.movedim(1, -1) for out in own]).movedim(-1, 2)  # channels last


def _of_shared_input(
    run: _Run, merge_weights: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, b: Tensor | None
) -> Tensor:
    """[N, C, ...] and [B, *weight] -> [B, N, O, ...], channel-major."""
    return split_channels(run(x, merge_weights(w), None if b is None else b.flatten(), 1), len(w))


def _under_shared_weight(run: _Run, groups: int, input: Any, weight: Tensor, bias: Any) -> Any:
    own_bias = isinstance(bias, Stacked)
    common = None if own_bias else bias
    if not isinstance(input, Stacked):
        out = run(input, weight, common, groups).unsqueeze(0)
    else:
        turn = samples_lead(input.whole)
        x = input.whole.transpose(0, 1) if turn else input.whole
        out = torch.unflatten(run(x.flatten(0, 1), weight, common, groups), 0, x.shape[:2])
        out = out.transpose(0, 1) if turn else out
    if not own_bias:
        return Stacked(out)
    if bias.shape != out.shape[2:3]:
        return NotImplemented
    space = [1] * (out.dim() - 3)
    return Stacked(out + bias.whole.to(out.dtype).view(len(bias.whole), 1, -1, *space))


def _outputs_first(w: Tensor) -> Tensor:
    """[B, O, C, ...] -> [B*O, C, ...]."""
    return w.flatten(0, 1)


def _outputs_second(w: Tensor) -> Tensor:
    """[B, C, O, ...] -> [C, B*O, ...]."""
    return w.transpose(0, 1).flatten(1, 2)


def _elements(input: Tensor, weight: Any) -> int:
    """Of all members' inputs."""
    return input.numel() * (len(weight.whole) if isinstance(weight, Stacked) else 1)


def _fixed(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


_LOWERINGS: dict[str, Callable[..., Any]] = {"grouped": _grouped, "one": _of_shared_input, "loop": _loop}
RULES = (
    Rule(
        (F.conv1d, F.conv2d, F.conv3d),
        {**_LOWERINGS, "bmm": ConvWindow.convolve},
        gives=Layout.CHANNEL_MAJOR,
        run=_conv,
    ),
    Rule(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        _LOWERINGS,
        gives=Layout.CHANNEL_MAJOR,
        run=_conv_transposed,
    ),
)
