"""What makes two models one structure, and where they differ.

A model is written down as a list of (path, description) entries: modules with their classes, parameters and buffers
with shapes and dtypes, and every other attribute that steers a forward pass. Floats that are attributes of a module, or
of a configuration object it holds (a dropout rate, an eps), are left open: members may differ in them.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Entry", "apart_paths", "digest", "entries", "mismatch", "obstacle"]

Entry = tuple[str, str]
"""A path such as "layers.0.weight" and what stands there."""

_EMPTY_CELL = CellType()
"""Of a variable that is not assigned yet."""

_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version"}
"""Attributes of every module that are written down in a form of their own, or mean nothing."""


def entries(model: nn.Module) -> list[Entry]:
    """Write down a model's structure."""
    first_path: dict[int, str] = {}
    return [entry for place in _places(model) for entry in _written(place, first_path)]


def obstacle(model: nn.Module, alone: bool) -> str | None:
    """Why a model cannot be a member of an array, in words, or None.

    Args:
        model: the candidate.
        alone: in an array of its own it runs as itself, so what its functions hold is no obstacle.
    """
    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {path!r} has a hook, which would not see its own gradient; train this model alone"
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules and not alone:
            return (
                f"{path or 'the model'!r} is what torch.compile returned; fuse the plain model, and compile its steps"
            )
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in () if alone else vars(module).items():
            if any(parts & set(map(id, held)) for held in _closed_over(value)):
                return (
                    f"{_join(path, name)!r} holds a function that closes over a part of the model, and so would be of "
                    "one member for all; make it a method or a functools.partial"
                )
    return None


