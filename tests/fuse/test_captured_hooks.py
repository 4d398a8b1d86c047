"""A step with hooks in its backward pass is not captured, because a trace would call them only once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COUNTS = pytest.mark.parametrize("count", [1, 2])


def counts(*args: Any) -> None:
    """A hook that would count."""


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def array_of(count: int, change: Callable[[nn.Module], Any] = counts) -> tuple[ModelArray, FusedOptimizer]:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(count)]
    for model in models:
        change(model)
    array = fuse(models)
    return array, fuse_optimizers([torch.optim.SGD(model.parameters(), lr=0.1) for model in models], array)


def capture(array: ModelArray, optimizer: FusedOptimizer, loss: Callable[..., Any] = square) -> CapturedStep:
    array.map(loss, X).sum().backward()
    optimizer.step()
    return CapturedStep(array, optimizer, loss, X, compiling=False)


MODULE_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "full": lambda model: model[1].register_full_backward_hook(counts),
    "full, before": lambda model: model[1].register_full_backward_pre_hook(counts),
    "of its node": lambda model: model[1].register_backward_hook(counts),
}


@COUNTS
@pytest.mark.parametrize("hook", MODULE_HOOKS.values(), ids=MODULE_HOOKS)
def test_of_a_module(hook: Any, count: int) -> None:
    with pytest.raises(FusionError, match=r"has a hook in the backward pass|a custom autograd function must run"):
        capture(*array_of(count, hook))


@COUNTS
def test_of_a_module_that_the_members_have_no_more(count: int) -> None:
    handles: list[Any] = []
    array, optimizer = array_of(count, lambda model: handles.append(model[1].register_backward_hook(counts)))
    for handle in handles:
        handle.remove()
    with pytest.raises(FusionError, match="a hook has been registered or removed since the models were fused"):
        capture(array, optimizer)


def hooked_output(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.register_hook(counts)
    return y.square().mean()


def hooked_node(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.grad_fn.register_hook(counts)
    return y.square().mean()


def hooked_nodes(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    torch.autograd.graph.register_multi_grad_hook([y], counts)
    return y.square().mean()


@COUNTS
@pytest.mark.parametrize("loss", [hooked_output, hooked_node, hooked_nodes])
def test_of_what_a_function_computes(loss: Any, count: int) -> None:
    with pytest.raises(FusionError, match="has a hook in the backward pass"):
        capture(*array_of(count), loss)


@contextmanager
def on_all_modules(array: ModelArray) -> Iterator[None]:
    handle = nn.modules.module.register_module_full_backward_pre_hook(counts)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def on_a_module(array: ModelArray) -> Iterator[None]:
    array.members[0][1].register_full_backward_hook(counts)
    yield


@contextmanager
def on_a_parameter(array: ModelArray) -> Iterator[None]:
    next(array.parameters()).register_hook(counts)
    yield


@contextmanager
def on_an_accumulated_gradient(array: ModelArray) -> Iterator[None]:
    next(array.parameters()).register_post_accumulate_grad_hook(counts)
    yield


@pytest.mark.parametrize("hook", [on_all_modules, on_a_module, on_a_parameter, on_an_accumulated_gradient])
def test_that_come_later(hook: Any) -> None:
    array, optimizer = array_of(2)
    step = capture(array, optimizer)
    assert step.fits(X)
    with hook(array):
        assert not step.fits(X)
        with pytest.raises(FusionError, match="has a hook in the backward pass"):
            CapturedStep(array, optimizer, square, X, compiling=False)


class Unpacking(nn.Linear):
    """Counts what the backward pass asks for."""

    asked = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, self._unpack):
            return super().forward(x).tanh()

    def _unpack(self, saved: Tensor) -> Tensor:
        self.asked += 1
        return saved


def test_attributes_that_the_backward_pass_changes() -> None:
    models = [Unpacking(4, 2).double() for _ in range(2)]
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), lr=0.1) for model in models], array)
    array.map(square, X).sum().backward()
    with pytest.raises(FusionError, match="keeps state in plain attributes"):
        CapturedStep(array, optimizer, square, X, compiling=False)
