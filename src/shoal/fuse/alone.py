"""Members that run one after another, as they are."""

import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.beside import accompanied
from shoal.fuse.generators import Drawn, seed_again
from shoal.fuse.intercept import member_run
from shoal.fuse.outer import home_of_row
from shoal.fuse.randomness import Randomness
from shoal.fuse.rows import rows
from shoal.fuse.slots import Slot, keep_rows
from shoal.fuse.stacked import Stacked
from shoal.fuse.transaction import Transaction

__all__ = ["MembersAlone", "described", "function_of", "place_of", "tensors_in"]

_TRIES = 3
"""Runs of all members in which it is found out whether a function is silent."""

Keys = Callable[[], list[int]]
"""Makes the keys of the members' random numbers, one each."""


class MembersAlone:
    """Runs functions on one member after another.

    Args:
        members: of the array.
        slots: of their tensors.
    """

    def __init__(self, members: Sequence[nn.Module], slots: Sequence[Slot]) -> None:
        self._members = members
        self._slots = slots
        self._silent: set[Any] = set()
        """Functions that a member has run by itself, and that have drawn no random numbers at all, and changed nothing
        but buffers: if they come to draw, they can be run again."""
        self._tries: Counter[Any] = Counter()
        """Runs of a member that were to show whether functions are silent."""

    def as_rows(self, fn: Callable[..., Any], keys: Keys, batch: tuple[Any, ...]) -> list[Any]:
        """What `fn` returns for each member; their parameters are rows of the stacked ones, where gradients go."""
        slots = self._own_slots()
        columns = [rows(slot.data) for slot in slots]
        alone = len(self._members) == 1
        results = []
        for b, member in enumerate(self._members):
            if b:
                seed_again()
            mine = pytree.tree_map_only(Tensor, partial(_own, b=b, alone=alone), batch)
            for slot, row in zip(slots, columns, strict=True):
                slot.put(b + 1, _shown(slot, row[b]))
            try:
                home = partial(home_of_row, self._slots, list(zip(slots, columns, strict=True)), b)
                with member_run(Randomness(partial(_key, keys, b), alone=True), home):
                    results.append(fn(member, *mine))
                keep_rows(slots, b, [row[b] for row in columns], member)
            finally:
                for slot in slots:
                    slot.put(b + 1, slot.own[b])
        self._check_shared()
        return results

    def one_by_one(
        self, fn: Callable[..., Any], keys: Keys, batch: tuple[Any, ...], forward: bool, training: bool
    ) -> Generator[Any, None, None]:
        """What `fn` returns for each member, whose own parameters get the gradients; see `ModelArray.one_by_one`."""
        lone = len(self._members) == 1
        key = (function_of(fn), training)
        for b, member in enumerate(self._members):
            if b:
                seed_again()
            mine = pytree.tree_map_only(Tensor, partial(_own, b=b, alone=lone), batch)
            try:
                if forward and self.is_silent(key):
                    result = self.silently(fn, keys, b, mine, training)
                else:
                    drawn = Drawn(self._device())
                    tried = forward and self._tries[key] < _TRIES * len(self._members)
                    held = Transaction([member], copies=False) if tried else None
                    source = Randomness(partial(_key, keys, b), alone=True)
                    with member_run(source):
                        result = fn(member, *mine)
                    self._note(key, held, drawn=bool(source.calls) or drawn())
            except BaseException:
                self.put_back(b)
                raise
            yield from self._handed(b, result)

    def silently(self, fn: Callable[..., Any], keys: Keys, b: int, batch: tuple[Any, ...], training: bool) -> Any:
        """Run a function that has drawn no random numbers before without a look at what it does, which is quicker.

        Raises:
            FusionError: it draws some now, and has changed its batch or its buffers, so it cannot run a second time.
        """
        buffers = [slot.own[b] for slot in self._slots if slot.registered and not slot.trainable]
        changeable = [*buffers, *tensors_in(batch)]
        versions = [tensor._version for tensor in changeable]
        drawn = Drawn(self._device())
        result = fn(self._members[b], *batch)
        if not drawn():
            return result
        self._silent.discard((function_of(fn), training))
        self.put_back(b)
        if versions != [tensor._version for tensor in changeable]:
            raise FusionError(
                f"{described(fn)} had drawn no random numbers and draws some now, and has changed its batch or buffers "
                "of the model already; it is looked at from now on: go back to what was saved before"
            )
        drawn.restore()
        seed_again()
        with member_run(Randomness(partial(_key, keys, b), alone=True)):
            return fn(self._members[b], *batch)

    def _device(self) -> torch.device:
        return next((slot.own[0].device for slot in self._slots if slot.own), torch.device("cpu"))

    def _note(self, key: Any, held: Transaction | None, drawn: bool) -> None:
        """Find out whether a function is silent, in some runs: the first of many a model does what others do not."""
        if drawn or (held is not None and held.changed() is not None):
            self._silent.discard(key)
        elif held is not None:
            self._silent.add(key)
        self._tries[key] += held is not None

    def is_silent(self, key: Any) -> bool:
        """Whether a function is known to draw nothing of torch's, in this thread that runs beside no other."""
        return key in self._silent and not accompanied()

    def take_over(self, b: int) -> None:
        """Copy what member b has put in the place of its own tensors, which stand there again then."""
        slots = self._own_slots()
        try:
            keep_rows(slots, b, [slot.own[b] for slot in slots], self._members[b])
        except BaseException:
            self.put_back(b)
            raise

    def put_back(self, b: int) -> None:
        """Member b has its own tensors again, after a function that it ran has failed."""
        for slot in self._own_slots():
            slot.put(b + 1, slot.own[b])

    def _handed(self, b: int, result: Any) -> Iterator[Any]:
        """What a function returned for a member. What it has put in the place of buffers is taken over when the caller
        is done with that: it may go backward, for which autograd has saved the buffers as they were.
        """
        self._check_shared()
        try:
            yield result
        finally:
            self.take_over(b)

    def _own_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.registered and not slot.shared]

    def _check_shared(self) -> None:
        for slot in self._slots:
            if slot.shared and slot.versions != slot.own_versions():
                raise FusionError(
                    f"{slot.path!r} is frozen and kept once for all members, and a member has changed it; register it "
                    "as a buffer, or give each member another value"
                )


