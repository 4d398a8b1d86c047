"""What a model holds beside its parameters and buffers, and whether running the model changes it."""

import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from shoal.errors import FusionError
from shoal.fuse.stacked import Stacked

__all__ = ["unchanged"]

_PLAIN = (bool, int, float, complex, str, bytes)
_OPAQUE = (type, Enum, FunctionType, MethodType, ModuleType, logging.Logger)


@contextmanager
def unchanged(model: nn.Module, constants: Collection[Tensor]) -> Iterator[None]:
    """Within, a model may change its parameters and buffers and nothing else.

    If it changes attributes, what is in lists, dicts and objects among them, or the values of tensors there, or if
    anything is raised, all of it is put back.

    Args:
        model: with whatever its modules refer to.
        constants: those of its parameters and buffers that must not change either.

    Raises:
        FusionError: the model changed something.
    """
    with _aside():
        held = _Held(model, {id(tensor) for tensor in constants})
    try:
        yield
        with _aside():
            if held.changed():
                raise FusionError(
                    "the model keeps state in plain attributes, which a trace would freeze; keep it in buffers"
                )
    except BaseException:
        with _aside():
            held.put_back()
        raise


class _Held:
    """Containers with what was in them, and tensors with their values.

    Args:
        model: whose.
        constants: `id` of parameters and buffers to be held.
    """

    def __init__(self, model: nn.Module, constants: Collection[int]) -> None:
        registered = {
            id(tensor)
            for module in model.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
        } - set(constants)
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        seen: set[int] = set(registered)
        for value in _within(model, seen):
            if isinstance(value, Tensor):
                whole = value.whole if isinstance(value, Stacked) else value
                self._tensors.append((whole, whole._version, whole.detach().clone()))
            else:
                self._containers.append((value, _items(value)))

    def changed(self) -> bool:
        """Whether anything is not as it was."""
        return any(tensor._version != version for tensor, version, _ in self._tensors) or any(
            not _alike(_items(container), items) for container, items in self._containers
        )

    def put_back(self) -> None:
        """Undo all changes."""
        for tensor, version, saved in self._tensors:
            if tensor._version != version:
                tensor.detach().copy_(saved)
        for container, items in self._containers:
            if _alike(_items(container), items):
                continue
            if isinstance(container, list):
                container[:] = items
                continue
            container.clear()
            if isinstance(container, deque):
                container.extend(items)
            else:
                container.update(items)


@contextmanager
def _aside() -> Iterator[None]:
    """Within, neither a tracer nor a rule notices what is done to tensors."""
    with torch.no_grad(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield


def _within(value: Any, seen: set[int]) -> Iterator[Any]:
    """Every mutable container and tensor that a value refers to, itself included."""
    if id(value) in seen or isinstance(value, (*_PLAIN, *_OPAQUE)):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for name, held in vars(value).items():
            if name not in ("_parameters", "_buffers"):
                yield from _within(held, seen)
        for tensor in (*value._parameters.values(), *value._buffers.values()):
            yield from _within(tensor, seen)
        yield vars(value)
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, set, deque, tuple, frozenset)):
        if not isinstance(value, (tuple, frozenset)):
            yield value
        for item in [*(value.values() if isinstance(value, dict) else value)]:
            yield from _within(item, seen)
    elif hasattr(value, "__dict__"):
        yield from _within(vars(value), seen)


def _items(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _alike(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(_same, items, others))


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return _alike(list(value), list(other))
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)
