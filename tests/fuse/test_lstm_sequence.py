"""The backward pass of an LSTM's steps: gradients, their gradients, and transforms, under which autograd takes over."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from looped_functions import in_loops
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from twins import build, close

from shoal.fuse.api import fuse
from shoal.fuse.rules.recurrent import lstm_sequence

B, T, N, H = 2, 3, 2, 2
SHAPES = {"gates": (B, T, N, 4 * H), "h": (B, N, H), "c": (B, N, H), "weight": (B, 4 * H, H)}
Tensors = tuple[Tensor, ...]


def tensors(trained: tuple[str, ...] = tuple(SHAPES), steps: int = T) -> Tensors:
    torch.manual_seed(0)
    shapes = {**SHAPES, "gates": (B, steps, N, 4 * H)}
    return tuple(
        torch.randn(shape, dtype=torch.float64, requires_grad=name in trained) for name, shape in shapes.items()
    )


@pytest.mark.in_turns
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("trained", [tuple(SHAPES), ("gates",), ("weight",), ("h", "c")], ids=", ".join)
def test_gradients_and_their_gradients(trained: tuple[str, ...], reverse: bool) -> None:
    given = tensors(trained, T - 1)
    assert gradcheck(lambda *x: lstm_sequence(*x, reverse), given)
    assert gradgradcheck(lambda *x: lstm_sequence(*x, reverse), given)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    "change",
    [torch.relu_, partial(functional.dropout, p=0.5, inplace=True), lambda output: output.mul_(2)],
    ids=["relu_", "dropout", "mul_"],
)
def test_results_may_be_changed_in_place(change: Callable[[Tensor], Tensor], reverse: bool) -> None:
    def gradients(run: Callable[..., tuple[Tensor, Tensor]]) -> Tensors:
        given = tensors()
        output, c = run(*given, reverse)
        loss = change(output).square().sum() + change(c).square().sum()
        return torch.autograd.grad(loss, given)

    for mine, own in zip(gradients(lstm_sequence), gradients(by_definition), strict=True):
        close(mine, own, "gradient")


def by_definition(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    outputs = {}
    for t in reversed(range(T)) if reverse else range(T):
        i, f, g, o = (gates[:, t] + h @ weight.mT).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        outputs[t] = h = o.sigmoid() * c.tanh()
    return torch.stack([outputs[t] for t in range(T)], 1), c


def of_vmap(run: Callable[..., tuple[Tensor, Tensor]]) -> Tensors:
    *rest, weight = tensors()
    gates, h, c = (torch.stack([x, 2 * x]) for x in rest)
    return torch.vmap(run, (0, 0, 0, None))(gates, h, c, weight)


def of_forward_mode(run: Callable[..., tuple[Tensor, Tensor]]) -> Tensors:
    gates, *rest = tensors()
    with forward_ad.dual_level():
        duals = run(forward_ad.make_dual(gates, torch.ones_like(gates)), *rest)
        return tuple(forward_ad.unpack_dual(dual).tangent for dual in duals)


TRANSFORMS: dict[str, Callable[[Callable[..., tuple[Tensor, Tensor]]], Tensors]] = {
    "none": lambda run: run(*tensors()),
    "no gradients": lambda run: torch.no_grad()(run)(*tensors()),
    "vmap": of_vmap,
    "forward mode": of_forward_mode,
    "gradient by torch.func": lambda run: torch.func.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2, 3))(*tensors()),
    "jacobian": lambda run: torch.func.jacrev(lambda *x: run(*x)[1], 3)(*tensors()).unbind(),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in forward mode
def test_transforms(name: str) -> None:
    for reverse in (False, True) if name == "none" else (True,):
        found = TRANSFORMS[name](lambda *x, reverse=reverse: lstm_sequence(*x, reverse))
        expected = TRANSFORMS[name](lambda *x, reverse=reverse: by_definition(*x, reverse))
        for mine, own in zip(found, expected, strict=True):
            close(mine, own, name)


def test_the_gradient_of_the_weights_is_one_product_of_all_steps() -> None:
    array = fuse(build(lambda: nn.LSTM(4, 3), 5, torch.float32))
    x = torch.randn(3, 3, 4)
    with in_loops() as looped:
        array(x)
    assert not looped
    graph = make_fx(lambda x: torch.autograd.grad(array(x)[0].sum(), list(array.parameters())))(x)
    products = [node for node in graph.graph.nodes if "bmm" in str(node.target)]
    assert len(products) == 2 * (1 + len(x)) + 1  # forward: inputs, steps; backward: steps, inputs' and states' weights
