"""Members whose optimizers step by themselves: any class, any hook."""

import inspect
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from shoal.core.errors import FusionError
from shoal.fuse.optim.stacked_param import StackedParam

__all__ = ["MemberLoop"]


class MemberLoop:
    """Optimizers without a fused rule, one after another.

    Each is lent its rows of the gradients and updates its own parameters, which are views of the array's, along with
    those that no other member has. Its state stays its own.

    Args:
        members: the optimizers.
        start: index of the first of them in the array.
        columns: each member's parameters.

    Raises:
        FusionError: an optimizer needs a closure, which would run one member alone, or sparse gradients.
    """

    def __init__(self, members: Sequence[Optimizer], start: int, columns: Sequence[Sequence[StackedParam]]) -> None:
        self._members = members
        self._start = start
        self._columns = columns
        for b, member in enumerate(members, start):
            if isinstance(member, SparseAdam):
                raise FusionError(
                    f"the optimizer of member {b}, SparseAdam, needs sparse gradients, which an array does not have; "
                    "use torch.optim.Adam, and sparse=False in the model"
                )
            _, *others = inspect.signature(type(member).step).parameters.values()
            if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others):
                raise FusionError(
                    f"the optimizer of member {b}, {type(member).__qualname__}, needs a closure to step, "
                    "which an array cannot give it; train this model alone"
                )

    def refresh(self) -> bool:
        """Nothing is kept of the members' parameter groups, so nothing grows old."""
        return True

    def step(self, missing: Mapping[Tensor, Collection[int]]) -> None:
        """Let every member step.

        Args:
            missing: as for `ParamGroupBatch.step`.

        Raises:
            FusionError: an optimizer put its parameters elsewhere in memory, so that they left the array.
        """
        for b, (member, columns) in enumerate(zip(self._members, self._columns, strict=True), self._start):
            for column in columns:
                grad = column.grad()
                column.own[b].grad = None if grad is None or b in missing.get(column.stacked, ()) else grad[b]
            try:
                member.step()
            except Exception as error:
                error.add_note(
                    f"raised by the optimizer of member {b}; members before it have been updated, it and those after "
                    f"it may not have been: go on from a checkpoint, without member {b} (`array.select`)"
                )
                raise
            finally:
                for column in columns:
                    column.own[b].grad = None
            for column in columns:
                if column.own[b].data_ptr() != column.stacked[b].data_ptr():
                    raise FusionError(
                        f"the optimizer of member {b}, {type(member).__qualname__}, replaced the memory of "
                        f"{column.path!r} instead of updating it in place; train this model alone"
                    )
