"""Bad input raises an error that names the value, the place and the remedy, in each step mode."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import build

from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.grads import clip_grad_norm_, clip_grad_value_
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.scaler import GradScaler
from shoal.fuse.step import StepMode, TrainingStep

MEMBERS = 3
X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def array_of(members: int = MEMBERS) -> ModelArray:
    return fuse(build(net, members))


def optimizer_of(array: ModelArray) -> FusedOptimizer:
    return fuse_optimizers([torch.optim.Adam(model.parameters()) for model in array.members], array)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


NO_SCALAR = "must return a scalar tensor .* got "
LOSSES = {
    "none": (lambda model, x: None, NO_SCALAR + "NoneType"),
    "tuple": (lambda model, x: (loss(model, x), 1), NO_SCALAR + "tuple"),
    "dict": (lambda model, x: {"loss": loss(model, x)}, NO_SCALAR + "dict"),
    "no mean": (lambda model, x: model(x).square(), NO_SCALAR + r"a tensor of shape \(5, 2\)"),
    "detached": (lambda model, x: loss(model, x).detach(), "depends on no parameter"),
}


@pytest.mark.parametrize("mode", ["eager", "plain"])
@pytest.mark.parametrize(("fn", "message"), LOSSES.values(), ids=LOSSES)
def test_losses(fn: Callable[..., Any], message: str, mode: StepMode) -> None:
    array = array_of()
    step = TrainingStep(array, optimizer_of(array), fn, modes=(mode,))
    with pytest.raises(FusionError, match=message):
        step(X)
    assert all(parameter.grad is None for model in (array, *array.members) for parameter in model.parameters())


@pytest.mark.parametrize("mode", ["eager", "plain"])
def test_losses_of_one_element_are_scalars(mode: StepMode) -> None:
    array = array_of()
    step = TrainingStep(array, optimizer_of(array), lambda model, x: loss(model, x).view(1), modes=(mode,))
    assert step(X).shape == (MEMBERS,)


def with_setting(name: str, value: Any) -> None:
    """One member's setting is spoiled after fusing."""
    array = array_of()
    optimizer = optimizer_of(array)
    optimizer.members[1].param_groups[0][name] = value
    optimizer.step()


def without_setting() -> None:
    array = array_of()
    optimizer = optimizer_of(array)
    del optimizer.members[1].param_groups[0]["lr"]
    optimizer.step()


def spoiled_before() -> None:
    array = array_of()
    optimizers = [torch.optim.Adam(model.parameters()) for model in array.members]
    optimizers[2].param_groups[0]["betas"] = 3
    fuse_optimizers(optimizers, array)


def pickled_within() -> None:
    array = array_of()
    array.map(lambda model, x: (pickle.dumps(array), loss(model, x))[1], X)


