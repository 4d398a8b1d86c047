"""Updates of an array of one, from the gradients of its member's own parameters."""

from collections.abc import Sequence
from operator import is_
from typing import Self

import torch
from torch.optim import Optimizer

from shoal.fuse.optim.cohort import Cohort, LoneCall
from shoal.fuse.optim.table import has_global_hooks, has_hooks

__all__ = ["LoneUpdate"]


class LoneUpdate:
    """What updates a member all of whose parameters kernels update.

    Args:
        member: the optimizer.
        cohorts: of each of its parameter groups.
        calls: of each of these.
    """

    def __init__(self, member: Optimizer, cohorts: Sequence[Cohort], calls: Sequence[LoneCall]) -> None:
        self.own = [own for call in calls for own in call.own]
        """The member's parameters."""
        self._member = member
        self._cohorts = list(zip(cohorts, calls, strict=True))
        self._state, self._kept = member.state, len(member.state)

    @classmethod
    def of(cls, member: Optimizer, units: Sequence[object]) -> Self | None:
        """That of the units of an array of one; None where they are more than kernels, or have not updated all yet."""
        cohorts = [unit for unit in units if isinstance(unit, Cohort)]
        calls = [call for cohort in cohorts if (call := cohort.lone()) is not None]
        if not len(units) == len(cohorts) == len(calls) == len(member.param_groups):
            return None
        update = cls(member, cohorts, calls)
        return update if update.fits() else None

    def fits(self) -> bool:
        """Whether the optimizer is made as it was; its numbers may be others, which are read."""
        member = self._member
        groups = member.param_groups
        if member.state is not self._state or len(self._state) != self._kept or len(groups) != len(self._cohorts):
            return False
        if has_hooks(member) or has_global_hooks():
            return False
        for (cohort, call), group in zip(self._cohorts, groups, strict=True):
            params = group["params"]
            if len(params) != len(call.own) or not all(map(is_, params, call.own)):
                return False
            if not cohort.refresh() or cohort.kernels is not call.rule or cohort.begun != call.begun:
                return False
        return True

    @torch.no_grad()
    def step(self) -> bool:
        """Update all; false, with nothing done, if a gradient is missing or lies unlike its parameter."""
        gradients = [[own.grad for own in call.own] for _, call in self._cohorts]
        for (_, call), grads in zip(self._cohorts, gradients, strict=True):
            for own, grad in zip(call.own, grads, strict=True):
                if grad is None or grad.layout is not torch.strided or grad.stride() != own.stride():
                    return False
        for (cohort, call), grads in zip(self._cohorts, gradients, strict=True):
            call.step([grad for grad in grads if grad is not None], cohort.lone_numbers)
        self._member._opt_called = True  # type: ignore[attr-defined]
        return True
