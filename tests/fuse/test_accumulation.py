"""Gradient accumulation: several backward passes before a step give each member the gradients of plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from twins import Of, build, check, close, compare_state

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.stacked import Stacked

BATCHES = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    """Statistics, a branch that not every loss reaches, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.other = nn.Linear(5, 3)
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def loss(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), LABELS)


def both_losses(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    features = model.body(x)
    return F.cross_entropy(model.head(features), LABELS), model.other(features).square().mean()


Backward = Callable[[Callable[..., Any], list[Tensor]], None]
"""Backward passes over some batches; takes what computes losses, of one model or of all."""


def summed(run: Callable[..., Any], batches: list[Tensor]) -> None:
    for x in batches:
        run(loss, x).sum().backward()


def divided(run: Callable[..., Any], batches: list[Tensor]) -> None:
    for x in batches:
        (run(loss, x) / len(batches)).sum().backward()


def added_up(run: Callable[..., Any], batches: list[Tensor]) -> None:
    sum(run(loss, x) for x in batches).sum().backward()


def twice(run: Callable[..., Any], batches: list[Tensor]) -> None:
    losses = run(loss, batches[0])
    losses.sum().backward(retain_graph=True)
    (2 * losses).sum().backward()


def one_loss_then_another(run: Callable[..., Any], batches: list[Tensor]) -> None:
    for x in batches:
        first, second = run(both_losses, x)
        first.sum().backward(retain_graph=True)
        second.sum().backward()


def joined_losses(run: Callable[..., Any], batches: list[Tensor]) -> None:
    for x in batches:
        first, second = run(both_losses, x)
        (first + 0.3 * second).sum().backward()


def each_its_own(run: Callable[..., Any], batches: list[Tensor]) -> None:
    """A loss of which one term comes only with the last batch."""
    for i, x in enumerate(batches):
        first, second = run(both_losses, x)
        (first if i < len(batches) - 1 else second).sum().backward()


def within(run: Callable[..., Any], batches: list[Tensor]) -> None:
    """The backward passes belong to the function."""

    def inside(model: Any, x: Tensor) -> Tensor:
        value = loss(model, x)
        value.backward(retain_graph=True)
        (value * value).backward()
        return value.detach()

    for x in batches:
        run(inside, x)


PASSES: dict[str, Backward] = {
    passes.__name__: passes
    for passes in (summed, divided, added_up, twice, one_loss_then_another, joined_losses, each_its_own)
}


class Pair:
    """An array with its optimizer, and the members alone with theirs."""

    def __init__(self, kind: type[Optimizer], members: int) -> None:
        models, self.alone = build(Net, members), build(Net, members)
        self.array = fuse(models)
        settings = [{"lr": 0.1 / (b + 1)} for b in range(members)]
        own = [kind(model.parameters(), **mine) for model, mine in zip(models, settings, strict=True)]
        self.optimizer = fuse_optimizers(own, self.array)
        self.optimizers = [kind(model.parameters(), **mine) for model, mine in zip(self.alone, settings, strict=True)]

    def train(self, passes: Backward, steps: int = 3, set_to_none: bool = True) -> None:
        for step in range(steps):
            batches = list(BATCHES + step)
            self.optimizer.zero_grad(set_to_none=set_to_none)
            passes(self.array.map, batches)
            for model, optimizer in zip(self.alone, self.optimizers, strict=True):
                optimizer.zero_grad(set_to_none=set_to_none)
                passes(lambda fn, x, model=model: fn(model, x), batches)
            compare_state(self.array, self.alone)
            self.optimizer.step()
            for optimizer in self.optimizers:
                optimizer.step()
        for b, (member, model) in enumerate(zip(self.array.unfuse(), self.alone, strict=True)):
            for name, value in model.state_dict().items():
                close(member.state_dict()[name], value, f"{name} of {b}")


@pytest.mark.parametrize("passes", [*PASSES.values(), within], ids=[*PASSES, "within"])
def test_equals_the_members_alone(passes: Backward) -> None:
    Pair(Adam, 3).train(passes)


@pytest.mark.parametrize("passes", [one_loss_then_another, within])
def test_equals_the_member_of_a_lone_array(passes: Backward) -> None:
    Pair(Adam, 1).train(passes)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_zeroed_gradients_go_on_to_step(kind: type[Optimizer], members: int, set_to_none: bool) -> None:
    """Without a new gradient, zeros still move by momentum, and None does not."""
    pair = Pair(kind, members)
    pair.train(one_loss_then_another, steps=1, set_to_none=set_to_none)
    pair.train(summed, steps=2, set_to_none=set_to_none)


def test_a_backward_pass_frees_the_graph() -> None:
    array = fuse(build(Net, 2))
    losses = array.map(loss, BATCHES[0])
    losses.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses.sum().backward()


def test_batches_of_the_members_own() -> None:
    models, alone = build(Net, 3), build(Net, 3)
    array = fuse(models)
    for shift in range(2):
        array.map(loss, Stacked(BATCHES + shift)).sum().backward()
        for x, model in zip(BATCHES + shift, alone, strict=True):
            loss(model, x).backward()
    compare_state(array, alone)


SUMS = {
    "linear, batch of one": lambda: Of(lambda m, x: m.a(x) + m.b(x.tanh()), a=nn.Linear(4, 3), b=nn.Linear(4, 3)),
    "norm, batch of one": lambda: Of(lambda m, x: m.a(x) + m.b(x.tanh()), a=nn.LayerNorm(4), b=nn.LayerNorm(4)),
    "parameters": lambda: Of(
        lambda m, x: m.a(x) * (m.p + m.q),
        a=nn.Linear(4, 3),
        p=nn.Parameter(torch.ones(3)),
        q=nn.Parameter(torch.ones(3)),
    ),
}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", SUMS)
def test_gradients_of_a_sum_do_not_lie_in_the_same_memory(name: str, members: int) -> None:
    """Torch hands the two biases views of one gradient, and would accumulate into both at once."""
    array = check(SUMS[name], torch.randn(1, 4, dtype=torch.float64), members=members)  # two steps accumulate
    memory = [p.grad.untyped_storage().data_ptr() for p in array.parameters()]
    assert len(set(memory)) == len(memory)
