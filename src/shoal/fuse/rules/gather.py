"""Functions that read or write along one axis at places that a tensor names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.axes import axis_of
from shoal.fuse.stacked import Stacked, count

__all__ = ["RULES"]


def _of_all(x: Tensor, members: int) -> Tensor:
    """[B, *shape]; of a shared tensor a view."""
    return x.whole if isinstance(x, Stacked) else x.expand(members, *x.shape)


def _returned(func: Any, x: Any, result: Tensor) -> Stacked:
    """An in-place function gives back its first argument."""
    return x if func.__name__.endswith("_") else Stacked(result)


def _gather(func: Any, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    if kwargs or not x.dim() or x.dim() != index.dim():
        return NotImplemented
    members = count((x, index)) or 1
    return Stacked(func(_of_all(x, members), axis_of(dim, x.dim()), _of_all(index, members)))


def _take_along(func: Any, x: Any, indices: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if kwargs or dim is None or not x.dim() or x.dim() != indices.dim():
        return NotImplemented
    data, places = (t.whole if isinstance(t, Stacked) else t.unsqueeze(0) for t in (x, indices))
    return Stacked(torch.take_along_dim(data, places, axis_of(dim, x.dim())))


def _scatter(
    func: Any, x: Any, dim: int, index: Any, src: Any = None, *args: Any, value: Any = None, **kwargs: Any
) -> Any:
    src = value if src is None else src
    if not x.dim() or x.dim() != index.dim():
        return NotImplemented
    members = count((x, index, src)) or 1
    if isinstance(src, Tensor):
        if src.dim() != x.dim():
            return NotImplemented
        src = _of_all(src, members)
    data = _of_all(x, members)
    return _returned(func, x, func(data, axis_of(dim, x.dim()), _of_all(index, members), src, *args, **kwargs))


def _index_select(func: Any, x: Any, dim: int, index: Any) -> Any:
    if not x.dim() or index.dim() != 1:
        return NotImplemented
    along = axis_of(dim, x.dim())
    if not isinstance(index, Stacked):
        return Stacked(x.whole.index_select(along, index))
    members = len(index.whole)
    data = _of_all(x, members)
    shape = (*data.shape[:along], len(index), *data.shape[along + 1 :])
    return Stacked(data.gather(along, _along(index, along, shape)))


def _index_write(
    func: Any, x: Any, dim: int, index: Any, source: Any = None, *, value: Any = None, alpha: float = 1
) -> Any:
    """`index_add`, `index_copy` and `index_fill`: with members' own indices, `scatter`."""
    source = value if source is None else source
    kind = func.__name__.rstrip("_")
    filled = kind == "index_fill"
    if not x.dim() or index.dim() != 1 or (isinstance(source, Tensor) and (filled or source.dim() != x.dim())):
        return NotImplemented
    members = count((x, index, source)) or 1
    data, along = _of_all(x, members), axis_of(dim, x.dim())
    if isinstance(source, Tensor):
        source = _of_all(source, members)
    if not isinstance(index, Stacked):
        scale = {"alpha": alpha} if alpha != 1 else {}
        return _returned(func, x, func(data, along, index, source, **scale))
    shape = (*data.shape[:along], len(index), *data.shape[along + 1 :]) if filled else source.shape
    places = _along(index, along, shape)
    write = getattr(Tensor, _SCATTERS[kind] + "_" * func.__name__.endswith("_"))
    return _returned(func, x, write(data, along, places, source if alpha == 1 else source * alpha))


def _along(index: Stacked, along: int, shape: tuple[int, ...]) -> Tensor:
    """Members' own [n] as places along one axis of [B, *shape], the same for all others."""
    if shape[along] != len(index):
        raise IndexError(f"an index of {len(index)} places for an axis of {shape[along]}")
    lead = [1] * (along - 1)
    return index.whole.view(len(index.whole), *lead, -1, *[1] * (len(shape) - along - 1)).expand(shape)


def _one_hot(func: Any, input: Any, num_classes: int = -1) -> Any:
    """With as many classes as the data show, the shape is each member's own."""
    return NotImplemented if num_classes < 1 else Stacked(F.one_hot(input.whole, num_classes))


def _bucketize(func: Any, input: Any, boundaries: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Stacked) or isinstance(boundaries, Stacked):
        return NotImplemented
    return Stacked(func(input.whole, boundaries, **kwargs))


def _searchsorted(func: Any, sorted_sequence: Any, input: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Tensor) or kwargs.get("sorter") is not None:
        return NotImplemented
    if sorted_sequence.dim() != 1:
        members = count((sorted_sequence, input)) or 1
        parts = (_of_all(t, members).contiguous() for t in (sorted_sequence, input))
        return Stacked(func(*parts, **kwargs))
    return _bucketize(torch.bucketize, input, sorted_sequence, **kwargs) if not kwargs else NotImplemented


_SCATTERS = {"index_add": "scatter_add", "index_copy": "scatter", "index_fill": "scatter"}


def _make() -> dict[Any, Any]:
    rules: dict[Any, Any] = {F.one_hot: _one_hot}
    named = {
        "gather": _gather,
        "take_along_dim": _take_along,
        "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_": _scatter,
        "index_select": _index_select,
        "searchsorted": _searchsorted,
        "bucketize": _bucketize,
        "index_add index_add_ index_copy index_copy_ index_fill index_fill_": _index_write,
    }
    for names, rule in named.items():
        for name in names.split():
            rules.update({getattr(home, name): rule for home in (torch, Tensor) if hasattr(home, name)})
    return rules


RULES = _make()
