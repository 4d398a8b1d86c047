"""The structure of a model: comparison of structures, structure digests, and obstacles to fusion.

A structure is a list of (path, description) entries: modules with their classes, tensors with shapes and dtypes, and
every other attribute that a forward pass may read, but for floats (a dropout rate, an eps), in which members may
differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.fuse.guard import Differences, differences
from shoal.fuse.model_copy import find_unbindable
from shoal.fuse.quantised import settings_of
from shoal.fuse.rows import unstackable
from shoal.fuse.structure_serializer import StructureSerializer, digest

__all__ = [
    "Entry",
    "UnfusedParts",
    "entries",
    "family_digest",
    "find_unfused_parts",
    "mismatch",
    "structure_digest",
    "why_not_fusible",
]

Entry = tuple[str, str]
"""A path such as "layers.0.weight" and the description of its value."""

_EXCERPT = 300
"""Number of characters of a description of which a message shows only a part."""

LARGE = 4
"""A parameter is large if it has at least 1/LARGE of the elements of the largest parameter."""

_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version", "_flat_weight_refs"}
"""Attributes of every module that are described separately, or that do not belong to the structure."""


def entries(model: nn.Module) -> list[Entry]:
    """List the entries of a model's structure."""
    return _entries(model, StructureSerializer(model))


def structure_digest(model: nn.Module) -> str:
    """A digest of a model's structure, equal in all processes; `mismatch` also compares what differs between them."""
    return digest(_entries(model, StructureSerializer(model, cross_process=True)))


def family_digest(model: nn.Module) -> str:
    """A digest that is equal for models whose partial fusion may pay off; "" for a model without parameters.

    It covers the class and the shapes of all parameters with at least a quarter of the largest one's elements: equal
    for adapters of any rank on one base model, not for networks of different widths.
    """
    parameters = [each for each in model.parameters() if not is_lazy(each)]
    least = max((each.numel() for each in parameters), default=0) / LARGE
    large = [(tuple(each.shape), each.dtype, each.requires_grad) for each in parameters if each.numel() >= least]
    return digest((type(model).__module__, type(model).__qualname__, *map(str, large))) if large else ""


def _entries(model: nn.Module, serializer: StructureSerializer) -> list[Entry]:
    return [entry for place in _places(model) for entry in _describe_place(place, serializer)]


def why_not_fusible(model: nn.Module, only_member: bool) -> str | None:
    """The reason why a model cannot be a member, or None; an only member's functions may refer to its parts."""
    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {path!r} has a hook, which would not see its own gradient; train this model alone"
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{path or 'the model'!r} was made by torch.jit, and an array cannot run a copy of it"
        if "_orig_mod" in module._modules and not only_member:
            return f"{path or 'the model'!r} was returned by torch.compile; fuse the plain model, and compile its steps"
    if not only_member and (tied := _find_overlap(model)):
        return f"{tied[0]!r} and {tied[1]!r} lie in one memory, which an array would separate; make them one parameter"
    stuck = None if only_member else find_unbindable(model)
    if stuck is not None:
        return (
            f"{stuck!r} refers to a part of the model that cannot be replaced by a member's own: a tensor or a list of "
            "modules that a function closes over, or a weak reference; let the function close over the module itself, "
            "and read the rest from it when called"
        )
    return None


def _find_overlap(model: nn.Module) -> tuple[str, str] | None:
    there: dict[int, tuple[str, Tensor]] = {}
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if unstackable(tensor) or not tensor.numel() or not (place := tensor.data_ptr()):
            continue
        first, other = there.setdefault(place, (path, tensor))
        if other is not tensor and (tensor.requires_grad or other.requires_grad):
            return first, path
    return None


def mismatch(first: list[Entry], other: list[Entry]) -> str | None:
    """Describe the first difference between two structures; None if there is none."""
    for (path_a, what_a), (path_b, what_b) in zip(first, other, strict=False):
        if (path_a, what_a) != (path_b, what_b):
            place = f"at {path_a!r}" if path_a == path_b else f"at {path_a!r} and {path_b!r}"
            return f"{place}: {_excerpt(what_a, what_b)} against {_excerpt(what_b, what_a)}"
    if len(first) != len(other):
        longer = first if len(first) > len(other) else other
        return f"at {longer[min(len(first), len(other))][0]!r}: only one has it"
    return None


