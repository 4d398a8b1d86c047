"""Gradient clipping: each member's gradients are clipped as by torch for one model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_twins import Net, Twins
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_ as clip_alone
from torch.optim import SGD
from twins import build, close, compare, compare_state

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.grads import clip_grad_norm_, clip_grad_value_

INF = float("inf")


def twins(members: int = 3, dtype: torch.dtype = torch.float64) -> Twins:
    result = Twins(lambda model, b: SGD(model.parameters(), lr=0.1), members, dtype=dtype)
    result.give_grads()
    return result


def test_a_member_without_a_limit_keeps_gradients_whose_norm_overflows() -> None:
    both = twins(dtype=torch.float32)
    gradients = [stacked.grad for _, stacked, _ in both.array.stacked_tensors() if stacked.grad is not None]
    gradients[0][0] = 3e38
    before = [each.clone() for each in gradients]
    norms = clip_grad_norm_(both.array, [INF, 1e-3, 1.0])
    assert norms.isinf().tolist() == [True, False, False]
    for grad, was in zip(gradients, before, strict=True):
        torch.testing.assert_close(grad[0], was[0], rtol=0, atol=0)
    assert any((grad[1] != was[1]).any() for grad, was in zip(gradients, before, strict=True))


@pytest.mark.in_turns(5)
@pytest.mark.parametrize(
    ("norm_type", "dtype"),
    [
        (2.0, torch.float64),
        (1.0, torch.float64),
        (3.5, torch.float64),
        (INF, torch.float64),
        (0.0, torch.float64),
        (2.0, torch.complex128),
        (INF, torch.complex128),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "max_norm",
    [0.5, 1e3, [0.1, 100.0, 1.0], torch.tensor([0.1, 100.0, 1.0]), torch.tensor(0.25), [INF, 0.0, 1.0]],
    ids=["small", "large", "each", "tensor", "scalar", "extreme"],
)
def test_equals_torch(max_norm: Any, norm_type: float, dtype: torch.dtype) -> None:
    both = twins(dtype=dtype)
    norms = clip_grad_norm_(both.array, max_norm, norm_type)
    limits = torch.as_tensor(max_norm, dtype=torch.float64).expand(3).tolist()
    for b, (model, limit) in enumerate(zip(both.alone, limits, strict=True)):
        expected = clip_alone(model.parameters(), limit, norm_type)
        torch.testing.assert_close(norms[b], expected, rtol=1e-12, atol=0)
        for path, stacked, _ in both.array.stacked_tensors():
            grad = model.get_parameter(path).grad
            if grad is None:
                assert stacked.grad is None
            else:
                torch.testing.assert_close(stacked.grad[b], grad, rtol=1e-12, atol=1e-15)


def test_a_nan_stays_with_its_member() -> None:
    poisoned, clean = twins(), twins()
    poisoned.array.get_parameter("stacked.bias").grad[1, 0] = float("nan")
    norms, expected = clip_grad_norm_(poisoned.array, 0.5), clip_grad_norm_(clean.array, 0.5)
    assert norms.isnan().tolist() == [False, True, False]
    for mine, other in zip(poisoned.array.parameters(), clean.array.parameters(), strict=True):
        if mine.grad is not None:
            assert torch.equal(mine.grad[::2], other.grad[::2])
    assert torch.equal(norms[::2], expected[::2])


def test_nonfinite_raises_before_anything_is_scaled() -> None:
    both = twins()
    both.array.get_parameter("stacked.bias").grad[2, 0] = INF
    before = both.array.get_parameter("stacked.weight").grad.clone()
    with pytest.raises(RuntimeError, match=r"members \[2\] is not finite"):
        clip_grad_norm_(both.array, 0.5, error_if_nonfinite=True)
    assert torch.equal(both.array.get_parameter("stacked.weight").grad, before)


def test_gradients_of_several_dtypes() -> None:
    models = [Net() for _ in range(2)]
    for model in models:
        model.bias.data = model.bias.data.half()
    array = fuse(models)
    for param in array.parameters():
        param.grad = torch.ones_like(param)
    alone = [copy.deepcopy(model) for model in models]
    norms = clip_grad_norm_(array, [1e9, 3.0])
    for b, (model, limit) in enumerate(zip(alone, [1e9, 3.0], strict=True)):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        torch.testing.assert_close(norms[b], clip_alone(model.parameters(), limit))
        for path, stacked, _ in array.stacked_tensors():
            torch.testing.assert_close(stacked.grad[b], model.get_parameter(path).grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "clip_value",
    [0.5, 1e3, [0.1, 100.0, 1.0], torch.tensor([0.1, 100.0, 1.0]), [INF, 0.0, 1.0]],
    ids=["small", "large", "each", "tensor", "extreme"],
)
def test_values_equal_torch(clip_value: Any, dtype: torch.dtype) -> None:
    both = twins(dtype=dtype)
    both.array.get_parameter("stacked.bias").grad[1, 0] = both.alone[1].bias.grad[0] = float("nan")
    clip_grad_value_(both.array, clip_value)
    limits = torch.as_tensor(clip_value, dtype=torch.float64).expand(3).tolist()
    for b, (model, limit) in enumerate(zip(both.alone, limits, strict=True)):
        utils.clip_grad_value_(model.parameters(), limit)
        for path, stacked, _ in both.array.stacked_tensors():
            grad = model.get_parameter(path).grad
            if grad is None:
                assert stacked.grad is None
            else:
                close(stacked.grad[b], grad, f"{path} of {b}", tolerance=0)


class Partial(nn.Module):
    """A body of one structure, and a head of the member's own, which the first has not."""

    def __init__(self, b: int) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Identity() if b == 0 else nn.Sequential(nn.Linear(4, 4 * b), nn.Tanh(), nn.Linear(4 * b, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().sum()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, -INF, 0.0], ids=str)
