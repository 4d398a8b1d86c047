"""Functions without a rule run by vmap or in a loop, with correct results, or are refused."""

import logging
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from twins import Make, Of, check, check_table

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.stacked import Stacked

torch.manual_seed(2)
X = torch.randn(6, 4, dtype=torch.float64)


def linear(out: int = 3) -> nn.Module:
    return nn.Linear(4, out)


class Doubler(torch.autograd.Function):
    """Torch functions of the user's own, whose gradient is not that of what they compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


def _scripted() -> Callable[[Tensor], Tensor]:
    """A function whose parts Python never sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(lambda x: x.sigmoid() * x, torch.ones(6, 3, dtype=torch.float64))


scripted = _scripted()


AT_ONCE: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "custom function of shared input": (linear, lambda m, x: m(Doubler.apply(x))),
    "einsum": (linear, lambda m, x: torch.einsum("ij,kj->ik", m(x), m(x))),
    "lambda and nested results": (linear, lambda m, x: {"a": m(x), "b": [m(x).sum(), (x, 3)], "c": True}),
    "numbers": (linear, lambda m, x: (m(x), 2, 1.5, False)),
    "agreed number": (linear, lambda m, x: m(x) * float((x.sum() + 0 * m(x).sum()).detach())),
    "agreed branch": (linear, lambda m, x: m(x) if (m(x) < 1e9).all() else x),
    "weight read directly": (linear, lambda m, x: x @ m.weight.T + sum(p.square().sum() for p in m.parameters())),
    "assigned gradient": (linear, lambda m, x: _gradient_of_input(m, x)),
    "gradient penalty": (linear, lambda m, x: _penalty(m, x)),
    "hook": (linear, lambda m, x: _hooked(m, x)),
    "no_grad": (linear, lambda m, x: _without_gradient(m, x)),
    "checkpoint": (
        linear,
        lambda m, x: torch.utils.checkpoint.checkpoint(
            lambda y: m(y).tanh(), x + 0 * m.weight.sum(), use_reentrant=False
        ),
    ),
    "list of outputs": (linear, lambda m, x: torch.stack([m(row) for row in x])),
    "logging": (linear, lambda m, x: (m(x), f"{m(x).mean():.3f}" and None)[0]),
}


