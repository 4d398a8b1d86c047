"""Members that one rule updates together: their numbers, their state, and the choice between the two lowerings."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.optim.lowerings import FunctionCalls, KernelCalls
from shoal.fuse.optim.param_state import ParamState, StackedParam
from shoal.fuse.optim.rule import KernelRule, Numbers, UpdateRule, unreadable
from shoal.fuse.rows import joined

__all__ = ["Lowering", "ParamGroupBatch"]

Lowering = Literal["kernels", "elementwise"]
"""Torch's fused kernels, one call for members of equal numbers, or multi-tensor functions of stacked tensors."""

_KERNEL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_CALLED, _SHARED, _FUNCTIONS, _WALKED = 1.6e-6, 2.5e-6, 33e-6, 1.2e-9
"""Seconds, for each parameter: of a kernel that is called, or is shared out among threads; of the functions that do the
same once for all members, and what their walks over memory take more for each element."""


_MOST_LIVE = 64
"""Sets of parameters that have had gradients together and are remembered."""


@dataclass(frozen=True)
class _ActiveParams:
    """Parameters that have gradients, and what updates them.

    Args:
        steps: their counts of updates, each [B], or all of them in one.
    """

    parts: Sequence[ParamState]
    steps: list[Tensor]
    calls: KernelCalls | FunctionCalls


