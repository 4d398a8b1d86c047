"""Parts of tensors, read and written.

An index is applied in two steps, as torch does: first numbers and slices, which leave a view, then tensors. The axes
that tensors index are brought to the front of what is left, where their places cannot be mistaken; what comes of them
stands where torch puts it: at the first of these axes if they are neighbours, in front otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from shoal.fuse.copies import note_copy
from shoal.fuse.rules.axes import axis
from shoal.fuse.rules.elementwise import align, elementwise
from shoal.fuse.rules.meta import agreed
from shoal.fuse.stacked import NeedsMemberError, Stacked, count

__all__ = ["RULES"]

_BASIC = {int, slice, NoneType, EllipsisType}


@dataclass(frozen=True)
class _Index:
    """A member's index, taken apart.

    Args:
        basic: numbers, slices and new axes, for the first step.
        places: axes of what that leaves which tensors index.
        tensors: integers that broadcast against each other, stacked or shared.
    """

    basic: tuple[Any, ...]
    places: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def _parse(x: Tensor, key: Any) -> _Index | None:
    """Take an index into `x` apart; None if it depends on data of a member's, or is none that torch knows."""
    keys = key if isinstance(key, tuple) else (key,)
    parts = [_plain(part) for part in keys]
    if not all(_covered(part) for part in parts) or sum(part is Ellipsis for part in parts) > 1:
        return None
    spoken_for = sum(_axes_of(part) for part in parts if part is not Ellipsis)
    basic: list[Any] = []
    places: list[int] = []
    tensors: list[Tensor] = []
    place = 0
    for part in parts:
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            found: Sequence[Tensor] = part.nonzero(as_tuple=True)
        elif isinstance(part, Tensor) and (part.dim() or isinstance(part, Stacked)):
            found = (part,)
        elif part is Ellipsis:
            free = x.dim() - spoken_for
            basic += [slice(None)] * free
            place += free
            continue
        else:
            basic.append(int(part) if isinstance(part, Tensor) else part)
            place += not isinstance(basic[-1], int)
            continue
        for tensor in found:
            basic.append(slice(None))
            places.append(place)
            tensors.append(tensor)
            place += 1
    if 0 < sum(tensor.dim() == 0 for tensor in tensors) < len(tensors):  # to torch a number, which is no neighbour
        return None
    return _Index(tuple(basic), tuple(places), tuple(tensors))


def _plain(part: Any) -> Any:
    """A list as a tensor; a slice with ends that all members agree on."""
    if type(part) is slice and not _is_basic(part):
        ends = (part.start, part.stop, part.step)
        return slice(*(agreed(end) if isinstance(end, Tensor) else end for end in ends))
    return torch.tensor(part) if isinstance(part, list) else part


def _covered(part: Any) -> bool:
    if isinstance(part, Tensor):
        if part.dtype == torch.bool:
            return part.dim() > 0 and not isinstance(part, Stacked)
        return part.dtype in (torch.int64, torch.int32)
    return _is_basic(part)


def _is_basic(part: Any) -> bool:
    """Is it a number, slice, new axis or ellipsis, the same for all members?"""
    if type(part) is slice:
        return not any(isinstance(end, Tensor) for end in (part.start, part.stop, part.step))
    return type(part) in _BASIC


def _axes_of(part: Any) -> int:
    """How many axes an index's part takes up."""
    if isinstance(part, Tensor) and part.dtype == torch.bool:
        return part.dim()
    return int(part is not None)


def _front(data: Tensor, index: _Index) -> tuple[Tensor, tuple[Any, ...], tuple[int, ...]]:
    """What tensors index, its indexed axes next to B; the tensors for it; the shape they broadcast to.

    Args:
        data: after the first step, [B, *shape].
        index: at least one tensor.
    """
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in index.tensors))  # type: ignore[no-untyped-call]
    first = [place + 1 for place in index.places]
    others = [i for i in range(1, data.dim()) if i not in first]
    members = len(data)
    of_all: list[Any] = [slice(None)]
    if any(isinstance(tensor, Stacked) for tensor in index.tensors):
        of_all = [torch.arange(members, device=data.device).view(-1, *[1] * len(shape))]
    for tensor in index.tensors:
        if isinstance(tensor, Stacked):
            missing = len(shape) - tensor.dim()
            of_all.append(tensor.whole.view(members, *[1] * missing, *tensor.shape))
        else:
            of_all.append(tensor)
    return data.permute(0, *first, *others), tuple(of_all), shape


def _offset(index: _Index) -> int:
    """The axis of a member's result at which the tensors' axes stand."""
    neighbours = all(b == a + 1 for a, b in pairwise(index.places))
    return index.places[0] if neighbours else 0