def _excerpt(text: str, other: str) -> str:
    """A description, or the part of a long one around its first difference from another one."""
    if len(text) <= _EXCERPT:
        return text
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
    begin = max(0, same - _EXCERPT // 2)
    return f"... {text[begin : begin + _EXCERPT]} ..."


class UnfusedParts(NamedTuple):
    """Paths of the smallest submodules that differ; (path, attribute name) -> differences that a guard protects."""

    modules: list[str]
    attributes: dict[tuple[str, str], Differences]


def find_unfused_parts(models: Sequence[nn.Module]) -> UnfusedParts | None:
    """Find the submodules and guarded attributes in which models differ; None if they differ in anything else.

    A module without a forward pass is replaced by the one that contains it; one at several paths is returned with each.
    """
    found: list[str] = []
    attributes: dict[tuple[str, str], Differences] = {}
    places = [list(_places(model)) for model in models]
    serializers = [StructureSerializer(model) for model in models]
    written: list[dict[str, list[Entry]]] = [
        {place.path: list(_describe_place(place, serializer)) for place in own}
        for serializer, own in zip(serializers, places, strict=True)
    ]
    aliases = [{place.path: place.first for place in own if place.first is not None} for own in places]
    inconsistent = {
        first for own in aliases for path, first in own.items() if any(a.get(path) != first for a in aliases)
    }
    agrees: dict[str, bool] = {}

    def visit(path: str, modules: Sequence[nn.Module]) -> bool:
        """Whether the modules at a path agree, except for submodules in `found`."""
        names = [[(name, child is None) for name, child in module._modules.items()] for module in modules]
        if path in inconsistent or any(n != names[0] for n in names):
            return False
        if any(own[path] != written[0][path] for own in written):
            guarded = _guarded_differences(path, modules, [own[path] for own in written], serializers)
            if guarded is None:
                return False
            attributes.update(guarded)
        if path in aliases[0]:
            return agrees.get(aliases[0][path], False)
        agrees[path] = True  # submodules may refer to this path
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
                for key in [key for key in attributes if key[0] == path or key[0].startswith(_join(path, ""))]:
                    del attributes[key]
                agrees.update({other: False for other in agrees if other.startswith(_join(path, ""))})
                return False
            found.append(inner)
        return True

    return UnfusedParts(found, attributes) if visit("", models) else None


def _guarded_differences(
    path: str, modules: Sequence[nn.Module], written: Sequence[list[Entry]], serializers: Sequence[StructureSerializer]
) -> dict[tuple[str, str], Differences] | None:
    """The differences between attributes of the modules at a path; None if a guard of them is impossible."""
    first = written[0]
    if any([where for where, _ in own] != [where for where, _ in first] for own in written):
        return None
    found = {}
    for number, (where, what) in enumerate(first):
        if all(own[number][1] == what for own in written):
            continue
        name = where.removeprefix(_join(path, "")) if path else where
        if not all(name in vars(module) for module in modules) or name.endswith("_hooks"):
            return None
        texts = [serializer.attribute for serializer in serializers]
        differing = differences([vars(module)[name] for module in modules], texts)
        if differing is None:
            return None
        found[path, name] = differing
    return found


class _Place(NamedTuple):
    """A path of a model, the module there, and an earlier path of the same module."""

    path: str
    module: nn.Module | None
    first: str | None


def _places(model: nn.Module) -> Iterator[_Place]:
    """Yield every path of a model once; at later paths of a module, its submodules are skipped."""
    first_path: dict[int, str] = {}

    def below(path: str, module: nn.Module | None) -> Iterator[_Place]:
        first = None if module is None else first_path.get(id(module))
        yield _Place(path, module, first)
        if module is not None and first is None:
            first_path[id(module)] = path
            for name, child in module._modules.items():
                yield from below(_join(path, name), child)

    return below("", model)


def _describe_place(place: _Place, serializer: StructureSerializer) -> Iterator[Entry]:
    if place.module is None:
        yield place.path, "no module"
    elif place.first is not None:
        yield place.path, f"the module at {place.first or '(model)'!r}"
    else:
        yield from _describe_module(place.path, place.module, serializer)


def _describe_module(path: str, module: nn.Module, serializer: StructureSerializer) -> Iterator[Entry]:
    mode = "training" if module.training else "evaluating"
    yield path or "(model)", f"{serializer.kind(type(module))} {mode}{settings_of(module)}"
    for kind_name, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in tensors.items():
            yield _join(path, name), f"{kind_name} {serializer.tensor(tensor, _join(path, name))}"
    for name, value in vars(module).items():
        if name in _OWN or name == "training":
            continue
        hooks = (name.startswith("_") and name.endswith("_hooks")) or name.endswith(("_hooks_with_kwargs", "_called"))
        if hooks and isinstance(value, Mapping):
            yield _join(path, name), serializer.hooks(value)
        else:
            yield _join(path, name), serializer.attribute(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