SETTING = "optimizer of member 1 has settings in group 0 that cannot be read, .*'lr': 'x'.*; correct them"
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "fuse: lazy": (
        lambda: fuse([nn.Sequential(nn.LazyLinear(2)) for _ in range(2)]),
        "member 0: '0.weight' is not initialized, .*call each model",
    ),
    "fuse: none": (lambda: fuse(None), "`models` must be a list of torch.nn.Module, got NoneType"),  # type: ignore[arg-type]
    "fuse: none within": (lambda: fuse([net(), None]), "got None among them"),  # type: ignore[list-item]
    "seeds: floats": (lambda: fuse(build(net, 2), [1, 0.5]), "seed of member 1 must be an integer, got 0.5"),  # type: ignore[list-item]
    "seeds: truth": (lambda: fuse(build(net, 2), [True, False]), "seed of member 0 must be an integer, got True"),
    "seeds: one": (lambda: fuse(build(net, 2), 5), "`seeds` must be a list of integers, got int"),  # type: ignore[arg-type]
    "select: twice": (lambda: array_of().select([0, 0]), r"each once, got \[0, 0\]"),
    "select: twice from the end": (lambda: array_of().select([2, -1]), r"each once, got \[2, -1\]"),
    "select: nobody": (lambda: array_of().select(torch.zeros(3, dtype=torch.bool)), r"each once, got \[\]"),
    "select: beyond": (lambda: array_of().select([0, 3]), r"each once, got \[3\]"),
    "select: mask": (lambda: array_of().select([True]), "1 truth values for 3 members"),
    "select: one": (lambda: array_of().select(1), "`indices` must be a list of integers, got int"),  # type: ignore[arg-type]
    "concat: model": (lambda: concat([array_of(), net()]), r"arrays\[1\] must be what `fuse` made, got Sequential"),  # type: ignore[list-item]
    "concat: one": (lambda: concat(array_of()), "`arrays` must be a list .* got ModelArray"),  # type: ignore[arg-type]
    "concat: twice": (lambda: concat([array_of()] * 2), r"arrays\[1\] is given twice"),
    "optimizers: none": (lambda: fuse_optimizers(None, array_of()), "`optimizers` must be a list .* got NoneType"),  # type: ignore[arg-type]
    "optimizers: within": (lambda: fuse_optimizers([None] * 3, array_of()), "got None for member 0"),  # type: ignore[list-item]
    "setting: text": (lambda: with_setting("lr", "x"), SETTING),
    "setting: missing": (without_setting, "optimizer of member 1 has settings in group 0 .*KeyError: 'lr'"),
    "setting: before": (spoiled_before, "optimizer of member 2 has settings in group 0 .*'betas': 3"),
    "clip: none": (lambda: clip_grad_norm_(array_of(), None), "`max_norm` must be one number or 3, got None"),  # type: ignore[arg-type]
    "clip: text": (lambda: clip_grad_value_(array_of(), "a"), "`clip_value` must be one number or 3, got 'a'"),  # type: ignore[arg-type]
    "clip: order": (
        lambda: clip_grad_norm_(array_of(), 1.0, "a"),
        "`norm_type` must be the order of a norm, .* got 'a'",
    ),  # type: ignore[arg-type]
    "map: none": (lambda: array_of().map(None), "`fn` must be a function of a model and a batch, got None"),  # type: ignore[arg-type]
    "scaler: states": (lambda: GradScaler(array_of()).load_state_dict(None), "`states` must be a list .* got None"),  # type: ignore[arg-type]
    "scaler: model": (lambda: GradScaler(net()), "`array` must be what `fuse` made, got Sequential"),  # type: ignore[arg-type]
    "scaler: text": (lambda: GradScaler(array_of(), "a"), "`scale` must be one number or 3, got 'a'"),  # type: ignore[arg-type]
    "scaler: losses": (lambda: GradScaler(array_of()).scale(None), "`losses` must be a tensor"),  # type: ignore[arg-type]
    "scaler: optimizer": (
        lambda: GradScaler(array_of()).step(optimizer_of(array_of())),
        "`optimizer` must be .* got that of another one",
    ),
    "scaler: state": (
        lambda: GradScaler(array_of()).load_state_dict([{"scale": 1.0}] * 3),
        "state of member 0 has no 'growth_factor'",
    ),
    "step: array": (lambda: TrainingStep(net(), optimizer_of(array_of()), loss), "`array` .* got Sequential"),  # type: ignore[arg-type]
    "step: optimizer": (lambda: TrainingStep(array_of(), None, loss), "`optimizer` must be .* got NoneType"),  # type: ignore[arg-type]
    "step: modes": (
        lambda: TrainingStep(array := array_of(), optimizer_of(array), loss, None),  # type: ignore[arg-type]
        "`modes` must be a tuple of step modes, got None",
    ),
    "step: another's": (lambda: TrainingStep(array_of(), optimizer_of(array_of()), loss), "got that of another one"),
    "meta": (lambda: array_of().to("meta"), "cannot be moved to 'meta'"),
    "pickle": (pickled_within, "pickled or copied within a function"),
}


@pytest.mark.parametrize(("do", "message"), BAD.values(), ids=BAD)
def test_refused_with_a_reason(do: Callable[[], Any], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        do()


CHOICES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([0, 2]),
    "array": lambda: np.array([0, 2]),
    "generator": lambda: (b for b in (0, 2)),
    "from the end": lambda: [0, -1],
    "mask": lambda: [True, False, True],
    "mask tensor": lambda: torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("given", CHOICES.values(), ids=CHOICES)
def test_members_are_chosen_as_elements_of_a_tensor(given: Callable[[], Any]) -> None:
    array = array_of()
    assert array.select(given()).members == (array.members[0], array.members[2])


def test_models_seeds_and_optimizers_may_come_from_iterators() -> None:
    models = build(net, MEMBERS)
    array = fuse(iter(models), seeds=torch.arange(MEMBERS))
    assert array.seeds == (0, 1, 2)
    assert len(fuse_optimizers((torch.optim.SGD(model.parameters()) for model in models), array).members) == MEMBERS


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    models = [torch.jit.trace(net().double(), X, check_trace=False) for _ in range(2)]
    with pytest.raises(FusionError, match="member 0 is a TorchScript module; fuse the plain module"):
        fuse(models)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["lr"] == 2.0:
            raise ArithmeticError("no root")
        super().step()


def test_an_optimizer_that_fails_is_named() -> None:
    array = array_of()
    optimizer = fuse_optimizers(
        [Failing(model.parameters(), lr=b + 1.0) for b, model in enumerate(array.members)], array
    )
    array.map(loss, X).sum().backward()
    with pytest.raises(ArithmeticError, match="no root") as caught:
        optimizer.step()
    assert caught.value.__notes__[0].startswith("raised by the optimizer of member 1; the members before 1 have been")
