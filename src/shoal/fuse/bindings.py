"""Copies of models, with functions in attributes (a patched `forward`, a hook, a callback) bound to the copy's parts.

`copy.deepcopy` does not copy functions, so they would still hold parts of the original model.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn

from shoal.core.errors import FusionError

__all__ = ["cells", "copy_of", "holder", "unbindable"]

_PLAIN = {type(None), bool, int, float, str}
_CONTAINERS = (list, tuple, set, frozenset, deque)
_REGISTERED = {"_parameters", "_buffers", "_modules", "_flat_weight_refs"}
"""Attributes that are handled elsewhere; no run reads the last, which is torch's, of recurrent layers."""


def cells(function: FunctionType) -> Iterator[Any]:
    """Values of the variables that a function closes over, without variables that have no value yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def unbindable(model: nn.Module) -> str | None:
    """The path of an attribute that holds a part of the model that `copy_of` cannot replace, or None.

    Such parts are tensors that a function closes over (modules can be replaced), and any part in a list or dict that it
    closes over.
    """
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in _PLAIN or name in _REGISTERED:
                continue
            if _stuck(value, parts, False, set()):
                return f"{path}.{name}" if path else name
    return None


def holder(root: nn.Module, parts: set[int], leave_out: Iterable[nn.Module] = ()) -> str | None:
    """The path of an attribute that holds, also in functions or lists, one of some modules or tensors, or None.

    Args:
        root: Model whose modules' attributes are searched.
        parts: `id` of the modules and tensors.
        leave_out: Modules that are not searched, with their submodules.
    """
    for path, module in root.named_modules(memo=set(leave_out)):
        for name, value in vars(module).items():
            if name not in _REGISTERED and _holds(value, parts, set()):
                return f"{path}.{name}" if path else name
    return None


def _stuck(value: Any, parts: set[int], closed: bool, seen: set[int]) -> bool:
    """Whether a value holds a part of the model that cannot be replaced.

    Args:
        value: Value of an attribute, or a value nested in it.
        parts: `id` of the model's modules, parameters and buffers.
        closed: Whether a function holds the value.
        seen: `id` of the values visited before.
    """
    if id(value) in seen or isinstance(value, nn.Module):
        return False
    if isinstance(value, Tensor):
        return closed and id(value) in parts
    seen.add(id(value))
    if isinstance(value, FunctionType):
        return any(_stuck(inner, parts, True, seen) for inner in _held(value))
    if isinstance(value, partial):
        return any(_stuck(inner, parts, closed, seen) for inner in _held(value))
    if isinstance(value, MethodType):
        return any(id(held) in parts and isinstance(held, Tensor) for held in _attributes(value.__self__))
    if isinstance(value, BuiltinFunctionType):
        return id(value.__self__) in parts
    if isinstance(value, ReferenceType):
        return id(value()) in parts
    if hasattr(value, "cache_info"):  # of functools.lru_cache
        return _holds(value.__wrapped__, parts, set())
    if isinstance(value, Mapping):
        values = list(value.values())
    elif isinstance(value, _CONTAINERS):
        values = list(value)
    else:
        values = [] if closed else _attributes(value)
    if isinstance(value, (set, frozenset, deque)):
        return any(_holds(inner, parts, set()) for inner in values if closed or not isinstance(inner, nn.Module))
    if closed and not isinstance(value, tuple):
        return any(_holds(inner, parts, set()) for inner in values)
    return any(_stuck(inner, parts, closed, seen) for inner in values)


def _holds(value: Any, parts: set[int], seen: set[int]) -> bool:
    """Whether a value is a part, or holds one in containers or functions."""
    if id(value) in parts:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds(inner, parts, seen) for inner in _held(value))


def _attributes(value: Any) -> list[Any]:
    return [] if isinstance(value, (type, nn.Module)) else list(getattr(value, "__dict__", {}).values())


def _held(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return [value.__self__]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, _CONTAINERS) else []


def copy_of(model: nn.Module, tensors: Iterable[Tensor]) -> nn.Module:
    """Copy a model such that the copy's functions hold the copy's modules.

    Args:
        model: Model for which `unbindable` returns None.
        tensors: Tensors of the model that the copy shares.

    Raises:
        FusionError: A part of the model cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    try:
        copied = copy.deepcopy(model, memo)
    except TypeError as error:
        raise FusionError(
            f"the model cannot be copied ({error}), and the array runs a copy; keep what cannot be copied outside of it"
        ) from error
    binder = _Binder({id(module): memo[id(module)] for module in model.modules()})
    for module in list(copied.modules()):
        for name, value in list(vars(module).items()):
            if name not in _REGISTERED:
                bound = binder.bound(value)
                if bound is not value:
                    vars(module)[name] = bound
    return copied


class _Binder:
    """Rebuilds functions that hold copied modules, so that they hold the copies; each function and variable once.

    Args:
        copies: Copies by the `id` of the modules.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._parts = set(copies)
        self._made: dict[int, Any] = {}

    def bound(self, value: Any) -> Any:
        """Bind the value of an attribute; lists, dicts and objects in it are changed in place."""
        if isinstance(value, (nn.Module, Tensor, type)):
            return value
        if isinstance(value, (FunctionType, partial, MethodType, tuple)):
            return self._again(value)
        if id(value) not in self._made:
            self._made[id(value)] = value
            inner = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", {})
            for key, held in list(enumerate(inner) if isinstance(inner, list) else inner.items()):
                new = self.bound(held)
                if new is not held:
                    inner[key] = new
        return value

    def _again(self, value: Any) -> Any:
        """Rebuild a function, or a value that it holds."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) in self._made:
            return self._made[id(value)]
        if not _holds(value, self._parts, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            again = partial(self._again(value.func), *map(self._again, value.args))
            again.keywords.update({name: self._again(inner) for name, inner in value.keywords.items()})
            vars(again).update({name: self._again(inner) for name, inner in vars(value).items()})
            return again
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._again(value.__self__))
        if isinstance(value, tuple):
            return tuple.__new__(type(value), map(self._again, value))
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        closure = tuple(map(self._cell, function.__closure__ or ()))
        again = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._made[id(function)] = again
        for old, new in zip(function.__closure__ or (), closure, strict=True):
            if new is not old:
                new.cell_contents = self._again(old.cell_contents)
        again.__defaults__ = function.__defaults__ and tuple(map(self._again, function.__defaults__))
        again.__kwdefaults__ = function.__kwdefaults__ and {
            name: self._again(value) for name, value in function.__kwdefaults__.items()
        }
        again.__qualname__ = function.__qualname__
        again.__module__ = function.__module__
        vars(again).update({name: self._again(value) for name, value in vars(function).items()})
        return again

    def _cell(self, cell: CellType) -> CellType:
        """The variable itself, or a new, still empty one if it holds a part; functions may share a variable."""
        try:
            holds = _holds(cell.cell_contents, self._parts, set())
        except ValueError:
            return cell
        return self._made.setdefault(id(cell), CellType()) if holds else cell
