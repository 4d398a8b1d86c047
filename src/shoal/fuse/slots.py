"""The places in a model where a member's own value stands: parameters, buffers, tensors and floats among attributes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Slot", "find_slots"]


@dataclass
class Slot:
    """One value that the members hold apart, and every place of a model where it is looked up.

    Args:
        path: of its first place, "layers.0.weight".
        own: the members' tensors; empty for a float.
        data: all of them, [B, *shape].
        registered: a parameter or buffer, which moves and is saved with its module.
        number: a float attribute.
        places: containers and keys: a module's parameters, its attributes, a list among them.
    """

    path: str
    own: list[Tensor]
    data: Tensor
    registered: bool
    number: bool = False
    places: list[tuple[Any, Any]] = field(default_factory=list)

    def fill(self, value: Any) -> None:
        """Put a value in all places."""
        for container, key in self.places:
            container[key] = value


def find_slots(stage: nn.Module, members: Sequence[nn.Module]) -> list[Slot]:
    """All slots of a model.

    Args:
        stage: the copy of `members[0]`, holding the same tensors, whose places will be filled.
        members: models of one structure.
    """
    slots: dict[int, Slot] = {}
    others = [list(_places(member)) for member in members]
    for b, places in enumerate(zip(*others, strict=True)):
        path, _, _, value = places[0]
        values = [place[3] for place in places]
        if isinstance(value, float):
            if any(v != value for v in values):
                slots[-b - 1] = Slot(path, [], torch.tensor(values, dtype=torch.float64), False, number=True)
        elif id(value) not in slots:
            registered = any(value is t for t in (*members[0].parameters(), *members[0].buffers()))
            if registered or any(not _same(v, value) for v in values):
                slots[id(value)] = Slot(path, values, torch.stack([v.detach() for v in values]), registered)
    for b, (_, container, key, value) in enumerate(_places(stage)):
        slot = slots.get(-b - 1 if isinstance(value, float) else id(value))
        if slot is not None:
            slot.places.append((container, key))
    return list(slots.values())


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


def _places(model: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, container, key, value) of everything that may differ between members, in a fixed order."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for container in (module._parameters, module._buffers):
            for name, value in container.items():
                if value is not None:
                    yield prefix + name, container, name, value
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, (Tensor, float)):
                yield prefix + name, vars(module), name, value
            elif isinstance(value, (list, dict)):
                items = enumerate(value) if isinstance(value, list) else value.items()
                for key, inner in list(items):
                    if isinstance(inner, Tensor):
                        yield f"{prefix}{name}.{key}", value, key, inner
