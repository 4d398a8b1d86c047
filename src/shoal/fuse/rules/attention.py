"""Rules for attention (`scaled_dot_product_attention`, multi-head attention): B is folded into the batch axis."""

import math
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.base import Rule
from shoal.fuse.rules.dropout import apply_dropout
from shoal.fuse.rules.elementwise import raise_rank
from shoal.fuse.stacked import Stacked, member_count
from shoal.fuse.torch_functions import draws_random

__all__ = ["RULES", "multi_head_without_overrides"]


def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    given = (query, key, value)
    rank = max(t.dim() for t in given)
    if isinstance(scale, Stacked) or min(t.dim() for t in given) < 2:
        return NotImplemented
    if enable_gqa and (rank < 3 or any(t.dim() != rank for t in given)):
        return NotImplemented
    if attn_mask is not None and (is_causal or attn_mask.dim() > rank):  # torch raises an error for both
        return NotImplemented
    members = member_count((*given, attn_mask, dropout_p)) or 1
    q, k, v = (_whole(t, max(rank, 3), members) for t in given)
    mask = None if attn_mask is None else _whole(attn_mask, max(rank, 3), members)
    if isinstance(dropout_p, Stacked) or dropout_p > 0:
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        weights = _weights(q, k, mask, is_causal, scale)
        out = apply_dropout(weights, dropout_p, tuple(weights.shape[1:])) @ v
    else:
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))  # type: ignore[no-untyped-call]
        if mask is not None:
            mask = attn_mask if not isinstance(attn_mask, Stacked) and attn_mask.dim() == 2 else _folded(mask, lead)
        q, k, v = (_folded(t, lead) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        out = torch.unflatten(out, 0, lead)
    return Stacked(out.squeeze(1) if rank == 2 else out)


def _whole(value: Any, rank: int, members: int) -> Tensor:
    """All members' data, [B, 1, ..., *shape], with axes of size one so that a member's tensor has rank `rank`."""
    if isinstance(value, Stacked):
        return raise_rank(value, rank)
    shared: Tensor = value.expand(members, *[1] * (rank - value.dim()), *value.shape)
    return shared


def _folded(data: Tensor, lead: Sequence[int]) -> Tensor:
    """[..., H, L, E] -> [prod(lead), H, L, E], as a view if the strides allow it."""
    return data.expand(*lead, *data.shape[-3:]).flatten(0, len(lead) - 1)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Attention weights: softmax of the scaled scores, [B, ..., L, S]; needed only with dropout."""
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-1, -2)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch._safe_softmax(scores, -1)  # zero instead of NaN in fully masked rows, as in torch's attention


def _multi_head(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's Python code, whose functions have rules; with dropout, a shared query is expanded to all members."""
    members = member_count((args, kwargs))
    if draws_random(func, args, kwargs) and members is not None and not isinstance(args[0], Stacked):
        args = (Stacked(args[0].expand(members, *args[0].shape)), *args[1:])
    with torch._C._EnableTorchFunction():
        return multi_head_without_overrides(*args, **kwargs)


multi_head_without_overrides = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""`multi_head_attention_forward` without its check for `__torch_function__` overrides."""

RULES = (
    Rule.direct(_attention, F.scaled_dot_product_attention),
    Rule.direct(_multi_head, F.multi_head_attention_forward),
)
