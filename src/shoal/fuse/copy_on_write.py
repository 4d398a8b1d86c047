"""Copies that are made when somebody writes."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["lazily_copied"]


def lazily_copied(batch: Any) -> Any:
    """A batch with copies of its tensors: each shares its memory until one of the two is written to (torch's copy on
    write).

    A tensor whose memory torch cannot watch over, such as NumPy's or what processes share, is copied at once; so are
    those of a GPU, whose allocator is not told then which streams use the memory (`record_stream`). For tensors that
    nobody writes to behind torch's back.
    """
    if type(batch) in (list, tuple) and all(type(part) is Tensor for part in batch):  # as most are
        return type(batch)(map(_copy, batch))
    return pytree.tree_map_only(Tensor, _copy, batch)


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous():
        try:
            return torch._lazy_clone(tensor)
        except RuntimeError:  # raised before anything is done
            pass
    return tensor.clone()
