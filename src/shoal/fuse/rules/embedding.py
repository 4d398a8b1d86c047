"""Rules for embeddings: lookups in one table of B*V rows, with the indices of member b shifted by b*V."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import FusionError
from shoal.fuse.rules.base import Rule, stacked_data
from shoal.fuse.stacked import NeedsMemberError, Stacked, member_count

__all__ = ["RULES"]


def _table(weight: Any) -> Tensor:
    """[B, V, E] -> [B*V, E], as a view of contiguous data; a shared table [V, E] is returned unchanged."""
    return weight.whole.flatten(0, 1) if isinstance(weight, Stacked) else weight


def _table_indices(input: Any, weight: Any) -> Tensor:
    """Indices of rows of the common table, [B, *]."""
    members = member_count((input, weight)) or 1
    indices = stacked_data(input, members)
    if not isinstance(weight, Stacked):
        return indices
    rows = weight.shape[0]
    outside = (indices < 0) | (indices >= rows)
    offset = torch.arange(members, device=indices.device).mul_(rows).view(-1, *[1] * input.dim())
    return (indices + offset).masked_fill(outside, -1)  # -1 raises an error instead of reading the next member's row


def _renormalise(weight: Any, table: Tensor, rows: Tensor, max_norm: float | None, norm_type: float) -> None:
    """Scale the rows that are looked up to a norm of at most `max_norm`, in the weight and in its table."""
    if max_norm is None:
        return
    torch.embedding_renorm_(table.detach(), rows.reshape(-1), max_norm, norm_type)
    if not weight.whole.is_contiguous():  # the table is a copy
        weight.whole.detach().copy_(table.detach().view(weight.whole.shape))


def _refuse_unsupported(weight: Any, max_norm: Any, sparse: bool) -> None:
    if sparse and isinstance(weight, Stacked) and weight.whole.requires_grad:
        raise FusionError("the gradient of a fused embedding is dense; pass sparse=False to the embedding")
    if max_norm is not None and not isinstance(weight, Stacked):
        raise NeedsMemberError("an embedding with max_norm changes a weight that all members share")


def _equals(input: Any, index: int) -> Tensor:
    indices: Tensor = input.whole if isinstance(input, Stacked) else input.unsqueeze(0)
    return indices == index


def _embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    _refuse_unsupported(weight, max_norm, sparse)
    if isinstance(max_norm, Stacked) or isinstance(norm_type, Stacked):
        return NotImplemented
    table, rows = _table(weight), _table_indices(input, weight)
    _renormalise(weight, table, rows, max_norm, norm_type)
    out = F.embedding(rows, table, scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None:  # in each member, the row of the padding index gets no gradient
        out = torch.where(_equals(input, padding_idx % weight.shape[0]).unsqueeze(-1), out.detach(), out)
    return Stacked(out)


def _embedding_bag(
    func: Any,
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    _refuse_unsupported(weight, max_norm, sparse)
    if any(isinstance(value, Stacked) for value in (offsets, max_norm, norm_type)):
        return NotImplemented
    if input.dim() != (2 if offsets is None else 1):
        return NotImplemented
    if scale_grad_by_freq:  # torch's kernel does not count per index, so a common table would change gradients
        return NotImplemented
    members = member_count((input, weight, per_sample_weights)) or 1
    table, rows = _table(weight), _table_indices(input, weight)
    _renormalise(weight, table, rows, max_norm, norm_type)
    if padding_idx is not None:  # use the first member's padding index for all, since the kernel supports one index
        padding_idx %= weight.shape[0]
        rows = rows.masked_fill(_equals(input, padding_idx), padding_idx)
    rows = rows.expand(members, *input.shape).flatten(0, 1)
    scales = per_sample_weights
    if scales is not None:
        scales = stacked_data(scales, members).flatten(0, 1)
    starts = None
    if offsets is not None:  # the last offset, if included, is only the end of the last bag
        starts = _starts(offsets[:-1] if include_last_offset else offsets, members, len(input))
    out = F.embedding_bag(
        rows,
        table,
        starts,
        mode=mode,
        per_sample_weights=scales,
        padding_idx=padding_idx,
    )
    return Stacked(out.view(members, -1, weight.shape[1]))


def _starts(offsets: Tensor, members: int, length: int) -> Tensor:
    """Offsets of the bags of all members, [B*M], with `length` indices per member."""
    begin = torch.arange(members, device=offsets.device, dtype=offsets.dtype).mul_(length)
    return (begin.unsqueeze(1) + offsets).flatten()


RULES = (
    Rule.direct(_embedding, F.embedding),
    Rule.direct(_embedding_bag, F.embedding_bag),
)
