"""Rows of stacked tensors: views of them for single members, stacking of members' tensors, rows without a gradient.

Where members run one by one, a member may not use a parameter that another member uses. In plain PyTorch its gradient
would be None, and an optimizer would not change the parameter: no momentum, no weight decay, no step count. The stacked
gradient has a row of zeros for such a member, and this module records that the row stands for no gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "bytes_of",
    "dense_parts",
    "forget_missing_grads",
    "member_rows",
    "members_without_grad",
    "missing_grads",
    "record_row_grad",
    "stack_rows",
    "storage_address",
    "unstackable",
]


class _Rows(torch.autograd.Function):
    """Rows that share memory, but are not views for autograd, so that each row can be changed in place."""

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.leaf = data if data.is_leaf else None
        return tuple(row.data for row in data.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        if ctx.leaf is not None:
            _record_backward(ctx.leaf, (b for b, grad in enumerate(grads) if grad is None))
        like = next(grad for grad in grads if grad is not None)
        return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


def member_rows(data: Tensor) -> tuple[Tensor, ...]:
    """The members' tensors, [*shape] each, of a stacked tensor [B, *shape], which receives their gradients."""
    if len(data) == 1:
        return (data.squeeze(0),)  # an ordinary view, which is faster
    return _Rows.apply(data) if data.requires_grad else data.unbind(0)  # type: ignore[no-untyped-call]


def stack_rows(tensors: Sequence[Tensor], move: bool = False) -> Tensor:
    """Stack tensors of one shape and dtype as [B, *shape]; a view if they are rows of a stacked tensor, else a copy.

    With `move`, each tensor becomes a view of its row once it is copied, which frees its memory for the next row.
    """
    first = tensors[0].detach()
    size, strides = first.numel(), first.stride()
    if not size or not all(_dense(t) and t.stride() == strides and t.dtype == first.dtype for t in tensors):
        strides = torch.empty(first.shape, device="meta").stride()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    shape, steps = (len(tensors), *first.shape), (size, *strides)
    if size and all(
        t.untyped_storage().data_ptr() == memory and t.storage_offset() == begin + b * size and t.stride() == strides
        for b, t in enumerate(tensors)
    ):
        return first.as_strided(shape, steps)
    whole = first.new_empty(len(tensors) * size).as_strided(shape, steps)
    del first  # release the memory of the first tensor
    for row, tensor in zip(whole.unbind(0), tensors, strict=True):
        row.copy_(tensor.detach())
        if move:
            tensor.data = row
    return whole


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in any order of axes."""
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def storage_address(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0 without storage, as for sparse tensors and in transforms of `torch.func`."""
    return tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else 0


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a tensor consists of: itself, or such as the indices and values of a sparse one."""
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


_missing_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Stacked parameter -> its rows without a gradient, and the id of the backward pass that recorded them last."""

_NO_PASS = -2
"""Value that is not an id of a backward pass: autograd's ids start at 0, and -1 means that no pass runs."""


def members_without_grad(stacked: Tensor) -> frozenset[int]:
    """The members without a gradient of a parameter [B, *shape] for which other members have a gradient."""
    if not _missing_rows or stacked.grad is None:
        return frozenset()
    return frozenset(b for b in _recorded(stacked)[0] if not stacked.grad[b].any())


def missing_grads(parameters: Iterable[Tensor]) -> dict[Tensor, frozenset[int]]:
    """Parameter -> the members without a gradient, for each parameter for which only some members have a gradient."""
    return (
        {parameter: rows for parameter in parameters if (rows := members_without_grad(parameter))}
        if _missing_rows
        else {}
    )


def _record_backward(stacked: Tensor, without: Iterable[int]) -> None:
    """Record that a backward pass is about to add gradients to a parameter for all members but these."""
    rows, now = frozenset(without), torch._C._current_graph_task_id()
    before, task = _recorded(stacked)
    if task == now or stacked.grad is not None:
        rows &= before
    _missing_rows[stacked] = rows, now


def record_row_grad(stacked: Tensor, b: int, has: bool) -> None:
    """Record that user code sets one member's gradient of a parameter to a tensor (`has`) or to None."""
    if stacked.grad is not None:
        rows, task = _recorded(stacked)
        _missing_rows[stacked] = rows - {b} if has else rows | {b}, task
    elif has:
        _missing_rows[stacked] = frozenset(range(len(stacked))) - {b}, _NO_PASS


def forget_missing_grads(parameters: Iterable[Tensor]) -> None:
    """Drop the records of parameters whose gradient is None."""
    if _missing_rows:
        for parameter in parameters:
            if parameter.grad is None and parameter in _missing_rows:
                del _missing_rows[parameter]


def _recorded(stacked: Tensor) -> tuple[frozenset[int], int]:
    return _missing_rows.get(stacked, (frozenset(), _NO_PASS))  # type: ignore[no-any-return, no-untyped-call]
