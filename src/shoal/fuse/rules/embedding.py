"""Embedding: one table of B·V rows, indices moved by b·V."""

from typing import Any

import torch
import torch.nn.functional as F

from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, Stacked) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    members, rows, _ = weight.whole.shape
    indices = input.whole if isinstance(input, Stacked) else input.unsqueeze(0)
    outside = (indices < 0) | (indices >= rows)
    offset = torch.arange(members, device=indices.device).mul_(rows).view(-1, *[1] * input.dim())
    moved = (indices + offset).masked_fill(outside, -1)  # an error, not a row of the next member
    out = F.embedding(moved, weight.whole.flatten(0, 1))
    if padding_idx is not None:  # the rows of the padding index take no gradient: one row per member
        padding = (indices == padding_idx % rows).unsqueeze(-1)
        out = torch.where(padding, out.detach(), out)
    return Stacked(out)


RULES: dict[Any, Any] = {F.embedding: _embedding}
