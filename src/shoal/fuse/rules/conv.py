"""Rules for convolutions: a convolution with B groups, batched matrix products (im2col), or a loop, by measurement.

With an input per member, the grouped lowering needs the channel-major layout [N, B*C, ...] and returns it, as do
elementwise functions, norms and pooling, so a chain of convolutions transposes nothing. With a shared input, one
convolution with B*C outputs computes all; with a shared weight, B is folded into the batch axis.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.autotune import fastest, times_replays
from shoal.fuse.rules.base import Layout, Rule, merge_channels, split_channels, stacked_data
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]

_Run = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""A convolution as a function of (input, weight, bias, groups), with all other options fixed."""

_Lowering = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""All members' convolutions: [B, N, C, ...], [B, *weight] and [B, O] -> [B, N, O, ...]."""

_SMALL = 2**20
"""Number of multiplications of one member, approximately, below which a convolution counts as small."""

_CHANNELS_LAST = "grouped, channels last"

_STREAMS = 4
"""Streams of the lowering by streams: late layers of ResNets fill about a quarter of a Hopper chip."""

_MOST_ELEMENTS = 2**24
"""Largest number of elements of the columns (im2col): columns of K-element kernels take K times the input's memory."""


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
    if input.dim() != weight.dim():  # the input has no batch axis
        return NotImplemented

    def run(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
        return func(x, w, b, stride, padding, dilation, groups)  # type: ignore[no-any-return]

    window = _ConvWindow.of(weight.shape[2:], stride, padding, dilation) if groups == 1 else None
    columns = window.convolve if window is not None and window.is_small(_elements(input, weight)) else None
    settings = (*map(_hashable, (stride, padding, dilation)), groups)
    return _run_all_members(func.__name__, run, input, weight, bias, settings, columns, _merge_outputs)


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

    settings = (*map(_hashable, (stride, padding, output_padding, dilation)), groups)
    return _run_all_members(func.__name__, run, input, weight, bias, settings, None, merge_channels)


def _run_all_members(
    name: str,
    run: _Run,
    input: Any,
    weight: Any,
    bias: Any,
    settings: tuple[Any, ...],
    columns: _Lowering | None,
    merge_weights: Callable[[Tensor], Tensor],
) -> Any:
    """A convolution of all members, for any combination of shared arguments; the last of `settings` is `groups`."""
    groups = settings[-1]
    if not isinstance(weight, Stacked):
        return _under_shared_weight(run, groups, input, weight, bias)
    w = weight.whole
    b = None if bias is None else stacked_data(bias, len(w))
    if not isinstance(input, Stacked) and groups == 1:
        shared: dict[str, _Lowering] = {
            "one": partial(_of_shared_input, run, merge_weights),
            "loop": lambda x, w, b: _loop(run, groups, x.expand(len(w), *x.shape), w, b),
        }
        return Stacked(fastest(name, shared, (input, w, b), settings))
    x = stacked_data(input, len(w))
    lowerings: dict[str, _Lowering] = {"grouped": partial(_grouped, run, groups)}
    if columns is not None:
        lowerings["bmm"] = columns
    if x.device.type == "cuda" and x.dim() == 5:
        lowerings[_CHANNELS_LAST] = partial(_grouped_channels_last, run, groups)
    loop = partial(_loop, run, groups)
    if x.device.type == "cuda" and times_replays():
        lowerings["streams"] = partial(_on_streams, run, groups)
    lowerings = {"loop": loop, **lowerings} if _prefers_loop(x, w, groups) else {**lowerings, "loop": loop}
    return Stacked(fastest(name, lowerings, (x, w, b), settings, {_CHANNELS_LAST: _in_channels_last}))


def _prefers_loop(x: Tensor, w: Tensor, groups: int) -> bool:
    """Whether the loop is the default lowering, which is used without a measurement.

    On a CPU, oneDNN's kernels process blocks of 8 channels; groups that do not fill one take up to twice the time.
    """
    if x.device.type != "cpu" or groups > 1 or not (w.shape[1] % 8 or w.shape[2] % 8):
        return False
    return x[0].numel() * w[0].numel() > _SMALL * x.shape[2]


def _grouped(run: _Run, groups: int, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    members = len(w)
    out = run(merge_channels(x), w.flatten(0, 1), None if b is None else b.flatten(), groups * members)
    return split_channels(out, members)


def _grouped_channels_last(run: _Run, groups: int, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """As `_grouped`, with [N, H, W, B*C] in memory, the layout of tensor cores; a chain of these copies nothing."""
    weight = w.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    merged = merge_channels(x).contiguous(memory_format=torch.channels_last)
    return split_channels(run(merged, weight, None if b is None else b.flatten(), groups * len(w)), len(w))


def _in_channels_last(x: Tensor, w: Tensor, b: Tensor | None) -> Sequence[Tensor | None]:
    """The arguments as `_grouped_channels_last` gets them from another one before it."""
    return split_channels(merge_channels(x).contiguous(memory_format=torch.channels_last), len(w)), w, b


_side_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _on_streams(run: _Run, groups: int, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """As `_loop`, with members on `_STREAMS` streams, in a CUDA graph as parallel branches (PyTorch issue 73764).

    Each stream first waits for the current one, so memory freed there is used again only after its last readers.
    """
    device = x.device
    if device not in _side_streams:
        _side_streams[device] = [torch.cuda.Stream(device) for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]
    streams, current = _side_streams[device][: len(w)], torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(current)
    own = []
    for number, row in enumerate(_rows(x, w, b)):
        with torch.cuda.stream(streams[number % len(streams)]):
            own.append(run(*row, groups))
    for stream in streams:
        current.wait_stream(stream)
    return _stacked(x, own)


def _loop(run: _Run, groups: int, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return _stacked(x, [run(*row, groups) for row in _rows(x, w, b)])


def _rows(x: Tensor, w: Tensor, b: Tensor | None) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    """Input, weight and bias of each member."""
    return zip(x.unbind(0), w.unbind(0), [None] * len(w) if b is None else b.unbind(0), strict=True)


def _stacked(x: Tensor, own: list[Tensor]) -> Tensor:
    """The members' results as [B, N, O, ...], in the memory layout of the input."""
    if _is_sample_major(x):
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
        transposed = _is_sample_major(input.whole)
        x = input.whole.transpose(0, 1) if transposed else input.whole
        out = torch.unflatten(run(x.flatten(0, 1), weight, common, groups), 0, x.shape[:2])
        out = out.transpose(0, 1) if transposed else out
    if not own_bias:
        return Stacked(out)
    if bias.shape != out.shape[2:3]:
        return NotImplemented
    space = [1] * (out.dim() - 3)
    return Stacked(out + bias.whole.to(out.dtype).view(len(bias.whole), 1, -1, *space))


def _merge_outputs(w: Tensor) -> Tensor:
    """[B, O, C, ...] -> [B*O, C, ...]."""
    return w.flatten(0, 1)


def _elements(input: Tensor, weight: Any) -> int:
    return input.numel() * (len(weight.whole) if isinstance(weight, Stacked) else 1)


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def _is_sample_major(data: Tensor) -> bool:
    """Whether the memory order of [B, N, C, ...] is N, B, C, ..., which is channel-major."""
    return not data.is_contiguous() and data.transpose(0, 1).is_contiguous()


@dataclass(frozen=True)
class _ConvWindow:
    """The windows of a convolution without groups; each column (im2col) contains the elements of one window."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: int | Sequence[int],
        padding: str | int | Sequence[int],
        dilation: int | Sequence[int],
    ) -> "_ConvWindow | None":
        """The windows for a convolution's options; None if unsupported: most 3-d kernels, and uneven padding."""
        steps, widths = _each_axis(stride, len(kernel)), _each_axis(dilation, len(kernel))
        if padding == "same":
            spans = [width * (size - 1) for width, size in zip(widths, kernel, strict=True)]
            if any(span % 2 for span in spans):
                return None
            zeros = [span // 2 for span in spans]
        else:
            zeros = _each_axis(0 if isinstance(padding, str) else padding, len(kernel))
        window = cls(kernel, steps, zeros, widths)
        return window if len(kernel) < 3 or window.pointwise else None

    @property
    def pointwise(self) -> bool:
        ones = (*self.kernel, *self.stride)
        return all(size == 1 for size in ones) and not any(self.padding)

    def window_counts(self, space: Sequence[int]) -> list[int]:
        return [
            (size + 2 * zeros - width * (kernel - 1) - 1) // step + 1
            for size, kernel, step, zeros, width in zip(
                space, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def is_small(self, inputs: int) -> bool:
        """Whether the columns of an input with `inputs` elements are below the memory limit."""
        return self.pointwise or inputs * math.prod(self.kernel) <= _MOST_ELEMENTS * math.prod(self.stride)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = self._unfold(x.transpose(0, 1)).transpose(0, 1) if _is_sample_major(x) else self._unfold(x)
        out = _product(weight.flatten(2), columns)
        if bias is not None:
            out = out + bias.to(out.dtype)[:, None, :, None]
        return torch.unflatten(out, 3, self.window_counts(x.shape[3:]))

    def _unfold(self, x: Tensor) -> Tensor:
        """[P, Q, C, *S] -> [P, Q, C*K, L], for L windows of K elements."""
        if self.pointwise:
            return x.flatten(3)
        images = x.flatten(0, 1) if x.dim() == 5 else x.flatten(0, 1).unsqueeze(2)
        return torch.unflatten(F.unfold(images, *self._two_dimensional()), 0, x.shape[:2])

    def _two_dimensional(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Kernel, dilation, padding and stride in two dimensions, as `F.unfold` takes them."""
        lead = 2 - len(self.kernel)
        return (
            (*[1] * lead, *self.kernel),
            (*[1] * lead, *self.dilation),
            (*[0] * lead, *self.padding),
            (*[1] * lead, *self.stride),
        )


def _each_axis(value: int | Sequence[int], axes: int) -> list[int]:
    if isinstance(value, int):
        return [value] * axes
    return list(value) * axes if len(value) == 1 else list(value)


def _product(weight: Tensor, columns: Tensor) -> Tensor:
    """[B, O, K] times [B, N, K, L] -> [B, N, O, L], by repeated weights or transposed columns, as moves less memory."""
    outputs, length = weight.shape[1], columns.shape[3]
    if length < outputs:
        transposed = columns.transpose(1, 2)
        return torch.unflatten(weight @ transposed.flatten(2), 2, transposed.shape[2:]).transpose(1, 2)
    if _is_sample_major(columns):
        return (weight @ columns.transpose(0, 1)).transpose(0, 1)
    return weight.unsqueeze(1) @ columns


_LOWERINGS: dict[str, Callable[..., Any]] = {"grouped": _grouped, "one": _of_shared_input, "loop": _loop}
RULES = (
    Rule(
        (F.conv1d, F.conv2d, F.conv3d),
        {**_LOWERINGS, "bmm": _ConvWindow.convolve},
        output_layout=Layout.CHANNEL_MAJOR,
        run=_conv,
    ),
    Rule(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        _LOWERINGS,
        output_layout=Layout.CHANNEL_MAJOR,
        run=_conv_transposed,
    ),
)
