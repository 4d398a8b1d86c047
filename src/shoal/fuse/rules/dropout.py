"""Dropout with each member's own mask and rate; see `shoal.fuse.randomness`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.randomness import current, keep_mask
from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "drop"]


def drop(x: Stacked, p: Any, mask_shape: tuple[int, ...]) -> Tensor:
    """All members' data with elements zeroed at rate `p` and the others scaled by 1 / (1 - p).

    Args:
        x: what is dropped.
        p: the rate, a float or a stacked number.
        mask_shape: of one member's mask; broadcasts to x's shape (channel dropout has ones).
    """
    data = x.all
    keys = current(len(data)).next()
    if isinstance(p, Stacked):
        rate: Any = p.all.to(data.device).view(-1, *[1] * x.dim())
        scale = torch.where(rate < 1, 1 / (1 - rate), 0.0)
    else:
        rate, scale = p, 0.0 if p == 1 else 1 / (1 - p)
    if not isinstance(p, Stacked) and p == 1:
        return data * 0.0
    keep = keep_mask(keys, mask_shape, rate, data.device)
    return data * (keep * scale).to(data.dtype)


def _rate(p: Any) -> tuple[float, float]:
    return (p.all.min().item(), p.all.max().item()) if isinstance(p, Stacked) else (p, p)


def _dropout(channels: bool) -> Any:
    def rule(func: Any, input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        if not isinstance(input, Stacked):
            return NotImplemented
        low, high = _rate(p)
        if not 0 <= low <= high <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {low if low < 0 else high}")
        if not training or high == 0:
            return input
        shape = tuple(input.shape)
        if channels:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        out = drop(input, p, shape)
        if inplace:
            input.all.copy_(out)
            return input
        return Stacked(out)

    return rule


def _torch_dropout(func: Any, input: Any, p: Any, train: bool) -> Any:  # noqa: A002
    return _dropout(channels=False)(func, input, p, train)


RULES: dict[Any, Any] = {
    F.dropout: _dropout(channels=False),
    torch.dropout: _torch_dropout,
    F.dropout1d: _dropout(channels=True),
    F.dropout2d: _dropout(channels=True),
    F.dropout3d: _dropout(channels=True),
}
