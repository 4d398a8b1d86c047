"""Linear maps and matrix products as batched matrix products over B."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.elementwise import raise_rank
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, Stacked):
        if isinstance(bias, Stacked):
            return NotImplemented
        return Stacked(F.linear(input.whole, weight, bias))
    if (bias is not None and not isinstance(bias, Stacked)) or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        return NotImplemented
    members = len(weight.whole)
    x = input.whole if isinstance(input, Stacked) else input.expand(members, *input.shape)
    lead = x.shape[1:-1]
    flat = x if len(lead) == 1 else x.reshape(members, -1, x.shape[-1])
    turned = weight.whole.transpose(1, 2)
    out = torch.bmm(flat, turned) if bias is None else torch.baddbmm(bias.whole.unsqueeze(1), flat, turned)
    return Stacked(out if len(lead) == 1 else out.view(members, *lead, out.shape[-1]))


def _matmul(func: Any, a: Any, b: Any) -> Any:
    exact = _RANKS.get(func)
    if a.dim() < 2 or b.dim() < 2 or (exact is not None and not a.dim() == b.dim() == exact):
        return NotImplemented
    rank = max(a.dim(), b.dim())
    return Stacked(torch.matmul(*(raise_rank(t, rank) if isinstance(t, Stacked) else t for t in (a, b))))


_RANKS = {torch.mm: 2, Tensor.mm: 2, torch.bmm: 3, Tensor.bmm: 3}
RULES: dict[Any, Any] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    **dict.fromkeys(_RANKS, _matmul),
}
