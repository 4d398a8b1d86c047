"""Containers and objects in attributes of models are each member's own, in each step mode."""

import copy
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.container_sync import ContainerSync
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import StepMode, TrainingStep

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass
class Meter:
    count: int = 0
    scale: dict[str, float] = field(default_factory=lambda: {"x": 0.0})


@dataclass
class Counted:
    """A callable object that counts its calls."""

    calls: int = 0

    def __call__(self) -> float:
        self.calls += 1
        return float(self.calls)


class Model(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.held = held


def count_in(name: Any) -> Callable[[Model], float]:
    def counted(model: Model) -> float:
        model.held[name] += 1
        return float(model.held[name])

    return counted


def count_anew(kind: Callable[[int], Any], read: Callable[[Any], int]) -> Callable[[Model], float]:
    def counted(model: Model) -> float:
        count = read(model.held) + 1
        model.held = kind(count)
        return float(count)

    return counted


def count_in_meter(model: Model) -> float:
    model.held.count += 1
    model.held.scale["x"] = 0.5 * model.held.count
    return model.held.scale["x"]


def append(model: Model) -> float:
    model.held.append(1)
    return float(len(model.held))


def add_to_set(model: Model) -> float:
    model.held.add(len(model.held))
    return float(len(model.held))


def cached(model: Model) -> Tensor:
    if "mask" not in model.held:
        model.held["mask"] = torch.tril(torch.ones(6, 6, dtype=torch.float64))
    return model.held["mask"].sum()


def hidden(model: Model) -> Tensor:
    before, _ = model.held
    now = torch.tanh(model.layer(X)) + 0.5 * before
    model.held = (now.detach(), 0)
    return before.sum()


CASES: dict[str, tuple[Any, Callable[[Model], Any]]] = {
    "dict": ({"n": 0}, count_in("n")),
    "Counter": (Counter(n=0), count_in("n")),
    "list": ([0], count_in(0)),
    "list that grows": ([], append),
    "deque": (deque([0]), count_in(0)),
    "set": (set(), add_to_set),
    "object": (Meter(), count_in_meter),
    "callable object": (Counted(), lambda model: model.held()),
    "tuple anew": ((0,), count_anew(lambda count: (count,), lambda held: held[0])),
    "dict anew": ({"n": 0}, count_anew(lambda count: {"n": count}, lambda held: held["n"])),
    "nested": ({"a": [{"n": 0}]}, count_anew(lambda n: {"a": [{"n": n}]}, lambda held: held["a"][0]["n"])),
    "mask by name": ({}, cached),
    "hidden state": ((torch.zeros(6, 4, dtype=torch.float64), 0), hidden),
}

MODES: dict[str, tuple[StepMode, ...]] = {"eager": ("eager",), "plain": ("plain",), "both": ("eager", "plain")}


def models(held: Any) -> list[Model]:
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(Model(copy.deepcopy(held)))
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("held", "use"), CASES.values(), ids=CASES)
def test_steps_are_those_of_each_model_alone(
    held: Any, use: Callable[[Model], Any], modes: tuple[StepMode, ...]
) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        return (model.layer(x) - 1).square().mean() * (1 + 0.1 * use(model))

    alone = models(held)
    for model in alone:
        optimizer = sgd(model)
        for _ in range(12):
            optimizer.zero_grad()
            loss(model, X).backward()
            optimizer.step()
    together = models(held)
    array = fuse(together)
    step = TrainingStep(array, fuse_optimizers([sgd(model) for model in together], array), loss, modes)
    for _ in range(12):
        step(X)
    for model, expected in zip(array.unfuse(), alone, strict=True):
        torch.testing.assert_close(model.layer.weight, expected.layer.weight, rtol=1e-12, atol=1e-14)
        if not isinstance(expected.held, tuple):
            assert str(model.held) == str(expected.held)


def test_what_training_has_put_into_an_object_is_there_in_evaluation() -> None:
    def use(model: Model) -> Tensor:
        y = torch.tanh(model.layer(X))
        if model.training:
            model.held.scale["mean"] = y.detach().mean()
        return (y - model.held.scale.get("mean", 0.0)).square().mean()

    alone, together = models(Meter()), models(Meter())
    array = fuse(together)
    for training in (True, False):
        array.train(training)
        expected = torch.stack([use(model.train(training)) for model in alone])
        torch.testing.assert_close(array.map(use), expected, rtol=1e-12, atol=1e-14)


def test_lists_that_a_caller_makes_different_are_refused() -> None:
    together = models([0])
    array = fuse(together)
    array.map(lambda model: model.layer(X).sum() * count_in(0)(model))
    together[0].held.append("only here")
    with pytest.raises(FusionError, match="the members now differ in 'held'; fuse them again"):
        array.map(lambda model: model.layer(X).sum())


def test_a_list_that_outgrows_its_limit_is_refused() -> None:
    def fill(model: Model, x: Tensor) -> Tensor:
        loss = model.layer(x).sum()
        model.held += [loss.detach()] * 100
        return loss

    models = [Model([]) for _ in range(2)]
    array = fuse(models)
    array.map(fill, X)
    assert [len(model.held) for model in models] == [100, 100]
    with pytest.raises(FusionError, match="'held' of a model changes and holds more than 128 entries"):
        array.map(fill, X)


def _in_place(held: Any) -> None:
    with torch.no_grad():
        held["tensor"].add_(1)


UNSEEN: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda held: held.update(number=2),
    "another name for it": lambda held: held.update(other=held.pop("last")),
    "a new entry": lambda held: held.update(new=True),
    "a list in a tuple": lambda held: held["tuple"][0].append(1),
    "an object's attribute": lambda held: setattr(held["meter"], "count", 5),
    "an object's dict": lambda held: setattr(held["meter"], "__dict__", {"count": 3, "scale": {}}),
    "a tensor in place": _in_place,
    "an array in place": lambda held: held["array"].fill(2),
    "a set": lambda held: held["set"].add(7),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_a_change_of_all_members_is_seen_after_steps_in_which_nothing_changed(change: Callable[[Any], Any]) -> None:
    """Comparing identities is fast; it must miss nothing."""
    exotic = {"set": {1}} if change is UNSEEN["a set"] else {}
    exotic |= {"array": np.ones(2)} if change is UNSEEN["an array in place"] else {}
    template, *members = [Model({}) for _ in range(3)]
    for model in (template, *members):
        values = {"number": 1000, "tuple": ([0], 1), "meter": Meter(), "tensor": torch.ones(2), "last": 7}
        model.held = values | copy.deepcopy(exotic)
    sync = ContainerSync([template], [[member] for member in members], ())
    template.held["number"] = 2000  # from now on, what is held is compared in each step
    sync.push(search=False)
    assert [sync.pull(search=False) for _ in range(3)] == [False] * 3
    assert [entries.are_same() for entries in sync._same[0, "held"]] == [not exotic] * 2
    for member in members:
        change(member.held)
    assert sync.pull(search=False)
    assert not sync.pull(search=False)
