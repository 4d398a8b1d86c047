"""Deep copies of models whose functions in attributes (a patched `forward`, a hook, a callback) refer to the copy.

`copy.deepcopy` does not copy functions, so functions of the copy would still refer to modules of the original model.
Here, a part of a model is one of its modules, parameters or buffers.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn

from shoal.core.errors import FusionError

__all__ = ["closure_values", "copy_model", "copy_training", "find_reference", "find_unbindable"]

_PLAIN = {type(None), bool, int, float, str}
_CONTAINERS = (list, tuple, set, frozenset, deque)
_REGISTERED = {"_parameters", "_buffers", "_modules", "_flat_weight_refs"}
"""Attributes that are handled elsewhere. `_flat_weight_refs`, which torch sets in recurrent layers, is never read."""


def closure_values(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the variables that a function closes over; variables without a value are skipped."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def find_unbindable(model: nn.Module) -> str | None:
    """Return the path of an attribute that refers to a part that `copy_model` cannot replace, or None.

    It cannot replace tensors that a function closes over, nor any part in a list or dict that a function closes over.
    """
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in _PLAIN or name in _REGISTERED:
                continue
            if _is_unreplaceable(value, parts, False, set()):
                return f"{path}.{name}" if path else name
    return None


def find_reference(root: nn.Module, parts: set[int], leave_out: Iterable[nn.Module] = ()) -> str | None:
    """Return the path of an attribute that refers to modules or tensors by `id`, also indirectly, or None."""
    for path, module in root.named_modules(memo=set(leave_out)):
        for name, value in vars(module).items():
            if name not in _REGISTERED and _contains(value, parts, set()):
                return f"{path}.{name}" if path else name
    return None


def _is_unreplaceable(value: Any, parts: set[int], closed: bool, seen: set[int]) -> bool:
    """Whether a value refers to a part of the model that cannot be replaced in a copy."""
    if id(value) in seen or isinstance(value, nn.Module):
        return False
    if isinstance(value, Tensor):
        return closed and id(value) in parts
    seen.add(id(value))
    if isinstance(value, FunctionType):
        return any(_is_unreplaceable(inner, parts, True, seen) for inner in _contents(value))
    if isinstance(value, partial):
        return any(_is_unreplaceable(inner, parts, closed, seen) for inner in _contents(value))
    if isinstance(value, MethodType):
        return any(id(held) in parts and isinstance(held, Tensor) for held in _attributes(value.__self__))
    if isinstance(value, BuiltinFunctionType):
        return id(value.__self__) in parts
    if isinstance(value, ReferenceType):
        return id(value()) in parts
    if hasattr(value, "cache_info"):  # a function decorated by functools.lru_cache
        return _contains(value.__wrapped__, parts, set())
    if isinstance(value, Mapping):
        values = list(value.values())
    elif isinstance(value, _CONTAINERS):
        values = list(value)
    else:
        values = [] if closed else _attributes(value)
    if isinstance(value, (set, frozenset, deque)):
        return any(_contains(inner, parts, set()) for inner in values if closed or not isinstance(inner, nn.Module))
    if closed and not isinstance(value, tuple):
        return any(_contains(inner, parts, set()) for inner in values)
    return any(_is_unreplaceable(inner, parts, closed, seen) for inner in values)


def _contains(value: Any, parts: set[int], seen: set[int]) -> bool:
    if id(value) in parts:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_contains(inner, parts, seen) for inner in _contents(value))


def _attributes(value: Any) -> list[Any]:
    return [] if isinstance(value, (type, nn.Module)) else list(getattr(value, "__dict__", {}).values())


def _contents(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*closure_values(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return [value.__self__]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, _CONTAINERS) else []


def copy_model(model: nn.Module, tensors: Iterable[Tensor]) -> nn.Module:
    """Copy a model without a `find_unbindable`, except for these tensors; the copy's functions refer to its modules."""
    return copy_training(model, [], {id(tensor): tensor for tensor in tensors})[0]


