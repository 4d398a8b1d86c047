"""Descriptions of the attributes of a model, by which models are compared.

Floats and tensors are left open where another member's can take their place; elsewhere they are described by value.
"""

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from pickle import PicklingError
from sys import modules as imported
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.fuse.bindings import cells

__all__ = ["StructureSerializer", "digest"]

_OF_EVERY_CLASS = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"),
    *("__static_attributes__", "__slotnames__", "_abc_impl"),
}
_LONG = 64
"""Number of bytes above which a bytes object is described by its digest."""

_LARGE = 2**32
"""Lower bound for results of `id` and `hash`, except for small numbers, which are their own hashes."""

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
"""An address, as in the default `repr` of an object."""


def digest(parts: Iterable[Any]) -> str:
    """A digest of the `repr` of some values."""
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=12).hexdigest()


class _Standing(NamedTuple):
    """Which values of another member can be put in the place of a value, or within it, when the array runs.

    Args:
        number: Whether another float can.
        tensor: Whether another tensor can.
        within: Whether other tensors can be put in lists, dicts and objects within the value.
    """

    number: bool
    tensor: bool
    within: bool

    @property
    def inner(self) -> "_Standing":
        """The same for the entries of a list, the values of a dict and the attributes of an object."""
        return self._replace(tensor=self.within)

    @property
    def fixed(self) -> "_Standing":
        """The same for entries that cannot be replaced: those of a tuple or a set, and the keys of a dict."""
        return self._replace(number=False, tensor=self == _UNSEEN)

    @property
    def held(self) -> "_Standing":
        """The same for values that a function or an opaque object holds."""
        return _UNSEEN if self == _UNSEEN else _SHUT


_OPEN = _Standing(True, True, True)
_SHUT = _Standing(False, False, False)
_UNSEEN = _Standing(False, True, True)
"""Standing within objects that functions hold: these may refer even to other members, and are not followed."""


_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_CALLABLES = (
    *(MethodType, FunctionType, CodeType, BuiltinFunctionType),
    *(partial, property, staticmethod, classmethod),
)


