"""Runs a function on one member of an array after another, with each member's own random numbers and gradients."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.array_state import ArrayState, check_shared, commit_member_rows
from shoal.fuse.generators import DrawDetector, seed_member
from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import RandomSource, member_keys
from shoal.fuse.rows import member_rows
from shoal.fuse.slots import Slot
from shoal.fuse.stacked import Stacked
from shoal.fuse.transaction import Transaction

__all__ = [
    "MemberRunner",
    "describe_function",
    "error_location",
    "function_identity",
    "member_batch",
    "refuse_outer_grad",
    "run_each_member",
    "tensors_in",
]

_INTERCEPTED_RUNS = 3
"""Number of runs without a random number after which a function is no longer intercepted."""


class MemberRunner:
    """Runs functions on a single model, with the random numbers that the model would draw in an array.

    Intercepting all torch functions takes a fifth of a small step's time. So after first runs without a random number,
    torch's generators are compared instead. A function that changes attributes of the model is always intercepted,
    since checkpoints do not contain these.
    """

    def __init__(self, seed: int, device: torch.device, intercepted: bool = False) -> None:
        self._seed = seed
        self._device = device
        self._intercepted = intercepted
        self._silent: Counter[Any] = Counter()
        """(function, mode) -> number of intercepted runs; no run drew a number unless all runs are intercepted."""

    def __call__(self, fn: Callable[..., Any], tick: int, model: nn.Module, *batch: Any) -> Any:
        """Call `fn` with the model and a batch; its random numbers depend on `tick` and the seed.

        If it draws only after its first runs, it is refused, since the numbers are not the model's.
        """
        drawn = DrawDetector(self._device)
        kind = (function_identity(fn), model.training)
        if self._silent[kind] >= _INTERCEPTED_RUNS and not self._intercepted:
            result = fn(model, *batch)
            if drawn():
                self._intercepted = True
                raise FusionError(
                    f"{describe_function(fn)} had drawn no random numbers and draws some now, which are not the "
                    "model's own; go back to what was saved before (from now on random functions are intercepted)"
                )
            return result
        before = None if self._intercepted else Transaction([model])
        source = RandomSource(partial(member_keys, [self._seed], [tick]), single_member=True)
        with member_run(source):
            result = fn(model, *batch)
        self._silent[kind] += 1
        if source.calls or drawn() or (before is not None and before.changed() is not None):
            self._intercepted = True
        return result


def run_each_member(
    state: ArrayState, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]
) -> list[Any]:
    """Call a function with each member, whose parameters are then rows of the stacked ones, which get the gradients."""
    registered = state.stacked_slots()
    columns = [member_rows(slot.data) for slot in registered]
    results = []
    for b, member in enumerate(state.members):
        if b:
            seed_member(b)
        mine = member_batch(batch, b, len(state.members))
        for slot, row in zip(registered, columns, strict=True):
            visible = _visible_tensor(slot, row[b])
            if attributes := vars(slot.member_tensors[b]):  # what the user or a library has set on the tensor itself
                vars(visible).update(attributes)
            slot.assign(b + 1, visible)
        try:
            row_lookup = partial(_owner_of_row, state.slots, list(zip(registered, columns, strict=True)), b)
            with member_run(RandomSource(partial(_member_key, keys, b), single_member=True), row_lookup):
                results.append(fn(member, *mine))
            commit_member_rows(registered, b, [row[b] for row in columns], member)
        finally:
            for slot in registered:
                slot.assign(b + 1, slot.member_tensors[b])
    check_shared(state.slots)
    return results


def member_batch(batch: Any, b: int, members: int) -> Any:
    """Member b's part of a batch: slices of stacked tensors, as lazy clones, since user code may write to them."""
    if members == 1 and type(batch) is list and all(type(leaf) is Tensor for leaf in batch):
        return batch.copy()  # the common case; equals the general case below
    mine = pytree.tree_map_only(Stacked, lambda value: value.whole[b], batch)
    return mine if members == 1 else lazy_clone(mine)


def _visible_tensor(slot: Slot, row: Tensor) -> Tensor:
    """The tensor that user code sees in place of a row: the row of a parameter, or a copy of a buffer.

    Autograd may save a buffer that user code then replaces; writing the new value to the row would change it.
    """
    copied = torch.is_grad_enabled() and not slot.trainable and not row.requires_grad
    return row.clone() if copied else row


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a batch; the common case of a list or tuple of tensors avoids the slower `pytree`."""
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in ([part] if isinstance(part, Tensor) else tensors_in(part))]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def function_identity(fn: Any) -> Any:
    """A key that identifies a function, equal for lambdas and bound methods that are created again at every call."""
    if isinstance(fn, partial):
        return function_identity(getattr(fn, "__wrapped__", fn.func))
    return getattr(getattr(fn, "__func__", fn), "__code__", fn)


def describe_function(fn: Any) -> str:
    """The name, file and line of a function."""
    code = function_identity(getattr(fn, "__wrapped__", fn))
    if not isinstance(code, CodeType):
        return str(getattr(fn, "__qualname__", fn))
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def error_location(error: BaseException, fn: Any) -> str:
    """The user function and line that raised an error; the location of `fn` if no frame is in user code."""
    places = [
        f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("shoal", "torch", "contextlib")
    ]
    return places[-1] if places else describe_function(fn)


def _member_key(keys: Callable[[], list[int]], b: int) -> list[int]:
    return keys()[b : b + 1]


_NO_PASS = -1
"""Autograd's id of the current backward pass when there is none."""


def _owner_of_row(
    slots: Iterable[Slot], columns: Sequence[tuple[Slot, Sequence[Tensor]]], b: int, tensor: Tensor
) -> tuple[Tensor, int] | None:
    """The stacked tensor of which a tensor is member b's row, and b; None if the tensor is not a row."""
    for slot, tensors in columns:
        if tensors[b] is tensor:
            return slot.data, b
    refuse_outer_grad(slots, tensor)
    return None


def refuse_outer_grad(slots: Iterable[Slot], tensor: Tensor) -> None:
    """Refuse access to the gradient of a parameter that is replaced by another tensor while a function runs."""
    if torch._C._current_graph_task_id() == _NO_PASS and any(
        tensor is slot.data or any(tensor is own for own in slot.member_tensors)
        for slot in slots
        if slot.trainable and not slot.shared
    ):
        raise FusionError(
            "a function accesses the gradient of an array's or a member's parameter without using the model that it is "
            "given, as an optimizer's `step` and `zero_grad` do; call these outside of `map`, or use `TrainingStep`"
        )
