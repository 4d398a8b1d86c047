"""Optimizer steps without a fused rule: the step of a single optimizer, and a loop over the members' optimizers."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import _use_grad_for_differentiable

from shoal.core.errors import FusionError
from shoal.fuse.constants import to_device
from shoal.fuse.optim.param_state import StackedParam
from shoal.fuse.optim.rule import kernel_takes
from shoal.fuse.optim.table import RULES, has_unmodified_step

__all__ = ["MemberLoop", "UnfusedStep", "check_fusible", "mode_setter", "required_argument"]

_CLASSES_WITH_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Exact classes; the `step` of a subclass may compute something else."""

_ZERO_GRAD = Optimizer.zero_grad
_HOOK_WRAPPER = Optimizer.profile_hook_step(_CLASSES_WITH_KERNEL[0].step).__code__
_NO_GRAD_WRAPPER = _use_grad_for_differentiable(_CLASSES_WITH_KERNEL[0].step).__code__
"""Code of torch's wrappers around each `step`: the outer one for hooks and profiler, the inner one for `no_grad`."""


_COUNTS = ("step", "mu_product")
"""Entries of an optimizer's state whose values torch reads: where these are on a GPU, the host waits for each one."""


def required_argument(owner: Any) -> str:
    """Return the name of an argument that the `step` of an optimizer or scheduler requires, as that of LBFGS, or ""."""
    of_class = getattr(type(owner), "step", None)  # else a scheduler may have wrapped it, with the parameter `self`
    parameters = [*inspect.signature(owner.step if of_class is None else of_class).parameters.values()]
    needed = parameters if of_class is None else parameters[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next((p.name for p in needed if p.default is p.empty and p.kind not in variadic), "")


def check_fusible(b: int, optimizer: Optimizer) -> None:
    """Refuse the optimizer of member b if an array's optimizer, which calls only its `step`, would leave out a part."""
    kind = type(optimizer).__qualname__
    if has_own_zero_grad(optimizer):
        raise FusionError(
            f"the optimizer of member {b}, {kind}, has a `zero_grad` of its own, which an array's optimizer does not "
            "call; train this model alone, or fuse the optimizer that it wraps"
        )
    if mode_setter(optimizer, train=True) is not None:
        raise FusionError(
            f"the optimizer of member {b}, {kind}, has modes (`train` and `eval`) in which the weights differ, and an "
            "array has none; train this model alone"
        )


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's `zero_grad` may do something else than torch's."""
    return getattr(type(optimizer), "zero_grad", None) is not _ZERO_GRAD or "zero_grad" in vars(optimizer)


def mode_setter(optimizer: Optimizer, train: bool) -> Callable[[], Any] | None:
    """Return the method `train` or `eval` of an optimizer that has both, as schedule-free ones do; else None."""
    methods = [getattr(optimizer, name, None) for name in ("eval", "train")]
    return methods[train] if all(map(callable, methods)) else None


class UnfusedStep:
    """The step of a single optimizer, with torch's fused kernel if there is one.

    Torch's default loop over the parameters takes ten times as long on the CPU, so `fused` is set during the step,
    unless the user chose. Torch's wrappers for hooks, profiler and compiler take as long as the kernel; unused ones are
    skipped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._has_kernel: bool | None = None if type(optimizer) in _CLASSES_WITH_KERNEL else False
        on_gpu = any(param.is_cuda for group in optimizer.param_groups for param in group["params"])
        self._counts = _HostCounts(optimizer) if on_gpu and type(optimizer) in RULES else None
        self._wrapped: Callable[..., Any] | None = None
        self._unwrapped: Callable[..., Any] | None = None

    def zero_grad(self) -> None:
        """Set the gradients to None, as the optimizer's `zero_grad` does."""
        optimizer = self._optimizer
        if has_own_zero_grad(optimizer) or _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def __call__(self) -> None:
        """Take one step of the optimizer."""
        if self._has_kernel is None:
            # Not in the constructor, because lazy parameters have no shape before the first forward pass. The kernels
            # need parameters without gaps in memory.
            params = [param for group in self._optimizer.param_groups for param in group["params"]]
            self._has_kernel = all(
                kernel_takes(param) and torch.empty_like(param).stride() == param.stride() for param in params
            )
        unmodified = type(self._optimizer) in _CLASSES_WITH_KERNEL and has_unmodified_step(self._optimizer)
        chosen = []
        if self._has_kernel and unmodified:
            chosen = [group for group in self._optimizer.param_groups if self._kernel_applies(group)]
        for group in chosen:
            group["fused"] = True
        try:
            with self._counts_shown():
                self._step(unmodified)
        finally:
            for group in chosen:
                group["fused"] = None

    def forget_counts(self) -> None:
        """Call it after the array's optimizer has advanced the counts of this one."""
        if self._counts is not None:
            self._counts.forget()

    def _counts_shown(self) -> AbstractContextManager[None]:
        if self._counts is None:
            return nullcontext()
        groups = self._optimizer.param_groups
        return self._counts.shown(group for group in groups if not (group.get("fused") or group.get("capturable")))

    def _step(self, unmodified: bool) -> None:
        """Take the step. If `unmodified`, the step is torch's own and has no hooks, so torch's wrappers are skipped."""
        optimizer = self._optimizer
        if not unmodified or optimizer.defaults["differentiable"] or _profiler_enabled():
            optimizer.step()
            return
        step = type(optimizer).step
        if step is not self._wrapped:
            self._wrapped, self._unwrapped = step, _without_wrappers(step)
        if self._unwrapped is None:
            optimizer.step()
            return
        if "step" in vars(optimizer):  # wrapped by a scheduler, which checks this attribute
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self._unwrapped(optimizer)

    def _kernel_applies(self, group: dict[str, Any]) -> bool:
        """Whether the kernel computes the loop's result; SGD's initialises momentum for a whole group or for none."""
        if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
            return False
        if group.get("capturable"):
            return False
        state, momentum = self._optimizer.state, group.get("momentum")
        for param in group["params"]:
            if (grad := param.grad) is None:
                continue
            if grad.stride() != param.stride() or (momentum and param not in state):
                return False
            if not param.is_cpu and param in state and not _kernel_reads_count(param, state[param].get("step")):
                return False
        return True


def _without_wrappers(step: Any) -> Callable[..., Any] | None:
    """The `step` of a class without torch's wrappers; None if there is another wrapper."""
    if getattr(step, "__code__", None) is _HOOK_WRAPPER:
        step = step.__wrapped__
    return step.__wrapped__ if getattr(step, "__code__", None) is _NO_GRAD_WRAPPER else None


def _kernel_reads_count(parameter: Tensor, count: object) -> bool:
    """Whether a GPU kernel can read a parameter's step count, which must be float32 on the same device."""
    if not isinstance(count, Tensor):
        return True
    return count.device == parameter.device and count.dtype == torch.float32


class MemberLoop:
    """Steps optimizers without a fused rule one after another; they may have any class and any hooks."""

    def __init__(
        self, members: Sequence[Optimizer], start: int, stacked_params: Sequence[Sequence[StackedParam]]
    ) -> None:
        self._members = members
        self._start = start
        self._stacked_params = stacked_params
        for b, member in enumerate(members, start):
            if isinstance(member, SparseAdam):
                raise FusionError(
                    f"the optimizer of member {b}, SparseAdam, needs sparse gradients, which an array does not have; "
                    "use torch.optim.Adam, and sparse=False in the model"
                )
            if required_argument(member):
                raise FusionError(
                    f"the optimizer of member {b}, {type(member).__qualname__}, needs a closure to step, "
                    "which an array cannot give it; train this model alone"
                )

    def refresh(self) -> bool:
        """Return True: the step reads the members' parameter groups anew, so nothing has to be refreshed."""
        return True

    def step(self, skip: Collection[int] = ()) -> None:
        """Take the step of every member, `skip` as for `FusedOptimizer`; parameters must stay views of the array's."""
        for b, (member, stacked_params) in enumerate(
            zip(self._members, self._stacked_params, strict=True), self._start
        ):
            if b in skip:
                continue
            for param in stacked_params:
                grad = param.grad()
                param.member_params[b].grad = None if grad is None else grad[b]
            try:
                member.step()
            except Exception as error:
                error.add_note(
                    f"raised by the optimizer of member {b}; the members before {b} have been updated, member {b} and "
                    f"those after it may not have been: continue from a checkpoint, without member {b} (`array.select`)"
                )
                raise
            finally:
                for param in stacked_params:
                    param.member_params[b].grad = None
            for param in stacked_params:
                if param.member_params[b].data_ptr() != param.stacked[b].data_ptr():
                    raise FusionError(
                        f"the optimizer of member {b}, {type(member).__qualname__}, replaced the memory of "
                        f"{param.path!r} instead of updating it in place; train this model alone"
                    )


class _HostCounts:
    """Shows an optimizer of torch its counts on the CPU, as torch keeps them, during a step of its own.

    They are read from the GPU once, and once more after `forget` or a change in place.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._read: list[tuple[Tensor, int]] = []
        """Counts on the GPU, [], and their versions, of which `_rows` holds the values."""
        self._rows: tuple[Tensor, ...] = ()

    def forget(self) -> None:
        """Read the counts anew at the next step, since they were advanced in another way."""
        self._read = []

    @contextmanager
    def shown(self, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Context manager for a step in which torch reads the counts of some parameter groups."""
        states = [self._optimizer.state.get(param, {}) for group in groups for param in group["params"]]
        places = [(mine, name) for mine in states for name in _COUNTS if _on_gpu(mine.get(name))]
        if not places:
            yield
            return
        counts = [mine[name] for mine, name in places]
        if [id(count) for count in counts] != [id(count) for count, _ in self._read] or any(
            count._version != version for count, version in self._read
        ):
            self._rows = torch.stack(counts).cpu().unbind()
        for (mine, name), row in zip(places, self._rows, strict=True):
            mine[name] = row
        try:
            yield
        finally:
            for (mine, name), count in zip(places, counts, strict=True):
                mine[name] = count
            torch._foreach_copy_(counts, to_device(torch.stack(self._rows), counts[0].device).unbind())
            self._read = [(count, count._version) for count in counts]


def _on_gpu(count: object) -> bool:
    return isinstance(count, Tensor) and count.is_cuda
