"""Copy-on-write copies of batches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["lazily_copied"]


def lazily_copied(batch: Any) -> Any:
    """Copy the tensors of a batch by torch's copy on write: a copy shares its memory until a write to either tensor.

    A tensor with memory that torch does not own, such as NumPy's or memory shared by processes, is copied at once. So
    is a tensor on a GPU, since its allocator would not learn which streams use the memory (`record_stream`). All writes
    to the tensors must go through torch.
    """
    if type(batch) in (list, tuple) and all(type(part) is Tensor for part in batch):  # the common case
        return type(batch)(map(_copy, batch))
    return pytree.tree_map_only(Tensor, _copy, batch)


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous():
        try:
            return torch._lazy_clone(tensor)
        except RuntimeError:  # raised before any change
            pass
    return tensor.clone()
