"""State that a trial carries from step to step outside of state dicts: attributes of its model and of its optimizers.

A counter, the hidden state of a recurrent network, a replay buffer, an optimizer that lives on the model: what differs
from a fresh build of the trial is pickled into its checkpoint, and put into the next build of the same trial. Objects
that a build makes are *parts*, known by their paths ("model.encoder.log"). A pickle refers to parts by path, so that
after loading a list of parameters holds those of the new model; parts themselves change in place, so that whatever else
refers to one (a hook, an optimizer) sees the change.
"""

import hashlib
import importlib
import io
import pickle
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from io import IOBase
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.core.errors import CheckpointError
from shoal.fuse.container_sync import MANAGED_ATTRIBUTES
from shoal.train.trial_parts import (
    LARGE,
    Kind,
    Part,
    Place,
    consists_of_atoms,
    find_parts,
    held_values,
    is_atom,
    joined,
)

__all__ = ["CarriedState", "Lost"]


@dataclass(frozen=True)
class Lost:
    """A value that cannot be pickled.

    Args:
        path: Path of the value, as in "model.encoder.clock".
        reason: Type of the value, and the error.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"`{self.path}`, {self.reason}"


class CarriedState:
    """State that a trial carries: all values that have changed since this object was made, right after a build.

    Args:
        task: Task of the trial, which is only referred to.
        model: Model of the trial.
        optimizer: Optimizers of the trial, nested in any way. The contents of their state dicts are left out.
        scheduler: LR schedulers of the trial, as for `optimizer`.
        device: Device of the trial. Tensors on it are restored on the device of the restored trial.
    """

    def __init__(self, task: object, model: nn.Module, optimizer: Any, scheduler: Any, device: torch.device) -> None:
        self.device = device
        self.parts: dict[int, Part] = {}
        self._roots = {"task": task, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        held = self._find_parts()
        self._fresh = {place: held.get(id(value)) or _Fingerprint.of(value, self) for place, value in self._entries()}
        self._plain = _plain_attributes(model)

    def _find_parts(self) -> dict[int, "_Fingerprint"]:
        """Find the parts; after the first time only those at the same paths, as other builds have no others.

        Return the fingerprints of values that are no parts, by `id`.
        """
        before = {part.path for part in self.parts.values()}
        self._namespaces: dict[str, list[dict[str, Any]]] = {}
        self.parts = find_parts(self._roots)
        found: dict[int, _Fingerprint] = {}
        for path, value in list(held_values(self.parts.values())):  # now that the parts that it refers to are known
            if id(value) not in self.parts and id(value) not in found:
                found[id(value)] = _Fingerprint.of(value, self)
                if found[id(value)].error:
                    self.parts[id(value)] = Part(path, value, Kind.OPAQUE)
        if before:
            self.parts = {key: part for key, part in self.parts.items() if part.path in before}
        return {key: fingerprint for key, fingerprint in found.items() if not fingerprint.error}

    def _entries(self) -> Iterator[tuple[Place, Any]]:
        for part in self.parts.values():
            for name, value in part.entries().items():
                yield (part.path, name), value

    def attributes(self) -> dict[Place, object]:
        """Fingerprints of attributes, which differ between two calls if an attribute has changed, but not in place of a
        tensor.
        """
        parts = [part for part in self.parts.values() if part.kind is not Kind.TENSOR]
        return {
            (part.path, name): _Fingerprint.of(value, self)
            for part in parts
            for name, value in part.entries().items()
            if not (part.kind is Kind.MODULE and name in part.value._buffers)
        }

    def model_has_none(self) -> bool:
        """Whether a quick look shows that the model carries nothing: its attributes are plain, and as built."""
        return self._plain is not None and all(
            len(own) == size and [own.get(name, own) for name in names] == values
            for own, size, names, values in self._plain
        )

    def dump(self) -> tuple[bytes, list[Lost]]:
        """Return the carried state, b"" if there is none, and what cannot be pickled."""
        changed, removed, lost = self._changes()
        if not changed and not removed:
            return b"", lost
        file = io.BytesIO()
        _StatePickler(file, self).dump((changed, removed))
        return file.getvalue(), lost

    def _changes(self) -> tuple[dict[Place, Any], list[Place], list[Lost]]:
        """The entries that differ from the fresh build, those that are no longer there, and what cannot be pickled."""
        now = dict(self._entries())
        changed, lost = {}, []
        for place, value in now.items():
            found = _Fingerprint.of(value, self)
            if found == self._fresh.get(place):
                continue
            if found.error:
                lost.append(Lost(joined(place), f"{_with_article(value)} ({found.error})"))
            else:
                changed[place] = value
        for part in self.parts.values():
            if part.kind is Kind.OPAQUE and isinstance(part.value, Iterator) and not isinstance(part.value, IOBase):
                lost.append(Lost(part.path, f"{_with_article(part.value)}, whose position cannot be read"))
        paths = {part.path for part in self.parts.values()}
        return changed, [place for place in self._fresh if place[0] in paths and place not in now], lost

    def restore(self, content: bytes, settings: bool = True) -> None:
        """Put the state that another build of the trial has dumped into this one, whose state dicts are loaded.

        What belongs to an optimizer or scheduler that is None here is left out.

        Args:
            settings: Whether schedulers and the parameter groups of optimizers are restored; not for another trial.

        Raises:
            CheckpointError: the state does not fit this build.
        """
        self._find_parts()
        if not content:
            return
        try:
            changed, removed = _StateUnpickler(io.BytesIO(content), self).load()
        except (pickle.UnpicklingError, ImportError, AttributeError, TypeError) as error:
            raise CheckpointError(f"its state outside of state dicts cannot be loaded: {error}") from error
        parts = {part.path: part for part in self.parts.values()}
        for place in (*changed, *removed):
            if self.lacks(place[0]):
                continue
            if place[0] not in parts:
                raise CheckpointError(f"it has a value of `{joined(place)}`, which a new build does not have")
            if settings or not _is_setting(place):
                part = parts[place[0]]
                part.set(place[1], changed[place]) if place in changed else part.remove(place[1])

    def lacks(self, path: str) -> bool:
        """Whether a path belongs to an optimizer or scheduler that is None here."""
        return self._roots[re.split(r"[.\[]", path, maxsplit=1)[0]] is None

    def resolve(self, module: str, name: str) -> Any:
        """Return the class or function of a module or, if it was pickled by value with the task, of its globals.

        Raises:
            AttributeError: there is none.
            ImportError: the module cannot be imported.
        """
        for space in self._globals_of(module):
            if (found := _descend(space.get(name.partition(".")[0]), name.split(".")[1:])) is not None:
                return found
        found = _descend(sys.modules.get(module) or importlib.import_module(module), name.split("."))
        if found is None:
            raise AttributeError(f"module {module!r} has no {name!r}")
        return found

    def _globals_of(self, module: str) -> list[dict[str, Any]]:
        """The globals of functions of a module, as the classes of the trial's objects have them."""
        if module not in self._namespaces:
            classes = {each for part in self.parts.values() for each in type(part.value).__mro__}
            functions = [held for each in classes if each.__module__ == module for held in vars(each).values()]
            spaces = {id(f.__globals__): f.__globals__ for f in functions if isinstance(f, FunctionType)}
            self._namespaces[module] = list(spaces.values())
        return self._namespaces[module]


