"""Members of equal structure with different floats: each member computes with its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from twins import build, check, check_table, close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SERIES = X.view(2, 3, 4)
IMAGES = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class With(nn.Module):
    """A linear layer, then a function of its output and a number."""

    def __init__(self, number: float, fn: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.number = number
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(self.layer(x), self.number)


class Learner(nn.Module):
    """A model that holds its loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x), LABELS)


class Scaled:
    """A configuration object with numbers in it."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.more = {"shift": scale / 3, "shifts": [scale / 7, 1.0]}

    def __call__(self, y: Tensor, number: float) -> Tensor:
        return y * self.scale + self.more["shift"] - self.more["shifts"][0] + number


def with_number(fn: Callable[[Tensor, Any], Any]) -> Callable[[float], nn.Module]:
    return lambda number: With(number, fn)


def after(make: Callable[[float], nn.Module]) -> Callable[[float], nn.Module]:
    return lambda number: nn.Sequential(nn.Linear(4, 4), make(number))


def after_conv(make: Callable[[float], nn.Module]) -> Callable[[float], nn.Module]:
    return lambda number: nn.Sequential(nn.Conv2d(4, 4, 3), make(number))


def evaluating(make: Callable[[float], nn.Module]) -> Callable[[float], nn.Module]:
    return lambda number: make(number).eval()


def arithmetic(y: Tensor, a: float) -> tuple[Tensor, ...]:
    return (
        y * a,
        a * y,
        y + a,
        a - y,
        y / a,
        a / (y * y + 1),
        y.abs() ** a,
        a**y,
        -a * y,
        (1 - a) * y,
        max(0.5, 0.5) * y,
    )


def comparison(y: Tensor, a: float) -> tuple[Tensor, ...]:
    return y > a, (y < a).double() * y, torch.where(y > a, y, a), y.clamp(min=-a), y.clamp(-a, a), y.clamp_max(a)


def functions(y: Tensor, a: float) -> tuple[Tensor, ...]:
    return torch.full_like(y, a) * y, y.lerp(y * y, a), torch.add(y, y, alpha=a), y.new_full((6, 4), a) * y


Case = tuple[Callable[[float], nn.Module], Tensor, Callable[[int], float]]


def rate(b: int) -> float:
    """Below 1, other for each member."""
    return 0.05 + 0.08 * b


def size(b: int) -> float:
    """Above 0, other for each member."""
    return 0.5 + 0.4 * b


CASES: dict[str, Case] = {
    "temperature": (with_number(lambda y, t: F.softmax(y / t, -1)), X, size),
    "residual": (with_number(lambda y, a: y + a * y.tanh()), X, size),
    "arithmetic": (with_number(arithmetic), X, size),
    "comparison": (with_number(comparison), X, rate),
    "functions": (with_number(functions), X, rate),
    "label-smoothing-module": (lambda s: Learner(nn.CrossEntropyLoss(label_smoothing=s)), X, rate),
    "weighted-losses": (with_number(lambda y, w: w * y.square().mean() + (1 - w) * y.abs().mean()), X, rate),
    "batch-norm-evaluating": (evaluating(after(lambda eps: nn.BatchNorm1d(4, eps=eps))), X, rate),
    "local-response-norm": (after_conv(lambda a: nn.LocalResponseNorm(2, alpha=a, beta=a, k=1 + a)), IMAGES, rate),
    "normalize": (with_number(lambda y, p: F.normalize(y, p=p)), X, lambda b: 1.5 + b),
    "cosine": (with_number(lambda y, eps: F.cosine_similarity(y, X, eps=eps)), X, size),
    "attention": (with_number(lambda y, s: F.scaled_dot_product_attention(y, y, y, scale=s)), SERIES, size),
    "lp-pooling": (after_conv(lambda p: nn.LPPool2d(p, 2)), IMAGES, lambda b: 1.5 + b),
    "configuration": (lambda a: With(a, Scaled(a)), X, size),
}


def total(result: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf.requires_grad]
    return torch.stack([leaf.sin().sum() for leaf in leaves]).sum()


def case(name: str) -> tuple[Any, ...]:
    """Its number is that of the member that is being built, whose number is the seed."""
    make, x, number = CASES[name]
    return lambda: make(number(torch.initial_seed())), x


def test_equals_the_members_alone() -> None:
    check_table({name: case(name) for name in CASES if name != "lp-pooling"})


def test_what_takes_a_plain_float_is_refused() -> None:
    check(*case("lp-pooling"), members=3, refused=True)


DROPOUTS: dict[str, Callable[[float], nn.Module]] = {
    "dropout": nn.Dropout,
    "channels": nn.Dropout1d,
    "alpha": nn.AlphaDropout,
    "attention": lambda p: nn.TransformerEncoderLayer(4, 2, 8, dropout=p, batch_first=True),
    "lstm": lambda p: nn.LSTM(4, 4, 2, dropout=p),
}


@pytest.mark.parametrize("make", DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_rates(make: Callable[[float], nn.Module]) -> None:
    """Each member's masks are those of the same member in an array of its own."""
    rates = [0.0, 0.2, 0.5, 0.9]

    def build_one(b: int) -> nn.Module:
        return build(lambda: make(rates[b]), b + 1)[b]

    array = fuse([build_one(b) for b in range(4)], seeds=[7, 8, 9, 10])
    alone = [fuse([build_one(b)], seeds=[7 + b]) for b in range(4)]
    for _ in range(2):
        result = pytree.tree_leaves(array(SERIES))
        for b, own in enumerate(alone):
            for mine, leaf in zip(pytree.tree_leaves(own(SERIES)), result, strict=True):
                close(leaf[b], mine[0], f"member {b}")


INTEGERS: dict[str, tuple[Callable[[Any], nn.Module], list[Any]]] = {
    "heads": (lambda heads: nn.TransformerEncoderLayer(4, heads, 4, 0.0, batch_first=True), [1, 2, 4]),
    "groups": (lambda groups: nn.GroupNorm(groups, 3), [1, 3, 3]),
    "axis": (lambda dim: nn.Softmax(dim), [1, 2, 0]),
    "flag": (lambda affine: nn.LayerNorm(4, elementwise_affine=affine), [True, False, True]),
    "name": (lambda name: nn.GELU(name), ["none", "tanh", "none"]),
}


class Around(nn.Module):
    """A part in which members differ, between parts in which they do not."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.part = part
        self.after = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_flags_make_another_structure(name: str) -> None:
    """Strictly fused they are refused with their path; otherwise the modules that hold them run member by member."""
    make, values = INTEGERS[name]

    def together() -> list[nn.Module]:
        return [build(lambda v=v: Around(make(v)), b + 1)[b] for b, v in enumerate(values)]

    with pytest.raises(FusionError, match=r"member 1 differs from member 0 at 'part"):
        fuse(together())
    members, alone = together(), together()
    array: ModelArray = fuse(members, strict=False)
    result, expected = array(SERIES), [model(SERIES) for model in alone]
    compare(result, expected)
    total(result).backward()
    for own in expected:
        total(own).backward()
    columns = {path: data for path, data, _ in array.stacked_tensors()}
    for b, (member, model) in enumerate(zip(members, alone, strict=True)):
        for path, parameter in model.named_parameters():
            grad = columns[path].grad[b] if path in columns else member.get_parameter(path).grad
            close(grad, parameter.grad, f"gradient of {path} of {b}")
