"""Optimizers of parameters with other dtypes, sizes and memory orders, and the number of calls that update them."""

from collections import Counter
from typing import Any

import pytest
import torch
from optim_twins import Net, Twins
from optimizer_factories import LOWERINGS, RULES, lr, plain
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.overrides import TorchFunctionMode

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.optim import lowerings
from shoal.fuse.optim.fused import fuse_optimizers

ONE_OF_EACH = (
    *("sgd-nesterov", "adam-decoupled", "adam-amsgrad", "adamax", "nadam-decay", "radam-decoupled", "adagrad"),
    *("adagrad-initial", "adadelta", "rmsprop", "rmsprop-momentum", "rmsprop-centered"),
)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_complex_parameters(name: str, lowering: Any) -> None:
    twins = Twins(RULES[name], 3, lowering=lowering, dtype=torch.complex128)
    twins.step(8)
    twins.check()


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name not in ("adam-amsgrad", "adagrad-initial")])
def test_other_dtypes(name: str, dtype: torch.dtype, rtol: float, lowering: Any) -> None:
    twins = Twins(RULES[name], 3, lowering=lowering, dtype=dtype)
    twins.step(5)
    twins.check(rtol)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_half_precision_is_computed_in_float32(lowering: Any) -> None:
    """An eps of 1e-8 is 0 in float16: a gradient of zero would divide zero by zero."""
    twins = Twins(RULES["adam"], 2, lowering=lowering, dtype=torch.float16)
    before = twins.array.get_parameter("stacked.weight").detach().clone()
    for param in twins.array.parameters():
        param.grad = torch.zeros_like(param)
    twins.fused.step()
    assert torch.equal(twins.array.get_parameter("stacked.weight"), before)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("cls", [SGD, Adam])
def test_dtypes_in_one_model(cls: Any, lowering: Any) -> None:
    models = [Net() for _ in range(2)]
    for model in models:
        model.bias = nn.Parameter(model.bias.detach().float())
    array = fuse(models)
    fused = fuse_optimizers([cls(model.parameters(), lr=0.1) for model in models], array, lowering=lowering)
    before = [p.detach().clone() for p in array.parameters()]
    for param in array.parameters():
        param.grad = torch.ones_like(param)
    fused.step()
    for param, old in zip(array.parameters(), before, strict=True):
        torch.testing.assert_close(param, old - 0.1)


def test_gradients_of_any_layout() -> None:
    twins = Twins(RULES["adam"], 3)
    for _ in range(3):
        twins.give_grads()
        weight = twins.array.get_parameter("stacked.weight")
        weight.grad = weight.grad.transpose(1, 2).contiguous().transpose(1, 2)
        assert not weight.grad.is_contiguous()
        twins.fused.step()
        for optimizer in twins.optimizers:
            optimizer.step()
    twins.check()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_parameters_in_another_order_of_memory(lowering: Any) -> None:
    torch.manual_seed(0)
    models = [nn.Conv2d(3, 4, 2).double() for _ in range(3)]
    alone = [nn.Conv2d(3, 4, 2).double() for _ in range(3)]
    for model, other in zip(models, alone, strict=True):
        other.load_state_dict(model.state_dict())
        model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    array = fuse(models)
    own = [Adam(model.parameters(), lr=lr(b)) for b, model in enumerate(models)]
    others = [Adam(model.parameters(), lr=lr(b)) for b, model in enumerate(alone)]
    fused = fuse_optimizers(own, array, lowering=lowering)
    for _ in range(3):
        for path, stacked, _ in array.stacked_tensors():
            stacked.grad = torch.randn_like(stacked).contiguous()
            for b, model in enumerate(alone):
                model.get_parameter(path).grad = stacked.grad[b].clone()
        fused.step()
        for optimizer in others:
            optimizer.step()
    for model, other, mine, its in zip(models, alone, own, others, strict=True):
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model.weight, other.weight, rtol=1e-9, atol=0)
        moment, expected = (o.state[m.weight]["exp_avg"] for o, m in ((mine, model), (its, other)))
        torch.testing.assert_close(moment, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("limit", [1, 5, 13], ids=lambda limit: f"{limit} elements")
@pytest.mark.parametrize("name", ["adam-numbers", "rmsprop-centered"])
def test_portions(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of 12, 3, 1 and 2 elements, five members."""
    monkeypatch.setattr(lowerings, "_CHUNK_ELEMENTS", limit)
    twins = Twins(RULES[name], 5, lowering="elementwise")
    twins.step(3)
    twins.check()


def test_an_empty_parameter() -> None:
    models = [nn.ParameterList([torch.ones(0), torch.ones(2)]) for _ in range(2)]
    array = fuse(models)
    for lowering in LOWERINGS:
        fused = fuse_optimizers([Adam(m.parameters(), lr=0.1) for m in models], array, lowering=lowering)
        for param in array.parameters():
            param.grad = torch.ones_like(param)
        before = models[0][1].detach().clone()
        fused.step()
        torch.testing.assert_close(models[0][1].detach(), before - 0.1)


def test_gaps_in_memory() -> None:
    models = [Net() for _ in range(2)]
    array = fuse(models)
    array.stacked.bias.data = torch.zeros(2, 6, dtype=torch.float64)[:, ::2]
    with pytest.raises(FusionError, match=r"'bias' has gaps in memory; make it contiguous"):
        fuse_optimizers([Adam(m.parameters()) for m in models], array)


class Calls(TorchFunctionMode):
    """Counts multi-tensor functions and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("_foreach", "_fused")):
            self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_calls_do_not_grow_in_number(name: str) -> None:
    counts = []
    for members in (2, 9):
        twins = Twins(RULES[name], members, lowering="elementwise")
        for skip in (["unused"], ["unused", "bias", "scale"]):
            twins.give_grads(skip)
            with Calls() as calls:
                twins.fused.step()
            counts.append(calls.names)
    assert all(count == counts[0] for count in counts)
    assert counts[0].total() < 18


@pytest.mark.parametrize("make", [plain(AdamW, lr=0.1), plain(SGD, lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_one_kernel_for_equal_members(make: Any) -> None:
    twins = Twins(make, 5, lowering="kernels")
    for rates, expected in (([1] * 5, 1), ([1, 1, 2, 2, 2], 2), ([1, 2, 1, 2, 1], 5), ([1] * 5, 1)):
        for side in (twins.own, twins.optimizers):
            for optimizer, rate in zip(side, rates, strict=True):
                optimizer.param_groups[0]["lr"] = 0.1 * rate
        with Calls() as calls:
            twins.fused.refresh()
            twins.give_grads()
            twins.fused.step()
        for optimizer in twins.optimizers:
            optimizer.step()
        assert sum(n for name, n in calls.names.items() if name.startswith("_fused")) == expected
        twins.check()
