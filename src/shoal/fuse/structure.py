"""The structure of a model: comparison, digests, and obstacles to fusion.

A structure is a list of (path, description) entries: modules with their classes, parameters and buffers with shapes and
dtypes, and every other attribute that steers a forward pass. Floats that are attributes of a module, or of a
configuration object it holds (a dropout rate, an eps), are left open: members may differ in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.fuse.bindings import unbindable
from shoal.fuse.guard import Differences, differences
from shoal.fuse.structure_serializer import StructureSerializer, digest

__all__ = ["Apart", "Entry", "entries", "family_digest", "find_apart", "mismatch", "obstacle", "structure_digest"]

Entry = tuple[str, str]
"""A path such as "layers.0.weight" and the description of its value."""

LARGE = 4
"""A parameter is large if it has at least one in `LARGE` of the elements of the largest one."""

_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version", "_flat_weight_refs"}
"""Attributes of every module that have entries of their own form, or no meaning for the structure."""


def entries(model: nn.Module) -> list[Entry]:
    """List the entries of a model's structure."""
    return _entries(model, StructureSerializer(model))


def structure_digest(model: nn.Module) -> str:
    """A digest of a model's structure, the same in every process that builds the model.

    Values that differ between processes are left open (see `StructureSerializer`), so models of one digest may still
    differ in them: `mismatch` decides whether they can be one array.
    """
    return digest(_entries(model, StructureSerializer(model, lasting=True)))


def family_digest(model: nn.Module) -> str:
    """A digest that is equal for models whose partially fused array may pay off; "" for a model without parameters.

    It covers their class, and the shapes of all parameters with at least a quarter of the elements of the largest:
    adapters of any rank on one base have equal digests, networks of different widths have not.
    """
    parameters = [each for each in model.parameters() if not is_lazy(each)]
    least = max((each.numel() for each in parameters), default=0) / LARGE
    large = [(tuple(each.shape), each.dtype, each.requires_grad) for each in parameters if each.numel() >= least]
    return digest((type(model).__module__, type(model).__qualname__, *map(str, large))) if large else ""


def _entries(model: nn.Module, writer: StructureSerializer) -> list[Entry]:
    return [entry for place in _places(model) for entry in _written(place, writer)]


def obstacle(model: nn.Module, alone: bool) -> str | None:
    """The reason why a model cannot be a member of an array, or None.

    Args:
        model: Candidate.
        alone: Whether it is the only member. It then runs as itself, so parts held by its functions are no obstacle.
    """
    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {path!r} has a hook, which would not see its own gradient; train this model alone"
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{path or 'the model'!r} was made by torch.jit, and an array cannot run a copy of it"
        if "_orig_mod" in module._modules and not alone:
            return f"{path or 'the model'!r} was returned by torch.compile; fuse the plain model, and compile its steps"
    if not alone and (tied := _in_one_memory(model)):
        return f"{tied[0]!r} and {tied[1]!r} lie in one memory, which an array would separate; make them one parameter"
    stuck = None if alone else unbindable(model)
    if stuck is not None:
        return (
            f"{stuck!r} holds a part of the model where no member's own can be put: a tensor or a list of modules that "
            "a function closes over, or a weak reference; have the function close over the module itself, and take the "
            "rest from there when called"
        )
    return None


def _in_one_memory(model: nn.Module) -> tuple[str, str] | None:
    """The paths of a trained parameter and of another tensor at the same address, or None."""
    there: dict[int, tuple[str, Tensor]] = {}
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or not (place := tensor.data_ptr()):
            continue
        first, other = there.setdefault(place, (path, tensor))
        if other is not tensor and (tensor.requires_grad or other.requires_grad):
            return first, path
    return None


