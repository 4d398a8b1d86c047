"""Functions of tensors, by rules, by vmap and in a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from twins import Of, check, close

from shoal.fuse.stacked import Stacked

torch.manual_seed(5)
WHOLE = torch.randn(3, 4, 6, 2, dtype=torch.float64)
SHARED = torch.randn(4, 6, 2, dtype=torch.float64)
INDEX = torch.tensor([3, 0, 2])


def members_equal(fn: Callable[..., Any], *wholes: Tensor) -> None:
    """The function of stacked tensors is that of the members' own."""
    result = fn(*(Stacked(whole.clone()) for whole in wholes))
    for b in range(len(wholes[0])):
        expected = fn(*(whole[b].clone() for whole in wholes))
        for mine, own in zip(_listed(result), _listed(expected), strict=True):
            if isinstance(own, Tensor):
                close(mine.whole[b] if isinstance(mine, Stacked) else mine, own, f"member {b}", 1e-12)
            else:
                assert mine == own


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(8, 6),
    "view -1": lambda x: x.view(-1, 2, 2),
    "view sequence": lambda x: x.view((24, 2)),
    "view dtype": lambda x: x.view(torch.int64),
    "view_as": lambda x: x.view_as(torch.empty(24, 2)),
    "reshape": lambda x: x.transpose(0, 1).reshape(-1),
    "reshape function": lambda x: torch.reshape(x, shape=(2, -1)),
    "flatten": lambda x: x.flatten(1),
    "flatten some": lambda x: torch.flatten(x, start_dim=0, end_dim=-2),
    "flatten 0-dim": lambda x: x.sum().flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "transpose": lambda x: x.transpose(-1, 0),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "t": lambda x: x[0].t(),
    "T": lambda x: x[0].T,
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "permute sequence": lambda x: torch.permute(x, (0, -1, 1)),
    "movedim": lambda x: x.movedim(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(-1) + x.unsqueeze(dim=-1),
    "squeeze": lambda x: x[:1, :, :1].squeeze(),
    "squeeze axis": lambda x: x[:1].squeeze(0) + x[:, :1].squeeze(1).sum(),
    "squeeze axes": lambda x: x[:1, :, :1].squeeze((0, -1)),
    "expand": lambda x: x[:, :1].expand(-1, 5, 2),
    "expand rank": lambda x: x.expand(2, *x.shape),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x[0], (3, 6, 2)),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "tile": lambda x: x.tile(2),
    "cat": lambda x: torch.cat([x, x, torch.ones(1, 6, 2, dtype=x.dtype)]),
    "cat axis": lambda x: torch.cat((x, SHARED), dim=-1),
    "cat axis by its other name": lambda x: torch.cat((x, SHARED), axis=1),
    "cat with nothing": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x, x.new_zeros(0)], 1),
    "stack": lambda x: torch.stack([x, SHARED], -1),
    "hstack": lambda x: torch.hstack([x, x]),
    "chunk": lambda x: x.chunk(3, 1),
    "split": lambda x: x.split([1, 2, 3], dim=1),
    "split even": lambda x: torch.split(x, 2),
    "unbind": lambda x: x.unbind(-1),
    "iteration": lambda x: [row * 2 for row in x],
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0, -1),
    "flip sequence": lambda x: torch.flip(x, (1,)),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "tril": lambda x: x.tril(-1) + torch.triu(x, diagonal=1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=3.0),
    "pad negative": lambda x: F.pad(x, (-1, 0)),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[1, 0], indexing="ij"),
    "atleast": lambda x: torch.atleast_3d(x[0]),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "select": lambda x: x.select(-1, 1),
}
REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum axis": lambda x: x.sum(1),
    "sum axes": lambda x: x.sum((0, -1), keepdim=True),
    "sum by axis": lambda x: x.sum(axis=1),
    "sum dtype": lambda x: x.sum(dtype=torch.float32),
    "mean": lambda x: x.mean() + x.mean(dim=[1, 2]),
    "mean keepdim": lambda x: x.mean(-1, keepdim=True),
    "prod": lambda x: x.prod(0) * x.prod(),
    "max": lambda x: x.max(),
    "max axis": lambda x: x.max(1),
    "max values": lambda x: x.max(dim=-1).values,
    "max of two": lambda x: x.max(SHARED),
    "min axis": lambda x: torch.min(x, 0, keepdim=True),
    "amax": lambda x: x.amax((0, 1)),
    "argmax": lambda x: x.argmax() + x.argmax(1),
    "std": lambda x: x.std() + x.std(0, keepdim=True),
    "var": lambda x: x.var(dim=1, unbiased=False),
    "var of all": lambda x: torch.var(x, False),
    "all": lambda x: x.gt(-10).all() | x.gt(0).any(1),
    "any": lambda x: (x > 0).any(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm() + x.norm(dim=1) + torch.linalg.vector_norm(x, dim=-1).sum(),
    "normalize": lambda x: F.normalize(x, dim=1),
    "median": lambda x: x.median(),
    "median axis": lambda x: x.median(1),
    "sort": lambda x: x.sort(),
    "sort axis": lambda x: torch.sort(x, 0, descending=True),
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: x.topk(2, 1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "cumsum": lambda x: x.cumsum(1) + x.cumprod(-1),
    "softmax": lambda x: x.softmax(1) + F.softmax(x, dim=-1),
    "softmax dtype": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "count": lambda x: x.gt(0).count_nonzero(),
    "diff": lambda x: x.diff(dim=1),
    "sum of a number": lambda x: x.sum().sum(0) + x.sum().mean(),
    "unique shape": lambda x: x.numel() + x.size(0) + x.dim() + len(x) + sum(x.shape),
}
MATRICES: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda x: x @ x.mT,
    "matmul shared": lambda x: x @ SHARED.mT,
    "shared matmul": lambda x: SHARED @ x.mT,
    "matmul rank": lambda x: x[0] @ SHARED.mT,
    "matmul vector": lambda x: x @ x[0, 0],
    "vector matmul": lambda x: x[0, 0] @ x.mT,
    "dot": lambda x: x[0, 0] @ x[1, 1],
    "mm": lambda x: torch.mm(x[0], x[1].t()),
    "bmm": lambda x: torch.bmm(x, SHARED.mT),
    "mv": lambda x: x[0].mv(x[0, 0]),
    "addmm": lambda x: torch.addmm(x[0, 0], x[0], x[1, :2]),
    "baddbmm": lambda x: torch.baddbmm(x[0, 0], x, x[:, :2]),
    "outer": lambda x: torch.outer(x[0, 0], x[1, 1]),
    "einsum": lambda x: torch.einsum("abc,adc->abd", x, SHARED),
    "einsum of one": lambda x: torch.einsum("abc->ca", x),
    "tensordot": lambda x: torch.tensordot(x, SHARED, dims=([0], [0])),
    "kron": lambda x: torch.kron(x[0], x[1]),
    "linalg": lambda x: torch.linalg.det(x[:2, :2, :]) + torch.linalg.inv(x[0, :2] @ x[0, :2].T + torch.eye(2)).sum(),
    "linear shared weight": lambda x: F.linear(x, SHARED[0], SHARED[0, :, 0]),
    "linear own bias": lambda x: F.linear(SHARED, SHARED[0], x[0, :, 0]),
    "cosine": lambda x: F.cosine_similarity(x, SHARED, dim=1),
    "cdist": lambda x: torch.cdist(x, SHARED),
    "bilinear": lambda x: F.bilinear(x[0], x[1], x[:3, :2]),
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs(),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "to dtype": lambda x: x.to(torch.float32),
    "to other": lambda x: torch.ones(2).to(x),
    "type_as": lambda x: SHARED.float().type_as(x) + x,
    "own to other": lambda x: x.float().to(x),
    "type": lambda x: (x.type(torch.float32), x.type()),
    "long": lambda x: x.long() + x.int(),
    "zeros_like": lambda x: torch.zeros_like(x) + torch.full_like(x, 2.0),
    "new": lambda x: (x.new_zeros(3), x.new_ones((2, 2)), x.new_full((2,), 3.0), x.new_zeros(size=(2,))),
    "new tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "new written": lambda x: _written(x.new_zeros(4), x),
    "clamp": lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0) + torch.clamp(x, max=SHARED),
    "clamp by own": lambda x: SHARED.clamp(min=x),
    "pow": lambda x: 2 ** x.abs() + x**2 + x.abs() ** SHARED,
    "scalars": lambda x: 1 - x / 2 + 3 // (x.abs() + 1) - x % 2,
    "compare": lambda x: (x > 0) & (x <= SHARED) | ~(x == 1),
    "lerp": lambda x: torch.lerp(x, SHARED, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, SHARED, value=0.5),
    "maximum": lambda x: torch.maximum(x, SHARED) + torch.minimum(SHARED, x),
    "channels last": lambda x: x.unsqueeze(0).contiguous(memory_format=torch.channels_last) + 1,
    "clone preserve": lambda x: x.clone(memory_format=torch.preserve_format),
    "data": lambda x: x.data + x.detach(),
    "out": lambda x: torch.add(x, SHARED, out=torch.empty_like(x)),
    "sum of a list": lambda x: sum([x, x, 1]),
    "bucketize": lambda x: torch.bucketize(x, SHARED[0, :, 0].sort().values),
    "one hot": lambda x: F.one_hot(x.argmax(1), 6),
    "complex": lambda x: torch.complex(x, x).abs() + torch.view_as_real(torch.complex(x, x))[..., 0],
    "keyword input": lambda x: torch.sum(input=x, dim=1),
    "broadcast": lambda x: torch.broadcast_tensors(x, SHARED[0]),
    "is": lambda x: (
        x.is_floating_point(),
        torch.is_tensor(x),
        x.is_cuda,
        x.dtype,
        x.device,
        x.ndim,
        x.is_contiguous(),
    ),
    "stride": lambda x: (x.stride(), x.transpose(0, 1).is_contiguous()),
    "strings": lambda x: f"{x.shape}",
    "multi pack": lambda x: torch.block_diag(x[0], x[1]),
    "vander": lambda x: torch.vander(x[0, 0]),
    "histogram of agreement": lambda x: x.mul(0).sum().item(),
}


