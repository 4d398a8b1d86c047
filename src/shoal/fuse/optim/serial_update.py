"""Updates of members one after another, from the gradients of their own parameters."""

from collections.abc import Sequence
from operator import is_
from typing import Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.optim.cohort import Cohort, SerialCalls
from shoal.fuse.optim.table import steps_as_made

__all__ = ["SerialUpdate"]


class SerialUpdate:
    """What updates members all of whose parameters kernels update.

    Args:
        members: the optimizers.
        cohorts: of their parameter groups that are not empty, with what updates them.
    """

    def __init__(self, members: Sequence[Optimizer], cohorts: Sequence[tuple[Cohort, SerialCalls]]) -> None:
        self._members = [(member, member.state, len(member.state), _sizes(member)) for member in members]
        self._cohorts = cohorts

    @classmethod
    def of(cls, members: Sequence[Optimizer], units: Sequence[object]) -> Self | None:
        """That of an array's units; None where they are more than kernels, or have not updated all yet."""
        cohorts = [(unit, calls) for unit in units if isinstance(unit, Cohort) and (calls := unit.serial()) is not None]
        return cls(members, cohorts) if 0 < len(cohorts) == len(units) else None

    @torch.no_grad()
    def step(self) -> bool:
        """Update all, with the numbers that the optimizers have now; false, with nothing done, where one is not made as
        it was, or a gradient is missing or sparse.
        """
        if not self._same():
            return False
        gradients = []
        for _, calls in self._cohorts:
            for trained in calls.trained:
                grads = _gradients(trained)
                if grads is None:
                    return False
                gradients.append(grads)
        left = iter(gradients)
        for cohort, calls in self._cohorts:
            calls.step([next(left) for _ in calls.trained], cohort.own_numbers)
        for member, *_ in self._members:
            member._opt_called = True  # type: ignore[attr-defined]
        return True

    def _same(self) -> bool:
        """Whether the optimizers are made as they were; their numbers are read anew."""
        for member, state, kept, sizes in self._members:
            if member.state is not state or len(state) != kept or not steps_as_made(member) or _sizes(member) != sizes:
                return False
        for cohort, calls in self._cohorts:
            for group, own in zip(cohort.groups, calls.own, strict=True):
                params = group["params"]
                if len(params) != len(own) or not all(map(is_, params, own)):
                    return False
            if not cohort.refresh() or cohort.kernels is not calls.rule or cohort.begun != calls.begun:
                return False
        return True


def _gradients(trained: Sequence[Tensor]) -> list[Tensor] | None:
    """Of parameters, in the order of their memory; None where one is missing or sparse."""
    grads = []
    for own in trained:
        grad = own.grad
        if grad is None or grad.layout is not torch.strided:
            return None
        grads.append(grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad))
    return grads


def _sizes(member: Optimizer) -> list[int]:
    """Of an optimizer's parameter groups."""
    return [len(group["params"]) for group in member.param_groups]
