"""Functions, operators and hooks of the user run for all members at once if torch allows it, else member by member."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import Make, Of, check, check_table

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse

torch.manual_seed(2)
X = torch.randn(6, 4, dtype=torch.float64)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


class Generated(torch.autograd.Function):
    """With a gradient that is not that of what it computes, and a rule for vmap that torch derives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Ruled(Generated):
    """With a rule for vmap of its own."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return Ruled.apply(x), in_dims[0]


class Weighted(torch.autograd.Function):
    """Of several tensors and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x @ weight.T * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight * ctx.factor, grad.T @ x * ctx.factor * 2, None


@torch.library.custom_op("shoal_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("shoal_tests::cube_at_once", mutates_args=())
def cube_at_once(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("shoal_tests::bump", mutates_args=("x",))
def bump(x: Tensor, other: Tensor) -> Tensor:
    x.add_(other)
    return x * 3


for operator in (cube, cube_at_once):
    operator.register_fake(torch.empty_like)
    operator.register_autograd(
        lambda ctx, grad: grad * 5 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
cube_at_once.register_vmap(lambda info, in_dims, x: (cube_at_once(x), in_dims[0]))


class Containers(nn.Module):
    """Modules and parameters in all of torch's containers, some with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.heads = nn.ModuleDict({"a": nn.Sequential(nn.Tanh(), nn.Linear(4, 3)), "b": nn.Linear(4, 3)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(1))})
        self.shifts = nn.ParameterList([torch.zeros(3), torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[::-1]:
            x = layer(x).tanh()
        return sum(self.heads[k](x) * self.scales[k] for k in self.heads) * self.shifts[1] + self.shifts[0]


def with_hooks(add: Callable[[nn.Sequential], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        add(model)
        return model

    return make


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def shift_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 1,)


def shift_any_input(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
    return (args[0] - module.bias.sum(),), kwargs


def treble_gradient(module: nn.Module, of_input: tuple[Tensor], of_output: tuple[Tensor]) -> tuple[Tensor]:
    return (of_input[0] * 3,)


def halve_gradient(module: nn.Module, of_output: tuple[Tensor]) -> tuple[Tensor]:
    return (of_output[0] / 2,)


def call(model: nn.Module, x: Tensor) -> Any:
    return model(x)


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any]]
AT_ONCE: dict[str, Case] = {
    "operator": (linear, lambda m, x: cube(m(x))),
    "operator by its full name": (linear, lambda m, x: torch.ops.shoal_tests.cube(m(x))),
    "operator of shared input": (linear, lambda m, x: m(cube(x))),
    "operator with a rule for vmap": (linear, lambda m, x: cube_at_once(m(x))),
    "operator that changes what is shared by its own": (linear, lambda m, x: m(x) + bump(x.clone(), x)[:, :3]),
    "forward hook": (with_hooks(lambda m: m[0].register_forward_hook(double_output)), call),
    "forward pre-hook": (with_hooks(lambda m: m[1].register_forward_pre_hook(shift_input)), call),
    "forward pre-hook with keywords": (
        with_hooks(lambda m: m[1].register_forward_pre_hook(shift_any_input, with_kwargs=True)),
        call,
    ),
    "containers": (Containers, call),
    "functional call": (
        Containers,
        lambda m, x: torch.func.functional_call(m, {k: p.tanh() for k, p in m.named_parameters()}, (x,)),
    ),
    "functional call of a state": (linear, lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), x)),
    "checkpoint": (Containers, lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "checkpoint of a part": (
        Containers,
        lambda m, x: m.heads["b"](checkpoint(lambda y: m.layers[0](y).tanh(), m.layers[1](x), use_reentrant=False)),
    ),
    "hooks of saved tensors": (linear, lambda m, x: _doubling_what_is_saved(m, x)),
    "caught error": (linear, lambda m, x: _viewed(m(x))),
    "chain in place": (linear, lambda m, x: m(x).mul_(2).add_(1).relu_()),
    "parts in place": (linear, lambda m, x: _rewritten(m(x) * 1)),
}
REFUSED: dict[str, Case] = {
    "function with a derived rule": (linear, lambda m, x: Generated.apply(m(x))),
    "function with a rule for vmap": (linear, lambda m, x: Ruled.apply(m(x))),
    "function of a weight": (linear, lambda m, x: Weighted.apply(x, m.weight, 2.0)),
    "operator that changes its arguments": (linear, lambda m, x: _bumped(m(x).detach(), m(x))),
    "loop until a member's numbers are small": (linear, lambda m, x: _halved_below(m(x), 1e-2)),
    "full backward hook": (with_hooks(lambda m: m[1].register_full_backward_hook(treble_gradient)), call),
    "full backward pre-hook": (with_hooks(lambda m: m[1].register_full_backward_pre_hook(halve_gradient)), call),
    "functional gradient": (linear, lambda m, x: torch.func.grad(lambda w: F.linear(x, w).sin().sum())(m.weight)),
}


def _doubling_what_is_saved(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        return m(x).tanh()


def _halved_below(x: Tensor, most: float) -> Tensor:
    while x.abs().sum() > most:
        x = x * 0.9
    return x


def _viewed(x: Tensor) -> Tensor:
    try:
        return x.view(99)
    except RuntimeError:
        return x.view(18)


def _rewritten(x: Tensor) -> Tensor:
    x.view(-1)[::2].mul_(3)
    x.t()[0].zero_()
    x[1] = x[2] * 2
    x[x > 1] = 0.5
    return x


def _bumped(changed: Tensor, x: Tensor) -> list[Tensor]:
    product = bump(changed, changed.clone())
    return [x * changed, x + product]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_at_once() -> None:
    def around(make: Make, fn: Callable[..., Any]) -> nn.Module:
        return Of(lambda m, x: fn(m.model, x), model=make())

    check_table({name: (partial(around, *case), X) for name, case in AT_ONCE.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, fn = REFUSED[name]
    check(make, X, fn=fn, members=3, refused=True)


class Compiled(nn.Module):
    """Its part is called through code that was made for this very member."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = torch.compile(nn.Linear(3, 3), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_part_is_refused_by_its_path() -> None:
    assert len(fuse([Compiled()])) == 1  # whose steps may be plain
    with pytest.raises(FusionError, match=r"member 0: 'second' was returned by torch\.compile; fuse"):
        fuse([Compiled(), Compiled()])


def test_a_part_compiled_in_place_runs_fused() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[1].compile(backend="eager")
        return model

    check(make, X, members=3)
