"""Members that differ in submodules: the captured step computes what the eager step computes."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_partial_fusion import BLOCKS, Net, X, Y, nets
from torch import Tensor, nn
from twins import build

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), Y)


def made(models: list[nn.Module], optimizer: Any) -> tuple[ModelArray, FusedOptimizer]:
    array = fuse(models, range(len(models)), strict=False)
    return array, fuse_optimizers([optimizer(m.parameters(), lr=0.01 * (b + 1)) for b, m in enumerate(models)], array)


def eager(array: ModelArray, optimizer: FusedOptimizer) -> Tensor:
    optimizer.zero_grad()
    losses: Tensor = array.map(loss, X)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()


@pytest.mark.in_turns
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_captured_step_is_an_eager_one(name: str, optimizer: Any) -> None:
    same(nets(name, 3, rate=0.3), optimizer, compiling=False)


@pytest.mark.thorough
def test_a_compiled_step_is_an_eager_one() -> None:
    same(nets("widths", 4, rate=0.3), torch.optim.SGD, compiling=True)


def same(models: list[nn.Module], optimizer: Any, compiling: bool) -> None:
    twins = copy.deepcopy(models)
    array, fused = made(models, optimizer)
    other, others = made(twins, optimizer)
    torch.testing.assert_close(eager(array, fused), eager(other, others))
    step = CapturedStep(array, fused, loss, X, compiling=compiling)
    for _ in range(3):
        assert step.fits(X)
        torch.testing.assert_close(step(X), eager(other, others), rtol=1e-9, atol=1e-9)
    for model, twin in zip(models, twins, strict=True):
        for (path, own), its in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(own, its, rtol=1e-9, atol=1e-9, msg=path)
    for one, two in zip(fused.members, others.members, strict=True):
        torch.testing.assert_close(one.state_dict()["state"], two.state_dict()["state"], rtol=1e-9, atol=1e-9)


class Renewed(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Counting(nn.Module):
    """Counts its calls in a plain attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize(
    ("block", "reason"), [(Renewed, "place of 'mean'"), (Counting, "changes: the step keeps state in plain attributes")]
)
def test_what_a_trace_would_freeze_in_a_members_own_module_is_refused(block: Any, reason: str) -> None:
    models = [*nets("widths", 1), *nets("widths", 1)]
    models[1].block = block()
    array, fused = made(models, torch.optim.SGD)
    eager(array, fused)
    before = copy.deepcopy([model.state_dict() for model in models])
    with pytest.raises(FusionError, match=reason):
        CapturedStep(array, fused, loss, X, compiling=False)
    for model, old in zip(models, before, strict=True):
        for path, own in model.state_dict().items():
            assert torch.equal(own, old[path]), path


