"""Copies that stand for views.

The memory of all members may have to be copied where that of one alone need not be: rows of [N, B*C, ...] are not side
by side for each member. What is then written to the one would be missing from the other, so it must not be written to
as long as the other can be read.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["note_copy", "one_memory", "refuse_stale"]


class _Copies(threading.local):
    """Groups of memory that is one for a member alone; those of which less than two are left are dropped."""

    def __init__(self) -> None:
        self.groups: list[set[StorageWeakRef]] = []


_copies = _Copies()


def note_copy(source: Tensor, result: Tensor) -> None:
    """Remember that a result would be a view of its source for a member alone, if it is a copy.

    Args:
        source: data of all members, [B, *shape].
        result: made of it, [B, *other shape].
    """
    if not _known(source, result):
        return
    if one_memory(source, result):
        return
    joined = {_memory(tensor) for tensor in (source, result)}
    others = []
    for group in _copies.groups:
        alive = {memory for memory in group if not _gone(memory)}
        if alive & joined:
            joined |= alive
        elif len(alive) > 1:
            others.append(alive)
    _copies.groups = [*others, joined]


def one_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of one, as far as that can be known."""
    return _known(x, y) and torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]


def _known(*tensors: Tensor) -> bool:
    """Whether tensors have memory; within a transform of `torch.func` they have none of their own."""
    return all(map(torch._C._has_storage, tensors))


def refuse_stale(name: str, changed: Sequence[Any]) -> None:
    """Refuse to write to what is a view, or has one, for a member alone, and here is a copy.

    Args:
        name: of the function.
        changed: what it writes to.

    Raises:
        NeedsMemberError: the other one is still in memory; autograd alone may keep it there.
    """
    if not _copies.groups:
        return
    for tensor in changed:
        if not isinstance(tensor, Stacked) or not _known(tensor.whole):
            continue
        memory = _memory(tensor.whole)
        for group in _copies.groups:
            if memory in group and any(not _gone(other) for other in group - {memory}):
                raise NeedsMemberError(
                    f"{name} changes a tensor and its view, of which all members' is a copy; "
                    "write to a clone of it, or without an in-place function"
                )


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