def _written(zeros: Tensor, x: Tensor) -> Tensor:
    zeros[1] = x[0, 0, 0]
    zeros[2:] = SHARED[0, :2, 0]
    return zeros


@pytest.mark.parametrize("table", [SHAPES, REDUCTIONS, MATRICES, OTHERS], ids=["shape", "sum", "matmul", "other"])
def test_table(table: dict[str, Callable[[Tensor], Any]], subtests: Any) -> None:
    for name, fn in table.items():
        with subtests.test(name):
            members_equal(fn, WHOLE)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(SHARED),
    "operators": lambda x: _operators(x),
    "relu_": lambda x: F.relu(x, inplace=True) + x.relu_() + torch.relu_(x),
    "fill_": lambda x: x[0].fill_(3.0) + x[1].zero_(),
    "clamp_": lambda x: x.clamp_(0, 1),
    "copy_": lambda x: x.copy_(SHARED),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2.0),
    "set part": lambda x: _set(x, 0, 1.0),
    "set slice": lambda x: _set(x, (slice(None), 1), SHARED[:, 0]),
    "set own": lambda x: _set(x, (slice(1, 3), ..., 0), x[:2, :, 1].clone()),
    "set tensor index": lambda x: _set(x, INDEX, SHARED[:3]),
    "set mask": lambda x: _set(x, x > 0, 0.0),
    "set wide value": lambda x: _set(x, 0, SHARED[:1]),
    "add to part": lambda x: _add_to_part(x),
    "index_add_": lambda x: x.index_add_(0, INDEX, SHARED[:3]),
    "scatter_": lambda x: x.scatter_(0, INDEX.view(3, 1, 1).expand(3, 6, 2), 9.0),
    "cumsum_": lambda x: x.cumsum_(1),
    "t_": lambda x: x[0].add_(1).t(),
    "through a view": lambda x: (x.view(-1)[:3].zero_(), x)[1],
    "through pieces of data": lambda x: (x.data.mul_(2), x)[1],
    "float into int": lambda x: x.long().add_(2),
    "own number": lambda x: x.sum().add_(SHARED.sum().float()),
    "logical": lambda x: (x > 0).logical_or_(SHARED > 0),
    "leaky relu": lambda x: F.leaky_relu(x, 0.1, True),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True, True),
}


