"""Validation of arguments and of an array's members; errors name the member, the module path and the remedy."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.errors import FusionError
from shoal.fuse.model_copy import find_reference
from shoal.fuse.structure import UnfusedParts, entries, find_unfused_parts, mismatch, why_not_fusible

__all__ = [
    "check_iterable",
    "check_members",
    "check_structure",
    "list_names",
    "parse_indices",
    "parse_member_values",
    "parse_seeds",
]


def check_iterable(given: Any, name: str, of: str) -> Iterable[Any]:
    """Return an argument if it is iterable, a list of `of`; else raise a FusionError."""
    if isinstance(given, Iterable):
        return given
    raise FusionError(f"`{name}` must be a list of {of}, got {type(given).__name__}; put a single one in a list")


def parse_indices(given: Any, members: int) -> list[int]:
    """Members chosen by indices, where negative ones count from the end, or by booleans, as indices from 0 to B - 1."""
    values = _values(given, "indices")
    if values and all(isinstance(value, (bool, np.bool_)) for value in values):
        if len(values) != members:
            raise FusionError(f"`indices` has {len(values)} truth values for {members} members; give one for each")
        values = [b for b, chosen in enumerate(values) if chosen]
    wrong = [v for v in values if not _is_integer(v) or not -members <= index(v) < members]
    chosen = [] if wrong else [index(value) % members for value in values]
    if wrong or not chosen or len(set(chosen)) < len(chosen):
        raise FusionError(f"`indices` must name some of {members} members, each once, got {wrong or values}")
    return chosen


def parse_seeds(given: Any, members: int) -> list[int]:
    """Check that there is one integer for each member, and return them."""
    values = _values(given, "seeds")
    if len(values) != members:
        raise FusionError(f"{members} models need as many seeds, got {len(values)}")
    for b, value in enumerate(values):
        if not _is_integer(value):
            raise FusionError(f"the seed of member {b} must be an integer, got {value!r}")
    return list(map(index, values))


def parse_member_values(given: Any, name: str, members: int, dtype: torch.dtype) -> Tensor:
    """One number per member, [B], from one number for all members or one for each."""
    try:
        values = torch.as_tensor(given, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise FusionError(f"`{name}` must be one number or {members}, got {given!r}") from error
    if values.shape not in ((), (members,)):
        raise FusionError(f"`{name}` must be one number or {members}, got shape {tuple(values.shape)}")
    return values.expand(members)


def _values(given: Any, name: str) -> list[Any]:
    values = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    return list(check_iterable(values, name, "integers"))


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_))


def check_members(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be in one array for other reasons than their structure."""
    if not models:
        raise FusionError("cannot fuse an empty list of models")
    for b, model in enumerate(models):
        _check_initialised(b, model)
        if not_fusible := why_not_fusible(model, only_member=len(models) == 1):
            raise FusionError(f"member {b}: {not_fusible}")
    owners: dict[int, int] = {}
    for b, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue  # models may share frozen ones
            if owners.setdefault(id(tensor), b) != b:
                other = owners[id(tensor)]
                raise FusionError(f"members {other} and {b} share the tensor {name!r}; give each a model of its own")
        if owners.setdefault(id(model), b) != b:
            raise FusionError(f"members {owners[id(model)]} and {b} are the same model; copy it with copy.deepcopy")
    devices = {tensor.device for model in models for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise FusionError(f"the members lie on several devices, {sorted(map(str, devices))}; move them to one first")


def _check_initialised(b: int, model: nn.Module) -> None:
    """Refuse models with uninitialized tensors, and TorchScript modules."""
    if isinstance(model, torch.jit.ScriptModule):
        raise FusionError(f"member {b} is a TorchScript module; fuse the plain module that it was made of")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise FusionError(
                f"member {b}: {name!r} is not initialized, so its shape is unknown; call each model on a batch before "
                "fusing, or name the layer's input size"
            )


def check_structure(models: Sequence[nn.Module], strict: bool) -> UnfusedParts:
    """Find the submodules and attributes in which members differ; refuse if `strict`, or if none contains it."""
    first = entries(models[0])
    for b, model in enumerate(models[1:], start=1):
        difference = mismatch(first, entries(model))
        if difference is None:
            continue
        found = f"member {b} differs from member 0 {difference}"
        unfused = find_unfused_parts(models)
        if unfused is None:
            raise FusionError(f"{found}; fuse only models of one structure")
        if strict and unfused.modules:
            where = ", ".join(map(repr, unfused.modules))
            raise FusionError(
                f"{found}; fuse only models of one structure, or run {where} member by member with strict=False"
            )
        for c, other in enumerate(models if unfused.modules else ()):
            _check_ties(c, other, unfused.modules)
        return unfused
    return UnfusedParts([], {})


def _check_ties(b: int, model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse tensors, functions and lists that unfused submodules share with the fused rest of a model."""
    unfused = {model.get_submodule(path) for path in paths}
    fused = {
        id(tensor)
        for _, module in model.named_modules(memo=set(unfused))  # without the submodules that run member by member
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    for path in paths:
        part = model.get_submodule(path)
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if id(tensor) in fused:
                raise FusionError(
                    f"member {b}: {path}.{name} is tied to a tensor outside of {path!r}, which must run member by "
                    "member; untie it"
                )
    theirs = {id(one) for part in unfused for one in _parts(part)}
    others = {id(one) for one in _parts(model)} - theirs
    held = [
        find_reference(model, theirs, unfused),
        *(_join_path(path, find_reference(model.get_submodule(path), others)) for path in paths),
    ]
    for where in held:
        if where is not None:
            raise FusionError(
                f"member {b}: {where!r} holds a module or tensor across the border of what must run member by member, "
                f"{', '.join(map(repr, paths))}; pass it as an argument of the forward pass"
            )


def _parts(model: nn.Module) -> Iterator[nn.Module | Tensor]:
    return chain(model.modules(), model.parameters(), model.buffers())


def _join_path(path: str, inner: str | None) -> str | None:
    return None if inner is None else f"{path}.{inner}"


_MOST_NAMES = 5


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*names[:_MOST_NAMES], *more])
