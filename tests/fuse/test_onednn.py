"""Linear maps by oneDNN: float32 only, so compared with float64 up to what float32 can tell apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from twins import Of

from shoal.fuse.autotune import forced
from shoal.fuse.making import fuse
from shoal.fuse.rules import linear, onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

torch.manual_seed(17)
X = torch.randn(6, 4)
PRECISION = {"rtol": 1e-5, "atol": 1e-5}


class Calls(TorchDispatchMode):
    """Counts the calls of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.shoal.linear
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small products have a choice of ways."""
    monkeypatch.setattr(linear, "_LARGE", 0)


def models(bias: bool = True, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(3)
    made = [nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias)) for _ in range(3)]
    return [model.to(dtype) for model in made]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (6, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_equals_the_members_in_more_precision(shape: tuple[int, ...], bias: bool) -> None:
    x = torch.randn(shape)
    array, twins = fuse(models(bias)), models(bias, torch.float64)
    with forced({"linear": "onednn"}), Calls() as calls:
        out = array(x)
        out.square().sum().backward()
    assert calls.count
    expected = [twin(x.double()) for twin in twins]
    torch.testing.assert_close(out, torch.stack(expected).float(), **PRECISION)
    torch.stack(expected).square().sum().backward()
    for b, twin in enumerate(twins):
        for parameter, stacked in zip(twin.parameters(), array.parameters(), strict=True):
            torch.testing.assert_close(stacked.grad[b], parameter.grad.float(), **PRECISION)


def test_second_derivatives() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x * model.rate
        (slope,) = torch.autograd.grad(model.layers(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    def of(dtype: torch.dtype) -> list[nn.Module]:
        rates = [nn.Parameter(torch.full((), 1.0 + b, dtype=dtype)) for b in range(3)]
        made = [Of(penalty, layers=layers) for layers in models(dtype=dtype)]
        for model, rate in zip(made, rates, strict=True):
            model.rate = rate
        return made

    array, twins = fuse(of(torch.float32)), of(torch.float64)
    with forced({"linear": "onednn"}), Calls() as calls:
        array.map(penalty, X.clone()).sum().backward()
    assert calls.count
    for b, twin in enumerate(twins):
        penalty(twin, X.double()).backward()
        for (name, parameter), stacked in zip(twin.named_parameters(), array.parameters(), strict=True):
            assert (parameter.grad is None) == (stacked.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(stacked.grad[b], parameter.grad.float(), rtol=1e-4, atol=1e-4, msg=name)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).square().sum())(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x.view(3, 2, 4)),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name: str) -> None:
    array, twins = fuse(models()), models(dtype=torch.float64)
    with forced({"linear": "onednn"}):
        out = array.map(TRANSFORMS[name], X)
    expected = torch.stack([TRANSFORMS[name](twin, X.double()) for twin in twins])
    torch.testing.assert_close(out, expected.float(), **PRECISION)


def test_a_trace_holds_it_as_one_function() -> None:
    own, w, b = torch.randn(3, 6, 4), torch.randn(3, 5, 4), torch.randn(3, 5)
    traced = make_fx(onednn.linear, tracing_mode="fake")(own, w, b)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert names.count("shoal.linear.default") == 1
    assert not [name for name in names if "conv" in name]
    torch.testing.assert_close(
        traced(own, w, b), torch.stack([F.linear(*each) for each in zip(own, w, b, strict=True)]), **PRECISION
    )


def test_results_are_laid_out_for_the_next_layer() -> None:
    x, w = torch.randn(3, 6, 4), torch.randn(3, 5, 4)
    assert onednn.linear(x, w, None).transpose(0, 1).is_contiguous()


NOT_USABLE: dict[str, Tensor] = {
    "float64": X.double(),
    "bfloat16": X.bfloat16(),
    "empty": X[:0],
    "without data": X.to("meta"),
}


@pytest.mark.parametrize("name", NOT_USABLE)
def test_only_for_what_it_computes_exactly(name: str) -> None:
    assert not onednn.usable(NOT_USABLE[name], None)
    assert onednn.usable(X, None)


def test_not_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not onednn.usable(X)
