"""The functions `fuse`, `concat` and `stack`: make arrays of models, join arrays, and stack the members' batches."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.checks import check_iterable, check_members, parse_seeds
from shoal.fuse.frozen import share_frozen
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.stacked import stack as stack_values

__all__ = ["concat", "fuse", "stack"]


def fuse(models: Iterable[nn.Module], seeds: Iterable[int] | Tensor | None = None, strict: bool = True) -> ModelArray:
    """Make one array of models of equal structure; the models may differ in tensor values and in float attributes.

    Args:
        models: One or more distinct models on one device, all in one mode (training or evaluation). If an iterator
            makes them one by one, frozen parameters with equal values are never held twice.
        seeds: Seeds of the members' random numbers; by default drawn from torch's default generator.
        strict: Whether to refuse models that differ in structure. If False, submodules in which the models differ run
            member by member, and the rest runs as one (partial fusion). The results of such submodules should agree in
            shape between the members.

    Raises:
        FusionError: There are no models, one is given twice, or the models differ; names the member and the module
            path.
    """
    if isinstance(models, nn.Module):
        raise FusionError(
            f"`models` must be a list of torch.nn.Module, got a single {type(models).__name__}; put it in a list"
        )
    members: list[nn.Module] = []
    for model in check_iterable(models, "models", "torch.nn.Module"):
        if not isinstance(model, nn.Module):
            raise FusionError(f"`models` must be a list of torch.nn.Module, got {model!r} among them")
        members.append(model)
        if not isinstance(models, Sequence):
            share_frozen(members[0], model)
    check_members(members)
    if seeds is None:
        seeds = torch.randint(0, 2**62, (len(members),)).tolist()
    return ModelArray(members, parse_seeds(seeds, len(members)), strict)


def concat(arrays: Iterable[ModelArray]) -> ModelArray:
    """Join several arrays into one array of all their members, in order; the given arrays cannot be used any more.

    Each member continues its own sequence of random numbers.

    Raises:
        FusionError: The structures of the arrays differ.
    """
    arrays = list(check_iterable(arrays, "arrays", "the arrays that `fuse` made"))
    for i, array in enumerate(arrays):
        if not isinstance(array, ModelArray):
            raise FusionError(f"arrays[{i}] must be what `fuse` made, got {type(array).__name__}; fuse models first")
        if any(array is other for other in arrays[:i]):
            raise FusionError(f"arrays[{i}] is given twice; a model can be a member only once")
        array.check_present()
    joined = fuse(
        [m for array in arrays for m in array.members],
        [s for array in arrays for s in array.seeds],
        strict=all(array.strict for array in arrays),
    )
    joined.ticks = [tick for array in arrays for tick in array.ticks]
    return joined


def stack(batches: Sequence[Any] | Tensor) -> Any:
    """Stack one batch per member into one batch, which an array accepts in place of a batch that all members share.

    Args:
        batches: One batch for each member, with equal nesting and tensors of one shape [N, ...]; or one tensor
            [B, N, ...], such as the result of another array, which is not copied.

    Returns:
        A batch nested like one member's batch, with `Stacked` tensors.

    Raises:
        FusionError: The batches differ in structure, in a tensor's shape or dtype, or in a value that is not a tensor.
    """
    if isinstance(batches, Stacked):
        raise FusionError("these batches are stacked already; give them to the array as they are")
    if isinstance(batches, Tensor):
        if batches.dim() == 0:
            raise FusionError("a tensor of the members' batches must have the shape [B, N, ...], got shape ()")
        return Stacked(batches)
    if not isinstance(batches, Sequence) or not batches:
        raise FusionError(f"`batches` must be a sequence with one batch for each member, got {batches!r}")
    try:
        return stack_values(list(batches))
    except NeedsMemberError as reason:
        raise FusionError(f"the members' batches cannot be stacked: {reason}") from None
