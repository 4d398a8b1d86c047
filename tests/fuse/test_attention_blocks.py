"""Attention with dropout and very many weights runs block by block, and computes what it computes at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs_on_cpu import graphs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.rules import attention
from shoal.fuse.shard import MaskRows, Shard, use_shard

X = torch.randn(2, 4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PADDED = torch.arange(5).lt(torch.tensor([[5], [3]]))[:, None, None]
SDPA = F.scaled_dot_product_attention


class Attends(nn.Module):
    def __init__(self, fn: Callable[..., Tensor], rate: float) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.rate, self.fn = rate, fn

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fn(self, x), self.rate)


CASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, x: SDPA(m.q(x), m.k(x), m.v(x), dropout_p=m.rate),
    "causal": lambda m, x: SDPA(m.q(x), m.k(x), m.v(x), dropout_p=m.rate, is_causal=True),
    "causal, more keys than queries": lambda m, x: SDPA(
        m.q(x[..., :3, :]), m.k(x), m.v(x), dropout_p=m.rate, is_causal=True
    ),
    "mask of samples": lambda m, x: SDPA(m.q(x), m.k(x), m.v(x), PADDED, m.rate, scale=0.3),
    "own mask": lambda m, x: SDPA(m.q(x), m.k(x), m.v(x), m.k.weight.detach().sum() * x.sum(-1, keepdim=True), m.rate),
    "own mask that trains": lambda m, x: SDPA(m.q(x), m.k(x), m.v(x), m.k.weight.sum() * X[..., :1], m.rate),
    "all masked": lambda m, x: SDPA(m.q(x), m.k(x), m.v(x), torch.zeros(5, 5, dtype=torch.bool), m.rate),
    "heads in groups": lambda m, x: SDPA(m.q(x), m.k(x[:, :2]), m.v(x[:, :2]), dropout_p=m.rate, enable_gqa=True),
    "shared query": lambda m, x: SDPA(x, m.k(x), m.v(x), dropout_p=m.rate),
    "shared": lambda m, x: m.v(SDPA(x, x, x, dropout_p=m.rate)),
    "one head": lambda m, x: SDPA(m.q(x[0, 0]), m.k(x[0, 0]), m.v(x[0, 0]), dropout_p=m.rate),
    "one sample of queries": lambda m, x: SDPA(m.q(x[:1]), m.k(x[:1]), m.v(x), dropout_p=m.rate),
    "checkpointed": lambda m, x: checkpoint(
        lambda y: SDPA(m.q(y), m.k(y), m.v(y), dropout_p=m.rate), m.k(x), use_reentrant=False
    ),
}
RATES = {"mixed": (0.0, 0.1, 0.5), "equal": (0.3, 0.3, 0.3)}


def array_of(fn: Callable[[Any, Tensor], Tensor], rates: tuple[float, ...] = RATES["mixed"]) -> ModelArray:
    models = []
    for b, rate in enumerate(rates):
        torch.manual_seed(b)
        models.append(Attends(fn, rate).double())
    return fuse(models, range(len(rates)))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def learnt(array: ModelArray, x: Tensor = X) -> list[Tensor]:
    array.zero_grad()
    losses = array.map(squares, x)
    losses.sum().backward()
    return [losses.detach(), *(each.grad for each in array.parameters() if each.grad is not None)]


def by_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(attention, "_MOST_WEIGHTS", 0)
    monkeypatch.setattr(attention, "_BLOCK", size)


@pytest.mark.parametrize(("rates", "size"), [("mixed", 11), ("equal", 70)], ids=["rows", "heads"])
def test_blocks_are_as_the_whole(rates: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name: learnt(array_of(fn, RATES[rates])) for name, fn in CASES.items()}
    by_blocks(monkeypatch, size)
    for name, fn in CASES.items():
        torch.testing.assert_close(learnt(array_of(fn, RATES[rates])), wanted[name], rtol=1e-9, atol=1e-12)


def test_a_member_is_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    by_blocks(monkeypatch, 40)
    losses = learnt(array_of(CASES["causal"]))[0]
    for b in range(3):
        member = array_of(CASES["causal"]).members[b]
        torch.testing.assert_close(learnt(fuse([member], [b]))[0], losses[b : b + 1], rtol=1e-9, atol=0)


def test_shards_of_a_batch_have_the_gradients_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    by_blocks(monkeypatch, 40)
    array, masks = array_of(CASES["plain"]), MaskRows()

    def run(first: int, rows: int) -> list[Tensor]:
        array.tick = 0
        with use_shard(Shard(first, rows, len(X), lambda total: None, masks)):
            return [each.clone() for each in learnt(array, X[first : first + rows])]

    for whole, first, second in zip(run(0, 2), run(0, 1), run(1, 1), strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-9, atol=1e-12)


def test_autocast_is_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        array = array_of(CASES["plain"]).float()
        with torch.autocast("cpu", torch.bfloat16):
            losses = array.map(squares, X.float())
        losses.sum().backward()
        return [losses.detach(), *(each.grad for each in array.parameters() if each.grad is not None)]

    wanted = run()
    by_blocks(monkeypatch, 40)
    torch.testing.assert_close(run(), wanted, rtol=2e-2, atol=1e-3)


def test_no_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest() -> int:
        sizes: list[int] = []
        x = X.repeat(1, 1, 20, 1)
        with saved_tensors_hooks(lambda tensor: (sizes.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
            array_of(CASES["plain"]).map(squares, x)
        return max(sizes)

    assert largest() == 3 * 2 * 4 * 100 * 100
    by_blocks(monkeypatch, 1000)
    assert largest() == 3 * 2 * 4 * 100 * 2


def test_a_captured_step_is_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    by_blocks(monkeypatch, 170)
    graphs(monkeypatch)
    array, twin = array_of(CASES["causal"]), array_of(CASES["causal"])
    optimizers = [
        fuse_optimizers([torch.optim.SGD(each.parameters(), lr=0.01) for each in own.members], own)
        for own in (array, twin)
    ]
    for own, optimizer in zip((array, twin), optimizers, strict=True):
        learnt(own)
        optimizer.step()
    step = CapturedStep(array, optimizers[0], squares, X, compiling=False)
    for _ in range(2):
        losses = learnt(twin)[0]
        optimizers[1].step()
        torch.testing.assert_close(step(X), losses, rtol=1e-9, atol=0)
