"""Snapshots of everything that a call of a function may change, to detect the changes and to roll them back."""

import logging
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, partial
from itertools import chain
from math import inf
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset

from shoal.core.errors import FusionError
from shoal.fuse.container_sync import MODULE_ATTRIBUTES
from shoal.fuse.frozen import same_values
from shoal.fuse.generators import DEFAULT_GENERATORS, GENERATOR_STATES, DrawDetector, PythonRngSnapshot, same_state
from shoal.fuse.stacked import Stacked
from shoal.fuse.unfused_module import modules_of

__all__ = ["FROZEN", "Transaction", "refuse_changes"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (Enum, ModuleType, logging.Logger)
_TRAINING = (Optimizer, LRScheduler, DataLoader)
_CONTAINERS = (list, deque, dict, set)
_REGISTERED = ("_parameters", "_buffers")
_LIBRARIES = frozenset({*sys.stdlib_module_names, "numpy", "shoal", "torch"})
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_DEPTH = 5
"""Number of levels of nested containers and objects that are followed from the names in a function."""
_LARGE = 1000
"""Largest size of a container named in a function at which its entries are followed."""
_MOST_BYTES = 4 << 20
"""Largest tensor or array outside of models, and largest frozen parameter, whose values are kept."""
FROZEN = "a frozen parameter"
"""Name of each of the `constants` in `changes` and `changed_for_good`."""
_MISSING = object()


@dataclass(frozen=True)
class _ContainerSnapshot:
    container: Any
    items: dict[Any, Any]
    label: str
    names: Collection[str] | None = None
    registered: bool = False
    of_model: bool = False

    def now(self) -> dict[Any, Any]:
        return _items(self.container, self.names)

    def changed(self, now: dict[Any, Any]) -> bool:
        return not (_all_same(now, self.items) and _all_same(now.values(), self.items.values()))


class Transaction:
    """Snapshot of everything that a call of a function may change.

    Args:
        models: Attributes of their modules are included, at any depth.
        functions: For them and for user functions that they call, the snapshot includes the variables that they close
            over, their defaults, the globals that they name, the objects of methods, and the contents of all these to
            the depth `_DEPTH`.
        tensors: Parameters and buffers, whose values and gradients are copied.
        constants: Frozen parameters of the models, which a call hardly ever changes. Their values are copied only up to
            `_MOST_BYTES` each, since a pretrained model has many; larger ones are watched.
        classes: Classes whose attributes and methods are included, except those of installed packages.
        left_out: Models and data sets that are left out where functions refer to them.

    Outside of models the values of tensors and arrays of at most `_MOST_BYTES`, and states of random generators, are
    included. Larger tensors are only watched, and larger arrays are left out. `changed_for_good` names what is only
    watched and has changed.
    """

    def __init__(
        self,
        models: Iterable[nn.Module] = (),
        functions: Iterable[Callable[..., Any]] = (),
        tensors: Iterable[Tensor] = (),
        classes: Iterable[type] = (),
        left_out: Iterable[object] = (),
        constants: Iterable[Tensor] = (),
    ) -> None:
        models, tensors, constants = list(models), list(tensors), list(constants)
        registered = [held for model in models for module in modules_of(model) for held in _registered(module)]
        self._left_out = list(left_out)
        self._snapshots: dict[int, _ContainerSnapshot] = {}
        self._visited = {id(tensor) for held in registered for tensor in held.values()} | set(map(id, tensors))
        self._visited |= {*map(id, constants), *map(id, DEFAULT_GENERATORS)}
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._outside: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        with _without_tracing():
            self._values = [(tensor, _version(tensor), tensor.detach().clone()) for tensor in tensors]
            self._gradients = [(each, each.grad, _copied(each.grad)) for each in tensors if each.is_leaf]
            self._generators = (DrawDetector(_device([*tensors, *constants])), PythonRngSnapshot())
            for constant in constants:
                self._record_tensor(constant, FROZEN)
            self._traverse((root, type(root).__name__, inf) for root in models)
            self._traverse((fn, "", _DEPTH) for fn in functions)
            self._traverse((kind, "", _DEPTH) for kind in classes)
        self._left_out.clear()  # a snapshot may outlive them

    def changed(self) -> str | None:
        """The name of the first change since the snapshot, or None; of parameters and buffers only `tensors` count."""
        return next(self.changes(), None)

    def changes(self, entries: bool = True) -> Iterator[str]:
        """Yield the names of all changes since the snapshot.

        Args:
            entries: Whether a new entry of a dict or set, as of a cache, counts as a change.
        """
        for seen in self._snapshots.values():
            if not seen.registered and seen.changed(now := seen.now()):
                before = seen.items
                grows = entries or isinstance(seen.container, (list, deque))
                keys = [
                    key
                    for key in ({**before, **now} if grows else before)
                    if key not in now or key not in before or not _same(now[key], before[key])
                ]
                if seen.label and (keys or entries):
                    yield seen.label
                elif not seen.label:
                    yield from (_entry_name("", key) for key in keys)
        if any(_version(tensor) != version for tensor, version, _ in (*self._tensors, *self._values)):
            yield "a tensor"
        yield from (label for label, tensor, version, _ in self._outside if _version(tensor) != version)
        yield from (label for label, value, saved in self._arrays if not same_state(_state(value), saved))
        for kind, before in self._classes:
            yield from (f"{kind.__name__}.{name}" for name in _changed_attributes(before, _attributes(kind)))

    def changed_for_good(self) -> str | None:
        """The name of the first tensor that has changed and that `restore` leaves; else None."""
        large = ((label, tensor, version) for label, tensor, version, saved in self._outside if saved is None)
        return next((label for label, tensor, version in large if _version(tensor) != version), None)

    def find_stacked(self) -> str | None:
        """The name of the first entry or variable outside of the models that a tensor of all members was put into."""
        for seen in self._snapshots.values():
            for key, value in () if seen.of_model else seen.now().items():
                changed = value is not seen.items.get(key, _MISSING)
                if changed and any(isinstance(leaf, Stacked) for leaf in pytree.tree_leaves(value)):
                    return _entry_name(seen.label, key)
        return None

    def restore(self, left_out: Collection[str] = ()) -> None:
        """Restore the state of the snapshot, except for what has these names in `changes`."""
        with _without_tracing():
            for seen in self._snapshots.values():
                now = seen.now()
                if seen.changed(now) and not (seen.label and seen.label in left_out):
                    _restore_entries(seen, now, left_out)
            for tensor, version, saved in self._tensors:
                # fused optimizer kernels do not change versions
                if _version(tensor) != version or not same_values(tensor, saved):
                    tensor.detach().copy_(saved)
            for label, tensor, version, values in self._outside:
                if values is not None and _version(tensor) != version and label not in left_out:
                    tensor.detach().copy_(values)
            self._outside = [
                (label, tensor, version if values is None else _version(tensor), values)
                for label, tensor, version, values in self._outside
            ]
            for label, value, kept in self._arrays:
                if label in left_out:
                    continue
                if isinstance(value, np.ndarray):
                    value[...] = kept
                else:
                    GENERATOR_STATES[type(value)][1](value, kept)
            for tensor, _, saved in self._values:  # includes writes that do not change versions
                if not same_values(tensor, saved):  # an equal tensor must keep its version, which is compared
                    tensor.detach().copy_(saved)
            for tensor, gradient, kept in self._gradients:
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
                tensor.grad = gradient
            for generators in self._generators:
                generators.restore()
            for kind, before in self._classes:
                for name in _changed_attributes(before, _attributes(kind)):
                    if f"{kind.__name__}.{name}" in left_out:
                        continue
                    if name not in before:
                        delattr(kind, name)
                    else:
                        setattr(kind, name, before[name])

    def _traverse(self, roots: Iterable[tuple[Any, str, float]]) -> None:
        """Record every container and tensor that can be reached from the roots, each once, breadth first."""
        to_do = deque(roots)
        while to_do:
            value, label, depth = to_do.popleft()
            if depth < 0 or id(value) in self._visited or isinstance(value, (*_PLAIN, *_OPAQUE)):
                continue
            if isinstance(value, (tuple, frozenset)):  # may be created by this traversal, and contains no cycle
                to_do += ((inner, label, depth - 1) for inner in value)
                continue
            of_model = depth == inf
            if not of_model and isinstance(value, (Tensor, nn.Module, Dataset)) and id(value) in self._left_out_ids:
                continue
            self._visited.add(id(value))
            if isinstance(value, Tensor):
                if of_model:
                    whole = value.whole if isinstance(value, Stacked) else value
                    self._tensors.append((whole, _version(whole), whole.detach().clone()))
                elif not isinstance(value, Stacked):  # which a step of an array has put there
                    self._record_tensor(value, label)
            elif isinstance(value, np.ndarray) or type(value) in GENERATOR_STATES:
                if not of_model and _is_kept(value):
                    self._arrays.append((label, value, _state(value)))
            elif isinstance(value, nn.Module):
                to_do += (
                    self._traverse_module(value, label) if of_model else self._traverse_outside(value, label, depth)
                )
            elif isinstance(value, type):
                to_do += () if of_model else self._traverse_class(value, depth)
            elif isinstance(value, (FunctionType, MethodType, partial)):
                if not of_model:
                    to_do += self._traverse_function(value, label, depth)
            elif isinstance(value, (*_CONTAINERS, CellType)):
                to_do += self._traverse_container(value, label, depth)
            elif isinstance(attributes := getattr(value, "__dict__", None), dict):
                if not of_model and isinstance(value, _TRAINING):
                    continue  # a trial's own, which checkpoints hold, and loaders, which batches come from
                if of_model:
                    to_do += self._traverse_container(attributes, label, depth)
                elif _top_package(type(value)) != "shoal":
                    to_do += self._traverse_container(attributes, type(value).__name__, depth)
                    to_do.append((type(value), label, depth - 1))

    @cached_property
    def _left_out_ids(self) -> set[int]:
        """The ids of objects that are left out, and of their parts; read only if a snapshot meets any."""
        return {id(each) for one in self._left_out for each in _parts(one)}

    def _record_tensor(self, tensor: Tensor, label: str) -> None:
        saved = tensor.detach().clone() if tensor.nbytes <= _MOST_BYTES else None
        self._outside.append((label, tensor, _version(tensor), saved))

    def _traverse_module(self, module: nn.Module, label: str) -> Iterator[tuple[Any, str, float]]:
        self._record(vars(module), label, of_model=True)
        for name, held in vars(module).items():
            if name in _REGISTERED:
                if isinstance(held, dict):  # no dict in modules of torch.jit
                    self._record(held, label, registered=True, of_model=True)
            else:
                yield held, f"{label}.{name}" if name != "_modules" else label, inf

    def _traverse_outside(self, module: nn.Module, label: str, depth: float) -> Iterator[tuple[Any, str, float]]:
        """Record a model that is not a trial's: a teacher, a target network."""
        for path, part in module.named_modules(prefix=label):
            self._visited.add(id(part))
            held = {name: value for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES}
            self._record(vars(part), path, held)
            yield from ((value, f"{path}.{name}", depth - 1) for name, value in held.items())
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                known = tensor is None or id(tensor) in self._visited or id(tensor) in self._left_out_ids
                if not known:
                    self._visited.add(id(tensor))
                    self._record_tensor(tensor, f"{path}.{name}")

    def _traverse_class(self, kind: type, depth: float) -> Iterator[tuple[Any, str, float]]:
        for base in kind.__mro__:
            if (base is kind or id(base) not in self._visited) and not _is_of_library(base):
                self._visited.add(id(base))
                attributes = _attributes(base)
                self._classes.append((base, attributes))
                functions = [getattr(held, "__func__", getattr(held, "fget", held)) for held in vars(base).values()]
                yield from ((held, "", depth) for held in functions if isinstance(held, FunctionType))
                yield from ((held, f"{base.__name__}.{name}", depth - 1) for name, held in attributes.items())

    def _traverse_container(self, container: Any, label: str, depth: float) -> Iterator[tuple[Any, str, float]]:
        items = self._record(container, label, of_model=depth == inf)
        if depth == inf or len(items) <= _LARGE:
            entries = ((key, inner) for key, inner in items.items() if not isinstance(inner, _PLAIN))
            yield from ((inner, _entry_name(label, key), depth - 1) for key, inner in entries)

    def _traverse_function(self, fn: Any, label: str, depth: float) -> Iterator[tuple[Any, str, float]]:
        if isinstance(fn, partial):
            yield fn.func, label, depth
            yield (*fn.args, *fn.keywords.values()), label, depth + 1
        elif isinstance(fn, MethodType):
            yield fn.__func__, label, depth
            yield fn.__self__, label, depth
        elif depth == _DEPTH or not _is_of_library(fn):
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
                yield cell, name, depth
            yield (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()), fn.__name__, depth + 1
            yield from self._traverse_globals(fn.__globals__, {*_names_in(fn.__code__)}, depth)

    def _traverse_globals(
        self, space: dict[str, Any], names: set[str], depth: float
    ) -> Iterator[tuple[Any, str, float]]:
        """Record the globals of these names, and those of other modules of the user that are named as `module.name`."""
        known = self._snapshots.get(id(space))
        held = self._record(space, "", names | set(known.names if known is not None and known.names else ()))
        for name, inner in held.items():
            if isinstance(inner, ModuleType) and not _is_library(inner.__name__) and vars(inner) is not space:
                yield from self._traverse_globals(vars(inner), names, depth - 1) if depth > 0 else ()
            else:
                yield inner, name, depth - 1

    def _record(self, container: Any, label: str, names: Collection[str] | None = None, **kind: bool) -> dict[Any, Any]:
        items = _items(container, names)
        self._snapshots[id(container)] = _ContainerSnapshot(container, items, label, names, **kind)
        return items


def _parts(of: object) -> Iterator[object]:
    """A model's modules, parameters and buffers; of anything else, itself."""
    return chain(of.modules(), of.parameters(), of.buffers()) if isinstance(of, nn.Module) else iter((of,))


def _attributes(kind: type) -> dict[str, Any]:
    """The attributes of a class that are neither methods nor descriptors, nor those of every class."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
    }


def _changed_attributes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if not _same(before.get(name, _MISSING), now.get(name, _MISSING))]


def _names_in(code: CodeType) -> Iterator[str]:
    """The names in a function and in those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@contextmanager
def refuse_changes(
    model: nn.Module, functions: Iterable[Callable[..., Any]] = (), constants: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Context manager that refuses changes of anything but a model's parameters and buffers not among `constants`.

    After a refusal or an error, all changes are rolled back.
    """
    transaction = Transaction([model], functions, constants=constants)
    try:
        yield
        if (label := transaction.changed()) is not None:
            raise FusionError(
                f"`{label}` changes: the step keeps state in plain attributes, lists or variables, which a trace would "
                "freeze; keep it in buffers"
            )
    except BaseException:
        transaction.restore()
        raise


@contextmanager
def _without_tracing() -> Iterator[None]:
    """Context manager in which neither tracers nor fusion rules see functions of tensors."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _items(container: Any, names: Collection[str] | None = None) -> dict[Any, Any]:
    """Entries of a container by key or position; with `names`, only these; no entry for a variable without a value."""
    if isinstance(container, CellType):
        try:
            return {None: container.cell_contents}
        except ValueError:
            return {}
    if names is not None:
        return {name: container[name] for name in names if name in container}
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _restore_entries(seen: _ContainerSnapshot, now: dict[Any, Any], left_out: Collection[str]) -> None:
    container: Any = seen.container
    if isinstance(container, CellType):
        if seen.items:
            container.cell_contents = seen.items[None]
        else:
            del container.cell_contents
    elif isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # not what a subclass makes of it
        stays = {key for key in {**seen.items, **now} if not seen.label and _entry_name("", key) in left_out}
        for key in now.keys() - stays if stays else now:
            kind.__delitem__(container, key)
        for key, value in seen.items.items():
            if key not in stays:
                kind.__setitem__(container, key, value)
    elif isinstance(container, list):
        container[:] = seen.items.values()
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(seen.items.values())


def _all_same(values: Collection[Any], others: Collection[Any]) -> bool:
    return len(values) == len(others) and (all(map(is_, values, others)) or all(map(_same, values, others)))


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return _all_same(value, other)
    if isinstance(value, Stacked):  # also a float in which members differ, which is a float for `isinstance`
        return value is other or (isinstance(other, Stacked) and value.floats == other.floats is not None)
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and bool(value == other))


def _version(tensor: Tensor) -> int:
    """Version counter of a tensor; 0 in inference mode, where tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def _entry_name(label: str, key: Any) -> str:
    """Name of an entry of a container, as user code would write it."""
    if isinstance(key, str) and key.isidentifier():
        return f"{label}.{key}" if label else key
    return f"{label}[{key!r}]" if isinstance(key, _PLAIN) and key is not None else label


def _registered(module: nn.Module) -> Iterator[dict[str, Any]]:
    return (held for name in _REGISTERED if isinstance(held := vars(module).get(name), dict))


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _is_kept(value: Any) -> bool:
    """Whether the state of a random generator, or the values of an array, are kept."""
    return not isinstance(value, np.ndarray) or (value.nbytes <= _MOST_BYTES and not value.dtype.hasobject)


def _state(value: Any) -> Any:
    """Return a copy of an array, or the state of a random generator."""
    return value.copy() if isinstance(value, np.ndarray) else GENERATOR_STATES[type(value)][0](value)


def _top_package(of: Any) -> str:
    """Name of the top-level package of a class or function."""
    return str(of.__module__).partition(".")[0]


def _is_of_library(of: Any) -> bool:
    """Whether a class or function is of Python, torch, NumPy, Shoal or an installed package."""
    return _is_library(str(of.__module__))


def _is_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _LIBRARIES or _is_installed(package)


@cache
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
