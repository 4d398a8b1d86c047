"""Samples as bytes that one process sends to another, with their tensors in a few shared memories.

Torch sends each tensor in a shared memory with a file descriptor of its own. A process may have some hundreds of these
open, fewer than the tensors of a block of samples. So all tensors of one dtype go in one shared memory.
"""

import math
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # teaches `ForkingPickler` shared memory
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["pack", "unpack"]


@dataclass(frozen=True)
class _Slice:
    """The place of a tensor or array: its dtype, first element, shape, and whether it is a NumPy array."""

    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    array: bool


_SMALL = 16
"""Bytes of an array up to which it is pickled as it is."""


def pack(value: Any) -> bytes:
    """Pickle samples or a batch. The receiver must call `unpack` once, while this process lives.

    Raises:
        Exception: A part of the value cannot be pickled.
    """
    leaves, spec = pytree.tree_flatten(value)
    parts: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for place, leaf in enumerate(leaves):
        tensor = _dense(leaf)
        if tensor is None:
            continue
        first = filled.get(tensor.dtype, 0)
        parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        filled[tensor.dtype] = first + tensor.numel()
        leaves[place] = _Slice(tensor.dtype, first, tuple(tensor.shape), type(leaf) is np.ndarray)
    memories = {dtype: torch.cat(some) for dtype, some in parts.items()}
    return bytes(ForkingPickler.dumps((memories, pytree.tree_unflatten(leaves, spec))))


def unpack(packed: bytes) -> Any:
    """The value that was packed. Its tensors share memory, but each may be changed in place on its own."""
    memories, value = ForkingPickler.loads(packed)
    return pytree.tree_map_only(_Slice, lambda place: _cut(memories[place.dtype], place), value)


def _dense(leaf: Any) -> Tensor | None:
    """The tensor of a leaf that a shared memory can hold; None for any other leaf."""
    if type(leaf) is np.ndarray and leaf.nbytes > _SMALL and leaf.dtype.isnative and leaf.dtype.kind in "biuf":
        leaf = torch.from_numpy(np.require(leaf, requirements=["C", "W"]))
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return None
    return None if leaf.requires_grad or leaf.is_quantized else leaf.resolve_conj().resolve_neg()


def _cut(memory: Tensor, place: _Slice) -> Any:
    # No view, whose changes in place would count for all other tensors of the memory in autograd.
    view = memory[place.first : place.first + math.prod(place.shape)].view(place.shape)
    tensor = torch.empty(0, dtype=place.dtype)
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    return tensor.numpy() if place.array else tensor
