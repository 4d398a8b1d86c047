"""Runs of a function on one member after another."""

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
from shoal.fuse.array_state import ArrayState, check_shared, keep_rows
from shoal.fuse.copy_on_write import lazily_copied
from shoal.fuse.generators import Drawn, seed_member
from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import Randomness, member_keys
from shoal.fuse.rows import rows
from shoal.fuse.slots import Slot
from shoal.fuse.stacked import Stacked
from shoal.fuse.transaction import Transaction

__all__ = [
    "MemberRunner",
    "described",
    "function_of",
    "own_part",
    "place_of",
    "refuse_outer_grad",
    "run_each",
    "tensors_in",
]

_TRIES = 3
"""Runs without a random number after which a function is assumed to draw none."""


class MemberRunner:
    """Runs functions on one model by itself, with the random numbers that the model would draw in an array.

    Intercepting each torch function of a small model takes a fifth of its step. So a function that has drawn nothing in
    its first runs is no longer intercepted; only torch's generators are compared before and after it. A function that
    changes attributes of the model, which no checkpoint holds, is always intercepted.

    Args:
        seed: Seed of the model's random numbers.
        device: Device of the model.
        watched: Whether to intercept all runs.
    """

    def __init__(self, seed: int, device: torch.device, watched: bool = False) -> None:
        self._seed = seed
        self._device = device
        self._watched = watched
        self._silent: Counter[Any] = Counter()
        """(function, mode) -> number of runs; none of them drew a number unless all runs are watched."""

    def __call__(self, fn: Callable[..., Any], tick: int, model: nn.Module, *batch: Any) -> Any:
        """Call `fn` with the model and a batch.

        Args:
            fn: Function of a model and a batch.
            tick: Number of the call; its random numbers depend on this number and the seed.
            model: Model in training or evaluation.
            batch: The model's own batch.

        Raises:
            FusionError: `fn` draws random numbers though it had drawn none in its first runs. These are not the
                model's own; from now on all runs are intercepted.
        """
        drawn = Drawn(self._device)
        kind = (function_of(fn), model.training)
        if self._silent[kind] >= _TRIES and not self._watched:
            result = fn(model, *batch)
            if drawn():
                self._watched = True
                raise FusionError(
                    f"{described(fn)} had drawn no random numbers and draws some now, which are not the model's own; "
                    "they are intercepted from now on: go back to what was saved before"
                )
            return result
        before = None if self._watched else Transaction([model])
        source = Randomness(partial(member_keys, [self._seed], [tick]), alone=True)
        with member_run(source):
            result = fn(model, *batch)
        self._silent[kind] += 1
        if source.calls or drawn() or (before is not None and before.changed() is not None):
            self._watched = True
        return result


def run_each(
    state: ArrayState, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]
) -> list[Any]:
    """The results of a function for each member; their parameters are rows of the stacked ones, where gradients go.

    Args:
        state: State of an array.
        fn: Function as for `ModelArray.map`.
        keys: Function that makes the keys of the members' random numbers, one each.
        batch: Arguments as for `ModelArray.map`.

    Raises:
        FusionError: A member has changed a frozen parameter that is kept once for all.
    """
    registered = state.own_slots()
    columns = [rows(slot.data) for slot in registered]
    results = []
    for b, member in enumerate(state.members):
        if b:
            seed_member(b)
        mine = own_part(batch, b, len(state.members))
        for slot, row in zip(registered, columns, strict=True):
            slot.put(b + 1, _shown(slot, row[b]))
        try:
            home = partial(_owner_of_row, state.slots, list(zip(registered, columns, strict=True)), b)
            with member_run(Randomness(partial(_key, keys, b), alone=True), home):
                results.append(fn(member, *mine))
            keep_rows(registered, b, [row[b] for row in columns], member)
        finally:
            for slot in registered:
                slot.put(b + 1, slot.own[b])
    check_shared(state.slots)
    return results


def own_part(batch: Any, b: int, members: int) -> Any:
    """Member b's part of a batch: its slices of stacked tensors, and copies of shared tensors, which it may change."""
    if members == 1 and type(batch) is list and all(type(leaf) is Tensor for leaf in batch):
        return batch.copy()  # the common case, with the result of the code below
    mine = pytree.tree_map_only(Stacked, lambda value: value.whole[b], batch)
    return mine if members == 1 else lazily_copied(mine)


def _shown(slot: Slot, row: Tensor) -> Tensor:
    """The tensor in the place of a row while a function runs: a copy of a buffer, else the row.

    Autograd may save the buffer, and its replacement is written to the row before the backward pass.
    """
    copied = torch.is_grad_enabled() and not slot.trainable and not row.requires_grad
    return row.clone() if copied else row


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a batch, without `pytree` for the common case of a list or tuple of tensors."""
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in ([part] if isinstance(part, Tensor) else tensors_in(part))]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def function_of(fn: Any) -> Any:
    """The identity of a function, which is equal for a lambda or a bound method made anew at every call."""
    if isinstance(fn, partial):
        return function_of(getattr(fn, "__wrapped__", fn.func))
    return getattr(getattr(fn, "__func__", fn), "__code__", fn)


def described(fn: Any) -> str:
    """A function's name, file and line."""
    code = function_of(getattr(fn, "__wrapped__", fn))
    if not isinstance(code, CodeType):
        return str(getattr(fn, "__qualname__", fn))
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def place_of(error: BaseException, fn: Any) -> str:
    """The user's function and line that raised an error; the place of `fn` if no frame is the user's."""
    places = [
        f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("shoal", "torch")
    ]
    return places[-1] if places else described(fn)


def _key(keys: Callable[[], list[int]], b: int) -> list[int]:
    return keys()[b : b + 1]


_NO_PASS = -1
"""Autograd's number of the current backward pass, outside of one."""


def _owner_of_row(
    slots: Iterable[Slot], columns: Sequence[tuple[Slot, Sequence[Tensor]]], b: int, tensor: Tensor
) -> tuple[Tensor, int] | None:
    """The stacked tensor of which a tensor of member b is a row, and b; None if it is no row.

    Args:
        slots: All slots of the array.
        columns: Slots with the rows that stand in the members' places.
        b: Number of the member that runs.
        tensor: Tensor whose gradient is requested.

    Raises:
        FusionError: See `refuse_outer_grad`.
    """
    for slot, tensors in columns:
        if tensors[b] is tensor:
            return slot.data, b
    refuse_outer_grad(slots, tensor)
    return None


def refuse_outer_grad(slots: Iterable[Slot], tensor: Tensor) -> None:
    """Refuse to give a function the gradient of a parameter that another tensor replaces while the function runs.

    Raises:
        FusionError: The tensor is such a parameter, and no backward pass runs.
    """
    if torch._C._current_graph_task_id() == _NO_PASS and any(
        tensor is slot.data or any(tensor is own for own in slot.own)
        for slot in slots
        if slot.trainable and not slot.shared
    ):
        raise FusionError(
            "a function asks for the gradient of an array's or a member's parameter, and not through the model that it "
            "is given, as an optimizer's `step` and `zero_grad` do; call these outside of `map`, or use `TrainingStep`"
        )
