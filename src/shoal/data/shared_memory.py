"""Serialization of samples for another process, with all tensors of one dtype in one block of shared memory.

Torch sends each tensor in a block of shared memory with its own file descriptor. A process may have some hundreds of
file descriptors open, which is fewer than the tensors of a block of samples. So the tensors of one dtype share a block.
"""

import math
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # registers tensors in shared memory with `ForkingPickler`
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["deserialize", "serialize"]


@dataclass(frozen=True)
class _Slice:
    """Position of a tensor or array in shared memory: dtype, first element, shape, and whether it is a NumPy array."""

    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    array: bool


_SMALL = 16
"""Maximum bytes of an array that is pickled by value."""


def serialize(value: Any) -> bytes:
    """Serialize samples or a batch. The receiver must call `deserialize` exactly once, while this process is alive.

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


def deserialize(packed: bytes) -> Any:
    """Return the value that was serialized. Its tensors are in shared memory; each may be changed in place
    independently."""
    memories, value = ForkingPickler.loads(packed)
    return pytree.tree_map_only(_Slice, lambda place: _tensor_at(memories[place.dtype], place), value)


def _dense(leaf: Any) -> Tensor | None:
    """Return the tensor of a leaf that shared memory can hold; None for any other leaf."""
    if type(leaf) is np.ndarray and leaf.nbytes > _SMALL and leaf.dtype.isnative and leaf.dtype.kind in "biuf":
        leaf = torch.from_numpy(np.require(leaf, requirements=["C", "W"]))
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return None
    return None if leaf.requires_grad or leaf.is_quantized else leaf.resolve_conj().resolve_neg()


def _tensor_at(memory: Tensor, place: _Slice) -> Any:
    # Not a view: autograd would count an in-place change of a view as a change of all other tensors of the memory.
    view = memory[place.first : place.first + math.prod(place.shape)].view(place.shape)
    tensor = torch.empty(0, dtype=place.dtype)
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    return tensor.numpy() if place.array else tensor
