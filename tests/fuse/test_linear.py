"""Linear layers and matrix products, by every lowering and with any arguments shared."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from twins import Of, check, check_table

from shoal.fuse.api import fuse
from shoal.fuse.autotune import forced_lowerings
from shoal.fuse.rules import linear
from shoal.fuse.stacked import Stacked

torch.manual_seed(13)
X = torch.randn(6, 4, dtype=torch.float64)
WEIGHT = torch.randn(3, 4, dtype=torch.float64)
BIAS = torch.randn(3, dtype=torch.float64)
INPUTS = {
    "of rank 1": X[0],
    "of rank 2": X,
    "of rank 3": X.view(2, 3, 4),
    "of rank 5": X.view(1, 3, 1, 2, 4),
    "of no rows": X[:0],
    "turned": X.view(2, 3, 4).transpose(0, 1),
}
LOWERINGS = ("baddbmm", "one", "loop")


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small weights have a choice of lowerings, and gradients in their own layout."""
    monkeypatch.setattr(linear, "_LARGE", 0)
    monkeypatch.setattr(linear, "_COPIED", 0)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_lowering_equals_the_members(lowering: str) -> None:
    def make(bias: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))

    cases = {f"{name}, bias {bias}": (partial(make, bias), x) for name, x in INPUTS.items() for bias in (True, False)}
    with forced_lowerings({"linear": lowering}):
        check_table(cases, members=[3], steps=1)


ARGUMENTS: dict[str, Callable[[nn.Module], tuple[Any, ...]]] = {
    "own weight, own bias": lambda m: (m.own.weight, m.own.bias),
    "own weight, shared bias": lambda m: (m.own.weight, BIAS),
    "own weight": lambda m: (m.own.weight,),
    "shared weight, own bias": lambda m: (WEIGHT, m.own.bias),
    "shared weight, shared bias": lambda m: (WEIGHT, BIAS),
    "shared weight": lambda m: (WEIGHT, None),
    "own vector": lambda m: (m.own.weight[0],),
    "shared vector": lambda m: (WEIGHT[0],),
}


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_any_mix_of_own_and_shared_arguments(lowering: str) -> None:
    def run(m: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"{name}, {own}, {arguments}": F.linear(given, *of(m)).sum() * m.own.bias
            for name, x in inputs.items()
            for own, given in (("own input", m.before(x)), ("shared input", x))
            for arguments, of in ARGUMENTS.items()
        }

    inputs = {name: INPUTS[name] for name in ("of rank 1", "of rank 2", "turned")}
    with forced_lowerings({"linear": lowering}):
        check(lambda: Of(run, before=nn.Linear(4, 4), own=nn.Linear(4, 3)), inputs, members=3, steps=1)


SQUARE = torch.randn(4, 4, dtype=torch.float64)
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "addmm": lambda a, b, c: torch.addmm(c, a, b),
    "addmm of a vector": lambda a, b, c: torch.addmm(c[0], a, b, beta=0.5, alpha=2),
    "addmm as a method": lambda a, b, c: c.addmm(a, b, alpha=3),
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None], beta=0.5),
    "baddbmm of many": lambda a, b, c: torch.baddbmm(c, torch.stack([a, b]), torch.stack([b, a]), alpha=2),
    "baddbmm with one of each": lambda a, b, c: torch.stack([c, a]).baddbmm(torch.stack([a, b]), torch.stack([b, a])),
    "addmv": lambda a, b, c: torch.addmv(c[0], a, b[0]),
    "mm": lambda a, b, c: torch.mm(a, b) + c,
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None]) + c,
    "mv": lambda a, b, c: torch.mv(a, b[0]) + c,
    "dot": lambda a, b, c: torch.dot(a[0], b[0]) + c,
    "matmul of a matrix and many": lambda a, b, c: torch.matmul(a, torch.stack([b, c])),
    "einsum": lambda a, b, c: torch.einsum("ij,kj,k->ik", a, b, c[0]),
    "bilinear": lambda a, b, c: F.bilinear(a, b, torch.stack([b, c]), c[0, :2]),
}
OWNERS = {
    "first": lambda m: (m.a, SQUARE, SQUARE.T),
    "second": lambda m: (SQUARE, m.a, SQUARE.T),
    "third": lambda m: (SQUARE, SQUARE.T, m.a),
    "all": lambda m: (m.a, m.b, m.a.T),
}


