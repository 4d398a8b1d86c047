"""Rules for dropout: each member has its own mask and rate; see `shoal.fuse.randomness`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.constants import constant
from shoal.fuse.randomness import current_source, keep_mask, keep_mask_blocks
from shoal.fuse.rules.base import Layout, Rule, stacked_data
from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "apply_dropout", "begin_dropout"]

_ALPHA = 1.7580993408473766
"""α, the negative limit of SELU at minus infinity; alpha dropout sets dropped elements to -α."""


def apply_dropout(data: Tensor, p: Any, mask_shape: Sequence[int]) -> Tensor:
    """Zero elements of [B, *shape] at rate `p`, by masks that broadcast to members; scale others by 1 / (1 - p)."""
    rates = _rates(p)
    return data * _factor(_keep_mask(data, rates, mask_shape), rates, data)


def begin_dropout(p: Any, shape: Sequence[int], device: torch.device) -> Callable[[Tensor, Sequence[range]], Tensor]:
    """As `apply_dropout` of [B, *shape] at rate `p`, block by block, with one draw.

    Returns:
        Function of the data of a block and of its ranges in all axes, which returns the block of the result.
    """
    rates = _rates(p)
    mask_of = keep_mask_blocks(_next_keys(shape[0], rates), shape[1:], rates, device)

    def drop(data: Tensor, block: Sequence[range]) -> Tensor:
        own = rates if len(rates) == 1 else rates[block[0].start : block[0].stop]
        return data * _factor(mask_of(block), own, data)

    return drop


def _factor(kept: Tensor, rates: Sequence[float], data: Tensor) -> Tensor:
    """The factor of the data: 0 where an element is dropped, else 1 / (1 - p)."""
    factor: Tensor = kept * _broadcastable([1 / (1 - rate) if rate < 1 else 0.0 for rate in rates], data)
    return factor


def _drop_alpha(data: Tensor, p: Any, mask_shape: Sequence[int]) -> Tensor:
    """Alpha dropout: set dropped elements to -α, then map all by x -> a·x + a·α·p, which keeps mean and variance.

    a = ((1 - p) (1 + p α²))^(-1/2); "Self-Normalizing Neural Networks", section 3. At p = 1 the result is zero.
    """
    rates = _rates(p)
    kept: Tensor = _keep_mask(data, rates, mask_shape).to(data.dtype)
    gains = [1 / math.sqrt((_ALPHA**2 * rate + 1) * (1 - rate)) if rate < 1 else 0.0 for rate in rates]
    limits = _broadcastable([_ALPHA * a for a in gains], data)
    shifts = _broadcastable([_ALPHA * a * rate for a, rate in zip(gains, rates, strict=True)], data)
    dropped: Tensor = data * (kept * _broadcastable(gains, data)) + ((kept - 1) * limits + shifts)
    return dropped


def _rates(p: Any) -> tuple[float, ...]:
    return (p.floats or ()) if isinstance(p, Stacked) else (p,)


def _keep_mask(data: Tensor, rates: tuple[float, ...], mask_shape: Sequence[int]) -> Tensor:
    """The mask, bool [B, *mask_shape]: True for elements that are kept."""
    keys = _next_keys(len(data), rates)
    if rates == (1,):
        return data.new_zeros((), dtype=torch.bool)
    return keep_mask(keys, tuple(mask_shape), rates, data.device)


def _next_keys(members: int, rates: tuple[float, ...]) -> Tensor:
    return current_source(members).next([rate > 0 for rate in rates] if len(rates) > 1 else None)


def _broadcastable(values: Sequence[float], data: Tensor) -> Any:
    """One number for all members or one for each, which makes a mask of the data's dtype; tensors are [B, 1, ...]."""
    if len(values) == 1 and data.dtype == torch.get_default_dtype():
        return values[0]
    return constant(values, data.dtype, data.device).view(-1, *[1] * (data.dim() - 1))


def _dropout(drop: Callable[..., Tensor], channels: bool = False, off_by_default: bool = False) -> Callable[..., Any]:
    def rule(func: Any, input: Any, p: Any = 0.5, training: bool = not off_by_default, inplace: bool = False) -> Any:
        rates = _rates(p)
        if not rates:
            return NotImplemented
        for rate in rates:
            if not 0 <= rate <= 1:
                raise ValueError(f"dropout probability has to be between 0 and 1, but got {rate}")
        if not training or max(rates) == 0:
            return input
        shape = tuple(input.shape)
        if channels:
            lead = 1 if input.dim() == _ONE_SAMPLE.get(func) else 2
            if input.dim() < lead:
                return NotImplemented
            shape = shape[:lead] + (1,) * (len(shape) - lead)
        data = stacked_data(input, len(rates))
        out = drop(data, p, shape)
        if inplace or func is torch.dropout_:
            data.copy_(out)
            return input
        return Stacked(out)

    return rule


_ONE_SAMPLE = {F.dropout1d: 2, F.dropout3d: 4}
"""Rank of an input without batch axis; `F.dropout2d` treats any input as a batch."""

_plain = _dropout(apply_dropout)
RULES = (
    Rule.direct(_plain, F.dropout, output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(lambda func, input, p, train: _plain(func, input, p, train), torch.dropout, torch.dropout_),
    Rule.direct(
        _dropout(apply_dropout, channels=True),
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        output_layout=Layout.CHANNEL_MAJOR,
    ),
    Rule.direct(_dropout(_drop_alpha, off_by_default=True), F.alpha_dropout),
    Rule.direct(_dropout(_drop_alpha, channels=True, off_by_default=True), F.feature_alpha_dropout),
)
