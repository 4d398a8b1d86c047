"""Runs a function of a model for all members of an array (`ModelArray.map`): at once, or member by member if needed.

In both cases results are plain tensors with a leading axis B.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.array_state import EVERY_FUNCTION, ArrayState
from shoal.fuse.member_changes import user_attributes
from shoal.fuse.per_member import (
    describe_function,
    error_location,
    function_identity,
    refuse_outer_grad,
    run_each_member,
)
from shoal.fuse.shard import IndivisibleStepError, active_shard
from shoal.fuse.slots import Slot
from shoal.fuse.stacked import NeedsMemberError, SharedWriteError, Stacked, events, refuse_custom_autograd
from shoal.fuse.transaction import Transaction
from shoal.fuse.unfused_module import unfused_tensor_places

__all__ = ["MapRunner"]

_log = logging.getLogger("shoal.fuse")

_logged: set[Any] = set()
"""Functions whose reason to run member by member was logged."""


class MapRunner:
    """Runs functions for `ModelArray.map`, which states the contract.

    Args:
        state: State of the array.
    """

    def __init__(self, state: ArrayState) -> None:
        self._state = state
        self._ran: set[Any] = set()
        """Functions that have run for all members at once without an error."""

    def __call__(self, fn: Callable[..., Any], training: bool, batch: tuple[Any, ...]) -> Any:
        """Run a function on all members; this counts as one call of the array.

        Args:
            fn: Function of a model and a batch.
            training: Mode of the array.
            batch: Further arguments of the function.

        Raises:
            FusionError: A call of the function after its first one shows that it must run member by member.
        """
        keys = self._state.next_keys()
        key = (function_identity(fn), training)
        by_member = self._state.by_member
        divided = active_shard() is not None  # only a run at once knows of shards
        if (len(self._state.members) == 1 and not divided) or key in by_member or EVERY_FUNCTION in by_member:
            return self._run_each(fn, keys, batch)
        if key not in self._ran:
            return self._run_first_time(fn, key, keys, batch)
        try:
            return self._run_at_once(fn, keys, batch)
        except NeedsMemberError as error:
            by_member.add(key)
            raise FusionError(
                f"{error_location(error, fn)}: {error}, in a later call than the first, whose effects are not rolled "
                "back; go back to what was saved before it (from now on the function runs member by member)"
            ) from error

    def _run_first_time(
        self, fn: Callable[..., Any], key: Any, keys: Callable[[], list[int]], batch: tuple[Any, ...]
    ) -> Any:
        """Run a function for the first time: at once, or, after a failure and a rollback, member by member."""
        transaction = self._transaction(fn)
        while True:
            uniform = [slot for slot in self._state.slots if slot.uniform]
            try:
                result = self._run_at_once(fn, keys, batch, transaction)
            except NeedsMemberError as error:
                reason = f"{error_location(error, fn)}: {error}"
                written = self._shared_slot(error)
            else:
                self._ran.add(key)
                return result
            transaction.restore()
            if written is not None:
                self._state.unshare(written)
                transaction = self._transaction(fn)
            elif uniform:
                for slot in uniform:  # the function may have to change such a buffer differently in each member
                    slot.uniform = False
            else:
                break
        if active_shard() is not None:
            raise IndivisibleStepError(f"{reason}, so it must run member by member")
        self._state.by_member.add(key)
        if key not in _logged:
            _logged.add(key)
            _log.warning("a function runs member by member: %s", reason)
        return self._run_each(fn, keys, batch)

    def _run_at_once(
        self,
        fn: Callable[..., Any],
        keys: Callable[[], list[int]],
        batch: tuple[Any, ...],
        transaction: Transaction | None = None,
    ) -> Any:
        """Run a function once for all members."""
        bypassed = events.bypasses
        try:
            with self._state.open(keys, partial(refuse_outer_grad, self._state.slots)) as model:
                result = fn(model, *batch)
                with torch._C.DisableTorchFunction():
                    result = pytree.tree_map(lambda value: _expand_leaf(value, len(self._state.members)), result)
                if transaction is not None and (left := transaction.find_member_effect()) is not None:
                    raise NeedsMemberError(left)
            return result
        except RuntimeError as error:
            if events.bypasses == bypassed:
                raise
            raise NeedsMemberError(str(error)) from error

    def _run_each(self, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]) -> Any:
        """Run a function on one member after another; their parameters are rows of the stacked ones."""
        if active_shard() is not None:
            raise IndivisibleStepError(f"{describe_function(fn)} must run member by member")
        state = self._state
        state.sync_before_member_runs()
        several = len(state.members) > 1
        attributes = user_attributes(state.members[0]) if several else {}
        results = run_each_member(state, fn, keys, batch)
        if several and any(v is not attributes.get(k) for k, v in user_attributes(state.members[0]).items()):
            state.by_member.add(EVERY_FUNCTION)  # the members hold attributes that the template does not
        return _join(results)

    def _transaction(self, fn: Callable[..., Any]) -> Transaction:
        """Take a snapshot of everything that a run for all members at once may change."""
        state = self._state
        state.sync_from_members()
        own = [*(slot.data for slot in state.slots if slot.member_tensors), *unfused_tensor_places(state.unfused)]
        places = {(id(held), key) for slot in state.slots for held, key in slot.places[0]}
        return Transaction([state.template], [fn], tensors=own, places=places)

    def _shared_slot(self, error: BaseException) -> Slot | None:
        """The slot of the frozen parameter, stored once, that the function tried to change; else None."""
        target = error.target if isinstance(error, SharedWriteError) else None
        return next((slot for slot in self._state.slots if slot.shared and slot.data is target), None)


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def _expand_leaf(value: Any, members: int) -> Any:
    """Give one leaf of a function's result for all members at once a leading axis B."""
    if isinstance(value, Stacked):
        refuse_custom_autograd([value])
        return value.whole
    if isinstance(value, Tensor):
        return value.expand(members, *value.shape)
    if isinstance(value, _NUMBERS):
        return torch.tensor([value] * members)
    if value is not None:
        raise NeedsMemberError(f"it returns a {type(value).__name__}, which may differ between members")
    return None


def _join(results: list[Any]) -> Any:
    """Join the results of a run member by member, in the form of a run at once."""
    leaves, specs = zip(*(pytree.tree_flatten(result) for result in results), strict=True)
    for b, spec in enumerate(specs):
        if spec != specs[0]:
            raise FusionError(f"members 0 and {b} return results of different structure: {specs[0]} and {spec}")
    return pytree.tree_unflatten([_join_leaf(column) for column in zip(*leaves, strict=True)], specs[0])


def _join_leaf(column: tuple[Any, ...]) -> Any:
    if all(isinstance(value, Tensor) for value in column):
        shapes = [tuple(value.shape) for value in column]
        if any(shape != shapes[0] for shape in shapes):
            raise FusionError(f"the members return tensors of different shapes, {shapes}; return their means or sums")
        return torch.stack(column)
    if all(isinstance(value, _NUMBERS) for value in column):
        return torch.tensor(column)
    return None if all(value is None for value in column) else list(column)