def test_products() -> None:
    def run(m: Any) -> dict[str, Tensor]:
        return {f"{name}, {who}": fn(*owners(m)) for name, fn in PRODUCTS.items() for who, owners in OWNERS.items()}

    check(lambda: Of(run, a=nn.Parameter(torch.randn(4, 4)), b=nn.Parameter(torch.randn(4, 4))), members=3, steps=1)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(
    ("lowering", "expected"),
    [("baddbmm", {"baddbmm": 2}), ("one", {"addmm": 1, "baddbmm": 1}), ("loop", {"addmm": 6})],
)
def test_a_lowering_is_what_it_is_called(lowering: str, expected: dict[str, int]) -> None:
    array = fuse([nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double() for _ in range(3)])
    with forced_lowerings({"linear": lowering}), Products() as counted:
        array(X)
    assert counted.calls == expected


@pytest.mark.parametrize("own_bias", [True, False])
def test_shared_weights_take_one_product(own_bias: bool) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x * model.own.weight.sum(), WEIGHT, model.own.bias if own_bias else BIAS)

    array = fuse([Of(run, own=nn.Linear(4, 3).double()) for _ in range(3)])
    with Products() as counted:
        array(X.view(2, 3, 4))
    assert sum(counted.calls.values()) == 1


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_autocast_gives_the_types_of_the_members(lowering: str) -> None:
    def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return model.layers(x), F.linear(x, WEIGHT.float(), model.layers[0].bias)

    models = [Of(run, layers=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16), forced_lowerings({"linear": lowering}):
        expected = [model(X.float()) for model in models]
        result = fuse(models)(X.float())
    for i, own in enumerate(zip(*expected, strict=True)):
        assert result[i].dtype == torch.bfloat16
        torch.testing.assert_close(result[i], torch.stack(own), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("trained", ["input", "weight", "bias", "all"])
@pytest.mark.parametrize("bias", ["own", "shared", "none"])
def test_shared_weights_of_half_precision(
    bias: str, trained: str, supported: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, gradients and the gradients of these are those in float64, rounded."""
    monkeypatch.setattr(torch.ops.mkldnn, linear._HALF[dtype], lambda: supported)
    torch.manual_seed(4)
    shapes = {"input": (3, 2, 5, 40), "weight": (7, 40), "bias": (3, 7) if bias == "own" else (7,)}
    half = {
        name: (torch.randn(shape) / 4).to(dtype) for name, shape in shapes.items() if name != "bias" or bias != "none"
    }
    leaves = [name for name in half if trained in (name, "all")]

    def computed(of: dict[str, Tensor]) -> list[Tensor]:
        given = {name: t.detach().clone().requires_grad_(name in leaves) for name, t in of.items()}
        b = given.get("bias")
        out = linear._under_shared_weight(Stacked(given["input"]), given["weight"], Stacked(b) if bias == "own" else b)
        widened = "_WidenedLinear" in functions_of(out.whole)
        assert widened == (out.dtype == dtype and not supported) or trained == "bias"
        wanted = [given[name] for name in leaves]
        first = torch.autograd.grad(out.whole.square().sum(), wanted, create_graph=True) if wanted else ()
        second = torch.autograd.grad(sum(each.square().sum() for each in first), wanted) if wanted else ()
        return [out.whole, *first, *second]

    exact = computed({name: tensor.double() for name, tensor in half.items()})
    for found, expected in zip(computed(half), exact, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double() / expected.norm(), expected / expected.norm(), rtol=0.05, atol=0.005)


def test_a_shared_bias_of_another_dtype_is_refused_as_alone() -> None:
    x, w, b = torch.randn(3, 2, 4).bfloat16(), torch.randn(5, 4).bfloat16(), torch.randn(5)
    with pytest.raises(RuntimeError, match="same dtype"):
        linear._under_shared_weight(Stacked(x), w, b)


def test_many_gradients_at_once_of_shared_weights_of_half_precision() -> None:
    torch.manual_seed(5)
    x, w = torch.randn(3, 2, 4).bfloat16(), torch.randn(5, 4).bfloat16().requires_grad_()
    out = linear._under_shared_weight(Stacked(x), w, None).whole
    directions = torch.randn(2, *out.shape).bfloat16()
    (found,) = torch.autograd.grad(out, w, directions, is_grads_batched=True)
    expected = torch.einsum("dbno,bnf->dof", directions.double(), x.double())
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.05)


def functions_of(tensor: Tensor) -> str:
    """Names of the functions in the graph of autograd."""
    names, left = [], [tensor.grad_fn]
    while left:
        if (node := left.pop()) is not None:
            names.append(node.name())
            left += [each for each, _ in node.next_functions]
    return " ".join(names)


def large(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x, w, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 2, 4), (2, 3, 4), (2, 3)))
    return x, w, b


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("trained", [(0, 1, 2), (1,), (1, 2), (0, 1)])
def test_gradients_of_large_weights_and_their_gradients(trained: tuple[int, ...], dtype: torch.dtype) -> None:
    given = [t.requires_grad_(i in trained) for i, t in enumerate(large(dtype))]
    assert gradcheck(linear.batched_linear, given)
    assert gradgradcheck(linear.batched_linear, given)
    assert gradgradcheck(lambda x, w: linear.batched_linear(x, w, None), given[:2])


@pytest.mark.usefixtures("all_large")
def test_the_gradient_of_large_weights_has_their_layout() -> None:
    array = fuse([nn.Linear(4, 3) for _ in range(2)])
    graph = make_fx(lambda x: torch.autograd.grad(array(x).sum(), list(array.parameters())))(torch.randn(6, 4))
    of_weight, _ = (node.meta["tensor_meta"] for node in graph.graph.find_nodes(op="output")[0].args[0])
    assert (of_weight.shape, of_weight.stride) == ((2, 3, 4), (12, 4, 1))


@pytest.mark.usefixtures("all_large")
def test_weights_may_change_before_the_backward_pass_of_an_input_without_gradients() -> None:
    x, w, b = large()
    loss = linear.batched_linear(x.detach(), w, b).sum()
    with torch.no_grad():
        w.mul_(2)
    loss.backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, x.detach().sum(1, keepdim=True).expand_as(w))


@pytest.mark.usefixtures("all_large")
def test_large_weights_on_a_device_without_autocast() -> None:
    x, w, b = (t.to("meta") for t in large())
    assert linear.batched_linear(x, w, b).shape == (2, 2, 3)


def forward_mode(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = linear.batched_linear(x, forward_ad.make_dual(w, torch.ones_like(w)), b)
        return forward_ad.unpack_dual(dual).tangent.detach()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "vmap": lambda x, w, b: torch.vmap(linear.batched_linear, (0, None, None))(torch.stack([x, 2 * x]), w, b),
    "forward mode": forward_mode,
    "gradient by torch.func": lambda *given: torch.func.grad(lambda *t: linear.batched_linear(*t).sum(), 1)(*given),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in forward mode
def test_transforms_of_large_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TRANSFORMS[name](*large())
    monkeypatch.setattr(linear, "_COPIED", 0)
    torch.testing.assert_close(TRANSFORMS[name](*large()), expected)


def test_an_error_speaks_of_one_member() -> None:
    array = fuse([nn.Sequential(nn.Linear(4, 3), nn.Linear(5, 2)) for _ in range(2)])
    with pytest.raises(RuntimeError, match=r"\(6x3 and 5x2\)"):
        array(X.float())