@dataclass(frozen=True)
class _Fingerprint:
    """A value as it was when it was looked at; equal ones have equal fingerprints."""

    content: Any
    error: str = field(default="", compare=False)

    @classmethod
    def of(cls, value: Any, state: CarriedState) -> "_Fingerprint":
        if (part := state.parts.get(id(value))) is not None:
            return cls((part.path,))
        if is_atom(value) or (type(value) in (list, dict) and not value):
            return cls(repr(value))
        content = _Hash()
        try:
            if isinstance(value, (list, tuple, dict)) and len(value) > LARGE and consists_of_atoms(value):
                pickle.Pickler(content, protocol=5).dump(value)  # in a tenth of the time: it calls nothing of ours
            else:
                _StatePickler(content, state, content.add).dump(value)
        except Exception as error:  # of any class, from user code
            return cls(tuple(map(id, pytree.tree_leaves([value]))), str(error) or type(error).__name__)
        return cls(content.digest())


class _Hash:
    """A file that computes the hash of what is written to it."""

    def __init__(self) -> None:
        hashed = hashlib.sha1(usedforsecurity=False)
        self.write, self.digest = hashed.update, hashed.digest

    def add(self, buffer: pickle.PickleBuffer) -> None:
        """Hash the memory of an array, which is not copied for it."""
        self.write(buffer.raw())


