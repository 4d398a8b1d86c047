import copy
from typing import Any

import pytest
import torch
from optim_twins import Net, Twins
from torch.nn.utils import clip_grad_norm_ as clip_alone
from torch.optim import SGD

from shoal.errors import FusionError
from shoal.fuse.array import fuse
from shoal.fuse.clip import clip_grad_norm_

INF = float("inf")


def twins(members: int = 3, dtype: torch.dtype = torch.float64) -> Twins:
    result = Twins(lambda model, b: SGD(model.parameters(), lr=0.1), members, dtype=dtype)
    result.give_grads()
    return result


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
        for path, stacked, _ in both.array.columns():
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
        for path, stacked, _ in array.columns():
            torch.testing.assert_close(stacked.grad[b], model.get_parameter(path).grad)


def test_no_gradients() -> None:
    assert clip_grad_norm_(fuse([Net(), Net()]), 1.0).tolist() == [0, 0]


def test_a_limit_for_each_member() -> None:
    with pytest.raises(FusionError, match=r"`max_norm` must be one number or 3, got shape \(2,\)"):
        clip_grad_norm_(twins().array, [1.0, 2.0])
