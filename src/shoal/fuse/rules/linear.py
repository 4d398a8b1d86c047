"""Linear maps and matrix products as batched matrix products over B."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.elementwise import raise_rank
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    if not isinstance(weight, Stacked) or (bias is not None and not isinstance(bias, Stacked)) or weight.dim() != 2:
        return NotImplemented
    members = len(weight.all)
    lead = input.shape[:-1]
    x = input.all if isinstance(input, Stacked) else input.expand(members, *input.shape)
    flat = x.reshape(members, -1, input.shape[-1])
    turned = weight.all.transpose(1, 2)
    if bias is None:
        out = torch.bmm(flat, turned)
    else:
        out = torch.baddbmm(bias.all.unsqueeze(1), flat, turned)
    return Stacked(out.view(members, *lead, out.shape[-1]))


def _matmul(func: Any, a: Any, b: Any) -> Any:
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    rank = max(a.dim(), b.dim())
    return Stacked(torch.matmul(*(raise_rank(t, rank) if isinstance(t, Stacked) else t for t in (a, b))))


RULES = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
}
