"""Differences between members that no module attribute shows: each member uses its own value, or fusion is refused."""

import copy
import functools
import math
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import build, close, compare, compare_state

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.structure import entries

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Uses(nn.Module):
    """A linear layer, then a function of a value and the layer's output."""

    def __init__(self, value: Any, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.value = value
        self.use = use
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        return self.use(self.value, x) * self.weight


class Net(nn.Module):
    def __init__(self, use: Uses | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.use = use or nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.use(self.lin(x))


def models(make: Callable[[int], nn.Module]) -> list[nn.Module]:
    numbers = iter(range(2))
    return build(lambda: make(next(numbers)), 2)


def check(make: Callable[[int], nn.Module], apart: bool, steps: int = 2) -> ModelArray:
    """Compare with members run alone; `unfused_parameters`: refused but for `strict=False`."""
    own, twins = models(make), models(make)
    if apart:
        with pytest.raises(FusionError, match="member 1 differs from member 0 at"):
            fuse(models(make), strict=True)
    array = fuse(own, seeds=range(2), strict=not apart)
    assert array.partial == apart
    for _ in range(steps):
        result = array(X)
        expected = [twin(X) for twin in twins]
        compare(result, expected)
        result.cos().sum().backward()
        sum(value.cos().sum() for value in expected).backward()
    if apart:
        for path, b, parameter in array.unfused_parameters():
            close(parameter.grad, twins[b].get_parameter(path).grad, path)
    else:
        compare_state(array, twins)
    return array


def patched(patch: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> Callable[[int], nn.Module]:
    def make(b: int) -> nn.Module:
        model = Net()
        model.lin.forward = patch(model.lin)  # type: ignore[method-assign]
        return model

    return make


def doubled(module: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(module, x)


def over_method(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    forward = module.forward
    return lambda x: 2 * forward(x)


def over_function(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    inner = over_method(module)
    return lambda x: inner(x).tanh()


def over_itself(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def halved(x: Tensor, depth: int = 2) -> Tensor:
        return halved(x, depth - 1) / 2 if depth else nn.Linear.forward(module, x)

    return halved


def with_default(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x, own=module, *, also=module.forward: own.weight.sum() + also(x)


def wrapped(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    module._old_forward = module.forward  # type: ignore[assignment]

    def new(own: nn.Module, x: Tensor) -> Any:
        return 2 * own._old_forward(x)  # type: ignore[operator]

    return functools.update_wrapper(functools.partial(new, module), module.forward)


def in_partial(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    forward = module.forward
    return functools.partial(lambda scale, x: scale * forward(x), 3.0)


REBOUND = {
    "method": over_method,
    "module": lambda module: lambda x: doubled(module, x),
    "function": over_function,
    "itself": over_itself,
    "default": with_default,
    "partial-of-module": lambda module: functools.partial(doubled, module),
    "partial-of-closure": in_partial,
    "wrapper": wrapped,
    "tuple": lambda module: (lambda held: lambda x: doubled(held[0], x))((module, 1)),
}


@pytest.mark.parametrize("name", REBOUND)
def test_a_function_that_holds_its_own_module(name: str) -> None:
    check(patched(REBOUND[name]), apart=False)


def test_functions_go_on_sharing_a_variable() -> None:
    def make(b: int) -> nn.Module:
        model = Net()
        lin, own = model.lin, calls.setdefault(len(calls), [])

        def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            own.append(1)
            return result + lin.weight.sum()

        model.lin.register_forward_hook(hook)
        return model

    calls: dict[int, list[int]] = {}
    array = fuse(models(make))
    close(array(X), torch.stack([model(X) for model in models(make)]), "output")
    assert list(map(len, calls.values())) == [1, 0, 1, 1]


STUCK: dict[str, Callable[[Net], Any]] = {
    "list": lambda model: (lambda held: lambda x: x @ held[0])([model.lin.weight]),
    "dict": lambda model: (lambda held: lambda x: held["lin"](x))({"lin": model.lin}),
    "method-of-tensor": lambda model: model.lin.weight.matmul,
    "object": lambda model: Scale(model.lin.weight).of,
    "cache": lambda model: functools.cache(model.lin.forward),
    "weak-reference": lambda model: weakref.ref(model.lin),
}


class Scale:
    def __init__(self, by: Any) -> None:
        self.by = by

    def of(self, x: Tensor) -> Tensor:
        return x * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: Any) -> None:
        self.by = by


class Both(Slotted):
    """Slots and attributes."""

    def __init__(self, by: Any) -> None:
        super().__init__(1.0)
        self.more = by


class Pair(NamedTuple):
    by: Any


@pytest.mark.parametrize("name", STUCK)
def test_what_cannot_be_put_for_each_member(name: str) -> None:
    def make(b: int) -> nn.Module:
        model = Net(Uses(None, lambda value, x: x))
        model.use.value = STUCK[name](model)
        return model

    with pytest.raises(
        FusionError, match=r"member 0: 'use.value' refers to a part of the model .* close over the module"
    ):
        fuse(models(make))
    assert len(fuse(models(make)[:1])) == 1


def test_a_function_that_closes_over_a_parameter() -> None:
    def make(b: int) -> nn.Module:
        model = Net(Uses(None, lambda value, x: value(x)))
        weight = model.lin.weight
        model.use.value = lambda x: x @ weight
        return model

    with pytest.raises(FusionError, match=r"member 0: 'use.value' refers to a part of the model"):
        fuse(models(make))


def vector(b: int) -> Tensor:
    return torch.full((4,), 1.0 + b, dtype=torch.float64)


def closing(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


def defaulting(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x, *, by=value: x * by


def scaled_by(value: Any) -> type:
    class Local:
        by = value

        def __init__(self) -> None:
            super().__init__()

    return Local


def times(value: Any, x: Tensor) -> Tensor:
    return x * value


def called(value: Any, x: Tensor) -> Any:
    return value(x)


def first(value: Any, x: Tensor) -> Tensor:
    return x * next(iter(value))


def by(value: Any, x: Tensor) -> Tensor:
    return x * value.by


REFERRED = [Scale(1.0 + b) for b in range(3)]

APART: dict[str, tuple[Callable[[int], Any], Callable[[Any, Tensor], Any]]] = {
    "closure": (lambda b: closing(vector(b)), called),
    "closure-in-list": (lambda b: [closing(vector(b))], lambda value, x: value[0](x)),
    "closure-over-list": (lambda b: closing(vector(b).tolist()[0]), called),
    "closure-over-module": (lambda b: (lambda net: lambda x: x * net.weight.sum())(nn.Linear(4, 4)), called),
    "default": (lambda b: defaulting(vector(b)), called),
    "code": (lambda b: [lambda x: x.tanh(), lambda x: x.relu(), lambda x: x + 1.5][b], called),
    "partial": (lambda b: functools.partial(torch.mul, vector(b)), called),
    "method-of-tensor": (lambda b: vector(b).mul, called),
    "method-of-object": (lambda b: Scale(vector(b)).of, called),
    "method-of-object-float": (lambda b: Scale(1.0 + b).of, called),
    "deque": (lambda b: deque([vector(b)]), first),
    "deque-floats": (lambda b: deque([1.0 + b]), first),
    "tuple": (lambda b: (vector(b),), first),
    "named-tuple": (lambda b: Pair(vector(b)), by),
    "set": (lambda b: {vector(b)}, first),
    "slots": (lambda b: Slotted(vector(b)), by),
    "slots-float": (lambda b: Slotted(1.0 + b), by),
    "bytes": (lambda b: bytearray([1 + b]), first),
    "class": (lambda b: scaled_by(1.0 + b), by),
    "instance-of-class": (lambda b: scaled_by(vector(b))(), by),
    "weak-reference": (lambda b: weakref.ref(REFERRED[b]), lambda value, x: x * value().by),
    "generator": (
        lambda b: torch.Generator().manual_seed(b),
        lambda value, x: x * torch.rand(4, generator=value, dtype=x.dtype),
    ),
    "random": (lambda b: random.Random(b), lambda value, x: x * value.random()),
    "random-state": (lambda b: np.random.RandomState(b), lambda value, x: x * value.rand()),
    "default-rng": (lambda b: np.random.default_rng(b), lambda value, x: x * value.random()),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", APART)
def test_what_differs_runs_apart(name: str) -> None:
    value, use = APART[name]
    check(lambda b: Net(Uses(value(b), use)), apart=True, steps=1)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", [name for name in APART if name != "closure-over-module"])  # another each time
def test_what_is_equal_runs_as_one(name: str) -> None:
    value, use = APART[name]
    check(lambda b: Net(Uses(value(1), use)), apart=False, steps=1)


def test_a_class_of_each_member() -> None:
    def make(b: int) -> nn.Module:
        class Local(nn.Module):
            scale = 1.0 + b

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4))

            def forward(self, x: Tensor) -> Tensor:
                return x * self.weight * self.scale

        return nn.Sequential(nn.Linear(4, 4), Local())

    check(make, apart=True)
    check(lambda b: make(1), apart=False)


def test_an_object_with_slots_and_attributes() -> None:
    check(lambda b: Net(Uses(Both(vector(b)), lambda value, x: x * value.more)), apart=False)


def test_a_partial_keyword_is_each_members_own() -> None:
    def make(b: int) -> nn.Module:
        model = Net(Uses(None, called))
        model.use.value = functools.partial(torch.nn.functional.linear, weight=model.lin.weight)
        return model

    check(make, apart=False)


@pytest.mark.parametrize("inside", [True, False], ids=["to-fused", "to-apart"])
def test_what_runs_apart_refers_to_nothing_across_its_border(inside: bool) -> None:
    def make(b: int) -> nn.Module:
        model = Net(Uses(None, called))
        lin = model.lin
        model.use.value = lambda x: lin(x)
        (model.use if inside else model.lin).depth = b
        return model

    with pytest.raises(FusionError, match=r"member 0: 'use.value' holds a module or tensor across the border"):
        fuse(models(make), strict=False)


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(FusionError, match=r"the model cannot be copied .*mappingproxy"):
        fuse(models(lambda b: Net(Uses(MappingProxyType({}), lambda value, x: x))))


def test_what_is_written_down_names_no_addresses() -> None:
    """Else equal models would be told apart in another process."""
    written = [repr(entries(Net(Uses(scaled_by(1.5), closing(vector(1)))))) for _ in range(2)]
    assert written[0] == written[1]
    assert "0x" not in written[0]


def guarded(value: float, x: Tensor) -> Tensor:
    try:
        return x * math.exp(value)
    except Exception:
        return x


AS_ONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "isinstance": lambda value, x: x * value if isinstance(value, float) else x,
    "isinstance-of-several": lambda value, x: x * value if isinstance(value, (int, float)) else x,
    "copy": lambda value, x: x * copy.deepcopy(value),
    "bool": lambda value, x: x * value if value else x,
}

REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "format": lambda value, x: x * float(f"{value:.2f}"),
    "str": lambda value, x: x * float(str(value)),
    "repr": lambda value, x: x * float(repr(value)),
    "percent": lambda value, x: x * float("%g" % value),  # noqa: UP031
    "hash": lambda value, x: x * (hash(value) % 7),
    "dict": lambda value, x: x * {1.25: 3.0, 2.0: 5.0}.get(value, 7.0),
    "set": lambda value, x: x * 3 if value in {1.25} else x,
    "round": lambda value, x: x * round(value),
    "round-to-digits": lambda value, x: x * round(value, 1),
    "int": lambda value, x: x * int(value),
    "float": lambda value, x: x * float(value),
    "index": lambda value, x: x * [1.0, 2.0, 3.0][math.floor(value)],
    "trunc": lambda value, x: x * math.trunc(value),
    "floor": lambda value, x: x * math.floor(value),
    "ceil": lambda value, x: x * math.ceil(value),
    "divmod": lambda value, x: x * divmod(value, 1)[1],
    "exp": lambda value, x: x * math.exp(value),
    "method": lambda value, x: x * 2 if value.is_integer() else x,
    "handler": guarded,
}


@pytest.mark.parametrize("name", AS_ONE)
def test_a_float_in_which_members_differ(name: str) -> None:
    check(lambda b: Net(Uses(1.25 + 0.75 * b, AS_ONE[name])), apart=False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_float_in_which_members_differ_is_no_plain_one(name: str) -> None:
    array = fuse(models(lambda b: Net(Uses(1.25 + 0.75 * b, REFUSED[name]))))
    with pytest.raises(FusionError, match=r"array\.unfuse\(\)"):
        array(X)


def test_a_long_difference_is_told_in_part() -> None:
    def make(last: str) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 1))
        model.words = [*("word",) * 500, len, last, *("word",) * 500]
        model.append(nn.Linear(1, len(last)))
        return model

    with pytest.raises(FusionError, match=r"at 'words': \.\.\. .*'first'.* against \.\.\. .*'another'.*") as caught:
        fuse([make("first"), make("another")])
    assert len(str(caught.value)) < 1000
