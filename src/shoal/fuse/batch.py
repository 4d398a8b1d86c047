"""Data of each member's own, where a plain batch is shared by all."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.core.errors import FusionError
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.stacked import stack as stack_values

__all__ = ["stack"]


def stack(batches: Sequence[Any] | Tensor) -> Any:
    """The members' own batches as one, to be given to an array in place of a shared batch.

    Args:
        batches: one for each member, nested alike, tensors of one shape [N, ...]; or one tensor [B, N, ...], such as
            what another array has returned, which is not copied.

    Returns:
        What one member's batch is, its tensors standing for all members'.

    Raises:
        FusionError: the batches differ in structure, in a tensor's shape or type, or in a value that is no tensor.
    """
    if isinstance(batches, Stacked):
        raise FusionError("these batches are stacked already; give them to the array as they are")
    if isinstance(batches, Tensor):
        if batches.dim() == 0:
            raise FusionError("a tensor to be stacked must have the members as its first axis, got shape ()")
        return Stacked(batches)
    if not isinstance(batches, Sequence) or not batches:
        raise FusionError(f"`batches` must be a sequence with one batch for each member, got {batches!r}")
    try:
        return stack_values(list(batches))
    except NeedsMemberError as reason:
        raise FusionError(f"the members' batches cannot be one: {reason}") from None