def copy_training(model: nn.Module, optimizers: Sequence[Any], memo: dict[int, Any]) -> tuple[nn.Module, list[Any]]:
    """Copy a model and the optimizers of its parameters, whose functions then refer to the copies.

    Args:
        memo: Memo of `copy.deepcopy`: `id` of an object -> its copy.

    Raises:
        FusionError: Something in the model or an optimizer cannot be copied.
    """
    kept = {*memo, id(memo)}
    copies = [memo.setdefault(id(one), object.__new__(type(one))) for one in optimizers]
    try:
        copied = copy.deepcopy(model, memo)
        for one, new in zip(optimizers, copies, strict=True):
            held = {name: value for name, value in vars(one).items() if name != "step" or not _counts_calls(value)}
            vars(new).update(copy.deepcopy(held, memo))
    except Exception as error:  # of any class, from a `__deepcopy__` or `__reduce__`
        raise FusionError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and the array runs a copy; keep what "
            "cannot be copied outside of it"
        ) from error
    for path, module in model.named_modules():
        if id(module) not in memo:
            raise FusionError(
                f"{path or 'the model'!r}, a {type(module).__name__}, is not copied when the model is: a class defines "
                "its own copies (as those of Keras do), and the array runs a copy; train this model in plain PyTorch"
            )
    binder = _Binder({key: new for key, new in memo.items() if key not in kept})
    for module in list(copied.modules()):
        for name, value in list(vars(module).items()):
            if name not in _REGISTERED:
                bound = binder.rebind(value)
                if bound is not value:
                    vars(module)[name] = bound
    for new in copies:
        binder.rebind(vars(new))
    return copied, copies


def _counts_calls(step: Any) -> bool:
    """Whether a `step` is that of the class, which an LR scheduler has wrapped to count its calls."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


_PLAIN = {type(None), bool, int, float, str, bytes}


class _Binder:
    """Rebuilds functions that refer to copied objects, each once, so that they refer to the copies.

    Args:
        copies: `id` of an object (a module, an optimizer, a list in an attribute) -> its copy.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._parts = set(copies)
        self._rebuilt: dict[int, Any] = {}

    def rebind(self, value: Any) -> Any:
        """Replace objects in the value of an attribute by their copies; lists, dicts and objects change in place."""
        if isinstance(value, (nn.Module, Tensor, type)):
            return value
        if isinstance(value, (FunctionType, partial, MethodType, BuiltinFunctionType, tuple)):
            return self._rebuild(value)
        if id(value) not in self._rebuilt:
            self._rebuilt[id(value)] = value
            inner = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", {})
            entries = enumerate(inner) if isinstance(inner, list) else inner.items()
            for key, held in [each for each in entries if type(each[1]) not in _PLAIN]:
                new = self.rebind(held)
                if new is not held:
                    inner[key] = new
        return value

    def _rebuild(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) in self._rebuilt:
            return self._rebuilt[id(value)]
        if not _contains(value, self._parts, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            rebuilt = partial(self._rebuild(value.func), *map(self._rebuild, value.args))
            rebuilt.keywords.update({name: self._rebuild(inner) for name, inner in value.keywords.items()})
            vars(rebuilt).update({name: self._rebuild(inner) for name, inner in vars(value).items()})
            return rebuilt
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._rebuild(value.__self__))
        if isinstance(value, BuiltinFunctionType):  # such as the `append` of a list
            return getattr(self._rebuild(value.__self__), value.__name__)
        if isinstance(value, tuple):
            return tuple.__new__(type(value), map(self._rebuild, value))
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        closure = tuple(map(self._cell, function.__closure__ or ()))
        rebuilt = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._rebuilt[id(function)] = rebuilt
        for old, new in zip(function.__closure__ or (), closure, strict=True):
            if new is not old:
                new.cell_contents = self._rebuild(old.cell_contents)
        rebuilt.__defaults__ = function.__defaults__ and tuple(map(self._rebuild, function.__defaults__))
        rebuilt.__kwdefaults__ = function.__kwdefaults__ and {
            name: self._rebuild(value) for name, value in function.__kwdefaults__.items()
        }
        rebuilt.__qualname__ = function.__qualname__
        rebuilt.__module__ = function.__module__
        vars(rebuilt).update({name: self._rebuild(value) for name, value in vars(function).items()})
        return rebuilt

    def _cell(self, cell: CellType) -> CellType:
        """The closure variable, or a new empty one if it refers to a part; functions that share a variable still do."""
        try:
            holds = _contains(cell.cell_contents, self._parts, set())
        except ValueError:
            return cell
        return self._rebuilt.setdefault(id(cell), CellType()) if holds else cell
