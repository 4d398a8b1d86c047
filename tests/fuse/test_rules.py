"""Every rule of the registry, and rules of users, pass the conformance suite."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function
from twins import check

import shoal
from shoal.core.errors import FusionError
from shoal.fuse.rules import table
from shoal.fuse.rules.base import Layout, Rule
from shoal.fuse.rules.table import FAMILIES
from shoal.testing import check_rule
from shoal.testing.rules import Case


def n(*shape: int) -> Tensor:
    """Numbers, [*shape]."""
    return torch.randn(shape, dtype=torch.float64)


def p(*shape: int) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05


def i(most: int, *shape: int) -> Tensor:
    """Integers below `most`."""
    return torch.randint(most, shape)


def b(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def w(units: int, gates: int, inputs: int = 3) -> list[Tensor]:
    """Weights of a recurrent cell."""
    return [n(gates * units, inputs), n(gates * units, units), n(gates * units), n(gates * units)]


ONE: dict[str, Case] = {
    "image": lambda f: f(n(2, 3, 4)),
    "share": lambda f: f(p(2, 3)),
    "more than one": lambda f: f(p(3) + 1.5),
    "number": lambda f: f(n()),
    "truths": lambda f: f(b(2, 3)),
    "integers": lambda f: f(i(5, 2, 3)),
    "and a number": lambda f: f(n(3), 0.5),
    "and two": lambda f: f(n(3), 0.1, 0.2),
}
SEVERAL: dict[str, Case] = {
    "two": lambda f: f(n(2, 3, 4), n(4)),
    "shares": lambda f: f(p(2, 3), p(3)),
    "of several ranks": lambda f: f(n(3), n(2, 3)),
    "and a number": lambda f: f(p(2, 3), 2.0),
    "three": lambda f: f(n(2, 3), n(3), n(2, 1)),
    "integers": lambda f: f(i(5, 2, 3), i(3, 3) + 1),
    "numbers of two types": lambda f: f(n(), torch.rand((), dtype=torch.float32) + 1),
    "masks": lambda f: f(b(2, 3), b(3)),
    "mask and number": lambda f: f(n(2, 3), b(2, 3), 0.5),
    "exponents": lambda f: f(n(3), i(3, 3)),
}
SHAPE: dict[str, Case] = {
    "alone": lambda f: f(n(2, 3)),
    "image": lambda f: f(n(2, 3, 4)),
    "size": lambda f: f(n(2, 3, 4), (3, 8)),
    "sizes": lambda f: f(n(2, 3), 3, 2),
    "axes": lambda f: f(n(2, 3, 4), (2, 0, 1)),
    "two axes": lambda f: f(n(2, 3, 4), 0, -1),
    "axis": lambda f: f(n(1, 3, 4), 0),
    "other": lambda f: f(n(2, 6), n(3, 4)),
    "wider": lambda f: f(n(3, 1), (2, 3, 4)),
    "list": lambda f: f([n(2, 3), n(2, 3)], 1),
    "pieces": lambda f: f(n(4, 3), 2, 0),
}
INDEX: dict[str, Case] = {
    "number": lambda f: f(n(4, 3), 0, 1),
    "range": lambda f: f(n(4, 3), 0, 1, 2),
    "choice": lambda f: f(b(2, 3), n(2, 3), n(3)),
    "choice of a number": lambda f: f(n(2, 3), b(2, 3), 0.5),
}
MEMORY: dict[str, Case] = {
    "alone": lambda f: f(n(2, 3, 4)),
    "type": lambda f: f(n(2, 3), torch.float32),
}
IMAGE: dict[str, Case] = {
    "image": lambda f: f(n(2, 4, 6, 4), 2),
    "volume": lambda f: f(n(2, 4, 4, 3, 4), 2),
    "sequence": lambda f: f(n(2, 4, 9), 2),
    "one sample": lambda f: f(n(4, 6, 4), 2),
    "power sequence": lambda f: f(p(2, 4, 4), 2.0, 2),
    "power image": lambda f: f(p(2, 4, 4, 4), 2.0, 2),
    "power volume": lambda f: f(p(2, 4, 4, 4, 4), 2.0, 2),
}
CONV: dict[str, Case] = {
    "sequence": lambda f: f(n(2, 4, 7), n(4, 4, 3), n(4), padding=1),
    "image": lambda f: f(n(2, 4, 5, 4), n(4, 4, 3, 2), n(4), 2),
    "image without bias": lambda f: f(n(2, 4, 5, 4), n(4, 4, 1, 1)),
    "groups": lambda f: f(n(2, 4, 5, 4), n(4, 2, 2, 2), n(4), groups=2),
    "volume": lambda f: f(n(2, 2, 3, 3, 3), n(2, 2, 2, 2, 2), n(2)),
    "one sample": lambda f: f(n(4, 5, 4), n(4, 4, 3, 2)),
}
NORM: dict[str, Case] = {
    "training": lambda f: f(n(3, 4, 2, 2), n(4), p(4), n(4), n(4), True),
    "evaluation": lambda f: f(n(3, 4, 2, 2), n(4), p(4), n(4), n(4), False),
    "of itself": lambda f: f(n(3, 4, 2, 2), None, None, None, None, True),
    "groups": lambda f: f(n(3, 4, 2, 2), 2, n(4), n(4)),
}


def recurrent(name: str) -> dict[str, Case]:
    """A layer, or a cell, of the kind that a function of torch has."""
    gates = {"l": 4, "g": 3, "r": 1}[name[0]]
    if "cell" in name:
        return {"cell": lambda f: f(n(3, 3), (n(3, 2), n(3, 2)) if gates == 4 else n(3, 2), *w(2, gates))}
    state = lambda: (n(1, 3, 2), n(1, 3, 2)) if gates == 4 else n(1, 3, 2)  # noqa: E731
    return {"layer": lambda f: f(n(2, 3, 3), state(), w(2, gates), True, 1, 0.0, True, False, False)}


CASES: dict[str, Mapping[str, Case]] = {
    "elementwise _unary": ONE,
    "elementwise elementwise": SEVERAL,
    "elementwise _clamp": SEVERAL,
    "elementwise _prelu": {
        "channels": lambda f: f(n(2, 4, 3), n(4)),
        "one slope": lambda f: f(n(2, 4), n(1)),
        "vector": lambda f: f(n(3), n(1)),
    },
    "elementwise like": {
        "alone": lambda f: f(n(2, 3)),
        "another": lambda f: f(n(2), n(3).float()),
        "fill": lambda f: f(n(2), 3.0),
    },
    "meta": {
        "alone": lambda f: f(n(2, 3)),
        "one": lambda f: f(torch.ones(1)),
        "integer": lambda f: f(torch.tensor(2)),
        "pair": lambda f: f(n(2), n(2)),
    },
    "meta _is_contiguous": MEMORY,
    "meta _contiguous": MEMORY,
    "meta _to": MEMORY,
    "axes": {
        "all": lambda f: f(n(2, 3, 4)),
        "truths": lambda f: f(b(2, 3)),
        "axis": lambda f: f(n(2, 3, 4), 1),
        "last": lambda f: f(n(2, 3), -1),
        "axes": lambda f: f(n(2, 3, 4), (0, 2)),
        "number": lambda f: f(n(), 0),
    },
    "shape": SHAPE,
    "shape _get": {
        "number": lambda f: f(n(2, 3), 1),
        "slices": lambda f: f(n(4, 3), (slice(1, None, 2), None, ..., 0)),
        "places": lambda f: f(n(4, 3), i(4, 2)),
        "later": lambda f: f(n(4, 3), (slice(None), i(3, 2))),
    },
    "shape _set": {
        "slice": lambda f: f(n(4, 3), slice(1, 3), n(3)),
        "places": lambda f: f(n(4, 3), torch.tensor([2, 0]), n(2, 3)),
        "places later": lambda f: f(n(3, 3), (slice(None), torch.tensor([2, 0, 1])), n(3, 3)),
        "mask": lambda f: f(n(4, 3), b(4, 3), 0.0),
    },
    "shape _select": INDEX,
    "shape _narrow": INDEX,
    "shape _where": INDEX,
    "linear _linear": {
        "matrix": lambda f: f(n(3, 4), n(5, 4), n(5)),
        "deep": lambda f: f(n(2, 3, 4), n(5, 4)),
        "vector": lambda f: f(n(4), n(5, 4), n(5)),
    },
    "linear _matmul": {
        "product": lambda f: f(n(3, 4), n(4, 2)),
        "products": lambda f: f(n(2, 3, 4), n(2, 4, 3)),
        "with a vector": lambda f: f(n(3, 4), n(4)),
    },
    "linear _addmm": {
        "matrix": lambda f: f(n(3, 2), n(3, 4), n(4, 2), beta=0.5),
        "vector": lambda f: f(n(2), n(3, 4), n(4, 2)),
    },
    "conv": CONV,
    "norm": NORM,
    "norm _layer_norm": {
        "both": lambda f: f(n(2, 3, 4), (4,), n(4), n(4)),
        "scale": lambda f: f(n(2, 3, 4), (3, 4), n(3, 4)),
        "neither": lambda f: f(n(2, 4), (4,)),
    },
    "embedding": {
        "rows": lambda f: f(i(5, 2, 3), n(5, 4)),
        "padding": lambda f: f(i(5, 2, 3), n(5, 4), padding_idx=1),
        "norm": lambda f: f(i(5, 2, 3), n(5, 4), max_norm=1.0),
        "weighted": lambda f: f(i(5, 2, 3), n(5, 4), per_sample_weights=n(2, 3), mode="sum"),
        "bags": lambda f: f(i(5, 6), n(5, 4), torch.tensor([0, 2, 5])),
    },
    "channelwise": {
        **IMAGE,
        "pad": lambda f: f(n(2, 4, 5, 5), (1, 1, 2, 1)),
        "reflection": lambda f: f(n(2, 4, 5, 5), (1, 1, 2, 1), mode="reflect"),
    },
    "channelwise _pool": IMAGE,
    "dropout": {
        "training": lambda f: f(n(2, 3, 4, 4), 0.4, True),
        "evaluation": lambda f: f(n(2, 3, 4), 0.4, False),
    },
    "attention": {
        "heads": lambda f: f(n(2, 3, 4), n(2, 5, 4), n(2, 5, 4)),
        "mask": lambda f: f(n(3, 4), n(5, 4), n(5, 4), n(3, 5)),
        "causal": lambda f: f(n(2, 2, 3, 4), n(2, 2, 3, 4), n(2, 2, 3, 4), is_causal=True),
        "dropout": lambda f: f(n(2, 3, 4), n(2, 5, 4), n(2, 5, 4), dropout_p=0.3),
        "layer": lambda f: f(
            *(n(3, 2, 4) for _ in range(3)), 4, 2, n(12, 4), n(12), None, None, False, 0.3, n(4, 4), n(4)
        ),
    },
    "loss": {
        "mean": lambda f: f(p(3, 2), p(3, 2)),
        "sum": lambda f: f(p(3, 2), p(3, 2), reduction="sum"),
        "none": lambda f: f(p(3, 2), p(3, 2), reduction="none"),
        "weights": lambda f: f(p(3, 2), p(3, 2), weight=p(2)),
    },
    "loss _class_loss": {
        "labels": lambda f: f(n(3, 4), i(4, 3)),
        "weights": lambda f: f(n(3, 4), i(4, 3), p(4), reduction="sum"),
        "pixels": lambda f: f(n(2, 4, 3), i(4, 2, 3), ignore_index=1),
        "shares": lambda f: f(n(3, 4), p(3, 4), label_smoothing=0.1),
    },
    "vocabulary": {
        "labels": lambda f: f(n(3, 4), n(5, 4), i(5, 3)),
        "tiles": lambda f: f(n(2, 3, 4), n(5, 4), i(5, 2, 3), bias=n(5), chunk=2),
        "changed logits": lambda f: f(n(3, 4), n(5, 4), i(5, 3), scale=0.5, softcap=2.0, ignore_index=1),
    },
    "vocabulary _linear_cross_entropy": {
        "mean": lambda f: f(n(3, 4), n(5, 4), i(5, 3), linear_bias=n(5), ignore_index=1),
        "sum": lambda f: f(n(3, 4), n(5, 4), i(5, 3), reduction="sum"),
        "none": lambda f: f(n(3, 4), n(5, 4), i(5, 3), reduction="none", options=nn.LinearCrossEntropyOptions()),
        "one row": lambda f: f(n(4), n(5, 4), i(5)),
        "weights": lambda f: f(n(3, 4), n(5, 4), i(5, 3), weight=p(5), label_smoothing=0.1),
    },
}
"""By family, or by family and the name of what a rule runs."""
EXEMPT = {
    "gradient": "asks for, or sets, parts of the graph of gradients, which differ by where it was recorded",
    "meta _refuse_memory_access": "refuses, always",
    "meta _refuse_reshape": "refuses, always",
    "meta _format": "shows all members' numbers",
    "meta _stride": "memory of members side by side",
    "meta _set_data": "gives back nothing",
    "shape _iterate": "gives an iterator; its values are those of `unbind`",
}


def _key(family: str, rule: Rule) -> str:
    name = f"{family} {getattr(rule.run, '__name__', '')}"
    return name if name in CASES or name in EXEMPT else family


def _name(func: Any) -> str:
    return str(getattr(func, "__qualname__", func))


FIRST = 4
"""Functions of a rule that take turns; the others run the same rule, and are checked when thorough."""
FUNCTIONS = [
    pytest.param(
        *(rule, func, key), id=f"{key}-{_name(func)}-{number}", marks=[pytest.mark.thorough] if number >= FIRST else []
    )
    for family, rules in FAMILIES.items()
    for rule in rules
    for number, func in enumerate(rule.functions)
    if (key := _key(family, rule)) not in EXEMPT and func not in (Tensor.cuda, torch.empty_like)
]


@pytest.mark.in_turns(5)
@pytest.mark.parametrize(("rule", "func", "key"), FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_function_keeps_the_contract(rule: Rule, func: Any, key: str) -> None:
    check_rule(rule, cases_of(key, func), [func])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "func", "key"), list({id(case.values[0]): case for case in reversed(FUNCTIONS)}.values())
)
@pytest.mark.filterwarnings("ignore")
def test_the_first_function_of_each_rule_keeps_the_contract_on_a_gpu(rule: Rule, func: Any, key: str) -> None:
    check_rule(rule, cases_of(key, func), [func], device="cuda")


def cases_of(key: str, func: Any) -> Mapping[str, Case]:
    """Those of its rule; of torch's functions that crash, or mean another thing, on cases of others, their own."""
    name = func.__name__
    if key == "recurrent":
        return recurrent(name)
    if key == "channelwise _pool":
        kind = {"1d": "sequence", "2d": "image", "3d": "volume"}[
            next(axes for axes in ("1d", "2d", "3d") if axes in name)
        ]
        return {case: IMAGE[case] for case in (kind, f"power {kind}")}
    return CASES[key]


