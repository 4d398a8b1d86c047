"""Functions of a copied model refer to the copy, also to lists, dicts and objects in its attributes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.fuse.model_copy import copy_training


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class Model(nn.Module):
    def __init__(self, held: Any, called: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.held = held
        self.called = called
        self.layer.register_forward_hook(lambda module, given, output: called())


def closure(held: Any, use: Callable[[Any], Any]) -> Callable[..., None]:
    def called(*given: Any) -> None:
        use(held)

    return called


def made(kind: str) -> tuple[Any, Callable[..., Any]]:
    """What a model holds, and a function that changes it."""
    if kind == "list":
        return (kept := []), closure(kept, lambda held: held.append(1))
    if kind == "dict":
        return (table := {}), closure(table, lambda held: held.update({len(held): 1}))
    if kind == "object":
        return (meter := Meter()), closure(meter, Meter.add)
    if kind == "method of a list":
        return (rows := []), lambda: rows.append(1)
    return (meter := Meter()), meter.add


def size(held: Any) -> int:
    return held.count if isinstance(held, Meter) else len(held)


@pytest.mark.parametrize("kind", ["list", "dict", "object", "method of a list", "method"])
def test_hooks_of_a_copy_change_what_the_copy_holds(kind: str) -> None:
    model = Model(*made(kind))
    (copied, _) = copy_training(model, [], {})
    copied.called()
    copied.layer(torch.ones(1, 2))
    assert (size(model.held), size(copied.held)) == (0, 2)
    model.layer(torch.ones(1, 2))
    assert (size(model.held), size(copied.held)) == (1, 2)


def test_the_method_of_a_list_in_an_attribute_is_that_of_the_copy() -> None:
    held: list[int] = []
    model = Model(held, held.append)
    model.layer._forward_hooks.clear()
    (copied, _) = copy_training(model, [], {})
    copied.called(1)
    assert (held, copied.held) == ([], [1])


def test_hooks_of_a_copied_optimizer_change_what_the_copied_model_holds() -> None:
    held: list[int] = []
    model = Model(held, len)
    model.layer._forward_hooks.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *given: held.append(1))
    copied, (other,) = copy_training(model, [optimizer], {})
    other.step()
    assert (held, copied.held) == ([], [1])
