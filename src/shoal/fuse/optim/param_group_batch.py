"""One parameter group of consecutive members, updated together by one rule and one of two lowerings."""

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
"""Torch's fused kernels, one call for members with equal numbers, or multi-tensor functions of stacked tensors."""

_KERNEL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_CALLED, _SHARED, _FUNCTIONS, _WALKED = 1.6e-6, 2.5e-6, 33e-6, 1.2e-9
"""Seconds per parameter: a kernel call on one thread, a kernel call on several threads, the functions for all members,
and the additional memory traffic of these functions per element."""

_MOST_LIVE = 64
"""Most sets of parameters with gradients whose `_ActiveParams` are cached."""


@dataclass(frozen=True)
class _ActiveParams:
    """Parameters that have gradients, and the calls that update them.

    Args:
        parts: The parameters.
        steps: Counts of updates: one tensor [B] per parameter, or one tensor for all.
        calls: The lowering of the update.
    """

    parts: Sequence[ParamState]
    steps: list[Tensor]
    calls: KernelCalls | FunctionCalls


class ParamGroupBatch:
    """One parameter group of consecutive members under one rule.

    State is stacked, and the members' own state consists of views of its rows. As in torch, a parameter's state is
    initialised, or taken from the members, at its first gradient.

    Args:
        rule: Rule of all members.
        members: Optimizers of the members.
        start: Index in the array of the first member.
        group: Index of the parameter group in each optimizer.
        columns: At least one parameter; either all are of all members, or all are of one single member.
        lowering: Lowering to use where both are possible; None: the faster one.
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
        """The members' rows of a tensor of the array; complex numbers as pairs of real ones."""
        if self._alone:
            stacked = stacked.unsqueeze(0)
        elif len(stacked) != len(self._members):
            stacked = stacked[self._rows]
        return torch.view_as_real(stacked.resolve_conj()) if stacked.is_complex() else stacked

    def refresh(self) -> bool:
        """Read the members' parameter groups anew.

        Returns:
            Whether all groups still follow the rule of this batch.
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
        """The members' numbers, [K, B] float64, in a tensor that `refresh` updates in place."""
        if self._table is None:
            numbers = torch.tensor(self._numbers, dtype=torch.float64)
            self._table = numbers.T.contiguous().to(self.parts[0].param.device)
        return self._table

    @torch.no_grad()
    def step(self, missing: Mapping[Tensor, Collection[int]]) -> None:
        """Update every parameter that has a gradient.

        Args:
            missing: Stacked parameter -> members without a gradient of it; their parameter and state stay unchanged.
        """
        found = [part.column.grad() for part in self.parts]
        places = tuple(i for i, grad in enumerate(found) if grad is not None)
        if not places:
            return
        live = self._live.get((self._kernels, places))
        if live is None:
            if len(self._live) >= _MOST_LIVE:  # in models that skip different layers at each step
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
            self._live.clear()  # these calls assume equal counts of updates in all members
            for part in live.parts:
                part.close(self._members, self._without(part, missing))

    def _begun(self, parts: Sequence[ParamState]) -> "_ActiveParams":
        """Open the state of these parameters and prepare their update, with one shared count tensor if possible."""
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
        """The parameter and state rows of the members that have no gradient."""
        for b in self._without(part, missing):
            yield from (tensor[b] for tensor in (part.param, *part.state))

    def _without(self, part: ParamState, missing: Mapping[Tensor, Collection[int]]) -> list[int]:
        """Members of this batch, by index in it, that have no gradient of a parameter."""
        first, end = self._rows.start, self._rows.stop
        return [b - first for b in missing.get(part.column.stacked, ()) if first <= b < end]

    def open(self, part: ParamState) -> ParamState:
        """The parameter, after its state is taken from the members or initialised."""
        if part.steps is None and self.rule.moments:
            part.open(self.rule, self._members)
        return part

    def _kernel_rule(self) -> KernelRule | None:
        """The rule if its kernel is the lowering to use, else None.

        On the CPU, functions are faster if the kernel would run once per member, each time on several threads for
        little work. On other devices, functions need fewer launches than one kernel per member.
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
    """A copy of settings in which tensors are floats, so that in-place changes of a tensor do not affect it."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Tensor) else value