def _gradient_of_input(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m(x).detach().requires_grad_()
    hidden.square().sum().backward()
    return m(x) * hidden.grad


def _penalty(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m(x)
    (grad,) = torch.autograd.grad(hidden.tanh().sum(), hidden, create_graph=True)
    return grad.square().sum(1)


def _hooked(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m(x)
    hidden.register_hook(lambda grad: grad * 3)
    return hidden * 2


def _without_gradient(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m(x).mean()
    return m(x) * scale


def test_at_once() -> None:
    def around(make: Make, fn: Callable[..., Any]) -> nn.Module:
        return Of(lambda m, x: fn(m.model, x), model=make())

    check_table({name: (partial(around, *case), X) for name, case in AT_ONCE.items()})


double = Doubler.apply

REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "custom function": (linear, lambda m, x: Doubler.apply(m(x))),
    "custom function in the middle": (linear, lambda m, x: double(m(x)).square().mean()),
    "list of what custom functions made": (linear, lambda m, x: torch.cat([m(x), double(m(x))])),
    "branch": (linear, lambda m, x: m(x) * 2 if m(x).sum() > m(-x).sum() else m(x)),
    "float": (linear, lambda m, x: m(x) * float(m(x).detach().sum())),
    "item": (linear, lambda m, x: m(x) + m(x).detach().sum().item()),
    "tolist": (linear, lambda m, x: m(x) + m(x).detach().sum(1).tolist()[0]),
    "mask": (linear, lambda m, x: m(x)[m(x) > 0].sum()),
    "nonzero": (linear, lambda m, x: m(x).flatten()[(m(x) > 0).flatten().nonzero()].sum()),
    "unique": (linear, lambda m, x: m(x).detach().mul(3).round().unique().sum() + m(x).sum()),
    "numpy": (linear, lambda m, x: m(x) + torch.from_numpy(m(x).detach().numpy() ** 2)),
    "script": (linear, lambda m, x: scripted(m(x))),
    "shared buffer written": (linear, lambda m, x: torch.zeros(6, 3, dtype=x.dtype).add_(m(x))),
    "shared part written": (linear, lambda m, x: _fill(torch.zeros(6, 3, dtype=x.dtype), m(x))),
    "input written": (linear, lambda m, x: m(x.sub_(m.bias.detach().sum()))),
    "input gradient": (linear, lambda m, x: _adversarial(m, x)),
    "length": (linear, lambda m, x: m(x[: int(m(x).sigmoid().sum())]).sum()),
    "returned number": (linear, lambda m, x: (m(x), m(x).detach().max().item())),
    "functional vmap": (linear, lambda m, x: torch.func.vmap(torch.sum)(m(x))),
}


def _fill(zeros: Tensor, value: Tensor) -> Tensor:
    zeros[0] = value[0]
    return zeros


def _adversarial(m: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(m(x).cos().sum(), x)
    return m(x.detach() + 0.1 * grad.sign())


@pytest.mark.parametrize(("name", "members"), [*((name, 3) for name in REFUSED), ("float", 1)])
def test_what_needs_one_members_value_is_refused(name: str, members: int) -> None:
    make, fn = REFUSED[name]
    check(make, X, fn=fn, members=members, refused=members > 1)


class Statistics(nn.Module):
    """Changes buffers in several ways, then asks a question that the members answer apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor, ask: bool = False) -> Tensor:
        x = self.norm(self.linear(x))
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().square().mean(0)
        if ask and self.linear.bias[0] > self.linear.bias[1]:
            return x * 2
        return x


@pytest.mark.parametrize("ask", [False, True])
def test_buffers_are_kept_and_counted_once(ask: bool) -> None:
    make = lambda: Statistics()  # noqa: E731
    array = check(make, X, fn=lambda m, x: m(x, ask=ask), members=3, refused=ask, steps=3)
    assert array.stacked.steps.tolist() == [0 if ask else 3] * 3


def test_members_that_disagree_only_later() -> None:
    """As long as they agree they run at once; when they do not, buffers have been changed, and it is refused."""

    class Late(Statistics):
        def forward(self, x: Tensor, ask: bool = False) -> Tensor:
            x = super().forward(x)
            if self.steps > 2 and self.linear.bias[0] > self.linear.bias[1]:
                return x * 2
            return x

    array = fuse([Late().double() for _ in range(5)])
    for _ in range(2):
        array(X)
    with pytest.raises(
        FusionError, match=r"Late.forward \(test_dispatch.py:\d+\): .* whose effects are not rolled back"
    ):
        array(X)


def test_a_shape_changing_buffer_is_refused() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, x.sum()[None]])
            return self.seen.sum()

    with pytest.raises(FusionError, match="'seen' changes its shape"):
        fuse([Growing(), Growing()])(torch.ones(2))


def test_different_shapes_of_members_are_refused() -> None:
    models = [nn.Linear(4, 3).double() for _ in range(3)]
    with pytest.raises(FusionError, match="different shapes"):
        fuse(models).map(lambda m, x: m(x)[m(x) > 0], X)


def test_a_wrong_shape_is_told_in_torchs_words_for_one_member_at_the_users_line() -> None:
    def users_function(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        return hidden @ x  # 3 against 6

    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(6x3 and 6x4\)") as caught:
        fuse([linear().double(), linear().double()]).map(users_function, X)
    text = "".join(traceback.format_exception(caught.value))
    assert "in matmul of 2 members, for one member: each (6, 3), shared (6, 4)" in text
    assert "return hidden @ x  # 3 against 6" in text
    assert "vmap" not in text.split("users_function")[0]
    assert "another exception occurred" not in text


WRONG: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "linear": lambda m, x: m(m(x)),
    "add": lambda m, x: m(x) + x,
    "view": lambda m, x: m(x).view(5, 5),
    "cat": lambda m, x: torch.cat([m(x), x[:2]]),
    "axis": lambda m, x: m(x).sum(2),
    "index": lambda m, x: m(x)[9],
    "embedding": lambda m, x: F.embedding(torch.tensor([3]), m.weight),
    "negative embedding": lambda m, x: F.embedding(torch.tensor([-1]), m.weight),
    "loss": lambda m, x: F.cross_entropy(m(x), torch.zeros(5, dtype=torch.int64)),
    "label": lambda m, x: F.cross_entropy(m(x), torch.full((6,), 3)),
    "stack axis": lambda m, x: torch.stack([m(x), m(x)], 4),
    "mm rank": lambda m, x: torch.mm(m(x)[None], x),
    "argument": lambda m, x: F.relu(m(x), nonsense=True),
    "backward of many": lambda m, x: m(x).backward(),
    "in place": lambda m, x: m(x).detach().add_(x),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_of_a_wrong_call_is_that_of_one_member(name: str) -> None:
    model = linear().double()
    with pytest.raises(Exception) as own:  # noqa: PT011
        WRONG[name](model, X)
    with pytest.raises(type(own.value)) as caught:
        fuse([model, linear().double()]).map(WRONG[name], X)
    if name not in ("in place",):
        assert str(caught.value).split("\n")[0] == str(own.value).split("\n")[0]


def test_an_in_place_function_that_fails_is_not_run_twice() -> None:
    calls: dict[int, Tensor] = {}

    def add_and_fail(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x).detach() * 0
        y.index_add_(0, torch.tensor([0, 1]), x[:2, :3])
        calls[len(calls)] = y.whole.sum(0) if isinstance(y, Stacked) else y
        return y

    whole = fuse([linear().double(), linear().double()]).map(add_and_fail, X)
    torch.testing.assert_close(whole[0][:2], X[:2, :3])
    assert len(calls) == 1


def test_the_loop_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    array = fuse([linear().double(), linear().double()])
    with caplog.at_level(logging.INFO, logger="shoal.fuse"):
        for _ in range(3):
            array.map(lambda m, x: F.ctc_loss(m(x).view(6, 1, 3).log_softmax(-1), *_ctc()), X)
    assert len([record for record in caplog.records if "in a loop" in record.message]) <= 1


def _ctc() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])


def test_user_code_may_call_methods_that_share_a_name_with_attributes() -> None:
    check(linear, X, fn=lambda m, x: (m(x) < 9).all().double() + m(x).sum(), members=2)


class Tied(nn.Module):
    """One weight in two places, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(11)), nn.Parameter(torch.ones(11))])
        self.both = [self.scales[0], self.scales[1]]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x)) * self.both[0] + self.scales[1]


