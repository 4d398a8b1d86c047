"""Copies that stand for views: which tensors of an array share memory in a member alone, but not in the array.

A view of one member's tensor may need a copy of all members' memory: the rows of a member in [N, B*C, ...] are not
contiguous. A later write to either tensor would be missing from the other. So writes to both are refused as long as
both can be read.
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
    """Groups of memory that a member alone would share; a group with fewer than two live memories is dropped."""

    def __init__(self) -> None:
        self.groups: list[set[StorageWeakRef]] = []


_copies = _Copies()


def note_copy(source: Tensor, result: Tensor) -> None:
    """Record that a result would be a view of its source for a member alone, if the result is a copy.

    Args:
        source: Data of all members, [B, *shape].
        result: Data computed from the source, [B, *other shape].
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
    """Whether two tensors share memory; False for tensors without memory of their own."""
    return _known(x, y) and torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]


def _known(*tensors: Tensor) -> bool:
    """Whether all tensors have memory; within a transform of `torch.func` they have none of their own."""
    return all(map(torch._C._has_storage, tensors))


def refuse_stale(name: str, changed: Sequence[Any]) -> None:
    """Refuse to write to a tensor that shares memory with another one in a member alone, but not in the array.

    Args:
        name: Name of the function.
        changed: Tensors that the function writes to.

    Raises:
        NeedsMemberError: The other tensor is still in memory, perhaps only because autograd keeps it.
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
                    f"{name} changes a tensor that shares its memory with a view, which is a copy in the array; write "
                    "to a clone of it, or use a function that is not in place"
                )


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
