"""Indexing: reads and writes of parts of tensors, at once, in a loop, or member by member if shapes depend on data.

Each member has its own `x` [4, 6, 2], `i` [3] (integers below 4), `m` [4] (bool); X, I and M are shared.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from looped_functions import in_loops
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from twins import close

from shoal.fuse.stacked import NeedsMemberError, Stacked

Case = Callable[[Tensor, Tensor, Tensor], Any]

GENERATOR = torch.Generator().manual_seed(5)
MOST = 10
OWN = torch.randn(MOST, 4, 6, 2, dtype=torch.float64, generator=GENERATOR)
OWN_INDEX = torch.stack([torch.randperm(4, generator=GENERATOR)[:3] for _ in range(MOST)])
OWN_MASK = torch.rand(MOST, 4, generator=GENERATOR) < 0.5
OWN_MASK[:2] = torch.tensor([[True, False, False, False], [True, True, False, True]])
X = torch.randn(4, 6, 2, dtype=torch.float64, generator=GENERATOR)
I = torch.tensor([3, 0, 2])  # noqa: E741
M = torch.tensor([True, False, True, True])
J = torch.tensor([[1], [0]])

READ: dict[str, Case] = {
    "numbers, slices, new axes": lambda x, i, m: x[1:, ::2, None, -1] + x[..., 0].sum() + x[None, :, ..., 1].sum(),
    "shared": lambda x, i, m: x[I],
    "shared, negative": lambda x, i, m: x[I - 4],
    "shared, last": lambda x, i, m: x[..., I % 2],
    "shared after a number": lambda x, i, m: x[1, :, I % 2],
    "shared before a number": lambda x, i, m: x[I, :, 1],
    "shared, a number of no axes": lambda x, i, m: x[torch.tensor(2)],
    "two shared": lambda x, i, m: x[I, I],
    "two shared that broadcast": lambda x, i, m: x[I, J],
    "two shared apart": lambda x, i, m: x[I, :, I % 2],
    "two shared around a number": lambda x, i, m: x[I, 1, I % 2],
    "two shared around a new axis": lambda x, i, m: x[I, None, I],
    "two shared after an ellipsis": lambda x, i, m: x[..., I, I % 2],
    "list": lambda x, i, m: x[[0, 2]] + x[[0, 1], [1, 2]].sum(),
    "nested list": lambda x, i, m: x[:, [[0, 2], [1, 1]]],
    "shared mask": lambda x, i, m: x[M],
    "shared mask of two axes": lambda x, i, m: x[X[..., 0] > 0],
    "shared mask and slice": lambda x, i, m: x[:, 1:, :][M, 2:],
    "shared mask and indices": lambda x, i, m: x[M, I],
    "shared mask of nothing": lambda x, i, m: x[M & ~M],
    "own": lambda x, i, m: x[i],
    "own, negative": lambda x, i, m: x[i - 4],
    "own, last": lambda x, i, m: x[..., i % 2],
    "own after a slice": lambda x, i, m: x[:, i + 1],
    "own after a number": lambda x, i, m: x[1, :, i % 2],
    "own number of no axes": lambda x, i, m: x[i[0]] + x[:, i[1]][:, 0].sum(),
    "own and shared": lambda x, i, m: x[i, I],
    "own and shared that broadcast": lambda x, i, m: x[J, i],
    "own and shared apart": lambda x, i, m: x[i, :, I % 2],
    "own and shared mask": lambda x, i, m: x[M, i],
    "own twice": lambda x, i, m: x[i, i, i % 2],
    "own, of two axes": lambda x, i, m: x[x.argmax(1) % 4],
    "of shared by own": lambda x, i, m: X[i] * x[0, 0, 0],
    "of shared by own and shared": lambda x, i, m: X[I, i] * x[0, 0, 0],
    "of shared by own apart": lambda x, i, m: X[i, :, I % 2] * x[0, 0, 0],
    "select, narrow": lambda x, i, m: x.select(1, -1) + x.narrow(1, 2, 1).squeeze(1),
    "index_select": lambda x, i, m: x.index_select(1, I) + torch.index_select(x, 1, i),
    "index_select of shared": lambda x, i, m: X.index_select(1, i) * x[0, 0, 0],
    "gather": lambda x, i, m: x.gather(1, x.argsort(1)[:3, :2]) + x.gather(-1, J.expand(3, 2, 2)),
    "gather from shared": lambda x, i, m: X.gather(1, x.argsort(1)) * x,
    "take_along_dim": lambda x, i, m: torch.take_along_dim(x, x.argsort(0), 0) + x.take_along_dim(J[None], 1)[0, 0],
    "take_along_dim of shared": lambda x, i, m: torch.take_along_dim(X, i.view(3, 1, 1), 0) * x[:3],
    "roll": lambda x, i, m: x.roll(1, 0) + x.roll((1, -2), (1, 2)) + x.roll(3),
    "movedim": lambda x, i, m: x.movedim(0, -1) + torch.moveaxis(x, (0, 1), (2, 0)),
    "diagonal": lambda x, i, m: x.diagonal() + x.diagonal(1, -1, 0).sum() + torch.diagonal(x, dim1=0, dim2=1),
    "tril, triu": lambda x, i, m: x.tril(-1) + torch.triu(x, diagonal=1),
    "unfold": lambda x, i, m: x.unfold(1, 3, 2),
    "view of another type": lambda x, i, m: x.float().view(torch.int32),
    "split": lambda x, i, m: [*x.split([1, 2, 3], 1), *x.chunk(3, 1), *torch.split(x, 4, dim=1)],
    "tensor_split": lambda x, i, m: [*x.tensor_split(4, 1), *torch.tensor_split(x, (1, 3))],
    "unbind": lambda x, i, m: [*x.unbind(1), *(row for row in x)],
    "cat of own and shared": lambda x, i, m: torch.cat([x, X, x[:2]]) + torch.stack([X, x])[:, :1].sum(),
    "cumsum, cummax": lambda x, i, m: [x.cumsum(1), x.cumprod(0), *x.cummax(1)],
    "repeat_interleave": lambda x, i, m: x.repeat_interleave(2, 1),
    "one_hot": lambda x, i, m: F.one_hot(i, 4) * x[0, 0, :1],
    "bucketize": lambda x, i, m: torch.bucketize(x, X[0, :, 0].sort().values),
    "searchsorted": lambda x, i, m: torch.searchsorted(x.sort(1).values.mT.contiguous(), X.mT.contiguous()),
    "where": lambda x, i, m: torch.where(x > 0, X, 0.5) + torch.where(X > 0, x, X) + x.where(X > 0, 0.0),
    "einsum": lambda x, i, m: torch.einsum("abc,adc->abd", x, X),
    "einsum, shared first": lambda x, i, m: torch.einsum("abc, abd -> cd", X, x),
    "einsum, own alone": lambda x, i, m: torch.einsum("abc->ca", x) + torch.einsum("...c->c", [x])[:, None],
    "einsum, implied result": lambda x, i, m: torch.einsum("ba,cb", x[..., 0], X[..., 1].T),
    "einsum, implied with an ellipsis": lambda x, i, m: torch.einsum("...b,cb", x, X[0]),
    "einsum, trace": lambda x, i, m: torch.einsum("ii", x[:, :4, 0]),
}
WRITE: dict[str, Case] = {
    "slice": lambda x, i, m: _set(x, (slice(1, 3), ..., 0), X[1:3, :, 0]),
    "shared": lambda x, i, m: _set(x, I, X[:3]),
    "shared, by own": lambda x, i, m: _set(x, I, x[1:].detach() * 2),
    "shared, a number": lambda x, i, m: _set(x, (slice(None), I), 2.0),
    "shared, a value that broadcasts": lambda x, i, m: _set(x, (slice(None), I), X[0, 0]),
    "two shared": lambda x, i, m: _set(x, (I, I), x[:3, 0].detach()),
    "two shared apart": lambda x, i, m: _set(x, (I, slice(None), I % 2), X[0, 0, 0] + X[:3, :, 0]),
    "shared later": lambda x, i, m: _set(x, (slice(None), I), X[:, :3]),
    "shared mask": lambda x, i, m: _set(x, M, X[:3]),
    "shared mask, a number": lambda x, i, m: _set(x, M, -1.0),
    "own": lambda x, i, m: _set(x, i, X[:3]),
    "own later": lambda x, i, m: _set(x, (slice(None), i), x[:, :3].detach() + 1),
    "own and shared": lambda x, i, m: _set(x, (i, I), 0.0),
    "own mask, a number": lambda x, i, m: _set(x, m, 3.0),
    "own mask of all axes": lambda x, i, m: _set(x, x.detach() > 0, 0),
    "added to a part": lambda x, i, m: _add(x, i),
    "index_put": lambda x, i, m: x.index_put((I, i), X[:3, 0]) + torch.index_put(X, (i,), x[:3]),
    "index_put that adds": lambda x, i, m: x.index_put((i % 2,), X[:3], accumulate=True),
    "index_put_": lambda x, i, m: x.index_put_((i, I), X[0, :3], accumulate=True),
    "scatter": lambda x, i, m: x.scatter(1, x.argsort(1)[:, :3], x.detach().exp()),
    "scatter of shared": lambda x, i, m: X.scatter(1, x.argsort(1), x),
    "scatter a number": lambda x, i, m: x.scatter(0, i.view(3, 1, 1), 2.0) + x.scatter(0, I.view(3, 1, 1), value=2.0),
    "scatter_": lambda x, i, m: x.scatter_(0, i.view(3, 1, 1), X),
    "scatter_add": lambda x, i, m: torch.zeros_like(x).scatter_add(1, x.argsort(1) % 2, x),
    "scatter_add_": lambda x, i, m: x.scatter_add_(0, (i % 2).view(3, 1, 1), X),
    "scatter_reduce": lambda x, i, m: x.scatter_reduce(
        0, (i % 2).view(3, 1, 1), X[:3, :1, :1], "amax", include_self=False
    ),
    "index_add": lambda x, i, m: x.index_add(0, I, X[:3], alpha=0.5) + x.index_add(0, i % 2, X[:3], alpha=2),
    "index_add of shared": lambda x, i, m: X.index_add(0, i, x[:3]),
    "index_add_": lambda x, i, m: x.index_add_(1, i, X[:, :3]).index_add_(1, I, X[:, :3]),
    "index_copy": lambda x, i, m: x.index_copy(0, I, X[:3]) + x.index_copy(0, i, X[:3]),
    "index_fill": lambda x, i, m: x.index_fill(0, I, 2.0) + x.index_fill(1, i, 3.0),
    "masked_fill": lambda x, i, m: x.masked_fill(m[:, None, None], 1.0).masked_fill_(M[:, None, None], 2.0),
}
OTHERS: dict[str, Case] = {
    "outer": lambda x, i, m: torch.outer(x[0, 0], X[0, 1]),
    "meshgrid": lambda x, i, m: list(torch.meshgrid(x[0, 0], X[1, 0], indexing="ij")),
    "take": lambda x, i, m: x.take(I),
    "hsplit, vsplit": lambda x, i, m: [*x.hsplit(2), *torch.vsplit(x, 2)],
    "masked_scatter": lambda x, i, m: x.masked_scatter(M[:, None, None], X),
    "repeat_interleave by shared": lambda x, i, m: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), 0),
    "as_strided": lambda x, i, m: x.as_strided((2, 2), (1, 3)),
    "diag_embed": lambda x, i, m: torch.diag_embed(x[0]) + x[0, :2].diag().sum(),
    "pad_sequence": lambda x, i, m: pad_sequence([x[0], x[1, :4], X[0]], batch_first=True),
}
APART: dict[str, Case] = {
    "own mask": lambda x, i, m: x[m],
    "of shared by own mask": lambda x, i, m: X[m],
    "own mask among others": lambda x, i, m: x[m, 1:],
    "masked_select": lambda x, i, m: x.masked_select(m[:, None, None]),
    "nonzero": lambda x, i, m: m.nonzero(),
    "where alone": lambda x, i, m: torch.where(m),
    "repeat_interleave by own": lambda x, i, m: x.repeat_interleave(m.long(), 0),
    "unique": lambda x, i, m: m.long().cumsum(0).unique(),
    "slice to own number": lambda x, i, m: x[: m.sum()],
    "one_hot of own size": lambda x, i, m: F.one_hot(m.sum()[None]),
}


def _set(x: Tensor, key: Any, value: Any) -> Tensor:
    x = x * 1
    x[key] = value
    return x


def _add(x: Tensor, i: Tensor) -> Tensor:
    x = x * 1
    x[I, 1] += 1
    x[i] *= X[:3]
    x[1:, i] -= x[1:, i].detach() / 2
    return x


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def run(fn: Case, members: int) -> None:
    """The function of all members against each alone, and the gradients of `x`."""
    whole = OWN[:members].clone().requires_grad_()
    result = listed(fn(Stacked(whole * 1), Stacked(OWN_INDEX[:members]), Stacked(OWN_MASK[:members])))
    for b in range(members):
        own = OWN[b].clone().requires_grad_()
        expected = listed(fn(own * 1, OWN_INDEX[b], OWN_MASK[b]))
        for mine, alone in zip(result, expected, strict=True):
            close(mine.whole[b] if isinstance(mine, Stacked) else mine, alone, f"member {b}", 1e-12)
        if (value := _value(expected)) is not None:
            (gradient,) = torch.autograd.grad(value, own)
            (of_all,) = torch.autograd.grad(
                _value([one.whole[b] for one in result if isinstance(one, Stacked)]), whole, retain_graph=True
            )
            close(of_all[b], gradient, f"gradient of {b}", 1e-12)
            assert not of_all[[other for other in range(members) if other != b]].any()


def _value(results: list[Tensor]) -> Any:
    values = [one.cos().sum() for one in results if one.requires_grad]
    return sum(values) if values else None


@pytest.mark.parametrize(
    ("table", "loops"),
    [(READ, {"__getitem__"}), (WRITE, {"__setitem__"}), (OTHERS, {"pad_sequence"})],
    ids=["read", "write", "other"],
)
def test_table(table: dict[str, Case], loops: set[str], subtests: Any) -> None:
    for name, fn in table.items():
        with subtests.test(name), in_loops() as found:
            run(fn, 3)
            assert set(found) <= loops


@pytest.mark.parametrize("name", APART)
def test_shapes_that_depend_on_data(name: str) -> None:
    """Members that disagree must run one by one; those that agree need not."""
    with pytest.raises(NeedsMemberError):
        APART[name](Stacked(OWN[:2]), Stacked(OWN_INDEX[:2]), Stacked(OWN_MASK[:2]))
    alike = OWN_MASK[:1].expand(2, 4)
    result = listed(APART[name](Stacked(OWN[:2]), Stacked(OWN_INDEX[:2]), Stacked(alike)))
    for b in range(2):
        for mine, own in zip(result, listed(APART[name](OWN[b], OWN_INDEX[b], alike[b])), strict=True):
            close(mine.whole[b], own, f"member {b}")


def test_a_shared_tensor_is_not_written_for_one() -> None:
    with pytest.raises(NeedsMemberError, match="all members share"):
        X.clone()[Stacked(OWN_INDEX)] = 0.0


def test_an_index_out_of_range_is_refused_as_for_one_member() -> None:
    for key in (Stacked(OWN_INDEX + 4), (I, Stacked(OWN_INDEX + 4)), I + 4, 4):
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            Stacked(OWN)[key]
