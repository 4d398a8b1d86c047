"""The parts of a trial: the objects that a build of it makes, each known by its path, and the state of each.

A path is what user code would write: "model.encoder.log". The values of an attribute that are no parts (numbers,
tuples, arrays, objects with a pickling of their own) belong to the part that has the attribute.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from shoal.fuse.container_sync import MANAGED_ATTRIBUTES
from shoal.fuse.quantised import state_names

__all__ = [
    "LARGE",
    "WHOLE",
    "Kind",
    "Part",
    "Place",
    "consists_of_atoms",
    "find_parts",
    "held_values",
    "is_atom",
    "joined",
]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_CONTAINERS = (list, deque, dict, set)
_LEVELS = 5
_REDUCERS = ("__reduce__", "__reduce_ex__", "__getstate__")
LARGE = 1000
"""Most items of a container that may be parts themselves; a larger one is taken as a whole."""

WHOLE = ""
"""Name of the entry that is all of a part: the items of a container, the values of a tensor."""

Place = tuple[str, str]
"""Path of a part, and the name of an entry of it: of an attribute, or `WHOLE`."""


class Kind(Enum):
    """Kinds of parts, by how their state is read and set."""

    MODULE = "module"
    OBJECT = "object"
    CONTAINER = "container"
    TENSOR = "tensor"
    OPAQUE = "opaque"
    """Objects that are only referred to: the task, data sets, and those that cannot be pickled."""


@dataclass(frozen=True)
class Part:
    """An object that a build of a trial has made.

    Args:
        left_out: Names of entries that a state dict holds.
    """

    path: str
    value: Any
    kind: Kind
    left_out: frozenset[str] = frozenset()

    def entries(self) -> dict[str, Any]:
        """The state of the part by name."""
        value = self.value
        match self.kind:
            case Kind.MODULE:
                names = sorted(value._non_persistent_buffers_set & value._buffers.keys())
                return _attributes(value, _left_out(value)) | {name: value._buffers[name] for name in names}
            case Kind.OBJECT:
                return _attributes(value, self.left_out)
            case Kind.CONTAINER:
                return {WHOLE: list(value.items() if isinstance(value, dict) else value)} | _attributes(value)
            case Kind.TENSOR:
                own = {} if WHOLE in self.left_out else {WHOLE: value.detach()}
                return {"requires_grad": value.is_leaf and value.requires_grad} | own
        return {}

    def set(self, name: str, new: Any) -> None:
        """Set an entry, in place where the part is more than its attributes."""
        value = self.value
        if self.kind is Kind.MODULE and name in value._non_persistent_buffers_set:
            value._buffers[name] = new
        elif self.kind is Kind.TENSOR and name == WHOLE:
            _assign_tensor(value, new)
        elif self.kind is Kind.TENSOR:
            value.requires_grad_(new)
        elif name == WHOLE and isinstance(value, list):
            value[:] = new
        elif name == WHOLE:
            value.clear()
            if isinstance(value, dict):
                for key, held in new:  # `Counter.update` counts
                    value[key] = held
            else:
                (value.update if isinstance(value, set) else value.extend)(new)
        elif hasattr(value, "__dict__"):
            vars(value)[name] = new
        else:
            object.__setattr__(value, name, new)  # a slot

    def remove(self, name: str) -> None:
        """Delete an attribute."""
        if hasattr(self.value, "__dict__") and name in vars(self.value):
            del vars(self.value)[name]


def find_parts(roots: dict[str, Any]) -> dict[int, Part]:
    """Find the parts of a trial by `id`, each at the first path that leads to it."""
    kept = _saved_tensors(roots["model"])
    found: dict[int, Part] = {}
    pending: list[tuple[str, Any, bool]] = [(name, value, True) for name, value in reversed(roots.items())]
    while pending:
        path, value, saved = pending.pop()
        if is_atom(value) or id(value) in found:
            continue
        if isinstance(value, torch.jit.ScriptModule):
            kind, left_out, inner = Kind.OPAQUE, frozenset[str](), []
        elif isinstance(value, nn.Module):
            kind, left_out = Kind.MODULE, frozenset[str]()
            registered = value._parameters | value._buffers | value._modules
            inner = [
                (name, held, False) for name, held in {**registered, **_attributes(value, _left_out(value))}.items()
            ]
        elif isinstance(value, Tensor):
            kind, left_out, inner = Kind.TENSOR, frozenset({WHOLE} if id(value) in kept else ()), []
        elif isinstance(value, _CONTAINERS):
            kind, left_out = Kind.CONTAINER, frozenset()
            inner = [(*each, saved) for each in _items(value)]
        elif isinstance(value, tuple):
            pending += [(path + name, held, saved) for name, held in reversed(list(_items(value)))]
            continue
        elif isinstance(value, (Dataset, DataLoader)) or path == "task":
            kind, left_out, inner = Kind.OPAQUE, frozenset(), []
        elif _is_plain(value):
            names = value.state_dict() if saved and hasattr(value, "state_dict") else ()
            kind, left_out = Kind.OBJECT, frozenset({"_opt_called", *names})
            inner = [(name, held, False) for name, held in _attributes(value, left_out).items()]
        else:
            continue
        found[id(value)] = Part(path, value, kind, left_out)
        pending += [(joined((path, name)), held, flag) for name, held, flag in reversed(inner)]
    return found


def _saved_tensors(model: nn.Module) -> set[int]:
    """The ids of the tensors that the model's state dict holds."""
    return {
        id(tensor)
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if name not in module._non_persistent_buffers_set
    }