def _operators(x: Tensor) -> Tensor:
    x += SHARED
    x *= 2
    x -= x
    x /= SHARED
    x **= 2
    return x


def _set(x: Tensor, key: Any, value: Any) -> Tensor:
    x[key] = value
    return x


def _add_to_part(x: Tensor) -> Tensor:
    x[0] += 1
    x[..., 1] *= SHARED[..., 1]
    return x


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    members_equal(lambda x: [IN_PLACE[name](x), x], WHOLE)


@pytest.mark.parametrize("name", ["set part", "set slice", "operators", "add to part", "copy_", "clamp_", "index_add_"])
def test_in_place_with_gradients(name: str) -> None:
    check(lambda: nn.Linear(2, 2), SHARED, fn=lambda m, x: IN_PLACE[name](m(x) * 1), members=3)


def test_an_in_place_function_returns_the_very_tensor() -> None:
    x = Stacked(WHOLE.clone())
    assert x.add_(1) is x
    assert x.mul_(SHARED) is x
    assert x.cumsum_(0) is x
    assert torch.add(x, 1, out=x) is x


SIZES = st.lists(st.integers(1, 3), max_size=3)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool])
BINARY = st.sampled_from([torch.add, torch.mul, torch.true_divide, torch.maximum, torch.eq, torch.where, torch.atan2])


