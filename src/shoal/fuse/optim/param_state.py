"""`StackedParam` and `ParamState`: one parameter of an array, and its stacked optimizer state."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.optim.rule import UpdateRule
from shoal.fuse.rows import stack_rows

__all__ = ["ParamState", "StackedParam", "flatten_rows"]


@dataclass(frozen=True, eq=False)
class StackedParam:
    """One parameter of all members, or of a single member.

    Args:
        stacked: All members' values, [B, *shape], or those of a single member, [*shape]; receives the gradients.
        member_params: The members' parameters, views of the rows of `stacked`; for a single member `stacked` itself.
        member: Index of the single member, for a submodule in which members differ; None for all members.
    """

    path: str
    stacked: Tensor
    member_params: Sequence[Tensor]
    member: int | None = None

    def grad(self) -> Tensor | None:
        """The gradients, in the shape of `stacked`; sparse ones are refused."""
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
        param: The members' rows of the stacked parameter, [B, *shape]; complex numbers as pairs of real ones.
        steps: Step counts, [B]; None before `open`, when `product` and `moments` are empty.
        product: The `product` of the rule, [B], in a list; empty if the rule has none.
        moments: The moments of the rule, shaped as `param`, in its memory order.
    """

    stacked_param: StackedParam
    member_params: Sequence[Tensor]
    param: Tensor
    steps: Tensor | None = field(default=None, init=False)
    product: list[Tensor] = field(default_factory=list, init=False)
    moments: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if torch.empty_like(self.param[0]).stride() != self.param[0].stride():
            raise FusionError(
                f"{self.stacked_param.path!r} has gaps in memory; make it contiguous() to update it in an array"
            )
        self._order = self.param.stride()

    @property
    def state(self) -> list[Tensor]:
        """All tensors that an update changes, except the parameter."""
        return [] if self.steps is None else [self.steps, *self.product, *self.moments]

    def open(self, rule: UpdateRule, members: Sequence[Optimizer]) -> None:
        """Stack or initialise the members' state; theirs becomes views of its rows, without a copy if contiguous."""
        before = [member.state.get(param, {}) for member, param in zip(members, self.member_params, strict=True)]
        self._initialised = [not mine for mine in before]
        shown: dict[str, Tensor] = {}
        for name in rule.moments:
            rows = [mine.get(name) for mine in before]
            begins = [rule.initial_moment(member.defaults) for member in members]
            shown[name] = self._stack_moments(rows, begins)
        if rule.counts_updates:
            counts = [mine.get("step", 0.0) for mine in before]
        else:
            counts = [float(rule.moments[0] in mine) for mine in before]
        self.steps = self._rows_of(counts, _count_dtype(self.param.device))
        self.moments = [torch.view_as_real(m) if m.is_complex() else m for m in shown.values()]
        if rule.product is not None:
            products = [mine.get(rule.product, 1.0) for mine in before]
            self.product = [self._rows_of(products, _count_dtype(torch.device("cpu")))]
            shown = {rule.product: self.product[0], **shown}
        if rule.counts_updates:
            shown = {"step": self.steps, **shown}
        for name, stacked in shown.items():
            for member, param, row in zip(members, self.member_params, stacked.unbind(), strict=True):
                member.state[param][name] = row

    @property
    def is_new(self) -> bool:
        """Whether the state is initialised and no member has updated the parameter yet."""
        return self.steps is not None and all(self._initialised) and not self.steps.any()

    def may_be_unused(self, which: Sequence[int]) -> bool:
        """Whether the state of some of these members is perhaps one that no step has updated."""
        return self.steps is not None and any(self._initialised[b] for b in which)

    def drop_unused(self, members: Sequence[Optimizer], which: Sequence[int], counts: Sequence[float]) -> bool:
        """Drop the state of those of `which` that no step has updated, since plain optimizers then have none.

        Args:
            counts: `steps` as numbers.

        Returns whether there was any; this object is then out of date.
        """
        self._initialised = [new and not count for new, count in zip(self._initialised, counts, strict=True)]
        unused = [b for b in which if self._initialised[b]]
        for b in unused:
            del members[b].state[self.member_params[b]]
        return bool(unused)

    def share_counter(self, steps: Tensor, rule: UpdateRule, members: Sequence[Optimizer]) -> None:
        """Use `steps`, [B], as the step counts; it already contains the current counts."""
        self.steps = steps
        if rule.counts_updates:
            for member, param, row in zip(members, self.member_params, steps.unbind(), strict=True):
                member.state[param]["step"] = row

    def _stack_moments(self, rows: Sequence[Tensor | None], begins: Sequence[float]) -> Tensor:
        """Stack the members' moments in the memory order of the parameter, which torch's kernels assume."""
        like = torch.view_as_complex(self.param) if self.stacked_param.stacked.is_complex() else self.param
        if all(row is not None for row in rows):
            moment = stack_rows([row.detach().to(like) for row in rows if row is not None])
            if moment.stride() == like.stride():
                return moment
        moment = torch.empty_like(like)
        for new, row, begin in zip(moment, rows, begins, strict=True):
            if row is None:
                new.fill_(complex(begin, begin) if new.is_complex() else begin)
            else:
                new.copy_(row.detach())
        return moment

    def in_param_order(self, grad: Tensor) -> Tensor:
        """A gradient, [B, *shape], in the memory order of the parameter."""
        if grad.stride() == self._order:
            return grad
        return torch.empty_strided(self.param.shape, self._order, dtype=grad.dtype, device=grad.device).copy_(grad)

    def _rows_of(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """The members' numbers as a tensor [B]; loaded states may have another dtype."""
        return stack_rows([torch.as_tensor(value, dtype=dtype, device=self.param.device).detach() for value in values])


def _count_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which torch's optimizers count steps; torch's kernels for CUDA read only float32."""
    on_cpu = device.type == "cpu"
    return torch.float64 if on_cpu and torch.get_default_dtype() == torch.float64 else torch.float32


def flatten_rows(stacked: Tensor) -> Tensor:
    """View dense rows [B, *shape] as [B, n], in memory order."""
    return stacked.as_strided((len(stacked), stacked[0].numel()), (stacked.stride(0), 1), stacked.storage_offset())
