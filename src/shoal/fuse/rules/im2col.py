"""Convolutions as matrix products of weights with columns, the input's windows written out side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ConvWindow", "samples_lead"]

_MOST_ELEMENTS = 2**24
"""Of columns: K windows of an input take K times its memory."""


def samples_lead(data: Tensor) -> bool:
    """Does [B, N, C, ...] lie in memory as [N, B, C, ...], which is channel-major?"""
    return not data.is_contiguous() and data.transpose(0, 1).is_contiguous()


@dataclass(frozen=True)
class ConvWindow:
    """Where the kernel of a convolution without groups stands, one number for each axis of space, one or two of them.

    Args:
        kernel: its size.
        stride: steps between windows.
        padding: zeros on either side.
        dilation: steps within a window.
    """

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
    ) -> "ConvWindow | None":
        """The window of a convolution's options, or None where this module has no way: 3-d kernels, uneven padding."""
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
        """The columns are the input itself."""
        ones = (*self.kernel, *self.stride)
        return all(size == 1 for size in ones) and not any(self.padding)

    def places(self, space: Sequence[int]) -> list[int]:
        """How many windows there are along each axis of an input of size `space`."""
        return [
            (size + 2 * zeros - width * (kernel - 1) - 1) // step + 1
            for size, kernel, step, zeros, width in self._axes(space)
        ]

    def small(self, inputs: int) -> bool:
        """Can an input of so many elements be written out as columns?"""
        return self.pointwise or inputs * math.prod(self.kernel) <= _MOST_ELEMENTS * math.prod(self.stride)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All members' convolutions.

        Args:
            x: [B, N, C, *S].
            weight: [B, O, C, *kernel].
            bias: [B, O].

        Returns:
            [B, N, O, *places], channel-major if `x` is.
        """
        columns = self._unfold(x.transpose(0, 1)).transpose(0, 1) if samples_lead(x) else self._unfold(x)
        out = _product(weight.flatten(2), columns)
        return torch.unflatten(_shifted(out, bias), 3, self.places(x.shape[3:]))

    def _unfold(self, x: Tensor) -> Tensor:
        """[P, Q, C, *S] -> [P, Q, C*K, L], for L windows of K elements."""
        if self.pointwise:
            return x.flatten(3)
        images = x.flatten(0, 1) if x.dim() == 5 else x.flatten(0, 1).unsqueeze(2)
        return torch.unflatten(F.unfold(images, *self._planar()), 0, x.shape[:2])

    def _planar(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Kernel, dilation, padding and stride in two dimensions, as `unfold` takes them."""
        lead = 2 - len(self.kernel)
        return (
            (*[1] * lead, *self.kernel),
            (*[1] * lead, *self.dilation),
            (*[0] * lead, *self.padding),
            (*[1] * lead, *self.stride),
        )

    def _axes(self, space: Sequence[int]) -> list[tuple[int, ...]]:
        return list(zip(space, self.kernel, self.stride, self.padding, self.dilation, strict=True))


def _each_axis(value: int | Sequence[int], axes: int) -> list[int]:
    if isinstance(value, int):
        return [value] * axes
    return list(value) * axes if len(value) == 1 else list(value)


def _product(weight: Tensor, columns: Tensor) -> Tensor:
    """[B, O, K] times [B, N, K, L] -> [B, N, O, L].

    As a product for each sample, which repeats the weights, or for each member, which transposes the columns:
    whichever moves less.
    """
    outputs, length = weight.shape[1], columns.shape[3]
    if length < outputs:
        turned = columns.transpose(1, 2)
        return torch.unflatten(weight @ turned.flatten(2), 2, turned.shape[2:]).transpose(1, 2)
    if samples_lead(columns):
        return (weight @ columns.transpose(0, 1)).transpose(0, 1)
    return weight.unsqueeze(1) @ columns


def _shifted(out: Tensor, bias: Tensor | None) -> Tensor:
    """[B, N, O, L] plus [B, O], in the type of the former."""
    return out if bias is None else out + bias.to(out.dtype)[:, None, :, None]
