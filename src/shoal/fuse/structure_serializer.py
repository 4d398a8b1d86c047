"""Serialises the attributes of a model to text; values that an array can replace by other members' are omitted."""

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

from shoal.fuse.model_copy import closure_values
from shoal.fuse.rows import dense_parts, is_packed, packed_state

__all__ = ["StructureSerializer", "digest"]

_OF_EVERY_CLASS = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"),
    *("__static_attributes__", "__slotnames__", "_abc_impl"),
}
_LONG = 64
"""Length above which bytes, and a dict or list of numbers and strings, are described by a digest."""

_LARGE = 2**32
"""Lower bound of results of `id` and `hash`; hashes of small integers, which equal the integers, are below it."""

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
"""An address, as in the default `repr` of an object."""


def digest(parts: Iterable[Any]) -> str:
    """A digest of the `repr` of some values."""
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=12).hexdigest()


class _Replaceable(NamedTuple):
    """Kinds of values that an array can replace by other members' values when it runs."""

    number: bool
    tensor: bool
    within: bool

    @property
    def inner(self) -> "_Replaceable":
        """Parts that can be replaced in entries of a list, values of a dict and attributes of an object."""
        return self._replace(tensor=self.within)

    @property
    def fixed(self) -> "_Replaceable":
        """Parts that can be replaced in fixed entries: those of a tuple or a set, and the keys of a dict."""
        return self._replace(number=False, tensor=self == _NOT_FOLLOWED)

    @property
    def referenced(self) -> "_Replaceable":
        """Parts that can be replaced in values that a function or an opaque object refers to."""
        return _NOT_FOLLOWED if self == _NOT_FOLLOWED else _FIXED


_REPLACEABLE = _Replaceable(True, True, True)
_FIXED = _Replaceable(False, False, False)
_NOT_FOLLOWED = _Replaceable(False, True, True)
"""For objects that functions refer to: these may refer to other members, so their tensors and modules are omitted."""


_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_CALLABLES = (
    *(MethodType, FunctionType, CodeType, BuiltinFunctionType),
    *(partial, property, staticmethod, classmethod),
)


