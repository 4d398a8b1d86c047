"""Runs a function on a single model with its own random numbers; names of user functions and of lines in them."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.generators import DrawDetector
from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import RandomSource, member_keys
from shoal.fuse.slots import Slot
from shoal.fuse.stacked import Stacked

__all__ = [
    "MemberRunner",
    "describe_function",
    "error_location",
    "function_identity",
    "member_batch",
    "refuse_outer_grad",
    "tensors_in",
]

_INTERCEPTED_RUNS = 3
"""Number of runs without a random number after which a function is no longer intercepted."""


class MemberRunner:
    """Runs functions on a single model, with the random numbers that the model would draw in an array.

    Intercepting all torch functions takes a fifth of a small step's time. So after first runs without a random number,
    torch's generators are compared instead.
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
        source = RandomSource(partial(member_keys, [self._seed], [tick]), single_member=True)
        with member_run(source):
            result = fn(model, *batch)
        self._silent[kind] += 1
        if source.calls or drawn():
            self._intercepted = True
        return result


def member_batch(batch: Any, b: int, members: int) -> Any:
    """Member b's part of a batch: slices of stacked tensors, as lazy clones, since user code may write to them."""
    if members == 1 and type(batch) is list and all(type(leaf) is Tensor for leaf in batch):
        return batch.copy()  # the common case; equals the general case below
    mine = pytree.tree_map_only(Stacked, lambda value: value.whole[b], batch)
    return mine if members == 1 else lazy_clone(mine)


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


_NO_PASS = -1
"""Autograd's id of the current backward pass when there is none."""


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
