"""Whose gradient a tensor's is, while a function runs on other tensors in the place of parameters."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.core.errors import FusionError
from shoal.fuse.slots import Slot

__all__ = ["owner_of_row", "refuse_outer_grad"]

_NO_PASS = -1
"""What autograd says outside of a backward pass."""


def owner_of_row(
    slots: Iterable[Slot], columns: Sequence[tuple[Slot, Sequence[Tensor]]], b: int, tensor: Tensor
) -> tuple[Tensor, int] | None:
    """The stacked tensor of which member b's tensor is a row, and b.

    Args:
        slots: all of the array.
        columns: of slots, the rows that stand in the members' places.
        b: the member that runs.
        tensor: whose gradient is asked for.

    Raises:
        FusionError: see `refuse_outer_grad`.
    """
    for slot, rows in columns:
        if rows[b] is tensor:
            return slot.data, b
    refuse_outer_grad(slots, tensor)
    return None


def refuse_outer_grad(slots: Iterable[Slot], tensor: Tensor) -> None:
    """Refuse the gradient of what is a parameter outside of the function, and has another in its place within.

    Raises:
        FusionError: names the remedy.
    """
    if torch._C._current_graph_task_id() == _NO_PASS and any(
        tensor is slot.data or any(tensor is own for own in slot.own)
        for slot in slots
        if slot.trainable and not slot.shared
    ):
        raise FusionError(
            "a function asks for the gradient of an array's or a member's parameter, and not through the model that it "
            "is given, as an optimizer's `step` and `zero_grad` do; call these outside of `map`, or use `TrainingStep`"
        )