def _tensor(sizes: list[int], dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, sizes).to(dtype)


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    fn=BINARY,
    dtypes=st.tuples(DTYPES, DTYPES),
    kinds=st.sampled_from(["own own", "own shared", "shared own"]),
)
def test_binary_functions_broadcast_and_promote_as_for_one(
    data: st.DataObject, fn: Any, dtypes: tuple[torch.dtype, torch.dtype], kinds: str
) -> None:
    sizes = data.draw(SIZES)
    mask = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    other = [size if keep else 1 for size, keep in zip(sizes, mask, strict=True)]
    other = other[data.draw(st.integers(0, len(other))) :]
    shapes = data.draw(st.permutations([sizes, other]))
    members = data.draw(st.integers(1, 3))
    wholes = [_tensor([members, *shape], dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    own = ["own" in kind for kind in kinds.split()]
    run = (lambda x, y: torch.where(x > 0, x, y)) if fn is torch.where else fn
    arguments = [[whole[b if mine else 0] for whole, mine in zip(wholes, own, strict=True)] for b in range(members)]
    try:
        expected = [run(*each) for each in arguments]
    except RuntimeError:
        return
    result = run(*(Stacked(whole) if mine else whole[0] for whole, mine in zip(wholes, own, strict=True)))
    for b, value in enumerate(expected):
        close(result.whole[b], value, f"{kinds} {shapes}", 1e-6 if value.dtype == torch.float32 else 1e-12)


def _layer(width: int) -> st.SearchStrategy[tuple[Callable[[], nn.Module], int]]:
    out = st.integers(1, 5)
    return st.one_of(
        out.map(lambda n: (lambda: nn.Linear(width, n), n)),
        st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.Identity]).map(lambda kind: (kind, width)),
        st.just((lambda: nn.LayerNorm(width), width)),
        st.just((lambda: nn.BatchNorm1d(width), width)),
        st.just((lambda: nn.Sequential(nn.Unflatten(1, (1, width)), nn.Conv1d(1, 2, 1), nn.Flatten()), 2 * width)),
        st.just((lambda: Of(lambda m, x: x + m.inner(x), inner=nn.Linear(width, width)), width)),
        st.just((lambda: Of(lambda m, x: torch.cat([x, m.w * x], 1), w=nn.Parameter(torch.randn(width))), 2 * width)),
    )


@st.composite
def stacks(draw: st.DrawFn) -> Callable[[], nn.Module]:
    width, makes = 3, []
    for _ in range(draw(st.integers(1, 5))):
        make, width = draw(_layer(width))
        makes.append(make)
        if width > 20:
            break
    return lambda: nn.Sequential(*(make() for make in makes))


@pytest.mark.thorough
@settings(deadline=None, max_examples=40)
@given(make=stacks(), members=st.integers(1, 4))
def test_random_stacks_of_modules(make: Callable[[], nn.Module], members: int) -> None:
    check(make, torch.randn(4, 3, dtype=torch.float64), members=members, tolerance=1e-7)