def mismatch(first: list[Entry], other: list[Entry]) -> str | None:
    """A description of the first difference between two structures, or None."""
    for (path_a, what_a), (path_b, what_b) in zip(first, other, strict=False):
        if (path_a, what_a) != (path_b, what_b):
            place = f"at {path_a!r}" if path_a == path_b else f"at {path_a!r} and {path_b!r}"
            return f"{place}: {what_a} against {what_b}"
    if len(first) != len(other):
        longer = first if len(first) > len(other) else other
        return f"at {longer[min(len(first), len(other))][0]!r}: only one has it"
    return None


class Apart(NamedTuple):
    """Differences between models that can be one array.

    Args:
        modules: Paths of the smallest submodules that differ. They run member by member.
        attributes: Path and attribute name of other modules -> differences that guards protect (`shoal.fuse.guard`).
    """

    modules: list[str]
    attributes: dict[tuple[str, str], Differences]


def find_apart(models: Sequence[nn.Module]) -> Apart | None:
    """Find the submodules and guarded attributes in which models differ; None if they differ elsewhere.

    Instead of a module without a forward pass of its own (a list of modules), the module that holds it is returned. A
    module at several paths is returned with each of them, also if the paths differ between the models.
    """
    found: list[str] = []
    attributes: dict[tuple[str, str], Differences] = {}
    places = [list(_places(model)) for model in models]
    writers = [StructureSerializer(model) for model in models]
    written: list[dict[str, list[Entry]]] = [
        {place.path: list(_written(place, writer)) for place in own}
        for writer, own in zip(writers, places, strict=True)
    ]
    aliases = [{place.path: place.first for place in own if place.first is not None} for own in places]
    torn = {first for own in aliases for path, first in own.items() if any(a.get(path) != first for a in aliases)}
    agrees: dict[str, bool] = {}

    def visit(path: str, modules: Sequence[nn.Module]) -> bool:
        """Whether the modules at a path agree except for submodules in `found`."""
        names = [[(name, child is None) for name, child in module._modules.items()] for module in modules]
        if path in torn or any(n != names[0] for n in names):
            return False
        if any(own[path] != written[0][path] for own in written):
            guarded = _guarded(path, modules, [own[path] for own in written], writers)
            if guarded is None:
                return False
            attributes.update(guarded)
        if path in aliases[0]:
            return agrees.get(aliases[0][path], False)
        agrees[path] = True  # for submodules that refer to it
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

    return Apart(found, attributes) if visit("", models) else None


def _guarded(
    path: str, modules: Sequence[nn.Module], written: Sequence[list[Entry]], writers: Sequence[StructureSerializer]
) -> dict[tuple[str, str], Differences] | None:
    """Differences of the attributes of the modules at a path; None if there are others, or a guard is impossible."""
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
        texts = [writer.attribute for writer in writers]
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
    """Every path of a model once; submodules of a module are left out at its later paths."""
    first_path: dict[int, str] = {}

    def below(path: str, module: nn.Module | None) -> Iterator[_Place]:
        first = None if module is None else first_path.get(id(module))
        yield _Place(path, module, first)
        if module is not None and first is None:
            first_path[id(module)] = path
            for name, child in module._modules.items():
                yield from below(_join(path, name), child)

    return below("", model)


def _written(place: _Place, writer: StructureSerializer) -> Iterator[Entry]:
    if place.module is None:
        yield place.path, "no module"
    elif place.first is not None:
        yield place.path, f"the module at {place.first or '(model)'!r}"
    else:
        yield from _module(place.path, place.module, writer)


def _module(path: str, module: nn.Module, writer: StructureSerializer) -> Iterator[Entry]:
    yield path or "(model)", f"{writer.kind(type(module))} {'training' if module.training else 'evaluating'}"
    for kind_name, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in tensors.items():
            yield _join(path, name), f"{kind_name} {writer.tensor(tensor, _join(path, name))}"
    for name, value in vars(module).items():
        if name in _OWN or name == "training":
            continue
        hooks = (name.startswith("_") and name.endswith("_hooks")) or name.endswith(("_hooks_with_kwargs", "_called"))
        if hooks and isinstance(value, Mapping):
            yield _join(path, name), writer.hooks(value)
        else:
            yield _join(path, name), writer.attribute(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