def held_values(parts: Iterable[Part]) -> Iterator[tuple[str, Any]]:
    """Yield the values of entries that are no parts, with their paths."""
    for part in parts:
        for name, value in () if part.kind is Kind.TENSOR else part.entries().items():
            path = joined((part.path, name))
            if part.kind is Kind.CONTAINER and name == WHOLE:
                yield from ((path + key, held) for key, held in _items(part.value) if not is_atom(held))
            elif not is_atom(value):
                yield path, value
            if isinstance(value, tuple):
                yield from ((path + key, held) for key, held in _items(value) if not is_atom(held))


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container that is not `LARGE`, except those of a set, with the keys of user code."""
    if len(container) > LARGE:
        return
    if isinstance(container, dict):
        for number, (key, value) in enumerate(container.items()):
            yield f"[{key!r}]" if is_atom(key) else f"[item {number}]", value
    elif not isinstance(container, set):
        for number, value in enumerate(container):
            yield f"[{number}]", value


def _is_plain(value: Any) -> bool:
    """Whether an object is no more than its attributes, so that it can be restored in place."""
    if isinstance(value, (Optimizer, LRScheduler)):
        return True
    kind: Any = type(value)
    default = all(getattr(kind, name) is getattr(object, name) for name in _REDUCERS)
    if not default or hasattr(kind, "__setstate__") or isinstance(value, type):
        return False
    try:
        value.__reduce_ex__(4)
    except TypeError:  # it has a state of C
        return False
    return True


def _left_out(module: nn.Module) -> frozenset[str]:
    """Attributes of a module that torch manages, or that hold what belongs to a quantised weight."""
    return MANAGED_ATTRIBUTES.union(state_names(module))


def _attributes(value: Any, left_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The attributes of an object, in a dict or in slots."""
    state = vars(value) if hasattr(value, "__dict__") else {}
    slots = {} if isinstance(value, (nn.Module, *_CONTAINERS)) else _slots(value)
    return {name: held for name, held in {**state, **slots}.items() if name not in left_out}


def _slots(value: Any) -> dict[str, Any]:
    state = object.__getstate__(value)
    return state[1] if isinstance(state, tuple) else {}


def is_atom(value: Any) -> bool:
    """Whether a value cannot change and equals what has an equal `repr`."""
    return type(value) in _ATOMS or (type(value) is tuple and all(map(is_atom, value)))


def consists_of_atoms(value: Any) -> bool:
    """Whether a value is of built-in containers, to a few levels, and atoms alone."""
    inner = [value]
    for _ in range(_LEVELS):
        kinds = set(map(type, inner)) - _ATOMS
        if not kinds <= {list, tuple, dict}:
            return False
        if not kinds:
            return True
        sequences = [each for each in inner if type(each) in (list, tuple)]
        tables = [each for each in inner if type(each) is dict]
        inner = list(chain(*sequences, *tables, *map(dict.values, tables)))
    return False


def joined(place: Place) -> str:
    """Return the path of an entry."""
    path, name = place
    return f"{path}.{name}" if name and not name.startswith("[") else path + name


def _assign_tensor(tensor: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape == new.shape and tensor.dtype == new.dtype and not tensor.is_inference():
            tensor.copy_(new)
        else:
            tensor.data = new.detach()
