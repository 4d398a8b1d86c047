"""The step of a fused optimizer as a function of tensors, for tracing and compilation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from shoal.fuse.optim.lowerings import update, update_by_kernels
from shoal.fuse.optim.param_group_batch import ParamGroupBatch
from shoal.fuse.optim.param_state import ParamState
from shoal.fuse.optim.rule import Hyperparameters, KernelRule, Tensors
from shoal.fuse.rows import changing

__all__ = ["TracedStep", "trace"]


@dataclass(frozen=True, eq=False)
class _BatchTrace:
    param_batch: ParamGroupBatch
    parts: list[tuple[ParamState, int]]
    constants: int
    frozen: Sequence[Hyperparameters] | None
    """Hyper-parameters of an update by fused kernels; None for one by the rule's formula."""
    coefficients: Tensor

    @property
    def counters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Numbers of updates and running products, [B] each."""
        steps = [part.steps for part, _ in self.parts if part.steps is not None]
        return steps, [part.product[0] for part, _ in self.parts if part.product]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A traceable optimizer step of `params`, [B, *shape] each, with its moments and coefficients, [R, B] each.

    `advance` computes small tensors, such as powers of β, outside of the trace, where a compiler would compute them
    again for every element of a parameter.
    """

    params: list[Tensor]
    state: list[Tensor]
    coefficients: list[Tensor]
    batches: list[_BatchTrace]

    @property
    def counters(self) -> list[Tensor]:
        """Numbers of updates and running products, [B] each, which `advance` changes."""
        return [counter for batch in self.batches for counters in batch.counters for counter in counters]

    @torch.no_grad()
    def advance(self, counters: Sequence[Tensor], coefficients: Sequence[Tensor], ends: Tensor | None = None) -> None:
        """Count an update and compute its coefficients, in place; call it before every run of the trace.

        A CUDA graph can record it.

        Args:
            counters: `counters`, or other tensors like them.
            coefficients: `coefficients`, or other tensors like them.
            ends: Whether each member is updated, bool [B]; None if all are.
        """
        left = iter(counters)
        for batch, mine in zip(self.batches, coefficients, strict=True):
            steps, products = ([next(left) for _ in kind] for kind in batch.counters)
            with changing([*steps, *products], _rows_of(batch.param_batch, ends)):
                mine.copy_(_next_rows(batch.param_batch, steps, products, batch.frozen is not None))

    def apply(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        ends: Tensor | None = None,
    ) -> None:
        """Update `params` and `state` in place; `make_fx` can trace it with other tensors of the same shapes.

        Args:
            ends: As for `advance`.
        """
        left = iter(state)
        with torch.no_grad():
            for batch, mine in zip(self.batches, coefficients, strict=True):
                rule, rows = batch.param_batch.rule, batch.param_batch.rows
                own = [rows(params[i]) for _, i in batch.parts]
                own_grads = [rows(grads[i]) for _, i in batch.parts]
                moments = [[next(left) for _ in part.moments] for part, _ in batch.parts]
                with changing([*own, *chain.from_iterable(moments)], _rows_of(batch.param_batch, ends)):
                    if batch.frozen is None or not isinstance(rule, KernelRule):
                        update(rule, own, own_grads, moments, mine, batch.constants)
                    else:
                        parts = [part for part, _ in batch.parts]
                        update_by_kernels(rule, parts, own, own_grads, moments, mine, batch.frozen)


def _rows_of(param_batch: ParamGroupBatch, ends: Tensor | None) -> Tensor | None:
    return None if ends is None else param_batch.member_rows(ends)


def trace(param_batches: Sequence[ParamGroupBatch], params: Sequence[Tensor], kernels: bool) -> TracedStep:
    """The traceable step of some batches, for those of `params` that they own; opens the state of these parameters.

    Args:
        kernels: Whether torch's fused kernels may update them, which a graph can record and compilers cannot fuse.
    """
    wanted = {id(param) for param in params}
    places: dict[int, int] = {}
    owned: list[Tensor] = []
    state: list[Tensor] = []
    batches = []
    for param_batch in param_batches:
        parts = []
        for part in param_batch.parts:
            stacked = part.stacked_param.stacked
            if id(stacked) not in wanted:
                continue
            if id(stacked) not in places:
                places[id(stacked)] = len(owned)
                owned.append(stacked)
            state.extend(param_batch.open(part).moments)
            parts.append((part, places[id(stacked)]))
        if parts:
            batches.append(_trace_batch(param_batch, parts, kernels))
    return TracedStep(owned, state, [batch.coefficients for batch in batches], batches)


def _trace_batch(param_batch: ParamGroupBatch, parts: list[tuple[ParamState, int]], kernels: bool) -> _BatchTrace:
    """Prepare a batch for tracing, with the coefficients of the next update, which is not counted yet."""
    steps = [part.steps.clone() for part, _ in parts if part.steps is not None]
    products = [part.product[0].clone() for part, _ in parts if part.product]
    constants = len(param_batch.rule.constants(param_batch.hyperparameters()))
    dtype = torch.float64 if any(part.param.dtype == torch.float64 for part, _ in parts) else torch.float32
    frozen = param_batch.freeze() if kernels else None
    rows = _next_rows(param_batch, steps, products, frozen is not None).to(dtype)
    return _BatchTrace(param_batch, parts, constants, frozen, rows)


def _next_rows(param_batch: ParamGroupBatch, steps: Tensors, products: Tensors, by_kernels: bool) -> Tensor:
    """Count an update in `steps` and `products`, and return its coefficients, [R, B]."""
    rule, table = param_batch.rule, param_batch.hyperparameters()
    if steps:
        torch._foreach_add_(steps, 1)
    if by_kernels:
        return torch.stack([table[0].float(), *(count.float() for count in steps)])
    return torch.stack(
        [*rule.constants(table), *(row for entry in rule.step_coefficients(table, steps, products) for row in entry)]
    )
