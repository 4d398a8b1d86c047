"""Detects writes to tensors that share memory in plain PyTorch, but are copies of each other in an array.

An array may have to copy where one member's function returns a view, since its rows in [N, B*C, ...] are not
contiguous. A later write to either tensor would not reach the other one, so it is refused.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["lazy_clone", "record_copy", "refuse_aliased_write", "share_memory"]


def lazy_clone(batch: Any) -> Any:
    """Clone a batch by torch's copy-on-write: a CPU tensor shares memory until torch writes to either one.

    Memory that torch does not own, or that processes share, is copied at once. A tensor on a GPU is copied at once too,
    since the allocator would not learn which streams use its memory (`record_stream`).
    """
    if type(batch) in (list, tuple) and all(type(part) is Tensor for part in batch):  # the common case
        return type(batch)(map(_copy, batch))
    return pytree.tree_map_only(Tensor, _copy, batch)


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous():
        try:
            return torch._lazy_clone(tensor)
        except RuntimeError:  # nothing has changed then
            pass
    return tensor.clone()


class _Copies(threading.local):
    """Alias sets: storages that would be one storage in plain PyTorch; a set is kept while two of them live."""

    def __init__(self) -> None:
        self.alias_sets: list[set[StorageWeakRef]] = []


_copies = _Copies()


def record_copy(source: Tensor, result: Tensor) -> None:
    """Record that a result is a copy of its source and would be a view in plain PyTorch; ignored if it is a view."""
    if not _have_storage(source, result):
        return
    if share_memory(source, result):
        return
    joined = {_storage(tensor) for tensor in (source, result)}
    others = []
    for alias_set in _copies.alias_sets:
        alive = {memory for memory in alias_set if not _is_freed(memory)}
        if alive & joined:
            joined |= alive
        elif len(alive) > 1:
            others.append(alive)
    _copies.alias_sets = [*others, joined]


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share memory; False for tensors without storage."""
    return _have_storage(x, y) and torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]


def _have_storage(*tensors: Tensor) -> bool:
    return all(map(torch._C._has_storage, tensors))


def refuse_aliased_write(name: str, changed: Sequence[Any]) -> None:
    """Refuse a write to a tensor that would share memory with another in plain PyTorch, but is a copy in the array."""
    if not _copies.alias_sets:
        return
    for tensor in changed:
        if not isinstance(tensor, Stacked) or not _have_storage(tensor.whole):
            continue
        memory = _storage(tensor.whole)
        for alias_set in _copies.alias_sets:
            if memory in alias_set and any(not _is_freed(other) for other in alias_set - {memory}):
                raise NeedsMemberError(
                    f"{name} changes a tensor that shares its memory with a view, which is a copy in the array; write "
                    "to a clone of it, or use a function that is not in place"
                )


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_freed(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