def test_parameters_of_one_member_count_for_it(norm_type: float) -> None:
    torch.manual_seed(0)
    models = [Partial(b).double() for b in range(4)]
    alone = copy.deepcopy(models)
    array = fuse(models, strict=False)
    x = torch.randn(5, 3, dtype=torch.float64)
    array(x).sum().backward()
    limits = [0.01, 1.0, 1e9, 0.1]
    norms = clip_grad_norm_(array, limits, norm_type)
    for b, (model, limit) in enumerate(zip(alone, limits, strict=True)):
        model(x).backward()
        close(norms[b], clip_alone(model.parameters(), limit, norm_type), f"norm of {b}")
    same_gradients(array, models, alone)
    clip_grad_value_(array, [1e-3, 1.0, 1e-2, 0.0])
    for model, limit in zip(alone, [1e-3, 1.0, 1e-2, 0.0], strict=True):
        utils.clip_grad_value_(model.parameters(), limit)
    same_gradients(array, models, alone)


def same_gradients(array: ModelArray, models: list[nn.Module], alone: list[nn.Module]) -> None:
    columns = {path: data for path, data, _ in array.stacked_tensors()}
    for b, (mine, other) in enumerate(zip(models, alone, strict=True)):
        own = dict(mine.named_parameters())
        for path, param in other.named_parameters():
            grad = columns[path].grad[b] if path in columns else own[path].grad
            close(grad, param.grad, f"gradient of {path} of {b}")


def test_values_where_only_single_members_have_parameters() -> None:
    models = [nn.Sequential(nn.Linear(2, b)).double() for b in (1, 2)]
    array = fuse(models, strict=False)
    for parameter in array.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    assert clip_grad_norm_(array, [1e9, 6.0]).tolist() == pytest.approx([27**0.5, 54**0.5])
    clip_grad_value_(array, [1.0, 2.0])
    assert [model[0].weight.grad.unique().tolist() for model in models] == [[1.0], [2.0]]


def clipped_by_total_norm(model: nn.Module) -> Tensor:
    total = utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
    return total


def clipped_by_value(model: nn.Module) -> Tensor:
    utils.clip_grad_value_(model.parameters(), 0.05)
    return torch.zeros(())


OF_THE_USER: dict[str, Callable[[nn.Module], Tensor]] = {
    "norm": lambda model: utils.clip_grad_norm_(model.parameters(), 0.5),
    "order": lambda model: utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1),
    "largest": lambda model: utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=INF),
    "finite": lambda model: utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True),
    "one-by-one": lambda model: utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False),
    "one": lambda model: utils.clip_grad_norm_(model[0].weight, 0.5),
    "total": clipped_by_total_norm,
    "value": clipped_by_value,
}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("clip", OF_THE_USER.values(), ids=OF_THE_USER)
def test_torchs_own_within_a_function(clip: Callable[[nn.Module], Tensor], members: int) -> None:
    """A custom step clips by torch's functions, and sees one member."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model(x).square().sum().backward()
        return clip(model)

    models, alone = build(make, members), build(make, members)
    array = fuse(models)
    x = torch.randn(5, 3, dtype=torch.float64)
    compare(array.map(step, x), [step(model, x) for model in alone])
    compare_state(array, alone)


def test_no_gradients() -> None:
    assert clip_grad_norm_(fuse([Net(), Net()]), 1.0).tolist() == [0, 0]


def test_a_limit_for_each_member() -> None:
    with pytest.raises(FusionError, match=r"`max_norm` must be one number or 3, got shape \(2,\)"):
        clip_grad_norm_(twins().array, [1.0, 2.0])


def test_a_value_for_each_member() -> None:
    with pytest.raises(FusionError, match=r"`clip_value` must be one number or 3, got shape \(2,\)"):
        clip_grad_value_(twins().array, [1.0, 2.0])


@pytest.mark.parametrize(("clip", "name"), [(clip_grad_norm_, "max_norm"), (clip_grad_value_, "clip_value")])
def test_limits_are_not_negative(clip: Any, name: str) -> None:
    with pytest.raises(FusionError, match=rf"`{name}` must not be negative, got \[1.0, -1.0, 1.0\]"):
        clip(twins().array, [1.0, -1.0, 1.0])


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_a_model_is_not_an_array(clip: Any) -> None:
    with pytest.raises(FusionError, match=r"`array` must be what `fuse` made, got Linear.*torch\.nn\.utils"):
        clip(nn.Linear(1, 1), 1.0)