class StructureSerializer:
    """Describes the attributes of one model.

    With `cross_process`, it omits values that differ between processes for the same model: integers as large as results
    of `id` and `hash`, addresses in strings, and the order of a mapping, which may come from a set. Classes and
    functions of a script are then described by their contents.
    """

    def __init__(self, model: nn.Module, cross_process: bool = False) -> None:
        self._cross_process = cross_process
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._paths.update({id(tensor): name for name, tensor in model.named_parameters()})
        self._paths.update({id(tensor): name for name, tensor in model.named_buffers()})
        self._first: dict[int, str] = {}
        self._classes: dict[int, str] = {}

    def attribute(self, value: Any) -> str:
        """Describe an attribute of a module."""
        return self._describe(value, (), _REPLACEABLE)

    def hooks(self, value: Mapping[Any, Any]) -> str:
        """Describe a module's hooks of one kind, without their ids."""
        return str([self._describe(hook, (), _FIXED) for hook in value.values()])

    def kind(self, value: type) -> str:
        """Describe a class by its name, and by its contents if it cannot be imported by name."""
        name = f"{value.__module__}.{value.__qualname__}"
        if self._is_named(value):
            return name
        if id(value) not in self._classes:
            self._classes[id(value)] = name  # used if the contents refer to the class itself
            made = {k: v for k, v in vars(value).items() if k not in _OF_EVERY_CLASS}
            self._classes[id(value)] = (
                f"{name} {digest([self._describe(made, (), _FIXED), *map(self.kind, value.__bases__)])}"
            )
        return self._classes[id(value)]

    def tensor(self, tensor: Tensor | None, path: str) -> str:
        """Describe a tensor by its shape and type, and by the path of an earlier occurrence."""
        if tensor is None:
            return "none"
        tied = self._first.setdefault(id(tensor), path)
        frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
        packed = f" {self._describe_packed(tensor)}" if is_packed(tensor) else ""
        return f"{tuple(tensor.shape)} {tensor.dtype}{frozen}{packed}" + (f" tied to {tied}" if tied != path else "")

    def _describe(self, value: Any, above: tuple[int, ...], replaceable: _Replaceable) -> str:
        if (text := self._describe_simple(value, replaceable)) is not None:
            return text
        if id(value) in above:
            return "above"
        above = (*above, id(value))
        if isinstance(value, Tensor):
            return self._describe_tensor(value, replaceable)
        if isinstance(value, nn.Module):
            return self._describe_module(value, replaceable)
        if isinstance(value, type):
            return f"class {self.kind(value)}"
        kind = self.kind(type(value))
        if isinstance(value, _CONTAINERS):
            return self._describe_container(value, kind, above, replaceable)
        if isinstance(value, _CALLABLES):
            return self._describe_callable(value, kind, above, replaceable)
        if isinstance(value, np.ndarray) and value.dtype == object:
            return f"{kind} {value.shape} {[self._describe(each, above, replaceable.fixed) for each in value.ravel()]}"
        if isinstance(value, (np.generic, np.ndarray)):
            return f"{kind} {value.dtype} {value.tolist()!r}"
        if isinstance(value, (slice, range)):
            return repr(value)
        if isinstance(value, Enum):
            return f"{kind} {value.name}"
        if isinstance(value, RemovableHandle):
            return kind  # the hook is described where it is registered, and the handle's id differs between members
        if isinstance(value, ReferenceType):
            return f"{kind} {[self._describe(value(), above, replaceable.referenced)]}"
        attributes = getattr(value, "__dict__", None)
        state = [self._describe(each, above, replaceable.referenced) for each in _state(value, attributes)]
        own = [self._describe_attributes(attributes, above, replaceable.inner)] if attributes else []
        return " ".join([kind, *own, *state])

    def _describe_simple(self, value: Any, replaceable: _Replaceable) -> str | None:
        """Describe a simple value, such as a number or a string; None for any other value."""
        if isinstance(value, float):
            return "float" if replaceable.number else repr(value)
        if isinstance(value, bytes) and len(value) > _LONG:
            return f"bytes {digest([value])}"
        if self._cross_process and isinstance(value, int) and abs(value) >= _LARGE:
            return "large int"
        if self._cross_process and isinstance(value, str):
            return repr(_ADDRESS.sub("0x", value))
        if value is None or isinstance(value, (bool, int, complex, str, bytes, torch.dtype, torch.Size)):
            return repr(value)
        return value.type if isinstance(value, torch.device) else None

    def _describe_container(self, value: Any, kind: str, above: tuple[int, ...], replaceable: _Replaceable) -> str:
        if not self._cross_process and _is_large_table(value):
            return f"{kind} {digest([repr(value)])}"
        if isinstance(value, Mapping):
            keys, values = value.keys(), value.values()
            names = [self._describe(key, above, replaceable.fixed) for key in keys]
            texts = [self._describe(each, above, replaceable.inner) for each in values]
            items = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
            return f"{kind}{{{', '.join(sorted(items) if self._cross_process else items)}}}"
        there = replaceable.inner if isinstance(value, list) else replaceable.fixed
        entries = [self._describe(each, above, there) for each in value]
        return f"{kind}({', '.join(sorted(entries) if isinstance(value, (set, frozenset)) else entries)})"

    def _describe_callable(self, value: Any, kind: str, above: tuple[int, ...], replaceable: _Replaceable) -> str:
        """Describe a function, a method, code, or a descriptor that calls functions."""
        referenced = replaceable.referenced
        if isinstance(value, MethodType):
            function, owner = (
                self._describe(value.__func__, above, referenced),
                self._describe(value.__self__, above, referenced),
            )
            return f"method {[function]} of {[owner]}"
        if isinstance(value, FunctionType):
            return f"function {self._describe_function(value, above, referenced)}"
        if isinstance(value, CodeType):
            constants = [self._describe(each, above, _FIXED) for each in value.co_consts]
            return f"code {digest([value.co_code, value.co_names, constants])}"
        if isinstance(value, BuiltinFunctionType):
            of_module = value.__self__ is None or isinstance(value.__self__, ModuleType)
            of = "" if of_module else f" of {[self._describe(value.__self__, above, referenced)]}"
            return f"{value.__module__}.{value.__qualname__}{of}"
        if isinstance(value, partial):
            named = self._describe(dict(value.keywords), above, replaceable._replace(number=False))
            called = [self._describe(each, above, replaceable.fixed) for each in (value.func, value.args)]
            return f"{kind} {called} {[named]}"
        return f"{kind} {[self._describe(each, above, referenced) for each in _functions(value)]}"

    def _describe_tensor(self, tensor: Tensor, replaceable: _Replaceable) -> str:
        own = self._paths.get(id(tensor))
        if replaceable.tensor:
            return f"tensor {self.tensor(tensor, '(attribute)')}"
        if own is not None:
            return f"the tensor at {own!r}"
        return f"tensor {tuple(tensor.shape)} {tensor.dtype} {_values(tensor)}"

    def _describe_packed(self, tensor: Tensor) -> str:
        """Describe the class of a packed parameter, and how it is packed; the values of its scales are omitted."""
        held = {
            path: f"{tuple(each.shape)} {each.dtype}" if isinstance(each, Tensor) else repr(each)
            for path, each in packed_state(tensor).items()
        }
        return f"{self.kind(type(tensor))} {held}"

    def _describe_module(self, module: nn.Module, replaceable: _Replaceable) -> str:
        if replaceable != _FIXED:
            return f"module {type(module).__qualname__}"
        own = self._paths.get(id(module))
        if own is not None:
            return f"the module at {own!r}"
        tensors = [f"{name} {_values(tensor)}" for name, tensor in module.state_dict().items()]
        return f"module {type(module).__qualname__} {digest(tensors)}"

    def _describe_attributes(
        self, attributes: dict[str, Any], above: tuple[int, ...], replaceable: _Replaceable
    ) -> str:
        """Describe an object's attributes; floats and plain tensors by value if they cannot be replaced."""
        if replaceable.within:
            return self._describe(attributes, above, replaceable)
        plain = {k: v for k, v in attributes.items() if type(v) in (float, Tensor)}
        rest = {k: v for k, v in attributes.items() if k not in plain}
        return f"{self._describe(plain, above, _FIXED)} {self._describe(rest, above, _NOT_FOLLOWED)}"

    def _is_named(self, value: Any) -> bool:
        """Whether its name identifies a class or function; names in a script do not, since workers do not have them."""
        return _importable(value) and not (self._cross_process and value.__module__ == "__main__")

    def _describe_function(self, function: FunctionType, above: tuple[int, ...], referenced: _Replaceable) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        if self._is_named(function):
            return name
        parts = [function.__code__, list(closure_values(function)), function.__defaults__, function.__kwdefaults__]
        return f"{name} {[self._describe(part, above, referenced) for part in parts]}"


def _importable(value: Any) -> bool:
    """Whether a class or function can be imported by its name, and so is the same object in all members."""
    found: Any = imported.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _functions(value: Any) -> Iterator[Any]:
    """The functions of a property, a class method or a static method."""
    return (f for f in (getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel")) if f is not None)


def _state(value: Any, attributes: dict[str, Any] | None) -> list[Any]:
    """The state of an object that pickle would store besides its attributes; empty if it cannot be pickled."""
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
    if (
        isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
    ):  # the second part is the state of slots
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
    parts = [part.detach().cpu().resolve_conj().resolve_neg() for part in dense_parts(tensor)]
    return f"of values {digest(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)}"


def _is_large_table(value: Any) -> bool:
    """Whether a value is a large dict or list, such as a vocabulary, of numbers and strings that `repr` tells apart."""
    if type(value) not in (dict, list) or len(value) <= _LONG:
        return False
    entries = (*value, *value.values()) if isinstance(value, dict) else value
    return set(map(type, entries)) <= {int, str, bool, type(None)}
