"""Copy-on-write clones of the tensors in a batch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["lazy_clone"]


def lazy_clone(batch: Any) -> Any:
    """Clone the tensors of a batch by torch's copy-on-write: a clone shares memory until either tensor is written to.

    A tensor whose memory torch does not own, such as NumPy's memory or memory shared by processes, is copied at once. A
    tensor on a GPU is copied at once too, since the allocator would not learn which streams use its memory
    (`record_stream`). All writes to the tensors must go through torch.
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