def _move(data: Tensor, count: int, source: int, target: int) -> Tensor:
    """Some axes moved together."""
    if source == target or count == 0:
        return data
    return data.movedim(tuple(range(source, source + count)), tuple(range(target, target + count)))


def _get(func: Any, x: Any, key: Any) -> Any:
    if isinstance(x, Stacked):
        if type(key) is tuple:
            if all(map(_is_basic, key)):
                return Stacked(x.whole[(slice(None), *key)])
        elif _is_basic(key):
            return Stacked(x.whole[:, key])
    index = _parse(x, key)
    if index is None:
        return NotImplemented
    members = count((x, index.tensors)) or 1
    data = x.whole if isinstance(x, Stacked) else x.expand(members, *x.shape)
    data = data[(slice(None), *index.basic)]
    if not index.tensors:
        return Stacked(data)
    front, tensors, shape = _front(data, index)
    result = front[tensors]
    if all(tensor.dim() == 0 for tensor in index.tensors):  # numbers to torch, of which a member alone gets a view
        note_copy(data, result)
    return Stacked(_move(result, len(shape), 1, 1 + _offset(index)))


def _set(func: Any, x: Any, key: Any, value: Any) -> Any:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("an assignment to a part of a tensor that all members share")
    if isinstance(key, Tensor) and key.dtype == torch.bool and key.dim() and not isinstance(value, Tensor):
        mask = key.whole if isinstance(key, Stacked) else key.unsqueeze(0)
        x.whole.masked_fill_(mask.reshape(*mask.shape, *[1] * (x.dim() - key.dim())), value)
        return None
    index = _parse(x, key)
    if index is None:
        return NotImplemented
    part = x.whole[(slice(None), *index.basic)]
    if index.tensors:
        return _put(part, index, value, accumulate=False)
    data = align((Stacked(part), value))
    if data[0].dim() != part.dim():
        return NotImplemented
    part.copy_(data[1]) if isinstance(value, Tensor) else part.fill_(value)
    return None


def _put(part: Tensor, index: _Index, value: Any, accumulate: bool) -> Any:
    """Write or add to what tensors index, in place.

    Args:
        part: of all members, after the first step, [B, *shape].
        index: at least one tensor.
        value: a number, or a tensor that broadcasts to what a member's index reads.
        accumulate: add.
    """
    front, tensors, shape = _front(part, index)
    if isinstance(value, Tensor):
        lead, offset = len(shape), _offset(index)
        others = front.shape[1 + len(index.tensors) :]
        read = (*others[:offset], *shape, *others[offset:])
        if value.dim() > len(read) or (isinstance(value, Stacked) and value.numbers is not None):
            return NotImplemented
        if isinstance(value, Stacked):
            value = value.whole.view(len(part), *[1] * (len(read) - value.dim()), *value.shape)
        value = _move(value.expand(len(part), *read), lead, 1 + offset, 1)
    if accumulate:
        front.index_put_(tuple(None if isinstance(i, slice) else i for i in tensors), value, True)
    else:
        front[tensors] = value
    return None


def _index_put(func: Any, x: Any, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    index = _parse(x, tuple(indices))
    if index is None or not index.tensors:
        return NotImplemented
    in_place = func is Tensor.index_put_ or func is torch.index_put_
    members = count((x, indices, values)) or 1
    data = x.whole if isinstance(x, Stacked) else x.expand(members, *x.shape)
    data = data if in_place else data.clone(memory_format=torch.contiguous_format)
    if _put(data, index, values, accumulate) is NotImplemented:
        return NotImplemented
    return x if in_place else Stacked(data)


def _select(func: Any, x: Stacked, dim: int, index: Any) -> Any:
    return Stacked(x.whole.select(axis(x, dim), index)) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, x: Stacked, dim: int, start: Any, length: int) -> Any:
    return Stacked(x.whole.narrow(axis(x, dim), start, length)) if isinstance(start, int) else NotImplemented


def _where(func: Any, condition: Any, input: Any = None, other: Any = None) -> Any:
    """The condition alone asks where it holds, which is each member's own."""
    return NotImplemented if input is None else elementwise(func, condition, input, other)


RULES: dict[Any, Any] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    torch.index_put: _index_put,
    torch.index_put_: _index_put,
    Tensor.index_put: _index_put,
    Tensor.index_put_: _index_put,
    torch.select: _select,
    Tensor.select: _select,
    torch.narrow: _narrow,
    Tensor.narrow: _narrow,
    torch.where: _where,
}
