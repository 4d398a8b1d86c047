"""Attention with B folded into the batch."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.dropout import drop
from shoal.fuse.rules.elementwise import raise_rank
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    members = next(len(t.all) for t in (query, key, value, attn_mask, dropout_p) if isinstance(t, Stacked))
    if not query.dim() == key.dim() == value.dim() == 4:
        return NotImplemented
    q, k, v = (t.all if isinstance(t, Stacked) else t.expand(members, *t.shape) for t in (query, key, value))
    mask = raise_rank(attn_mask, 4) if isinstance(attn_mask, Stacked) else attn_mask
    if isinstance(dropout_p, Stacked) or dropout_p > 0:
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        weights = drop(Stacked(_weights(q, k, mask, is_causal, scale)), dropout_p, (*q.shape[1:-1], k.shape[-2]))
        return Stacked(weights @ v)
    if mask is not None and mask.dim() > 3 and mask.shape[-4] != 1 or isinstance(attn_mask, Stacked):
        mask = mask.expand(members, q.shape[1], *mask.shape[-3:]).flatten(0, 1)
    folded = (t.flatten(0, 1) for t in (q, k, v))
    out = F.scaled_dot_product_attention(*folded, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return Stacked(out.unflatten(0, (members, -1)))


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Softmax of the scaled scores, shape [B, N, H, L, S]; only needed where dropout acts on it."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


RULES = {F.scaled_dot_product_attention: _attention}
