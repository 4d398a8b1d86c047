"""Whether models can be members of one array: refusals that name the member, the module path and the remedy."""

from collections.abc import Iterable, Sequence

from torch import nn

from shoal.errors import FusionError
from shoal.fuse.structure import apart_paths, entries, mismatch, obstacle

__all__ = ["check_members", "modules_apart"]


def check_members(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be in an array together, whatever their structure.

    Raises:
        FusionError: no models, one that cannot be a member, the same model twice, two that share a tensor, or models
            on several devices.
    """
    if not models:
        raise FusionError("cannot fuse an empty list of models")
    for b, model in enumerate(models):
        if not_fusible := obstacle(model, alone=len(models) == 1):
            raise FusionError(f"member {b}: {not_fusible}")
    owners: dict[int, int] = {}
    for b, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if owners.setdefault(id(tensor), b) != b:
                other = owners[id(tensor)]
                raise FusionError(f"members {other} and {b} share the tensor {name!r}; give each a model of its own")
        if owners.setdefault(id(model), b) != b:
            raise FusionError(f"members {owners[id(model)]} and {b} are the same model; copy it with copy.deepcopy")
    devices = {tensor.device for model in models for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise FusionError(f"the members lie on several devices, {sorted(map(str, devices))}; move them to one first")


def modules_apart(models: Sequence[nn.Module], strict: bool) -> list[str]:
    """The paths of the submodules in which models differ, which are to run member by member.

    Args:
        models: the members.
        strict: refuse any difference.

    Raises:
        FusionError: there is a difference, and `strict`, or it is none of submodules; names the first one.
    """
    first = entries(models[0])
    for b, model in enumerate(models[1:], start=1):
        difference = mismatch(first, entries(model))
        if difference is None:
            continue
        found = f"member {b} differs from member 0 {difference}"
        paths = apart_paths(models)
        if paths is None:
            raise FusionError(f"{found}; fuse only models of one structure")
        if strict:
            where = ", ".join(map(repr, paths))
            raise FusionError(f"{found}; fuse only models of one structure, or run {where} apart with strict=False")
        for c, other in enumerate(models):
            _check_ties(c, other, paths)
        return paths
    return []


def _check_ties(b: int, model: nn.Module, paths: Iterable[str]) -> None:
    """What runs apart must not hold tensors of what is fused."""
    apart = {model.get_submodule(path) for path in paths}
    fused = {
        id(tensor)
        for _, module in model.named_modules(memo=apart)  # those, and what is below them alone, are left out
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    for path in paths:
        part = model.get_submodule(path)
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if id(tensor) in fused:
                raise FusionError(
                    f"member {b}: {path}.{name} is tied to a tensor outside of {path!r}, which must run apart; untie it"
                )