class StructureSerializer:
    """Describes the attributes of one model.

    Args:
        model: Model whose modules and tensors are described by their paths.
        lasting: Whether to leave open values that differ between processes for the same model: numbers as large as
            those of `id` and `hash`, addresses in strings, the order of a mapping, which may come from a set. Classes
            and functions of a script are described by their contents.
    """

    def __init__(self, model: nn.Module, lasting: bool = False) -> None:
        self._lasting = lasting
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._paths.update({id(tensor): name for name, tensor in model.named_parameters()})
        self._paths.update({id(tensor): name for name, tensor in model.named_buffers()})
        self._first: dict[int, str] = {}
        self._classes: dict[int, str] = {}

    def attribute(self, value: Any) -> str:
        """Describe an attribute of a module."""
        return self._any(value, (), _OPEN)

    def hooks(self, value: Mapping[Any, Any]) -> str:
        """Describe a module's hooks of one kind, without their ids."""
        return str([self._any(hook, (), _SHUT) for hook in value.values()])

    def kind(self, value: type) -> str:
        """Describe a class by its name, and by its contents if it cannot be imported by name."""
        name = f"{value.__module__}.{value.__qualname__}"
        if self._is_named(value):
            return name
        if id(value) not in self._classes:
            self._classes[id(value)] = name  # for contents that refer to the class
            made = {k: v for k, v in vars(value).items() if k not in _OF_EVERY_CLASS}
            self._classes[id(value)] = (
                f"{name} {digest([self._any(made, (), _SHUT), *map(self.kind, value.__bases__)])}"
            )
        return self._classes[id(value)]

    def tensor(self, tensor: Tensor | None, path: str) -> str:
        """Describe a tensor by its shape and type, and by the path of an earlier occurrence."""
        if tensor is None:
            return "none"
        tied = self._first.setdefault(id(tensor), path)
        frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
        return f"{tuple(tensor.shape)} {tensor.dtype}{frozen}" + (f" tied to {tied}" if tied != path else "")

    def _any(self, value: Any, above: tuple[int, ...], standing: _Standing) -> str:
        """Describe any value.

        Args:
            value: Value to describe.
            above: `id` of the values in which it is nested.
            standing: Values that another member may have in its place.
        """
        if (text := self._simple(value, standing)) is not None:
            return text
        if id(value) in above:
            return "above"
        above = (*above, id(value))
        if isinstance(value, Tensor):
            return self._tensor(value, standing)
        if isinstance(value, nn.Module):
            return self._module(value, standing)
        if isinstance(value, type):
            return f"class {self.kind(value)}"
        kind = self.kind(type(value))
        if isinstance(value, _CONTAINERS):
            return self._container(value, kind, above, standing)
        if isinstance(value, _CALLABLES):
            return self._callable(value, kind, above, standing)
        if isinstance(value, np.ndarray) and value.dtype == object:
            return f"{kind} {value.shape} {[self._any(each, above, standing.fixed) for each in value.ravel()]}"
        if isinstance(value, (np.generic, np.ndarray)):
            return f"{kind} {value.dtype} {value.tolist()!r}"
        if isinstance(value, (slice, range)):
            return repr(value)
        if isinstance(value, Enum):
            return f"{kind} {value.name}"
        if isinstance(value, RemovableHandle):
            return kind  # its hook is described where it is registered, and its number differs between members
        if isinstance(value, ReferenceType):
            return f"{kind} {[self._any(value(), above, standing.held)]}"
        attributes = getattr(value, "__dict__", None)
        state = [self._any(each, above, standing.held) for each in _state(value, attributes)]
        own = [self._attributes(attributes, above, standing.inner)] if attributes else []
        return " ".join([kind, *own, *state])

    def _simple(self, value: Any, standing: _Standing) -> str | None:
        """Describe a number, a string or the like; None for any other value."""
        if isinstance(value, float):
            return "float" if standing.number else repr(value)
        if isinstance(value, bytes) and len(value) > _LONG:
            return f"bytes {digest([value])}"
        if self._lasting and isinstance(value, int) and abs(value) >= _LARGE:
            return "large int"
        if self._lasting and isinstance(value, str):
            return repr(_ADDRESS.sub("0x", value))
        if value is None or isinstance(value, (bool, int, complex, str, bytes, torch.dtype, torch.Size)):
            return repr(value)
        return value.type if isinstance(value, torch.device) else None

    def _container(self, value: Any, kind: str, above: tuple[int, ...], standing: _Standing) -> str:
        """Describe a mapping, a sequence or a set."""
        if isinstance(value, Mapping):
            keys, values = value.keys(), value.values()
            names = [self._any(key, above, standing.fixed) for key in keys]
            texts = [self._any(each, above, standing.inner) for each in values]
            items = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
            return f"{kind}{{{', '.join(sorted(items) if self._lasting else items)}}}"
        there = standing.inner if isinstance(value, list) else standing.fixed
        entries = [self._any(each, above, there) for each in value]
        return f"{kind}({', '.join(sorted(entries) if isinstance(value, (set, frozenset)) else entries)})"

    def _callable(self, value: Any, kind: str, above: tuple[int, ...], standing: _Standing) -> str:
        """Describe a function, a method, code, or a descriptor that calls functions."""
        held = standing.held
        if isinstance(value, MethodType):
            function, owner = self._any(value.__func__, above, held), self._any(value.__self__, above, held)
            return f"method {[function]} of {[owner]}"
        if isinstance(value, FunctionType):
            return f"function {self._function(value, above, held)}"
        if isinstance(value, CodeType):
            constants = [self._any(each, above, _SHUT) for each in value.co_consts]
            return f"code {digest([value.co_code, value.co_names, constants])}"
        if isinstance(value, BuiltinFunctionType):
            of_module = value.__self__ is None or isinstance(value.__self__, ModuleType)
            of = "" if of_module else f" of {[self._any(value.__self__, above, held)]}"
            return f"{value.__module__}.{value.__qualname__}{of}"
        if isinstance(value, partial):
            named = self._any(dict(value.keywords), above, standing._replace(number=False))
            called = [self._any(each, above, standing.fixed) for each in (value.func, value.args)]
            return f"{kind} {called} {[named]}"
        return f"{kind} {[self._any(each, above, held) for each in _functions(value)]}"

    def _tensor(self, tensor: Tensor, standing: _Standing) -> str:
        own = self._paths.get(id(tensor))
        if standing.tensor:
            return f"tensor {self.tensor(tensor, '(attribute)')}"
        if own is not None:
            return f"the tensor at {own!r}"
        return f"tensor {tuple(tensor.shape)} {tensor.dtype} {_values(tensor)}"

    def _module(self, module: nn.Module, standing: _Standing) -> str:
        if standing != _SHUT:
            return f"module {type(module).__qualname__}"
        own = self._paths.get(id(module))
        if own is not None:
            return f"the module at {own!r}"
        tensors = [f"{name} {_values(tensor)}" for name, tensor in module.state_dict().items()]
        return f"module {type(module).__qualname__} {digest(tensors)}"

    def _attributes(self, attributes: dict[str, Any], above: tuple[int, ...], standing: _Standing) -> str:
        """Describe an object's attributes; numbers and plain tensors by value if no other ones can be put there."""
        if standing.within:
            return self._any(attributes, above, standing)
        plain = {k: v for k, v in attributes.items() if type(v) in (float, Tensor)}
        rest = {k: v for k, v in attributes.items() if k not in plain}
        return f"{self._any(plain, above, _SHUT)} {self._any(rest, above, _UNSEEN)}"

    def _is_named(self, value: Any) -> bool:
        """Whether a name identifies a class or function; names of a script do not, since its workers lack them."""
        return _importable(value) and not (self._lasting and value.__module__ == "__main__")

    def _function(self, function: FunctionType, above: tuple[int, ...], held: _Standing) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        if self._is_named(function):
            return name
        parts = [function.__code__, list(cells(function)), function.__defaults__, function.__kwdefaults__]
        return f"{name} {[self._any(part, above, held) for part in parts]}"


