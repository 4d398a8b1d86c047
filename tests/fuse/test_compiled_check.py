"""A compiled step that computes something else is refused, in half precision too; one that only rounds less is not."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from shoal.core.errors import FusionError
from shoal.fuse import capture as capture_module
from shoal.fuse.api import fuse
from shoal.fuse.capture import CapturedStep
from shoal.fuse.inductor import Float32Interpreter
from shoal.fuse.optim.fused import fuse_optimizers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](hidden)))


def convolutional() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*first, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(48, 96), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x.reshape(len(x), 4, 2, 48)).chunk(3, -1)
        return self.out(F.softmax(F.scaled_dot_product_attention(query, key, value), -1, torch.float32).mean((1, 2)))


class Adapted(nn.Module):
    """Its base is frozen and equal in all members: a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.base = nn.Linear(192, 32).requires_grad_(False)
        self.adapter, self.out = nn.Linear(192, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.out(F.relu(self.base(x) + self.adapter(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions and norms": convolutional,
    "attention": Attention,
    "adapters on a shared base": Adapted,
}


def capture(make: Callable[[], nn.Module], half: torch.dtype | None, of_weights: bool = False) -> CapturedStep:
    """Compile a step of two models: in half precision by autocast, of the weights, or not at all."""
    torch.manual_seed(0)
    models = [make().to(half if of_weights else torch.float32) for _ in range(2)]
    array = fuse(models, seeds=range(2))
    optimizer = fuse_optimizers([torch.optim.Adam(model.parameters(), lr=0.01) for model in models], array)
    x = torch.randn(16, 3, 8, 16 if make is Attention else 8)
    batch = (x.to(half) if of_weights else x, torch.randint(0, 10, (16,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None and not of_weights):
            return F.cross_entropy(model(batch[0]), batch[1])

    array.map(loss, batch).sum().backward()
    optimizer.step()
    return CapturedStep(array, optimizer, loss, batch, compiling=True)


class Compiled(Float32Interpreter):
    """Stands for compiled code, which rounds less: not at all here. A fault multiplies the first gradient by a factor.

    It writes to inputs in half precision what it has computed in float32.
    """

    def __init__(self, graph: GraphModule, factor: float) -> None:
        super().__init__(graph)
        self._factor = factor
        self.hit = 0

    def __call__(self, *tensors: Tensor) -> Tensor:
        wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors]
        losses: Tensor = self.run(*wide)
        for tensor, value in zip(tensors, wide, strict=True):
            tensor.copy_(value)
        return losses

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if self.hit or self._factor == 1:
            return result
        if target is torch.ops.aten.convolution_backward.default:
            self.hit += 1
            return (result[0], result[1] * self._factor, *result[2:])
        if target in (torch.ops.aten.nll_loss_backward.default, torch.ops.aten._log_softmax_backward_data.default):
            self.hit += 1
            return result * self._factor
        return result


HALVES = pytest.mark.parametrize(
    ("half", "of_weights"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)],
    ids=["bf16 by autocast", "bf16 weights", "f16 weights"],
)


@pytest.mark.in_turns(4)
@HALVES
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_step_that_only_rounds_less_is_accepted(
    make: Callable[[], nn.Module], half: torch.dtype, of_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "compile_graph", lambda graph, example: Compiled(graph, 1.0))
    capture(make, half, of_weights)


@pytest.mark.in_turns(4)
@HALVES
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_wrong_factor_is_found_in_half_precision(
    make: Callable[[], nn.Module], half: torch.dtype, of_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Compiled] = []
    monkeypatch.setattr(
        capture_module, "compile_graph", lambda graph, example: made.append(Compiled(graph, 1.5)) or made[0]
    )
    with pytest.raises(FusionError, match="this is a compiler fault"):
        capture(make, half, of_weights)
    assert made[0].hit == 1


@pytest.mark.parametrize(("factor", "refused"), [(1.0, False), (1.05, True)])
def test_in_float32_a_small_fault_is_found(factor: float, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "compile_graph", lambda graph, example: Compiled(graph, factor))
    with pytest.raises(FusionError, match="this is a compiler fault") if refused else nullcontext():
        capture(Attention, None)


def test_frozen_parameters_are_read_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)) for _ in range(2)]
    array = fuse(models, seeds=range(2))
    optimizer = fuse_optimizers([torch.optim.SGD(model[1].parameters(), lr=0.1) for model in models], array)
    places: list[set[int]] = []

    def compiled(graph: GraphModule, example: Any) -> Callable[..., Tensor]:
        def run(*tensors: Tensor) -> Tensor:
            places.append({tensor.data_ptr() for tensor in tensors})
            losses: Tensor = graph(*tensors)
            return losses

        return run

    monkeypatch.setattr(capture_module, "compile_graph", compiled)
    batch = torch.randn(5, 3)
    array.map(lambda model, batch: model(batch).square().mean(), batch).sum().backward()
    CapturedStep(array, optimizer, lambda model, batch: model(batch).square().mean(), batch, compiling=True)
    frozen, trained = ([p.data_ptr() for p in array.parameters() if p.requires_grad is grad] for grad in (False, True))
    assert (len(frozen), len(trained)) == (2, 2)
    assert [(read.issuperset(frozen), read.isdisjoint(trained)) for read in places] == [(True, True)]


class Swapping(nn.Module):
    """Two of its buffers change places in each step; others count, are infinite in part, or nowhere a number."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(192, 10)
        self.register_buffer("now", torch.zeros(192))
        self.register_buffer("before", torch.ones(192))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("least", torch.tensor([torch.inf, 0.0]))
        self.register_buffer("unused", torch.tensor(torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        self.now, self.before = self.before, self.now
        self.now.add_(0.1 * self.out.weight.detach().mean(0))
        self.count += 10**6
        self.least.copy_(torch.minimum(self.least, self.before.min()) - 1)
        return self.out(x.flatten(1) + self.now - self.before)


class ReadsLate(Float32Interpreter):
    """Stands for compiled code without the copies of a step, so that it reads what the step has already written."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        copies = target is torch.ops.aten.clone.default and not kwargs
        return args[0] if copies else super().call_function(target, args, kwargs)


@pytest.mark.parametrize("interpreter", [Float32Interpreter, ReadsLate])
def test_a_fault_in_buffers_is_found(interpreter: type[Float32Interpreter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "compile_graph", lambda graph, example: interpreter(graph).run)
    with pytest.raises(FusionError, match="compiler fault") if interpreter is ReadsLate else nullcontext():
        capture(Swapping, None)


@pytest.mark.thorough
def test_the_compiler_drops_the_copy_of_buffers_that_change_places() -> None:
    with pytest.raises(FusionError, match="compiler fault"):
        capture(Swapping, None)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_compiler_is_accepted_in_half_precision() -> None:
    capture(convolutional, torch.bfloat16)
