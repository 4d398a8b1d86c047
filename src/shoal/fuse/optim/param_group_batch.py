"""`ParamGroupBatch`: parameters of one group of consecutive members, updated together by one rule."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.constants import constant, to_device
from shoal.fuse.optim.lowerings import ForeachCalls, KernelCalls
from shoal.fuse.optim.param_state import ParamState, StackedParam
from shoal.fuse.optim.rule import Hyperparameters, KernelRule, UpdateRule, kernel_takes, unreadable_settings
from shoal.fuse.rows import changing, stack_rows

__all__ = ["Lowering", "ParamGroupBatch"]

Lowering = Literal["kernels", "elementwise"]
"""Torch's fused kernels, with one call for members with equal hyper-parameters, or `torch._foreach_*` functions."""

_KERNEL_CALL, _THREADED_KERNEL_CALL, _FOREACH_CALLS, _FOREACH_ELEMENT = 1.6e-6, 2.5e-6, 33e-6, 1.2e-9
"""Seconds per parameter: a kernel call on one thread, a kernel call on several threads, the `torch._foreach_*`
functions for all members, and the additional memory traffic of these functions per element, on a CPU."""

_KERNEL_TENSORS, _FOREACH_LAUNCHES = 30, 5
"""On CUDA, at least: parameters that one launch of a fused kernel takes, and launches of `torch._foreach_*` functions
per parameter. Coefficients `[B, 1, ...]` keep these functions from torch's kernels for many tensors."""

_MAX_CACHED_SETS = 64
"""Largest number of sets of parameters with gradients whose `_ActiveParams` are cached."""


@dataclass(frozen=True)
class _ActiveParams:
    parts: Sequence[ParamState]
    steps: list[Tensor]
    calls: KernelCalls | ForeachCalls


