"""A fused optimizer's step as a function of tensors, for tracing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.fuse.optim.cohort import Cohort
from shoal.fuse.optim.functions import update
from shoal.fuse.optim.part import Part

__all__ = ["TracedStep", "trace"]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """What a traced step reads and writes, and the step itself.

    Args:
        params: stacked parameters, [B, *shape]; to be updated.
        state: to be updated; what the members' own state shows.
        numbers: hyper-parameters, [K, B] float64 each. `FusedOptimizer.refresh` writes new values into these tensors.
        plan: cohorts, each with its parts and the places of their parameters in `params`.
    """

    params: list[Tensor]
    state: list[Tensor]
    numbers: list[Tensor]
    plan: list[tuple[Cohort, list[tuple[Part, int]]]]

    def apply(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], state: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> None:
        """Update `params` and `state` in place, by functions that `make_fx` can trace.

        Args:
            params: these, or stand-ins of the same shapes; as `grads`, `state` and `numbers`.
            grads: of `params`, in their order.
            state: as `self.state`.
            numbers: as `self.numbers`.
        """
        left = iter(state)
        with torch.no_grad():
            for (cohort, parts), mine in zip(self.plan, numbers, strict=True):
                update(
                    cohort.rule,
                    [cohort.rows(params[i]) for _, i in parts],
                    [cohort.rows(grads[i]) for _, i in parts],
                    [[next(left) for _ in part.state] for part, _ in parts],
                    mine,
                )


def trace(cohorts: Sequence[Cohort], params: Sequence[Tensor]) -> TracedStep:
    """The step of some cohorts on those of `params` that they own; begins the state of these.

    Args:
        cohorts: in any order.
        params: stacked parameters that get gradients.
    """
    wanted = {id(param) for param in params}
    places: dict[int, int] = {}
    owned: list[Tensor] = []
    state: list[Tensor] = []
    plan = []
    for cohort in cohorts:
        parts = []
        for part in cohort.parts:
            stacked = part.column.stacked
            if id(stacked) not in wanted:
                continue
            if id(stacked) not in places:
                places[id(stacked)] = len(owned)
                owned.append(stacked)
            state.extend(cohort.open(part).state)
            parts.append((part, places[id(stacked)]))
        if parts:
            plan.append((cohort, parts))
    return TracedStep(owned, state, [cohort.numbers() for cohort, _ in plan], plan)
