"""Updates of an array of one, from the gradients of its member's own parameters."""

from collections.abc import Sequence
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.optim.cohort import Cohort, LoneCall
from shoal.fuse.optim.table import steps_as_made

__all__ = ["LoneUpdate"]


class LoneUpdate:
    """What updates a member all of whose parameters kernels update.

    Args:
        member: the optimizer.
        cohorts: of each of its parameter groups that is not empty, with what updates it.
    """

    def __init__(self, member: Optimizer, cohorts: Sequence[tuple[Cohort, LoneCall]]) -> None:
        self._member = member
        self._cohorts = cohorts
        self._state, self._kept = member.state, len(member.state)
        self._sizes = _sizes(member)

    @classmethod
    def of(cls, member: Optimizer, units: Sequence[object]) -> Self | None:
        """That of the units of an array of one; None where they are more than kernels, or have not updated all yet."""
        cohorts = [(unit, call) for unit in units if isinstance(unit, Cohort) and (call := unit.lone()) is not None]
        return cls(member, cohorts) if 0 < len(cohorts) == len(units) else None

    @torch.no_grad()
    def step(self) -> bool:
        """Update all, with the numbers that the optimizer has now; false, with nothing done, where it is not made as
        it was, or a gradient is missing or sparse.
        """
        if not self._same():
            return False
        gradients = []
        for cohort, call in self._cohorts:
            grads: list[Tensor] = []
            for own in call.trained:
                grad = own.grad
                if grad is None or grad.layout is not torch.strided:
                    return False
                grads.append(grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad))
            gradients.append((cohort, call, grads))
        for cohort, call, grads in gradients:
            call.step(grads, cohort.lone_numbers)
        self._member._opt_called = True  # type: ignore[attr-defined]
        return True

    def _same(self) -> bool:
        """Whether the optimizer is made as it was; its numbers are read anew."""
        member = self._member
        if member.state is not self._state or len(self._state) != self._kept:
            return False
        if not steps_as_made(member) or _sizes(member) != self._sizes:
            return False
        groups: list[dict[str, Any]] = [group for group in member.param_groups if group["params"]]
        for (cohort, call), group in zip(self._cohorts, groups, strict=True):
            params = group["params"]
            if len(params) != len(call.own) or not all(map(is_, params, call.own)):
                return False
            if not cohort.refresh() or cohort.kernels is not call.rule or cohort.begun != call.begun:
                return False
        return True


def _sizes(member: Optimizer) -> list[int]:
    """Of an optimizer's parameter groups."""
    return [len(group["params"]) for group in member.param_groups]
