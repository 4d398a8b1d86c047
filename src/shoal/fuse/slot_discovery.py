"""Looks through a model for what members hold apart: parameters, buffers, tensors and floats among attributes."""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.frozen import lent, same
from shoal.fuse.slots import Slot

__all__ = ["find_slots", "tensors_within"]


def find_slots(stage: nn.Module, members: Sequence[nn.Module], apart: Sequence[str] = ()) -> list[Slot]:
    """All slots of a model.

    Args:
        stage: the copy of `members[0]`, holding the same tensors, whose places will be filled.
        members: models of one structure.
        apart: paths of submodules that are left out.
    """
    names = {id(t): name for name, t in chain(members[0].named_parameters(), members[0].named_buffers())}
    passive = {id(t) for module in members[0].modules() if not _trains(module) for t in module._buffers.values()}
    slots: dict[Any, Slot] = {}
    walks = [list(_walk(model, "", {id(model.get_submodule(path)) for path in apart})) for model in (stage, *members)]
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
                if key not in names and (
                    isinstance(columns[1][1], tuple) or all(same(value, first) for value in values)
                ):
                    continue  # what is in tuples was compared as part of the structure
                slots[key] = slot = Slot(names.get(key, path), values, [[] for _ in columns], registered=key in names)
                frozen = isinstance(first, nn.Parameter) and not first.requires_grad
                if slot.registered and len(members) == 1:
                    slot.shared = frozen and lent(first)
                elif slot.registered and (frozen or key in passive):
                    slot.shared = frozen and all(same(value, first) for value in values)
                    slot.alike = not frozen and all(same(value, first) for value in values)
        for places, (_, container, name, _) in zip(slots[key].places, columns, strict=True):
            places.append((container, name))
        if isinstance(columns[0][1], tuple) or columns[0][1] is columns[1][1]:
            raise FusionError(f"the members differ in {path!r}, where no value can be put; keep it in a list or dict")
    return list(slots.values())


def tensors_within(model: nn.Module) -> list[Tensor]:
    """Every tensor that a model holds, registered or not."""
    return [value for _, _, _, value in _walk(model, "", set()) if isinstance(value, Tensor)]


def _trains(module: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in module._parameters.values())


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
    elif isinstance(value, deque):
        yield from _items(tuple(value), enumerate(value), path, seen)
    elif isinstance(value, (set, frozenset)):
        yield from _items((), enumerate(inner for inner in value if isinstance(inner, Tensor)), path, seen)
    elif isinstance(value, partial):
        yield from _items(value.keywords, value.keywords.items(), path, seen)
        yield from _items(value.args, enumerate(value.args), path, seen)
    elif not isinstance(value, _OPAQUE):
        slotted = [name for base in type(value).__mro__ for name in _slots_of(base) if hasattr(value, name)]
        yield from _items((), [(name, getattr(value, name)) for name in slotted], path, seen)
        if hasattr(value, "__dict__"):
            yield from _items(vars(value), vars(value).items(), path, seen)


def _items(container: Any, items: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, value in list(items):
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Tensor) or (isinstance(value, float) and not isinstance(container, tuple)):
            yield _join(path, key), container, key, value
        else:
            yield from _walk(value, _join(path, key), seen)


def _slots_of(kind: type) -> Sequence[str]:
    """The names of what instances of a class hold without a `__dict__`."""
    names = vars(kind).get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


_REGISTERED = {"_parameters", "_buffers", "_modules"}
_PLAIN = {type(None), bool, int, str}
_OPAQUE = (type, Enum, FunctionType, MethodType, ModuleType)
