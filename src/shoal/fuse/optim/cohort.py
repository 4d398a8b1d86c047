"""Members that one rule updates together: their stacked state, and the choice between the two lowerings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.optim.column import Column
from shoal.fuse.optim.rule import Numbers, Rule

__all__ = ["Cohort", "Lowering", "Part"]

Lowering = Literal["kernels", "elementwise"]
"""Torch's fused kernels, one call for each member, or functions of stacked tensors, some calls for each parameter."""

_KERNEL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Part:
    """One parameter of a cohort's members.

    Args:
        column: of the array.
        param: the members' rows of it, [B, *shape]; complex numbers as pairs of real ones.
        state: number of updates, [B], and the rule's moments, as `param`; None until the first update.
    """

    column: Column
    param: Tensor
    state: list[Tensor] | None = field(default=None, init=False)


class Cohort:
    """Consecutive members' parameters of one group, under one rule.

    State is stacked, and the members' own state is made of views of its rows. It is taken over from the members, or
    begun, when a parameter has its first gradient, as torch does.

    Args:
        rule: of all members.
        members: the optimizers.
        start: index of the first of them in the array.
        group: index of their parameter group.
        columns: at least one parameter.
        lowering: what to use where both are possible; by default kernels on the CPU, where many small functions cost
            more than arithmetic, and stacked functions elsewhere.
    """

    def __init__(
        self,
        rule: Rule,
        members: Sequence[Optimizer],
        start: int,
        group: int,
        columns: Sequence[Column],
        lowering: Lowering | None,
    ) -> None:
        self.rule = rule
        self._members = members
        self._rows = slice(start, start + len(members))
        self._group = group
        self.parts = [Part(column, self.rows(column.stacked.detach())) for column in columns]
        if lowering is None:
            lowering = "kernels" if columns[0].stacked.device.type == "cpu" else "elementwise"
        self._kernels = lowering == "kernels" and all(
            part.param.dtype in _KERNEL_DTYPES and part.param.is_contiguous() for part in self.parts
        )
        self._use_kernels = False
        self._read = itemgetter(*rule.settings)
        self._settings: list[Any] = []
        self._numbers: list[Numbers] = []
        self._unbound: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
        self._table: Tensor | None = None

    def rows(self, stacked: Tensor) -> Tensor:
        """The cohort's rows of an array's tensor; complex numbers as pairs of real ones."""
        if len(stacked) != len(self._members):
            stacked = stacked[self._rows]
        return torch.view_as_real(stacked.resolve_conj()) if stacked.is_complex() else stacked

    def refresh(self) -> bool:
        """Read the members' parameter groups anew.

        Returns:
            Whether they still follow the cohort's rule.
        """
        settings = [self._read(member.param_groups[self._group]) for member in self._members]
        if settings == self._settings:
            return True
        parsed = [self.rule.parse(mine) for mine in settings]
        numbers = [both[1] for both in parsed if both is not None and both[0] == self.rule]
        if len(numbers) < len(parsed):
            return False
        self._settings = [_plain(mine) for mine in settings]
        self._numbers = numbers
        self._use_kernels = self._kernels and self.rule.has_kernel(numbers)
        if self._table is not None:
            self._table.copy_(torch.tensor(numbers, dtype=torch.float64).T)
        return True

    def numbers(self) -> Tensor:
        """The members' numbers, [K, B] float64, in a tensor that `refresh` keeps up to date."""
        if self._table is None:
            numbers = torch.tensor(self._numbers, dtype=torch.float64)
            self._table = numbers.T.contiguous().to(self.parts[0].param.device)
        return self._table

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        found = [part.column.grad() for part in self.parts]
        live = tuple(i for i, grad in enumerate(found) if grad is not None)
        if not live:
            return
        parts = [self.parts[i] for i in live]
        states = [self.open(part) for part in parts]
        grads = [self.rows(grad) for grad in found if grad is not None]
        if not self._use_kernels:
            self.update([part.param for part in parts], grads, states, self.numbers())
            return
        if self.rule.moments:
            torch._foreach_add_([state[0] for state in states], 1)
        if live not in self._unbound:
            self._unbound[live] = self._unbind(parts, states)
        kernel = self.rule.kernel
        by_member = zip(*[grad.contiguous().unbind() for grad in grads], strict=True)
        for (params, moments, steps), mine, numbers in zip(self._unbound[live], by_member, self._numbers, strict=True):
            kernel(params, mine, moments, steps, numbers)

    def update(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Sequence[Tensor]], numbers: Tensor
    ) -> None:
        """One update by stacked tensors, in place; a pure function of them otherwise.

        Args:
            params: the cohort's rows, [B, *shape].
            grads: as `params`.
            states: of each parameter: number of updates and moments.
            numbers: [K, B] float64.
        """
        for param, grad, state in zip(params, grads, states, strict=True):
            if state:
                state[0].add_(1)
            self.rule.elementwise(param, grad, state, numbers)

    def open(self, part: Part) -> list[Tensor]:
        """The state of a parameter; at first taken over from the members, or begun at zero where one has none."""
        if part.state is None:
            part.state = self._stack(part) if self.rule.moments else []
        return part.state

    def _stack(self, part: Part) -> list[Tensor]:
        own = part.column.own[self._rows]
        before = [member.state.get(param, {}) for member, param in zip(self._members, own, strict=True)]
        moments = []
        for name in self.rule.moments:
            old = [mine.get(name) for mine in before]
            rows = [torch.zeros_like(p) if m is None else m for p, m in zip(own, old, strict=True)]
            moments.append(torch.stack(rows).detach().to(own[0]))
        if self.rule.counts:
            counts = [float(mine.get("step", 0)) for mine in before]
        else:
            counts = [float(mine.get(self.rule.moments[0]) is not None) for mine in before]
        wide = torch.get_default_dtype() == torch.float64
        step = torch.tensor(counts, dtype=torch.float64 if wide else torch.float32, device=part.param.device)
        shared = dict(zip(self.rule.moments, moments, strict=True))
        if self.rule.counts:
            shared = {"step": step, **shared}
        for name, stacked in shared.items():
            for member, param, row in zip(self._members, own, stacked.unbind(), strict=True):
                member.state[param][name] = row
        return [step, *(torch.view_as_real(m) if m.is_complex() else m for m in moments)]

    def _unbind(self, parts: Sequence[Part], states: Sequence[list[Tensor]]) -> list[tuple[Any, ...]]:
        """For each member the lists of tensors that a kernel takes."""
        params = [part.param.unbind() for part in parts]
        unbound = [[tensor.unbind() for tensor in state] for state in states]
        result = []
        for b in range(len(self._members)):
            steps, *moments = [[rows[b] for rows in kind] for kind in zip(*unbound, strict=True)] or [[]]
            result.append(([rows[b] for rows in params], moments, steps))
        return result


def _plain(value: Any) -> Any:
    """Settings that stay what they are when a tensor among them is changed in place."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Tensor) else value
