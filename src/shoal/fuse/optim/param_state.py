"""One parameter of an array, and the stacked optimizer state of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.optim.rule import UpdateRule
from shoal.fuse.rows import joined

__all__ = ["ParamState", "StackedParam", "flat"]


@dataclass(frozen=True, eq=False)
class StackedParam:
    """One parameter of all members, or of a single member.

    Args:
        path: Name of the parameter, as in "layers.0.weight".
        stacked: All members' values, [B, *shape], or those of a single member, [*shape]; receives the gradients.
        own: The members' parameters, views of the rows of `stacked`; for a single member `stacked` itself.
        member: Index of the single member, in a submodule in which members differ; None: all members.
    """

    path: str
    stacked: Tensor
    own: Sequence[Tensor]
    member: int | None = None

    def grad(self) -> Tensor | None:
        """The gradients, in the shape of `stacked`.

        Raises:
            FusionError: The gradients are sparse.
        """
        grad = self.stacked.grad
        if grad is not None and grad.layout is not torch.strided:
            raise FusionError(
                f"the gradient of {self.path!r} is sparse; make it dense (sparse=False) to fuse its model"
            )
        return grad


@dataclass(eq=False)
class ParamState:
    """One parameter of the members of a `ParamGroupBatch`, with their optimizers' state.

    Args:
        column: The parameter in the array.
        own: The members' parameters.
        param: The members' rows of the stacked parameter, [B, *shape]; complex numbers as pairs of real ones.
        steps: Number of updates, [B]; None before the state is opened, when `product` and `moments` are empty.
        product: The `product` of the rule, [B], in a list; empty if the rule has none.
        moments: The moments of the rule, shaped as `param`, in its memory order.

    Raises:
        FusionError: A member's row has gaps in memory.
    """

    column: StackedParam
    own: Sequence[Tensor]
    param: Tensor
    steps: Tensor | None = field(default=None, init=False)
    product: list[Tensor] = field(default_factory=list, init=False)
    moments: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if torch.empty_like(self.param[0]).stride() != self.param[0].stride():
            raise FusionError(f"{self.column.path!r} has gaps in memory; make it contiguous() to update it in an array")
        self._order = self.param.stride()

    @property
    def state(self) -> list[Tensor]:
        """All tensors besides the parameter that an update changes."""
        return [] if self.steps is None else [self.steps, *self.product, *self.moments]

    def open(self, rule: UpdateRule, members: Sequence[Optimizer]) -> None:
        """Stack the members' state, or initialise it; the members' state then consists of views of its rows.

        Rows that already lie in one memory, such as those of an array, are not copied.
        """
        before = [member.state.get(param, {}) for member, param in zip(members, self.own, strict=True)]
        self._begun = [not mine for mine in before]
        shown: dict[str, Tensor] = {}
        for name in rule.moments:
            rows = [mine.get(name) for mine in before]
            begins = [rule.begin(member.defaults) for member in members]
            shown[name] = self._taken_over(rows, begins)
        if rule.counts:
            counts = [mine.get("step", 0.0) for mine in before]
        else:
            counts = [float(rule.moments[0] in mine) for mine in before]
        self.steps = self._numbers(counts)
        self.moments = [torch.view_as_real(m) if m.is_complex() else m for m in shown.values()]
        if rule.product is not None:
            self.product = [self._numbers([mine.get(rule.product, 1.0) for mine in before])]
            shown = {rule.product: self.product[0], **shown}
        if rule.counts:
            shown = {"step": self.steps, **shown}
        for name, stacked in shown.items():
            for member, param, row in zip(members, self.own, stacked.unbind(), strict=True):
                member.state[param][name] = row

    @property
    def new(self) -> bool:
        """Whether the state is initialised and no member has updated the parameter yet."""
        return self.steps is not None and all(self._begun) and not self.steps.any()

    def count_in(self, steps: Tensor, rule: UpdateRule, members: Sequence[Optimizer]) -> None:
        """Count updates in `steps`, [B], which holds the current counts already."""
        self.steps = steps
        if rule.counts:
            for member, param, row in zip(members, self.own, steps.unbind(), strict=True):
                member.state[param]["step"] = row

    def close(self, members: Sequence[Optimizer], without: Sequence[int]) -> None:
        """Delete the state of the members in `without` that have had no update; the next `open` stacks anew."""
        if self.steps is not None and (never := [b for b in without if self._begun[b] and not self.steps[b]]):
            for b in never:
                del members[b].state[self.own[b]]
            self.steps = None

    def _taken_over(self, rows: Sequence[Tensor | None], begins: Sequence[float]) -> Tensor:
        """Stack the members' moments in the memory order of the parameter, which torch's kernels assume.

        Args:
            rows: Moment of each member; None: the member has none.
            begins: Initial value of each member.
        """
        like = torch.view_as_complex(self.param) if self.column.stacked.is_complex() else self.param
        if all(row is not None for row in rows):
            moment = joined([row.detach().to(like) for row in rows if row is not None])
            if moment.stride() == like.stride():
                return moment
        moment = torch.empty_like(like)
        for new, row, begin in zip(moment, rows, begins, strict=True):
            if row is None:
                new.fill_(complex(begin, begin) if new.is_complex() else begin)
            else:
                new.copy_(row.detach())
        return moment

    def ordered(self, grad: Tensor) -> Tensor:
        """A gradient, [B, *shape], in the memory order of the parameter."""
        if grad.stride() == self._order:
            return grad
        return torch.empty_strided(self.param.shape, self._order, dtype=grad.dtype, device=grad.device).copy_(grad)

    def _numbers(self, values: Sequence[Any]) -> Tensor:
        """Values as a tensor [B] of the type in which torch's optimizers count; `load_state_dict` may change it."""
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        return joined([torch.as_tensor(value, dtype=dtype, device=self.param.device).detach() for value in values])


def flat(stacked: Tensor) -> Tensor:
    """Dense rows [B, *shape] as [B, n], in memory order."""
    return stacked.as_strided((len(stacked), stacked[0].numel()), (stacked.stride(0), 1), stacked.storage_offset())