def _shown(slot: Slot, row: Tensor) -> Tensor:
    """What stands for a row of a slot while a function runs: a copy of a buffer, for autograd may save it, and what is
    put in its place is written to the row before the pass backward.
    """
    copied = torch.is_grad_enabled() and not slot.trainable and not row.requires_grad
    return row.clone() if copied else row


def tensors_in(tree: Any) -> list[Tensor]:
    """Those of a batch; a list or tuple of tensors, such as most are, is known at once."""
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in ([part] if isinstance(part, Tensor) else tensors_in(part))]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def function_of(fn: Any) -> Any:
    """What stays the same when a lambda or a bound method is made anew at every call."""
    if isinstance(fn, partial):
        return function_of(fn.func)
    return getattr(getattr(fn, "__func__", fn), "__code__", fn)


def described(fn: Any) -> str:
    """A function by its name and where it is written."""
    code = function_of(getattr(fn, "__wrapped__", fn))
    if not isinstance(code, CodeType):
        return str(getattr(fn, "__qualname__", fn))
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def place_of(error: BaseException, fn: Any) -> str:
    """The function and the line of the user's that an error comes from; of one from nowhere, where `fn` is written."""
    places = [
        f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("shoal", "torch")
    ]
    return places[-1] if places else described(fn)


def _key(keys: Keys, b: int) -> list[int]:
    return keys()[b : b + 1]


def _own(value: Tensor, b: int, alone: bool) -> Tensor:
    """Member b's part of a batch: a slice, or what is shared, which it may change without the others' seeing it."""
    if isinstance(value, Stacked):
        return value.whole[b]
    return value if alone else value.clone()
