"""Compares and copies samples, and finds their kind as `torch.utils.data.default_collate` distinguishes kinds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["compact", "copy_sample", "has_graph", "is_copyable", "sample_kind", "samples_equal", "views_larger_memory"]

_SIMPLE = frozenset({int, float, bool, str, bytes})
_LISTS = frozenset({tuple, list})
"""Checked first: these types are common, and checks for `Sequence` are slow."""


def sample_kind(value: Any) -> object:
    """Return the kind of a sample, by which it is collated: its structure, types, dtypes and shapes.

    Among samples of one kind, no row depends on others; integers among floats get the dtype of the first sample.
    """
    cls = type(value)
    if cls in _SIMPLE or isinstance(value, (str, bytes)):
        return cls
    if isinstance(value, Tensor):
        return (cls, value.dtype, value.shape, value.device, value.requires_grad)
    if cls is np.ndarray:
        return (cls, value.dtype, value.shape)
    if cls is dict or isinstance(value, Mapping):
        return (cls, tuple(value), *map(sample_kind, value.values()))
    if cls in _LISTS or isinstance(value, Sequence):
        return (cls, *map(sample_kind, value))
    return cls


def samples_equal(one: Any, other: Any) -> bool:
    """Return whether two samples are bitwise equal."""
    if sample_kind(one) != sample_kind(other):
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
        return all(samples_equal(one[key], other[key]) for key in one)
    if isinstance(one, Sequence):
        return all(map(samples_equal, one, other))
    # Numbers are compared exactly; `default_collate` refuses anything else.
    return not isinstance(one, (int, float)) or repr(one) == repr(other)


def has_graph(value: Any) -> bool:
    """Return whether a sample has an autograd graph, which can be used only once."""
    cls = type(value)
    if cls in _SIMPLE:
        return False
    if isinstance(value, Tensor):
        return value.requires_grad
    if cls is dict or isinstance(value, Mapping):
        return any(map(has_graph, value.values()))
    return (cls in _LISTS or isinstance(value, Sequence)) and any(map(has_graph, value))


def copy_sample(value: Any) -> Any:
    """Return a detached copy of a sample."""
    if type(value) is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if type(value) is np.ndarray else _map_parts(copy_sample, value)


def compact(value: Any) -> Any:
    """Return a sample to keep. Views are copied, so that they do not keep a larger memory alive."""
    if type(value) is Tensor:
        return value.clone() if views_larger_memory(value) else value
    if type(value) is np.ndarray:
        return value.copy() if views_larger_memory(value) else value
    return _map_parts(compact, value)


def views_larger_memory(value: Any) -> bool:
    """Return whether a sample contains a view of a larger memory."""
    cls = type(value)
    if cls is Tensor:
        return value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
    if cls is np.ndarray:
        return value.base is not None
    return any(map(views_larger_memory, value.values() if cls is dict else value if cls in _LISTS else ()))


def _map_parts(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the parts of a list, tuple or dict; return any other value unchanged."""
    cls = type(value)
    if cls in _LISTS:
        return cls(map(change, value))
    return {key: change(part) for key, part in value.items()} if cls is dict else value


_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None))


def is_copyable(batch: Any) -> bool:
    """Return whether a batch can be copied: it contains only text, numbers and tensors without autograd graphs."""
    leaves = pytree.tree_leaves(batch)
    return all(not x.requires_grad if isinstance(x, Tensor) else isinstance(x, _IMMUTABLE) for x in leaves)