@torch.library.custom_op("shoal_tests::scaled", mutates_args=())
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


scaled.register_fake(lambda x, scale: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@wrap_torch_function(lambda x, scale: (x, scale))
def wrapped(x: Tensor, scale: Tensor) -> Tensor:
    """A function of Python's."""
    return Scale.apply(x, scale)  # type: ignore[no-any-return, no-untyped-call]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


SCALED: dict[str, Case] = {"rows": lambda f: f(n(4, 3), n(3))}


def joined(x: Tensor, scale: Tensor) -> Tensor:
    """[B, N, C] and [B, C]."""
    return x * scale.unsqueeze(1)


def of_contiguous(x: Tensor, scale: Tensor) -> Tensor:
    assert x.is_contiguous()
    return joined(x, scale)


def of_transposed(x: Tensor, scale: Tensor) -> Tensor:
    assert x.transpose(0, 1).is_contiguous()
    return joined(x, scale)


LOWERINGS = {"one": joined, "other": lambda x, scale: torch.einsum("bnc,bc->bnc", x, scale)}
USERS = {
    "operator": Rule((scaled,), LOWERINGS),
    "function": Rule((wrapped,), LOWERINGS),
    "that wants contiguous memory": Rule((wrapped,), {"one": of_contiguous}, input_layouts=(Layout.MODEL_MAJOR,)),
    "that wants the other layout": Rule((wrapped,), {"one": of_transposed}, input_layouts=(Layout.CHANNEL_MAJOR,)),
    "that declines some": Rule(
        (wrapped,), LOWERINGS, declines=lambda x, scale: "three columns" if x.shape[1] == 3 else None
    ),
}


@pytest.mark.parametrize("name", USERS)
def test_rule_of_a_user(name: str) -> None:
    check_rule(USERS[name], {**SCALED, "wide": lambda f: f(n(2, 4), n(4))})


WRONG: dict[str, tuple[Rule, str]] = {
    "another result": (Rule((wrapped,), {"one": lambda x, scale: joined(x, scale) + 1e-6}), "not close"),
    "another gradient": (Rule((wrapped,), {"one": lambda x, s: joined(x, s.detach())}), "gradient"),
    "another result in one lowering": (Rule((wrapped,), {**LOWERINGS, "two": lambda x, s: x}), "lowering two"),
    "members mixed up": (Rule((wrapped,), {"one": lambda x, s: joined(x, s.flip(0))}), "of member 0"),
    "an error": (Rule((wrapped,), {"one": lambda x, s: joined(x, s[:, :2])}), "raises RuntimeError.*NotImplemented"),
    "another type": (Rule((wrapped,), {"one": lambda x, s: joined(x, s).float()}), "float32 instead of torch.float64"),
    "no result": (Rule((wrapped,), LOWERINGS, declines=lambda x, s: "all"), "declines every case"),
}


@pytest.mark.parametrize("name", WRONG)
def test_suite_finds_a_rule_that_gives(name: str) -> None:
    rule, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check_rule(rule, SCALED)


def test_suite_refuses_cases_that_a_function_does_not_accept() -> None:
    with pytest.raises(AssertionError, match="wrapped accepts none of the cases odd"):
        check_rule(USERS["function"], {"odd": lambda f: f(n(4, 3), n(2))})


REFUSED: dict[str, tuple[Callable[[], Rule], str]] = {
    "autograd function": (lambda: Rule((Scale,), LOWERINGS), r"Scale.apply has no overrides; .*wrap_torch_function"),
    "plain function": (lambda: Rule((joined,), LOWERINGS), r"joined has no overrides.*wrap_torch_function"),
    "no function": (lambda: Rule((), LOWERINGS), "needs functions and lowerings"),
    "no lowering": (lambda: Rule((wrapped,), {}), "needs functions and lowerings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(FusionError, match=message):
        make()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each call of a rule, for functions of this file."""
    ran: list[str] = []

    def run(x: Tensor, scale: Tensor) -> Tensor:
        ran.append("rule")
        return joined(x, scale)

    for func in (rule := Rule((scaled, wrapped), {"one": run})).functions:
        monkeypatch.setitem(table.RULES, func, rule)
    shoal.fuse.register_rule(rule)
    return ran


@pytest.mark.parametrize("func", [scaled, torch.ops.shoal_tests.scaled, wrapped], ids=["operator", "by name", "python"])
def test_a_registered_rule_runs_in_arrays(func: Any, registered: list[str]) -> None:
    check(lambda: nn.Linear(4, 3), n(5, 4), fn=lambda m, x: func(m(x), m.bias), members=3, steps=1)
    assert registered


def test_fuse_is_a_package_that_can_be_called_and_pickled() -> None:
    assert len(shoal.fuse([nn.Linear(2, 2)]).members) == 1
    assert pickle.loads(pickle.dumps(shoal.fuse)) is shoal.fuse