def _closed_over(value: Any) -> Iterator[list[Any]]:
    """The objects that the functions in an attribute hold."""
    if isinstance(value, FunctionType):
        yield [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
        yield list(value.__defaults__ or ())
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _closed_over(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _closed_over(inner)


def digest(parts: Iterable[Any]) -> str:
    """A short name for anything that can be written down."""
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=12).hexdigest()


def mismatch(first: list[Entry], other: list[Entry]) -> str | None:
    """The first place where two structures differ, in words, or None."""
    for (path_a, what_a), (path_b, what_b) in zip(first, other, strict=False):
        if (path_a, what_a) != (path_b, what_b):
            place = f"at {path_a!r}" if path_a == path_b else f"at {path_a!r} and {path_b!r}"
            return f"{place}: {what_a} against {what_b}"
    if len(first) != len(other):
        longer = first if len(first) > len(other) else other
        return f"at {longer[min(len(first), len(other))][0]!r}: only one has it"
    return None


def apart_paths(models: Sequence[nn.Module]) -> list[str] | None:
    """The smallest submodules in which models differ, by path; None if they differ outside of submodules.

    A module that has no forward pass of its own (a list of modules) is taken with the module that holds it. One that
    stands at several paths is found at each of them, and also if it does not stand at the same paths in all models.
    """
    found: list[str] = []
    places = [list(_places(model)) for model in models]
    written: list[dict[str, list[Entry]]] = []
    for own in places:
        first_path: dict[int, str] = {}
        written.append({place.path: list(_written(place, first_path)) for place in own})
    aliases = [{place.path: place.first for place in own if place.first is not None} for own in places]
    torn = {first for own in aliases for path, first in own.items() if any(a.get(path) != first for a in aliases)}
    agrees: dict[str, bool] = {}

    def visit(path: str, modules: Sequence[nn.Module]) -> bool:
        """Whether the modules at a path agree but for submodules that are found."""
        names = [[(name, child is None) for name, child in module._modules.items()] for module in modules]
        if path in torn or any(own[path] != written[0][path] for own in written) or any(n != names[0] for n in names):
            return False
        if path in aliases[0]:
            return agrees.get(aliases[0][path], False)
        agrees[path] = True  # for what is below and refers to it
        here = len(found)
        for name, child in modules[0]._modules.items():
            if child is None:
                continue
            inner, below = _join(path, name), [module.get_submodule(name) for module in modules]
            agrees[inner] = visit(inner, below)
            if agrees[inner]:
                continue
            if any(type(module).forward is nn.Module.forward for module in below):
                del found[here:]
                agrees.update({other: False for other in agrees if other.startswith(_join(path, ""))})
                return False
            found.append(inner)
        return True

    return found if visit("", models) else None


class _Place(NamedTuple):
    """A path of a model, the module there, and the path where that was met before."""

    path: str
    module: nn.Module | None
    first: str | None


def _places(model: nn.Module) -> Iterator[_Place]:
    """Every path of a model once; what is below a module is left out where that is met again."""
    first_path: dict[int, str] = {}

    def below(path: str, module: nn.Module | None) -> Iterator[_Place]:
        first = None if module is None else first_path.get(id(module))
        yield _Place(path, module, first)
        if module is not None and first is None:
            first_path[id(module)] = path
            for name, child in module._modules.items():
                yield from below(_join(path, name), child)

    return below("", model)


def _written(place: _Place, first_path: dict[int, str]) -> Iterator[Entry]:
    if place.module is None:
        yield place.path, "no module"
    elif place.first is not None:
        yield place.path, f"the module at {place.first or '(model)'!r}"
    else:
        yield from _module(place.path, place.module, first_path)


def _module(path: str, module: nn.Module, first_path: dict[int, str]) -> Iterator[Entry]:
    kind = type(module)
    yield path or "(model)", f"{kind.__module__}.{kind.__qualname__} {'training' if module.training else 'evaluating'}"
    for kind_name, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in tensors.items():
            yield _join(path, name), f"{kind_name} {_tensor(tensor, _join(path, name), first_path)}"
    for name, value in vars(module).items():
        if name in _OWN or name == "training":
            continue
        if isinstance(value, float):
            yield _join(path, name), "float"
        elif (name.startswith("_") and name.endswith("_hooks")) or name.endswith(("_hooks_with_kwargs", "_called")):
            yield _join(path, name), _encode(list(value.values()), first_path, (), variable=False)
        else:
            yield _join(path, name), _encode(value, first_path, ())


def _tensor(tensor: Tensor | None, path: str, first_path: dict[int, str]) -> str:
    if tensor is None:
        return "none"
    tied = first_path.setdefault(id(tensor), path)
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    return f"{tuple(tensor.shape)} {tensor.dtype}{frozen}" + (f" tied to {tied}" if tied != path else "")


def _encode(value: Any, first_path: dict[int, str], above: tuple[int, ...], variable: bool = True) -> str:
    """Write down an attribute; `variable`: its floats stand where another member's can be put."""
    if isinstance(value, float):
        return "float" if variable else repr(value)
    if value is None or isinstance(value, (bool, int, complex, str, bytes, torch.dtype, torch.Size)):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if id(value) in above:
        return "above"
    above = (*above, id(value))

    def inner(values: Iterable[Any], variable: bool = variable) -> list[str]:
        return [_encode(inside, first_path, above, variable) for inside in values]

    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        return f"tensor {_tensor(value, '(attribute)', first_path)}"
    if isinstance(value, nn.Module):
        return f"module {type(value).__qualname__}"
    if isinstance(value, Mapping):
        items = zip(inner(value.keys(), variable=False), inner(value.values()), strict=True)
        return f"{kind}{{{', '.join(f'{key}: {what}' for key, what in items)}}}"
    if isinstance(value, list):
        return f"{kind}({', '.join(inner(value))})"
    if isinstance(value, tuple):
        return f"{kind}({', '.join(inner(value, variable=False))})"
    if isinstance(value, (set, frozenset)):
        return f"{kind}({', '.join(sorted(inner(value, variable=False)))})"
    if isinstance(value, MethodType):
        return f"method {value.__func__.__module__}.{value.__func__.__qualname__}"
    if isinstance(value, FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        settings = inner([closed, value.__defaults__], variable=False)
        return f"function {value.__module__}.{value.__qualname__} {settings}"
    if isinstance(value, partial):
        return f"{kind} {inner([value.func, value.args, dict(value.keywords)], variable=False)}"
    if isinstance(value, (np.generic, np.ndarray)):
        return f"{kind} {value.dtype} {value.tolist()!r}"
    if isinstance(value, (slice, range)):
        return repr(value)
    if isinstance(value, deque):
        return f"{kind}({', '.join(inner(value, variable=False))})"
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Enum):
        return f"{kind} {value.name}"
    attributes = getattr(value, "__dict__", None)
    return f"{kind} {_encode(attributes, first_path, above, variable)}" if attributes else kind


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
