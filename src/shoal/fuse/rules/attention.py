"""Rules for attention (`scaled_dot_product_attention`, multi-head attention): B is folded into the batch axis."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.fuse.rules.base import Rule
from shoal.fuse.rules.dropout import apply_dropout, begin_dropout
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
        out = _with_dropout(q, k, v, mask, dropout_p, partial(_weights, is_causal=is_causal, scale=scale))
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


_MOST_WEIGHTS = 1 << 25
"""Most attention weights that are kept for the backward pass."""

_BLOCK = 1 << 22
"""Number of weights of a block, if there are more than `_MOST_WEIGHTS`; at least one row."""

_MOST_BLOCKS = 16
"""About how many blocks there are at most: a captured step has the operations of each."""


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: Any, weights_of: Callable[..., Tensor]
) -> Tensor:
    """Attention whose weights are dropped at rate `p`: at once, or block by block, twice, if these are very many."""
    leads = [each.shape[:-2] for each in (q, k, mask) if each is not None]
    lead: tuple[int, ...] = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
    shape = (*lead, q.shape[-2], k.shape[-2])
    by_blocks = torch.broadcast_shapes(lead, v.shape[:-2]) == lead and (mask is None or not mask.requires_grad)  # type: ignore[no-untyped-call]
    if prod(shape) <= _MOST_WEIGHTS or not by_blocks:
        weights = weights_of(q, k, mask)
        return apply_dropout(weights, p, tuple(weights.shape[1:])) @ v
    drop = begin_dropout(p, shape, q.device)

    def attend(block: Sequence[range], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return drop(weights_of(q, k, mask, first_row=block[-2].start), block) @ v

    q, k, v = (each.expand(*lead, *each.shape[-2:]) for each in (q, k, v))
    out: Tensor = _Blocks.apply(attend, shape, q, k, v, None if mask is None else mask.expand(shape))  # type: ignore[no-untyped-call]
    return out


class _Blocks(torch.autograd.Function):
    """Attention of one block of the weights after another, which are computed once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], shape: Sequence[int], *tensors: Any) -> Tensor:
        """Compute the whole result of q, k, v and mask; `shape` is that of the weights."""
        kind = tensors[0].device.type
        ctx.attend, ctx.shape = attend, shape
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(*tensors)
        out: Tensor | None = None
        for block in _blocks(shape):
            part = attend(block, *_cut(block, tensors))
            if out is None:
                out = part.new_empty(*shape[:-1], part.shape[-1])
            out[_slices(block[:-1])] = part
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradients of q, k and v."""
        *inputs, mask = ctx.saved_tensors
        grads = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in inputs]
        with torch._C.DisableTorchFunction(), torch.enable_grad(), torch.autocast(*ctx.autocast):
            for block in _blocks(ctx.shape):
                *parts, own_mask = _cut(block, (*inputs, mask))
                leaves = [each.detach().requires_grad_() for each in parts]
                part = ctx.attend(block, *leaves, own_mask)
                found = torch.autograd.grad(part, leaves, grad[_slices(block[:-1])])
                for whole, own in zip(_cut(block, (*grads, None)), found, strict=False):
                    whole += own
        return None, None, *grads, None


def _blocks(shape: Sequence[int]) -> Iterator[Sequence[range]]:
    """Blocks of about `_BLOCK` elements, and at least a row, as ranges in each axis; few enough for a trace."""
    steps, inner, most = [], shape[-1], max(_BLOCK, prod(shape) // _MOST_BLOCKS)
    for size in reversed(shape[:-1]):
        steps.append(max(1, min(size, most // inner)))
        inner *= size
    ranges = [
        [range(first, min(first + step, size)) for first in range(0, size, step)]
        for size, step in zip(shape, reversed(steps), strict=False)
    ]
    return ((*block, range(shape[-1])) for block in product(*ranges))


def _cut(block: Sequence[range], tensors: Sequence[Any]) -> Sequence[Any]:
    """The parts of q, k, v and mask, as views, for a block of the weights."""
    q, k, v, mask = tensors
    lead, rows = _slices(block[:-2]), _slices(block[:-1])
    return q[rows], k[lead], v[lead], None if mask is None else mask[rows]


def _slices(block: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(own.start, own.stop) for own in block)


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, first_row: int = 0
) -> Tensor:
    """Attention weights: softmax of the scaled scores, [B, ..., L, S], of queries from a row on."""
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-1, -2)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(first_row)
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
