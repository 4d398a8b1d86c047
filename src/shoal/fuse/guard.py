"""Guards on attributes in which members differ: a function that reads such an attribute is refused.

Forward passes seldom read the configurations and tables of a model, such as the `peft_config` and ranks of adapters. So
models that differ only there count as equal in structure. The template of the array holds the first member's values,
and a guard refuses reads of the values that differ.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.randomness import active_source
from shoal.fuse.stacked import NeedsMemberError

__all__ = ["Differences", "differences", "guard", "is_guarded", "refuse_user_access"]

Differences = Mapping[Any, "Differences | None"]
"""Key or attribute name of a value that differs -> the differences within the value, or None if all of it differs."""


def differences(values: Sequence[Any], texts: Sequence[Callable[[Any], str]]) -> "Differences | None":
    """Find the differences between the members' values of an attribute; None if a guard is impossible.

    A guard replaces a dict, a list of strings, or an object whose state is its `__dict__`, of the same class in all
    members; torch reads lists of numbers past any guard. A differing value in a dict or an object must not contain
    tensors, modules or floats: arrays keep these for each member. Equal `texts` mean equal values.
    """
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        return None
    if kind is list:
        return {} if all(isinstance(part, str) for value in values for part in value) else None
    if kind is not dict and (isinstance(values[0], _NOT_GUARDED) or not _has_only_dict_state(values[0])):
        return None
    tables = [value if kind is dict else vars(value) for value in values]
    if any(table.keys() != tables[0].keys() for table in tables):
        return None
    found: dict[Any, Differences | None] = {}
    for key in tables[0]:
        theirs = [table[key] for table in tables]
        if len({text(value) for text, value in zip(texts, theirs, strict=True)}) == 1:
            continue
        if all(map(_is_plain, theirs)):
            found[key] = None
        elif (below := differences(theirs, texts)) is not None:
            found[key] = below
        else:
            return None
    return found or None  # empty if only the order of keys differs


def guard(container: dict[Any, Any], key: Any, differing: Differences, path: str) -> None:
    """Replace a value in the attributes of a module or an object, or in a dict, by a guarded version of it."""
    value = container[key]
    whole = frozenset(inner for inner, below in differing.items() if below is None)
    if type(value) in _GUARDED:
        value = container[key] = _GUARDED[type(value)](value)
        value.path, value.differing = path, whole
    for inner, below in differing.items():
        if below is not None:
            guard(value if isinstance(value, dict) else vars(value), inner, below, f"{path}.{inner}")
    if not isinstance(value, (_GuardedDict, _GuardedList)):
        try:
            value.__class__ = _guarded_class(cast("Hashable", type(value)), whole, path)
        except TypeError as error:
            raise FusionError(f"the members differ in {path!r}, which cannot be guarded: {error}") from error


def is_guarded(value: Any) -> bool:
    """Whether a value is a guarded version of another one."""
    return type(value) in _GUARDED.values() or "_is_guarded" in vars(type(value))


def refuse_user_access(what: str, frame: FrameType) -> None:
    """Refuse an operation of user code (outside of Shoal and torch) while an array runs for all members at once."""
    source = active_source()
    if source is None or source.single_member:
        return
    if frame.f_globals.get("__name__", "").partition(".")[0] not in ("shoal", "torch"):
        raise NeedsMemberError(f"{what}, in which the members differ")


def _guarded_method(kind: type, name: str, keyed: bool) -> Any:
    """A method of a guarded dict or list that refuses access to differing keys, or every access."""
    method = getattr(kind, name)

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not keyed or args[0] in self.differing:
            what = f"{self.path}[{args[0]!r}]" if keyed else self.path
            refuse_user_access(f"it reads or changes {what!r}", sys._getframe(1))
        return method(self, *args, **kwargs)

    return guarded


class _GuardedDict(dict[Any, Any]):
    path: str
    differing: frozenset[Any]

    def __iter__(self) -> Iterator[Any]:
        """The keys. Overridden so that `dict(self)` and `**self` read values through `__getitem__`."""
        return super().__iter__()


class _GuardedList(list[Any]):
    path: str
    differing: frozenset[Any]

    def __radd__(self, other: list[Any]) -> list[Any]:
        refuse_user_access(f"it reads {self.path!r}", sys._getframe(1))
        return [*other, *self]


_GUARDED: dict[type, Any] = {dict: _GuardedDict, list: _GuardedList}

_KEYED_METHODS = ("__getitem__", "__setitem__", "__delitem__", "get", "pop", "setdefault")
_UNKEYED_METHODS = (
    "__eq__",
    "__ne__",
    "__repr__",
    "__or__",
    "__ior__",
    "items",
    "values",
    "copy",
    "update",
    "clear",
    "popitem",
)
_LIST_METHODS = {name for name in vars(list) if callable(getattr(list, name))} - vars(object).keys()

for _name in _KEYED_METHODS:
    setattr(_GuardedDict, _name, _guarded_method(dict, _name, keyed=True))
for _name in _UNKEYED_METHODS:
    setattr(_GuardedDict, _name, _guarded_method(dict, _name, keyed=False))
for _name in _LIST_METHODS | {"__eq__", "__ne__", "__repr__"}:
    setattr(_GuardedList, _name, _guarded_method(list, _name, keyed=False))


@cache
def _guarded_class(kind: Any, differing: frozenset[str], path: str) -> type:
    """A subclass whose instances refuse reads and writes of differing attributes."""

    def get(self: Any, name: str) -> Any:
        if name in differing or name == "__dict__":
            refuse_user_access(f"it reads {path}.{name}", sys._getframe(1))
        return kind.__getattribute__(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        if name in differing:
            refuse_user_access(f"it sets {path}.{name}", sys._getframe(1))
        kind.__setattr__(self, name, value)

    own = {
        "__getattribute__": get,
        "__setattr__": put,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_is_guarded": True,
    }
    return type(kind.__name__, (kind,), own)


def _is_plain(value: Any) -> bool:
    """Whether a value consists of integers, strings, None, enum members, and containers of these."""
    if isinstance(value, dict):
        return all(_is_plain(part) for item in value.items() for part in item)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, str, bytes, Enum))


class _Plain:
    """A class without slots or state in C."""


def _has_only_dict_state(value: Any) -> bool:
    """Whether the `__dict__` of an object is all of its state."""
    return hasattr(value, "__dict__") and type(value).__basicsize__ == _Plain.__basicsize__


_NOT_GUARDED = (nn.Module, Tensor, type, Enum, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
