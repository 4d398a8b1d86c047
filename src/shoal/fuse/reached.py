"""Lists, dicts and variables that a function and a model refer to, and what a run at once leaves in them.

What is put there while all members run as one would be one entry, where each member by itself makes its own.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["Reached", "nothing_left"]

_OPAQUE = (type, Enum, FunctionType, MethodType, ModuleType, logging.Logger, Tensor, nn.Module)
_CONTAINERS = (list, deque, dict, set, tuple, CellType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEPTH = 4
"""Of containers and objects in each other, from the function or the module on."""
_LARGE = 1000
"""What lies in containers of more entries is not looked at."""
_MISSING = object()


class Reached:
    """What is in lists, dicts, sets and variables now.

    Args:
        fn: what it closes over, its defaults, the globals it names, the object it is a method of, what a `partial`
            gives it, and what lies in these.
        model: what lies in its modules' attributes; the attributes themselves are looked after elsewhere.
        places: `id` of containers, with keys, that are looked after elsewhere as well.
    """

    def __init__(self, fn: Callable[..., Any], model: nn.Module, places: Collection[tuple[int, Any]]) -> None:
        self._places = places
        self._before: dict[int, tuple[Any, Sequence[str] | None, dict[Any, Any]]] = {}
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE and not name.endswith("_hooks"):
                    self._walk(value, _DEPTH)
        self._of_model = set(self._before)
        self._function(fn)

    def check(self) -> None:
        """Refuse what each member has to put there by itself.

        Raises:
            NeedsMemberError: a list has got tensors, or one of the model's anything, or a stacked tensor stands where
                none stood.
        """
        for place, (container, names, before) in self._before.items():
            if isinstance(container, (list, deque)) and len(container) > len(before):
                entries = pytree.tree_leaves(list(container)[len(before) :])
                if place in self._of_model or any(isinstance(entry, Tensor) for entry in entries):
                    raise NeedsMemberError("it appends to a list, of which each member has its own entries")
            for key, value in _items(container, names):
                new = value is not before.get(key, _MISSING) and (id(container), key) not in self._places
                if new and any(isinstance(leaf, Stacked) for leaf in pytree.tree_leaves(value)):
                    raise NeedsMemberError("it puts a tensor into a dict or a variable, where each member has its own")

    def put_back(self) -> bool:
        """Leave in them what was there; returns whether that was not so already."""
        changed = False
        for container, names, before in self._before.values():
            now = dict(_items(container, names))
            if len(now) != len(before) or any(now.get(key, _MISSING) is not value for key, value in before.items()):
                _fill(container, now, before)
                changed = True
        return changed

    def _function(self, fn: Any) -> None:
        if isinstance(fn, partial):
            self._function(fn.func)
            self._walk((*fn.args, *fn.keywords.values()), _DEPTH + 1)
        elif isinstance(fn, MethodType):
            self._function(fn.__func__)
            self._walk(fn.__self__, _DEPTH)
        elif isinstance(fn, FunctionType):
            self._walk((*(fn.__closure__ or ()), *(fn.__defaults__ or ())), _DEPTH + 2)
            names = fn.__code__.co_names
            self._before[id(fn.__globals__)] = fn.__globals__, names, dict(_items(fn.__globals__, names))
            self._walk(tuple(fn.__globals__.get(name) for name in names), _DEPTH + 1)
        else:
            self._walk(fn, _DEPTH)

    def _walk(self, value: Any, depth: int) -> None:
        if not depth or isinstance(value, _OPAQUE):
            return
        if not isinstance(value, _CONTAINERS):
            value = getattr(value, "__dict__", None)
            if not isinstance(value, dict):
                return
        if id(value) in self._before:
            return
        items = dict(_items(value))
        if not isinstance(value, tuple):
            self._before[id(value)] = value, None, items
        if len(items) <= _LARGE:
            for inner in items.values():
                self._walk(inner, depth - 1)


@contextmanager
def nothing_left(fn: Callable[..., Any]) -> Iterator[None]:
    """Within, a function is run that must leave nothing in what it refers to; what it leaves is taken out.

    Raises:
        FusionError: it has left something.
    """
    reached = Reached(fn, nn.Module(), ())
    try:
        yield
    finally:
        changed = reached.put_back()
    if changed:
        raise FusionError("a function keeps state in lists, dicts or variables, which a trace would freeze")


def _items(container: Any, names: Sequence[str] | None = None) -> Iterator[tuple[Any, Any]]:
    """What is in a container, by key or index; of a dict only what is named."""
    if isinstance(container, CellType):
        try:
            return iter([(None, container.cell_contents)])
        except ValueError:  # the variable has no value yet
            return iter(())
    if names is not None:
        return iter([(name, container[name]) for name in names if name in container])
    if isinstance(container, dict):
        return iter(dict.items(container))
    return enumerate(container)


def _fill(container: Any, now: dict[Any, Any], before: dict[Any, Any]) -> None:
    if isinstance(container, CellType):
        if before:
            container.cell_contents = before[None]
        else:
            del container.cell_contents
    elif isinstance(container, dict):
        for key in now.keys() - before.keys():
            dict.pop(container, key)
        dict.update(container, before)
    elif isinstance(container, list):
        container[:] = before.values()
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before.values())
