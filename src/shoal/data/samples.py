"""What a sample is made of, as far as `torch.utils.data.default_collate` tells samples apart."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["attached", "bulky", "compact", "copied", "kind", "plain", "same"]

_SIMPLE = frozenset({int, float, bool, str, bytes})
_LISTS = frozenset({tuple, list})
"""Asked for first: these are what samples are of as a rule, and to tell a sequence by its methods takes long."""


def kind(value: Any) -> object:
    """What decides how a sample is collated: its structure, and the types, dtypes and shapes of what is in it.

    Of samples of one kind, a batch of some is the same rows whatever others are collated with them. (Not so of a 1
    among floats: it becomes the dtype that the first sample has.)
    """
    cls = type(value)
    if cls in _SIMPLE or isinstance(value, (str, bytes)):
        return cls
    if isinstance(value, Tensor):
        return (cls, value.dtype, value.shape, value.device, value.requires_grad)
    if cls is np.ndarray:
        return (cls, value.dtype, value.shape)
    if cls is dict or isinstance(value, Mapping):
        return (cls, tuple(value), *map(kind, value.values()))
    if cls in _LISTS or isinstance(value, Sequence):
        return (cls, *map(kind, value))
    return cls


def same(one: Any, other: Any) -> bool:
    """Whether two samples are bitwise the same."""
    if kind(one) != kind(other):
        return False
    if isinstance(one, Tensor):
        dense = [x.detach().to_dense().contiguous() for x in (one, other)]
        # As bytes: no number is equal to itself if it is none.
        return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in dense))
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, (str, bytes)):
        return bool(one == other)
    if isinstance(one, Mapping):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence):
        return all(map(same, one, other))
    # Numbers, told exactly; of anything else `default_collate` will not make a batch.
    return not isinstance(one, (int, float)) or repr(one) == repr(other)


def attached(value: Any) -> bool:
    """Whether a graph hangs on a sample: it can go backwards but once."""
    cls = type(value)
    if cls in _SIMPLE:
        return False
    if isinstance(value, Tensor):
        return value.requires_grad
    if cls is dict or isinstance(value, Mapping):
        return any(map(attached, value.values()))
    return (cls in _LISTS or isinstance(value, Sequence)) and any(map(attached, value))


def copied(value: Any) -> Any:
    """A sample in memory of its own, part of no graph."""
    if type(value) is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if type(value) is np.ndarray else _of_parts(copied, value)


def compact(value: Any) -> Any:
    """A sample for keeping: what is a view of something larger is copied, or that would be kept with it."""
    if type(value) is Tensor:
        return value.clone() if bulky(value) else value
    if type(value) is np.ndarray:
        return value.copy() if bulky(value) else value
    return _of_parts(compact, value)


def bulky(value: Any) -> bool:
    """Whether anything in a sample is a view of something larger."""
    cls = type(value)
    if cls is Tensor:
        return value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
    if cls is np.ndarray:
        return value.base is not None
    return any(map(bulky, value.values() if cls is dict else value if cls in _LISTS else ()))


def _of_parts(change: Callable[[Any], Any], value: Any) -> Any:
    """A list, tuple or dict with its parts changed; anything else as it is."""
    cls = type(value)
    if cls in _LISTS:
        return cls(map(change, value))
    return {key: change(part) for key, part in value.items()} if cls is dict else value


def plain(batch: Any) -> bool:
    """Whether a batch can be copied: it holds tensors that no graph hangs on, text, and nothing else."""
    leaves = pytree.tree_leaves(batch)
    return all(not x.requires_grad if isinstance(x, Tensor) else isinstance(x, (str, bytes)) for x in leaves)