def _importable(value: Any) -> bool:
    """Whether the name of a class or function leads to it, so that it is the same in all members."""
    found: Any = imported.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _functions(value: Any) -> Iterator[Any]:
    """Functions of a property, a class method or a static method."""
    return (f for f in (getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel")) if f is not None)


def _state(value: Any, attributes: dict[str, Any] | None) -> list[Any]:
    """The state of an object that pickle would write besides its attributes; empty if it cannot be pickled."""
    kind = type(value)
    defined = {name for base in kind.__mro__[:-1] for name in vars(base)}
    if attributes is not None and not defined & {"__slots__", "__reduce__", "__reduce_ex__"}:
        return []
    try:
        reduced = value.__reduce_ex__(4)
    except (TypeError, AttributeError, RuntimeError, NotImplementedError, PicklingError):
        return []
    if isinstance(reduced, str):
        return [reduced]
    _, arguments, state, *contents = (*reduced, None, None, None)[:5]
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # of slots
        state = state[1]
    elif attributes is not None and isinstance(state, dict):
        state = None
    return [
        arguments[1:] if arguments[:1] == (kind,) else arguments,
        state,
        *(list(c) for c in contents if c is not None),
    ]


def _values(tensor: Tensor) -> str:
    """A digest of a tensor's elements, which are unknown on the device "meta"."""
    if tensor.is_meta:
        return "of unknown values"
    plain = (
        (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().cpu().resolve_conj().resolve_neg()
    )
    return f"of values {digest([plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()])}"
