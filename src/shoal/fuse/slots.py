"""The places in a model where a member's own value stands: parameters, buffers, tensors and floats among attributes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import FusionError
from shoal.fuse.stacked import Stacked

__all__ = ["Slot", "find_slots", "tensors_within"]

Place = tuple[Any, Any]
"""A container and a key: a module's parameters, its attributes, a list among them."""


@dataclass(eq=False)
class Slot:
    """One value that the members hold apart, and every place of a model where it is looked up.

    Args:
        path: of its first place, "layers.0.weight".
        own: the members' tensors; empty for floats.
        places: the stage's, then each member's.
        registered: a parameter or buffer, which moves and is saved with its module.
        numbers: the members' floats.
        home: container and key of the stacked tensor, shape [B, *shape].
    """

    path: str
    own: list[Tensor]
    places: list[list[Place]]
    registered: bool = False
    numbers: tuple[float, ...] | None = None
    home: Place = field(default=({}, None))
    shown: Stacked | None = None

    @property
    def data(self) -> Tensor:
        """All members' tensors, [B, *shape]."""
        container, key = self.home
        return container[key]  # type: ignore[no-any-return]

    def show(self) -> None:
        """Put the stacked tensor in all places of the stage."""
        if self.numbers is not None:
            self.shown = Stacked.of_numbers(self.numbers)
        elif self.shown is None or self.shown.whole is not self.data:
            self.shown = Stacked(self.data)
        self.put(0, self.shown)

    def put(self, which: int, value: Any) -> None:
        """Put a value in all places of the stage (0) or of member `which` - 1."""
        for container, key in self.places[which]:
            container[key] = value

    def found(self, which: int) -> Any:
        """What stands in the first place."""
        container, key = self.places[which][0]
        return container.get(key) if isinstance(container, dict) else container[key]

    def keep(self) -> None:
        """Take over what user code has put in the stage's place instead of changing it in place."""
        value = self.found(0)
        if value is self.shown:
            return
        if isinstance(value, Stacked) and value.numbers is not None:
            self.numbers = value.numbers
        elif isinstance(value, float) and self.numbers is not None:
            self.numbers = (value,) * len(self.numbers)
        elif isinstance(value, Tensor) and self.own:
            new = value.whole if isinstance(value, Stacked) else value.expand(len(self.own), *value.shape)
            if self.registered:
                _copy(self.path, self.data, new)
            else:
                self.home[0][self.home[1]] = new

    def keep_row(self, b: int, row: Tensor) -> None:
        """The same for member b, in whose place a row of the stacked tensor stood."""
        value, stacked = self.found(b + 1), self.data.data[b]
        if isinstance(value, Tensor) and (value is not row or value.data_ptr() != stacked.data_ptr()):
            _copy(self.path, stacked, value)


def _copy(path: str, target: Tensor, value: Tensor) -> None:
    if target.shape != value.shape:
        shapes = f"from {tuple(target.shape)} to {tuple(value.shape)}"
        raise FusionError(f"{path!r} changes its shape while the array runs, {shapes}; keep it or do not register it")
    with torch.no_grad():
        target.copy_(value)


def find_slots(stage: nn.Module, members: Sequence[nn.Module]) -> list[Slot]:
    """All slots of a model.

    Args:
        stage: the copy of `members[0]`, holding the same tensors, whose places will be filled.
        members: models of one structure.
    """
    names = {id(t): name for name, t in chain(members[0].named_parameters(), members[0].named_buffers())}
    slots: dict[Any, Slot] = {}
    walks = [list(_walk(model, "", set())) for model in (stage, *members)]
    if any([place[0] for place in walk] != [place[0] for place in walks[0]] for walk in walks):
        raise FusionError("the members hold tensors or floats in different places; fuse only models of one structure")
    for number, columns in enumerate(zip(*walks, strict=True)):
        path, _, _, first = columns[1]
        values = [column[3] for column in columns[1:]]
        if isinstance(first, float):
            key: Any = number
            if all(value == first or (value != value and first != first) for value in values):
                continue
            slots[key] = Slot(path, [], [[] for _ in columns], numbers=tuple(map(float, values)))
        else:
            key = id(first)
            if key not in slots:
                if key not in names and all(_same(value, first) for value in values):
                    continue
                slots[key] = Slot(names.get(key, path), values, [[] for _ in columns], registered=key in names)
        for places, (_, container, name, _) in zip(slots[key].places, columns, strict=True):
            places.append((container, name))
        if isinstance(columns[0][1], (tuple, set, frozenset)) or columns[0][1] is columns[1][1]:
            raise FusionError(f"the members differ in {path!r}, where no value can be put; keep it in a list or dict")
    return list(slots.values())


def tensors_within(model: nn.Module) -> list[Tensor]:
    """Every tensor that a model holds, registered or not."""
    return [value for _, _, _, value in _walk(model, "", set()) if isinstance(value, Tensor)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, container, key, value) of every tensor and float that may differ between members, in a fixed order."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for container in (value._parameters, value._buffers):
            yield from _items(container, container.items(), path, seen)
        attributes = vars(value)
        own = [
            (name, attributes[name]) for name in attributes if name not in _REGISTERED and not name.endswith("_hooks")
        ]
        yield from _items(attributes, own, path, seen)
        for name, child in value._modules.items():
            yield from _walk(child, _join(path, name), seen)
    elif isinstance(value, dict):
        yield from _items(value, value.items(), path, seen)
    elif isinstance(value, (list, tuple)):
        yield from _items(value, enumerate(value), path, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        yield from _items(vars(value), vars(value).items(), path, seen)


def _items(container: Any, items: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, value in list(items):
        if isinstance(value, Tensor) or (isinstance(value, float) and not isinstance(container, tuple)):
            yield _join(path, key), container, key, value
        else:
            yield from _walk(value, _join(path, key), seen)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


_REGISTERED = {"_parameters", "_buffers", "_modules"}
_OPAQUE = (type, Enum, FunctionType, MethodType, ModuleType)
