"""Stacking of members' tensors, and what tensors of other layouts and of other libraries' classes consist of."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "bytes_of",
    "changing",
    "data_address",
    "dense_parts",
    "is_dense",
    "is_packed",
    "is_small_part",
    "packed_state",
    "stack_rows",
    "storage_address",
    "unsqueeze_like",
    "unstackable",
]

_LARGE_BYTES = 1 << 20
"""Bytes of a stacked tensor from which the memory of rows that are not used matters."""


_OWN = ("torch", "shoal")
_SETTINGS = (bool, int, float, str, torch.dtype, torch.Size)


def stack_rows(tensors: Sequence[Tensor], move: bool = False) -> Tensor:
    """Stack tensors of one shape and dtype as [B, *shape]; a view if they are rows of a stacked tensor, else a copy.

    Rows of a large stacked tensor are copied as well if more than half of it are other rows, whose memory is then free.
    With `move`, each tensor becomes a view of its row once it is copied, which frees its memory for the next row.
    """
    first = tensors[0].detach()
    size, strides = first.numel(), first.stride()
    if not size or not all(is_dense(t) and t.stride() == strides and t.dtype == first.dtype for t in tensors):
        strides = torch.empty(first.shape, device="meta").stride()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    shape, steps = (len(tensors), *first.shape), (size, *strides)
    if (
        size
        and not is_small_part(first, len(tensors))
        and all(
            t.untyped_storage().data_ptr() == memory
            and t.storage_offset() == begin + b * size
            and t.stride() == strides
            for b, t in enumerate(tensors)
        )
    ):
        return first.as_strided(shape, steps)
    whole = first.new_empty(len(tensors) * size).as_strided(shape, steps)
    del first  # release the memory of the first tensor
    for row, tensor in zip(whole.unbind(0), tensors, strict=True):
        row.copy_(tensor.detach())
        if move:
            tensor.data = row
    return whole


def is_small_part(row: Tensor, rows: int) -> bool:
    """Whether so many rows are less than half of their large stacked tensor."""
    held, each = row.untyped_storage().nbytes(), row.nbytes
    return held >= _LARGE_BYTES and held > 2 * rows * each > 0 and held % each == 0


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in any order of axes."""
    axes = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    span = 1 + sum((size - 1) * step for size, step in axes)
    return tensor.numel() == 0 or (span == tensor.numel() and all(step for _, step in axes))


def unsqueeze_like(numbers: Tensor, like: Tensor) -> Tensor:
    """One number per member, [B], in a shape that broadcasts against `like`, [B, ...]."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


@contextmanager
def changing(tensors: Sequence[Tensor], which: Tensor | None) -> Iterator[None]:
    """Context manager after which the rows of tensors, [B, ...], of members that are not among `which` are as before.

    Args:
        which: bool [B]; None for all.
    """
    before = [] if which is None else [tensor.clone() for tensor in tensors]
    yield
    if which is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(unsqueeze_like(which, tensor), tensor, old))


def storage_address(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0 without storage, as for sparse tensors and in transforms of `torch.func`."""
    return tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else 0


def data_address(tensor: Tensor) -> int:
    """Address of a tensor's own first element; 0 without storage, as `storage_address` says."""
    return tensor.data_ptr() if storage_address(tensor) else 0


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a tensor consists of: itself, or such as the indices and values of a sparse one.

    Those of a packed parameter are its codes and the tensors that it holds beside them, such as their scales.
    """
    if is_packed(tensor):
        held = [
            each for value in packed_state(tensor).values() if isinstance(value, Tensor) for each in dense_parts(value)
        ]
        if hasattr(tensor, "__tensor_flatten__"):
            return tuple(held)
        return tensor.detach(), *held
    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.is_quantized:
        return (tensor.dequantize(),)
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is a frozen parameter of another library's class, as those that hold quantised weights."""
    own = type(tensor)
    foreign = own not in (Tensor, nn.Parameter) and isinstance(tensor, nn.Parameter) and _library(own) not in _OWN
    return foreign and not tensor.requires_grad


def packed_state(tensor: Tensor) -> dict[str, Any]:
    """The tensors, numbers and names that a packed parameter holds in its attributes, by path.

    Objects of the library itself are followed, as a quantisation state. Modules and all other values are left out, and
    so are private numbers and names, such as a flag that another library has set.
    """
    library, seen, found = _library(type(tensor)), {id(tensor)}, dict[str, Any]()
    remaining = list(vars(tensor).items())
    while remaining:
        path, value = remaining.pop()
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, _SETTINGS):
            if not path.rpartition(".")[2].startswith("_"):
                found[path] = value
        elif not isinstance(value, nn.Module) and _library(type(value)) == library and id(value) not in seen:
            seen.add(id(value))
            remaining += [(f"{path}.{name}", held) for name, held in getattr(value, "__dict__", {}).items()]
    return dict(sorted(found.items()))


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The number of bytes of tensors, some of which may be sparse."""
    return sum(part.nbytes for tensor in tensors for part in dense_parts(tensor))


def unstackable(tensor: Tensor) -> str:
    """Why tensors of this kind cannot be rows of one tensor; "" if they can."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a class of tensors of its own"
    if tensor.is_quantized or tensor.is_nested:
        return "a quantized tensor" if tensor.is_quantized else "a nested tensor"
    return "" if tensor.layout is torch.strided else f"a tensor of layout {tensor.layout}"
