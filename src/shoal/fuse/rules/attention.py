"""Attention with B folded into the batch."""

import math
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.dropout import drop
from shoal.fuse.rules.elementwise import raise_rank
from shoal.fuse.stacked import Stacked, count

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
    members = count((query, key, value, attn_mask, dropout_p)) or 1
    if not query.dim() == key.dim() == value.dim() == 4:
        return NotImplemented
    q, k, v = (t.whole if isinstance(t, Stacked) else t.expand(members, *t.shape) for t in (query, key, value))
    mask = raise_rank(attn_mask, 4) if isinstance(attn_mask, Stacked) else attn_mask
    if isinstance(dropout_p, Stacked) or dropout_p > 0:
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        weights = _weights(q, k, mask, is_causal, scale)
        return Stacked(drop(weights, dropout_p, tuple(weights.shape[1:])) @ v)
    if isinstance(attn_mask, Stacked) or (mask is not None and mask.dim() > 3 and mask.shape[0] != 1):
        mask = mask.expand(members, q.shape[1], *mask.shape[-3:]).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return Stacked(out.view(*q.shape[:2], *out.shape[1:]))


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Softmax of the scaled scores, shape [B, N, H, L, S]; only needed where dropout acts on it."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch._safe_softmax(scores, -1)  # zero, not NaN, where all is masked, as in torch's own attention


def _multi_head(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own Python code, whose parts have rules."""
    with torch._C._EnableTorchFunction():
        return _multi_head_parts(*args, **kwargs)


_multi_head_parts = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""`multi_head_attention_forward` without its question whether an argument overrides it."""

RULES: dict[Any, Any] = {F.scaled_dot_product_attention: _attention, F.multi_head_attention_forward: _multi_head}