class ParamGroupBatch:
    """The parameters of one dtype in a group of consecutive members, or of a single member, with one update rule.

    State is stacked, and the members' own state consists of views of its rows. As in torch, a parameter's state is
    initialised, or stacked from the members' state, at its first gradient.
    """

    def __init__(
        self,
        rule: UpdateRule,
        members: Sequence[Optimizer],
        start: int,
        group: int,
        stacked_params: Sequence[StackedParam],
        lowering: Lowering | None,
    ) -> None:
        self.rule = rule
        self._members = members
        self._rows = slice(start, start + len(members))
        self._group = group
        self._single_member = stacked_params[0].member is not None
        own = slice(None) if self._single_member else self._rows
        self.parts = [
            ParamState(param, param.member_params[own], self.rows(param.stacked.detach())) for param in stacked_params
        ]
        self._lowering = lowering
        self._read = itemgetter(*rule.settings)
        self._settings: list[Any] = []
        self._hyperparameters: list[Hyperparameters] = []
        self._table: Tensor | None = None
        self.kernels: KernelRule | None = None
        """The rule if its kernel is the lowering to use."""
        self.changes_rates_only = True
        """Whether no hyper-parameter but the learning rates has changed so far."""
        self.frozen = False
        """Whether a graph has the others as constants; the batch is out of date once they change."""
        self._dropped = False  # whether the state of a member was dropped, so that it must be stacked anew
        self._active: dict[tuple[KernelRule | None, tuple[int, ...]], _ActiveParams] = {}
        self._plain = not self._single_member and all(
            not part.stacked_param.stacked.is_complex() and len(part.param) == len(part.stacked_param.stacked)
            for part in self.parts
        )

    def rows(self, stacked: Tensor) -> Tensor:
        """The members' rows of a tensor of the array; complex numbers as pairs of real ones."""
        if self._single_member:
            stacked = stacked.unsqueeze(0)
        elif len(stacked) != len(self._members):
            stacked = stacked[self._rows]
        return torch.view_as_real(stacked.resolve_conj()) if stacked.is_complex() else stacked

    def member_rows(self, numbers: Tensor) -> Tensor:
        """The rows of this batch's members in a tensor [B, ...] of all members."""
        return numbers[self._rows]

    def refresh(self) -> bool:
        """Read the members' parameter groups again; return whether all still follow the rule of this batch."""
        if self._dropped:
            return False
        groups = [member.param_groups[self._group] for member in self._members]
        try:
            settings = [self._read(group) for group in groups]
        except KeyError as error:
            b, group = next((b, group) for b, group in enumerate(groups) if error.args[0] not in group)
            raise unreadable_settings(self._rows.start + b, self._group, group, error) from error
        if settings == self._settings:
            return True
        parsed = [self._parse(b, mine) for b, mine in enumerate(settings)]
        hyperparameters = [both[1] for both in parsed if both is not None and both[0] == self.rule]
        if len(hyperparameters) < len(parsed):
            return False
        if self._hyperparameters and [now[1:] for now in hyperparameters] != [old[1:] for old in self._hyperparameters]:
            self.changes_rates_only = False
            if self.frozen:
                return False
        self._settings = [_without_tensors(mine) for mine in settings]
        self._hyperparameters = hyperparameters
        self.kernels = self._kernel_rule()
        if self._table is not None:
            numbers = torch.tensor(hyperparameters, dtype=torch.float64).T.contiguous()
            self._table.copy_(to_device(numbers, self._table.device))
        return True

    def _parse(self, b: int, settings: Any) -> tuple[UpdateRule, Hyperparameters] | None:
        try:
            return self.rule.parse(settings)
        except (TypeError, ValueError) as error:
            group = self._members[b].param_groups[self._group]
            raise unreadable_settings(self._rows.start + b, self._group, group, error) from error

    def freeze(self) -> Sequence[Hyperparameters] | None:
        """The hyper-parameters for a CUDA graph of fused kernels, in which only learning rates may change, or None."""
        # The kernels read rates as float32, which is too coarse for float64.
        suited = all(part.param.is_cuda and part.param.dtype != torch.float64 for part in self.parts)
        self.frozen = self.kernels is not None and self.changes_rates_only and suited
        return self._hyperparameters if self.frozen else None

    def hyperparameters(self) -> Tensor:
        """The members' hyper-parameters, [K, B] float64, in a tensor that `refresh` updates in place."""
        if self._table is None:
            numbers = torch.tensor(self._hyperparameters, dtype=torch.float64).T.contiguous()
            self._table = to_device(numbers, self.parts[0].param.device)
        return self._table

    @torch.no_grad()
    def step(self, skip: Collection[int] = ()) -> None:
        """Update parameters with gradients; `skip` as for `FusedOptimizer`."""
        skipped = [b - self._rows.start for b in sorted(skip) if self._rows.start <= b < self._rows.stop]
        if len(skipped) == len(self._members):
            return
        found = [part.stacked_param.grad() for part in self.parts]
        places = tuple(i for i, grad in enumerate(found) if grad is not None)
        if not places:
            return
        active = self._active.get((self.kernels, places))
        if active is None:
            if len(self._active) >= _MAX_CACHED_SETS:  # as in models that skip layers at random
                self._active.clear()
            active = self._active[self.kernels, places] = self._prepare([self.parts[i] for i in places])
        present = [grad for grad in found if grad is not None]
        grads = present if self._plain else [self.rows(grad) for grad in present]
        with self._skipping(active.parts, skipped) if skipped else nullcontext():
            if active.steps:
                torch._foreach_add_(active.steps, 1)
            active.calls.step(grads, self._hyperparameters)

    @contextmanager
    def _skipping(self, parts: Sequence[ParamState], members: Sequence[int]) -> Iterator[None]:
        """Context manager in which some members keep their parameters and state."""
        updated = constant([b not in members for b in range(len(self._members))], torch.bool, parts[0].param.device)
        with changing([tensor for part in parts for tensor in (part.param, *part.state)], updated):
            yield
        self.forget_calls()
        unknown = [part for part in parts if part.may_be_unused(members)]
        counts = torch.stack([part.steps for part in unknown if part.steps is not None]).tolist() if unknown else []
        dropped = [part.drop_unused(self._members, members, own) for part, own in zip(unknown, counts, strict=True)]
        self._dropped = any(dropped)

    def forget_calls(self) -> None:
        """Prepare the updates anew, as they are for the members' step counts, which now differ otherwise."""
        self._active.clear()

    def _prepare(self, parts: Sequence[ParamState]) -> "_ActiveParams":
        """Open the state of parameters, and prepare their update; all share one tensor of step counts if possible."""
        for part in parts:
            self.open(part)
        counted = [part for part in parts if part.steps is not None]
        steps = [part.steps for part in counted if part.steps is not None]
        together = stack_rows(steps) if steps else None
        if together is not None and (
            together.data_ptr() == steps[0].data_ptr() or all(part.is_new for part in counted)
        ):
            for part, row in zip(counted, together.unbind(), strict=True):
                part.share_counter(row, self.rule, self._members)
            steps = [together]
        calls = ForeachCalls(self.rule, parts) if self.kernels is None else KernelCalls(self.kernels, parts)
        return _ActiveParams(parts, steps, calls)

    def open(self, part: ParamState) -> ParamState:
        """Stack the members' state of a parameter, or initialise it, unless that was done; return the parameter."""
        if part.steps is None and self.rule.moments:
            part.open(self.rule, self._members)
        return part

    def _kernel_rule(self) -> KernelRule | None:
        """The rule if its kernel is the lowering to use, else None.

        On the CPU, `torch._foreach_*` beats many small kernels on several threads; on CUDA the fewer launches win.
        """
        if not isinstance(self.rule, KernelRule) or not self.rule.has_kernel(self._hyperparameters):
            return None
        if not all(kernel_takes(part.param) for part in self.parts):
            return None
        device = self.parts[0].param.device.type
        if device != "cpu" and not (device == "cuda" and self.rule.on_cuda):
            return None
        if self._lowering is not None:
            return self.rule if self._lowering == "kernels" else None
        calls = 1 + sum(a != b for a, b in pairwise(self._hyperparameters))
        if device == "cuda":
            launches = calls * ceil(len(self.parts) / _KERNEL_TENSORS)
            return self.rule if launches <= _FOREACH_LAUNCHES * len(self.parts) else None
        share = calls * (_THREADED_KERNEL_CALL if torch.get_num_threads() > 1 else _KERNEL_CALL)
        mean = sum(part.param.numel() for part in self.parts) / len(self.parts)
        return self.rule if share <= _FOREACH_CALLS + mean * _FOREACH_ELEMENT else None


def _without_tensors(value: Any) -> Any:
    """A copy of settings in which tensors are floats, so that in-place changes of a tensor do not affect it."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_without_tensors, value))
    return float(value) if isinstance(value, Tensor) else value
