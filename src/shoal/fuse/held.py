"""What a model holds beside its parameters and buffers, and whether running the model changes it."""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from shoal.core.errors import FusionError
from shoal.fuse.stacked import Stacked

__all__ = ["Held", "unchanged"]

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
        held = Held([model], {id(tensor) for tensor in constants}, values=True)
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


class Held:
    """What is in containers, and in those within, and tensors, as they are when this is made.

    Args:
        holders: models, or lists, dicts, sets and deques; the parameters and buffers of models are left out.
        constants: `id` of parameters and buffers to be held.
        values: copy those of tensors, to put them back.
    """

    def __init__(self, holders: Iterable[Any], constants: Collection[int] = (), values: bool = False) -> None:
        holders = list(holders)
        seen = {
            id(tensor)
            for model in holders
            if isinstance(model, nn.Module)
            for module in model.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
        } - set(constants)
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []
        for value in chain.from_iterable(_within(holder, seen) for holder in holders):
            if isinstance(value, Tensor):
                whole = value.whole if isinstance(value, Stacked) else value
                self._tensors.append((whole, _version(whole), whole.detach().clone() if values else None))
            else:
                self._containers.append((value, _items(value)))

    def changed(self) -> bool:
        """Whether anything is not as it was."""
        return any(_version(tensor) != version for tensor, version, _ in self._tensors) or any(
            not _alike(_items(container), items) for container, items in self._containers
        )

    def put_back(self) -> None:
        """Undo all changes; of tensors if their values were copied."""
        for tensor, version, saved in self._tensors:
            if saved is not None and _version(tensor) != version:
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


def _within(holder: Any, seen: set[int]) -> Iterator[Any]:
    """Every mutable container and tensor that a value refers to, itself included."""
    left = [holder]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (*_PLAIN, *_OPAQUE)):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            left += (held for name, held in vars(value).items() if name not in ("_parameters", "_buffers"))
            left += (*value._parameters.values(), *value._buffers.values())
            yield vars(value)
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, set, deque, tuple, frozenset)):
            left += value.values() if isinstance(value, dict) else value
            if not isinstance(value, (tuple, frozenset)):
                yield value
        elif hasattr(value, "__dict__"):
            left.append(vars(value))


def _version(tensor: Tensor) -> int:
    """Grows with what is written to a tensor; those of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _items(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _alike(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(_same, items, others))


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return _alike(list(value), list(other))
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)
