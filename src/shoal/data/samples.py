"""Kinds of samples as `torch.utils.data.default_collate` distinguishes them; comparing and copying samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["attached", "bulky", "compact", "copied", "kind", "plain", "same"]

_SIMPLE = frozenset({int, float, bool, str, bytes})
_LISTS = frozenset({tuple, list})
"""Checked first: these types are common, and checks for `Sequence` are slow."""


def kind(value: Any) -> object:
    """The kind of a sample, which decides how it is collated: its structure, with types, dtypes and shapes.

    The row of a sample in a batch is the same whatever other samples of its kind are in the batch. (Not so for a 1
    among floats, which gets the dtype of the first sample.)
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
    """Whether two samples are bitwise equal."""
    if kind(one) != kind(other):
        return False
    if isinstance(one, Tensor):
        dense = [x.detach().to_dense().contiguous() for x in (one, other)]
        # As bytes, since NaN is not equal to itself.
        return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in dense))
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, (str, bytes)):
        return bool(one == other)
    if isinstance(one, Mapping):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence):
        return all(map(same, one, other))
    # Numbers are compared exactly; `default_collate` refuses anything else.
    return not isinstance(one, (int, float)) or repr(one) == repr(other)


def attached(value: Any) -> bool:
    """Whether a sample has an autograd graph, which can be used only once."""
    cls = type(value)
    if cls in _SIMPLE:
        return False
    if isinstance(value, Tensor):
        return value.requires_grad
    if cls is dict or isinstance(value, Mapping):
        return any(map(attached, value.values()))
    return (cls in _LISTS or isinstance(value, Sequence)) and any(map(attached, value))


def copied(value: Any) -> Any:
    """A detached copy of a sample."""
    if type(value) is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if type(value) is np.ndarray else _of_parts(copied, value)


def compact(value: Any) -> Any:
    """A sample to keep: views are copied, so that they do not keep the larger memory."""
    if type(value) is Tensor:
        return value.clone() if bulky(value) else value
    if type(value) is np.ndarray:
        return value.copy() if bulky(value) else value
    return _of_parts(compact, value)


def bulky(value: Any) -> bool:
    """Whether a sample has a view of larger memory."""
    cls = type(value)
    if cls is Tensor:
        return value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
    if cls is np.ndarray:
        return value.base is not None
    return any(map(bulky, value.values() if cls is dict else value if cls in _LISTS else ()))


def _of_parts(change: Callable[[Any], Any], value: Any) -> Any:
    """A list, tuple or dict with its parts changed; any other value unchanged."""
    cls = type(value)
    if cls in _LISTS:
        return cls(map(change, value))
    return {key: change(part) for key, part in value.items()} if cls is dict else value


_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None))


def plain(batch: Any) -> bool:
    """Whether a batch can be copied: it holds only text, numbers and tensors without autograd graphs."""
    leaves = pytree.tree_leaves(batch)
    return all(not x.requires_grad if isinstance(x, Tensor) else isinstance(x, _IMMUTABLE) for x in leaves)