class ParamGroupBatch:
    """Consecutive members' parameters of one group, under one rule.

    State is stacked, and the members' own state is made of views of its rows. It is taken over from the members, or
    begun, when a parameter has its first gradient, as torch does.

    Args:
        rule: of all members.
        members: the optimizers.
        start: index of the first of them in the array.
        group: index of their parameter group.
        columns: at least one parameter; all of the members', or all of one member alone.
        lowering: what to use where both are possible; by default what is faster there.
    """

    def __init__(
        self,
        rule: UpdateRule,
        members: Sequence[Optimizer],
        start: int,
        group: int,
        columns: Sequence[StackedParam],
        lowering: Lowering | None,
    ) -> None:
        self.rule = rule
        self._members = members
        self._rows = slice(start, start + len(members))
        self._group = group
        self._alone = columns[0].member is not None
        own = slice(None) if self._alone else self._rows
        self.parts = [ParamState(column, column.own[own], self.rows(column.stacked.detach())) for column in columns]
        self._lowering = lowering
        self._read = itemgetter(*rule.settings)
        self._settings: list[Any] = []
        self._numbers: list[Numbers] = []
        self._table: Tensor | None = None
        self._kernels: KernelRule | None = None
        self._live: dict[tuple[KernelRule | None, tuple[int, ...]], _ActiveParams] = {}
        self._plain = not self._alone and all(
            not part.column.stacked.is_complex() and len(part.param) == len(part.column.stacked) for part in self.parts
        )

    def rows(self, stacked: Tensor) -> Tensor:
        """The batch of groups's rows of an array's tensor; complex numbers as pairs of real ones."""
        if self._alone:
            stacked = stacked.unsqueeze(0)
        elif len(stacked) != len(self._members):
            stacked = stacked[self._rows]
        return torch.view_as_real(stacked.resolve_conj()) if stacked.is_complex() else stacked

    def refresh(self) -> bool:
        """Read the members' parameter groups anew.

        Returns:
            Whether they still follow the batch of groups's rule.
        """
        groups = [member.param_groups[self._group] for member in self._members]
        try:
            settings = [self._read(group) for group in groups]
        except KeyError as error:
            b, group = next((b, group) for b, group in enumerate(groups) if error.args[0] not in group)
            raise unreadable(self._rows.start + b, self._group, group, error) from error
        if settings == self._settings:
            return True
        parsed = [self._parsed(b, mine) for b, mine in enumerate(settings)]
        numbers = [both[1] for both in parsed if both is not None and both[0] == self.rule]
        if len(numbers) < len(parsed):
            return False
        self._settings = [_plain(mine) for mine in settings]
        self._numbers = numbers
        self._kernels = self._kernel_rule()
        if self._table is not None:
            self._table.copy_(torch.tensor(numbers, dtype=torch.float64).T)
        return True

    def _parsed(self, b: int, settings: Any) -> tuple[UpdateRule, Numbers] | None:
        try:
            return self.rule.parse(settings)
        except (TypeError, ValueError) as error:
            group = self._members[b].param_groups[self._group]
            raise unreadable(self._rows.start + b, self._group, group, error) from error

    def numbers(self) -> Tensor:
        """The members' numbers, [K, B] float64, in a tensor that `refresh` keeps up to date."""
        if self._table is None:
            numbers = torch.tensor(self._numbers, dtype=torch.float64)
            self._table = numbers.T.contiguous().to(self.parts[0].param.device)
        return self._table

    @torch.no_grad()
    def step(self, missing: Mapping[Tensor, Collection[int]]) -> None:
        """Update every parameter that has a gradient.

        Args:
            missing: members that have none of a stacked parameter of which others have one; theirs stays as it is.
        """
        found = [part.column.grad() for part in self.parts]
        places = tuple(i for i, grad in enumerate(found) if grad is not None)
        if not places:
            return
        live = self._live.get((self._kernels, places))
        if live is None:
            if len(self._live) >= _MOST_LIVE:  # of models that leave out other layers at each step
                self._live.clear()
            live = self._live[self._kernels, places] = self._begun([self.parts[i] for i in places])
        present = [grad for grad in found if grad is not None]
        grads = present if self._plain else [self.rows(grad) for grad in present]
        kept = [(row, row.clone()) for part in live.parts for row in self._rows_of(part, missing)] if missing else []
        if live.steps:
            torch._foreach_add_(live.steps, 1)
        live.calls.step(grads, self._numbers)
        if kept:
            for row, before in kept:
                row.copy_(before)
            self._live.clear()  # which takes it that members go on counting together
            for part in live.parts:
                part.close(self._members, self._without(part, missing))

    def _begun(self, parts: Sequence[ParamState]) -> "_ActiveParams":
        """What an update of these parameters takes; if it is their first, it is counted as one for all of them."""
        for part in parts:
            self.open(part)
        counted = [part for part in parts if part.steps is not None]
        steps = [part.steps for part in counted if part.steps is not None]
        together = joined(steps) if steps else None
        if together is not None and (together.data_ptr() == steps[0].data_ptr() or all(part.new for part in counted)):
            for part, row in zip(counted, together.unbind(), strict=True):
                part.count_in(row, self.rule, self._members)
            steps = [together]
        calls = FunctionCalls(self.rule, parts) if self._kernels is None else KernelCalls(self._kernels, parts)
        return _ActiveParams(parts, steps, calls)

    def _rows_of(self, part: ParamState, missing: Mapping[Tensor, Collection[int]]) -> Iterator[Tensor]:
        """A parameter, and the state of it, of members that have no gradient."""
        for b in self._without(part, missing):
            yield from (tensor[b] for tensor in (part.param, *part.state))

    def _without(self, part: ParamState, missing: Mapping[Tensor, Collection[int]]) -> list[int]:
        """Those of the batch of groups's members that have no gradient of a parameter."""
        first, end = self._rows.start, self._rows.stop
        return [b - first for b in missing.get(part.column.stacked, ()) if first <= b < end]

    def open(self, part: ParamState) -> ParamState:
        """A parameter with its state, which the first time is taken over from the members, or begun."""
        if part.steps is None and self.rule.moments:
            part.open(self.rule, self._members)
        return part

    def _kernel_rule(self) -> KernelRule | None:
        """The rule, if its kernel is to be used.

        On the CPU functions win where a kernel would be called for many members and shared out among threads each time
        for little work; elsewhere they are few, and a kernel for each member would be many.
        """
        if not isinstance(self.rule, KernelRule) or not self.rule.has_kernel(self._numbers):
            return None
        if any(part.param.dtype not in _KERNEL_DTYPES for part in self.parts):
            return None
        if self._lowering is not None:
            return self.rule if self._lowering == "kernels" else None
        if self.parts[0].param.device.type != "cpu":
            return None
        calls = 1 + sum(a != b for a, b in pairwise(self._numbers))
        share = calls * (_SHARED if torch.get_num_threads() > 1 else _CALLED)
        mean = sum(part.param.numel() for part in self.parts) / len(self.parts)
        return self.rule if share <= _FUNCTIONS + mean * _WALKED else None


def _plain(value: Any) -> Any:
    """Settings that stay what they are when a tensor among them is changed in place."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Tensor) else value