class Unregistered(nn.Module):
    """Tensors and floats of a member's own at places that modules do not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.offset = torch.randn(3, dtype=torch.float64)
        self.deep = {"list": [torch.randn(3, dtype=torch.float64)], "none": None}
        self.config = Config(torch.rand(()).item())
        self.power = torch.rand(()).item() + 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.offset * self.deep["list"][0]
        return x.abs() ** self.power * (1 - self.config.rate) + self.config.rate * 2


class Config:
    def __init__(self, rate: float) -> None:
        self.rate = rate


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied": (Tied, torch.arange(6)),
    "unregistered": (Unregistered, X),
    "frozen": (Frozen, X),
    "no parameters": (lambda: nn.Sequential(nn.Tanh(), nn.Flatten()), X),
    "pruned": (lambda: _pruned(), X),
}


def _pruned() -> nn.Module:
    model = nn.Linear(4, 3)
    prune.l1_unstructured(model, "weight", 0.4)
    return model


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, members: int) -> None:
    make, x = MODULES[name]
    check(make, x, members=members)


def test_float_attributes_that_a_function_changes() -> None:
    class Annealed(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            self.rate *= 0.5
            return x * self.rate

    array = fuse([Annealed(1.0), Annealed(3.0)])
    assert [array(torch.ones(2)).tolist() for _ in range(2)] == [[[0.5] * 2, [1.5] * 2], [[0.25] * 2, [0.75] * 2]]


def test_floats_keep_the_type_of_what_they_meet() -> None:
    def mixed(model: Any, x: Tensor) -> Any:
        return [
            x * model.rate,
            model.rate + x.int(),
            x.sum() * model.rate,
            x.half() - model.rate,
            2 ** (x * model.rate),
        ]

    models = [Of(mixed, rate=0.1), Of(mixed, rate=0.7)]
    whole = fuse(models)(torch.ones(3))
    for b, rate in enumerate([0.1, 0.7]):
        expected = mixed(Of(mixed, rate=rate), torch.ones(3))
        for mine, own in zip(whole, expected, strict=True):
            assert mine.dtype == own.dtype
            torch.testing.assert_close(mine[b], own)