def _plain_attributes(model: nn.Module) -> list[tuple[dict[str, Any], int, list[str], list[Any]]] | None:
    """The attributes of each module, their number, and the names and values of those of its own; None if a value is no
    number or text, nor a flat list of these.
    """
    found = []
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in MANAGED_ATTRIBUTES}
        flat = [item for value in own.values() for item in (value if type(value) in (list, tuple) else [value])]
        if module._non_persistent_buffers_set or not all(map(is_atom, flat)):
            return None
        values = [list(value) if type(value) is list else value for value in own.values()]
        found.append((vars(module), len(vars(module)), list(own), values))
    return found


def _is_setting(place: Place) -> bool:
    path = joined(place)
    return path.startswith("scheduler") or ".param_groups" in path


def _with_article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not is_lazy(tensor)


def _descend(value: Any, names: Iterable[str]) -> Any:
    for name in names:
        value = getattr(value, name, None)
    return value


class _StatePickler(pickle.Pickler):
    def __init__(self, file: Any, state: CarriedState, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._state = state

    def persistent_id(self, value: Any) -> str | None:
        part = self._state.parts.get(id(value))
        return None if part is None else part.path

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (type, FunctionType)) and value.__module__ != __name__:
            try:
                found = self._state.resolve(value.__module__, value.__qualname__)
            except (AttributeError, ImportError, ValueError):
                return NotImplemented
            return (_global, (value.__module__, value.__qualname__)) if found is value else NotImplemented
        if isinstance(value, weakref.ReferenceType) and value() is not None:
            return weakref.ref, (value(),)
        return NotImplemented

    def _tensor(self, value: Tensor) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or not _has_memory(value) or value.is_quantized:
            return NotImplemented
        plain_value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = pickle.PickleBuffer(plain_value.reshape(-1).view(torch.uint8).numpy().data)
        moves = value.device == self._state.device
        trained = value.is_leaf and value.requires_grad
        return _made_tensor, (content, value.dtype, value.shape, moves, trained, type(value) is nn.Parameter)


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, state: CarriedState) -> None:
        super().__init__(file)
        self._state = state
        self._values = {part.path: part.value for part in state.parts.values()}

    def persistent_load(self, path: str) -> Any:
        if self._state.lacks(path):
            return None
        if path not in self._values:
            raise pickle.UnpicklingError(f"a new build has no `{path}`")
        return self._values[path]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _global.__name__):
            return self._state.resolve
        found = super().find_class(module, name)
        return partial(_made_tensor, self._state.device) if found is _made_tensor else found


def _global(module: str, name: str) -> Any:
    """Stands for `CarriedState.resolve` in a pickle."""
    raise NotImplementedError


def _made_tensor(
    device: torch.device,
    content: bytes | bytearray,
    dtype: torch.dtype,
    shape: torch.Size,
    moves: bool,
    trained: bool,
    parameter: bool,
) -> Tensor:
    """Return a tensor from the bytes of its elements, on the trial's device if it `moves` there."""
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype) if content else torch.empty(0)
    made = values.to(dtype).reshape(shape).to(device if moves else None)
    return nn.Parameter(made, trained) if parameter else made.requires_grad_(trained)