class LowRank(nn.Module):
    """An adapter whose two factors are modules, so that what comes out of the first differs in shape."""

    def __init__(self, rank: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.down = nn.Linear(8, rank, bias=False)
        self.up = nn.Linear(rank, 8, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.between(self.down(x)))


def scaled(x: Tensor) -> Tensor:
    return F.dropout(x * 0.5, 0.3)


def written(x: Tensor) -> Tensor:
    return x.mul_(0.5)


def cut(x: Tensor) -> Tensor:
    return torch.cat([x[..., :2].add_(1.0), x[..., 2:]], -1)


def sized(x: Tensor) -> Tensor:
    return x / x.shape[-1]


def recorded(x: Tensor) -> Tensor:
    return Squared.apply(x)  # type: ignore[no-any-return, no-untyped-call]


BETWEEN = {
    "an autograd function": recorded,
    "in place": written,
    "a view of one shape": cut,
    "the shape itself": sized,
}


def of_ranks(ranks: Sequence[int], between: Callable[[Tensor], Tensor]) -> list[nn.Module]:
    return [build(lambda rank=rank: Net(LowRank(rank, between), 0.2), 1)[0] for rank in ranks]


def test_dropout_of_what_differs_in_shape_between_two_modules() -> None:
    models = of_ranks((2, 4, 4), scaled)
    twins = [copy.deepcopy(model) for model in models]
    array, fused = made(models, torch.optim.SGD)
    assert {path for path, _, _ in array.unfused_parameters()} == {"block.down.weight", "block.up.weight"}
    alone = [made([twin], torch.optim.SGD) for twin in twins]
    for b, (one, own) in enumerate(alone):
        one.seeds = (b,)
        for group in own.members[0].param_groups:
            group["lr"] = 0.01 * (b + 1)
    for _ in range(2):
        torch.testing.assert_close(eager(array, fused), torch.cat([eager(*one) for one in alone]), rtol=1e-9, atol=1e-9)
    for model, twin in zip(models, twins, strict=True):
        for (path, own), its in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(own, its, rtol=1e-9, atol=1e-9, msg=path)
    step = CapturedStep(array, fused, loss, X, compiling=False)
    torch.testing.assert_close(step(X), torch.cat([eager(*one) for one in alone]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BETWEEN)
def test_what_needs_one_members_shape_is_refused(name: str) -> None:
    array, fused = made(of_ranks((2, 4, 4), BETWEEN[name]), torch.optim.SGD)
    with pytest.raises(FusionError, match=r"array\.unfuse\(\)"):
        eager(array, fused)


def decayed(model: nn.Module, x: Tensor) -> Tensor:
    return loss(model, x) + 0.1 * sum(each.square().sum() for each in model.parameters())


def by_class(model: nn.Module, x: Tensor) -> Tensor:
    return loss(model, x) + 0.1 * sum(m.weight.abs().sum() for m in model.modules() if isinstance(m, nn.Linear))


def of_the_part(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for parameter in model.block.parameters():
            parameter.mul_(0.9)
    return loss(model, x)


def by_the_class_of_the_part(model: Any, x: Tensor) -> Tensor:
    return loss(model, x) * (2.0 if isinstance(model.block, nn.Sequential) else 1.0)


@pytest.mark.parametrize("fn", [decayed, by_class, by_the_class_of_the_part, of_the_part])
def test_a_loss_that_looks_through_a_model_is_refused(fn: Any) -> None:
    array, _ = made(nets("widths", 3), torch.optim.SGD)
    with pytest.raises(FusionError, match=r"'block', in which the members differ; .*array\.unfuse\(\)"):
        array.map(fn, X)


def test_a_captured_step_does_not_fit_after_a_buffer_of_one_member_was_replaced() -> None:
    array, fused = made(nets("widths", 2), torch.optim.SGD)
    eager(array, fused)
    step = CapturedStep(array, fused, loss, X, compiling=False)
    assert step.fits(X)
    norm: Any = array.members[1].block
    norm[2].running_mean = torch.ones(16, dtype=torch.float64)
    assert not step.fits(X)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class Stem(nn.Module):
    """Its convolution leaves other lengths in each member, of which BatchNorm keeps statistics."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(1, 2, stride, stride), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x[:, None])).mean(-1)


def layer_by_layer(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for layer in model.block:
        x = layer(x)
    return F.cross_entropy(model.head(x), Y)


def marked(model: Any, x: Tensor) -> Tensor:
    model.block.scale = 2.0
    return loss(model, x) * model.block.scale


def of_state(model: Any, x: Tensor) -> Tensor:
    return loss(model, x) * len(model.state_dict())


def applied(model: Any, x: Tensor) -> Tensor:
    model.apply(lambda module: module.eval() if isinstance(module, nn.BatchNorm1d) else None)
    return loss(model, x)


PARTS: dict[str, tuple[Callable[[int], nn.Module], Any]] = {
    "statistics of lengths": (Stem, lambda model, x: F.mse_loss(model(x), torch.zeros(6, 2, dtype=torch.float64))),
    **{fn.__name__: (lambda b: nets("widths", b)[-1], fn) for fn in (layer_by_layer, marked, of_state, applied)},
}


@pytest.mark.parametrize("name", PARTS)
def test_what_needs_a_members_own_part_is_refused(name: str) -> None:
    make, fn = PARTS[name]
    models = [make(1).double(), make(2).double()]
    before = copy.deepcopy([model.state_dict() for model in models])
    with pytest.raises(FusionError, match=r"array\.unfuse\(\)"):
        fuse(models, [0, 1], strict=False).map(fn, X)
    for model, state in zip(models, before, strict=True):
        for path, value in model.state_dict().items():
            assert torch.equal(value, state[path]), path


def test_a_captured_step_does_not_fit_after_a_part_was_frozen() -> None:
    array, fused = made(nets("widths", 2), torch.optim.SGD)
    eager(array, fused)
    step = CapturedStep(array, fused, loss, X, compiling=False)
    for member in array.members:
        member.get_submodule("block").requires_grad_(False)
    assert not step.fits(X)
