"""The rows of a data stream that members of a pack have still to take in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import PackError

__all__ = ["RowBuffer"]


@dataclass
class _BufferedBatch:
    """A batch.

    Args:
        first: number of its first row.
        leaves: its tensors, on the device.
        own: whether nobody else has them.
    """

    first: int
    leaves: list[Tensor]
    own: bool

    @property
    def end(self) -> int:
        """Number of the first row after it."""
        return self.first + len(self.leaves[0])

    def rows(self, first: int, end: int) -> list[Tensor]:
        """Those that it has of some rows."""
        return [leaf[max(first - self.first, 0) : end - self.first] for leaf in self.leaves]


class RowBuffer:
    """Batches as one long sequence of rows, of which any stretch can be taken; each is moved to the device once.

    Args:
        device: where the rows lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.end = 0
        """Number of rows that have come so far."""
        self._device = device
        self._parts: list[_BufferedBatch] = []
        self._spec: pytree.TreeSpec | None = None

    def add(self, batch: Any) -> None:
        """Append a batch.

        Raises:
            PackError: it is no nest of tensors of one length, or cannot be joined with the rows that are left.
        """
        leaves, spec = pytree.tree_flatten(batch)
        rows = _length(leaves)
        if self._parts:
            self._check_fit(leaves, spec)
        if rows == 0:
            return
        moved = [leaf.to(self._device) for leaf in leaves]
        own = all(one is not other for one, other in zip(moved, leaves, strict=True))
        self._spec = spec
        self._parts.append(_BufferedBatch(self.end, moved, own))
        self.end += rows

    def take(self, first: int, end: int) -> Any:
        """The rows from number `first` to before number `end`, nested as the batches are.

        They are the taker's own, who may change them in place.
        """
        stretches = [part.rows(first, end) for part in self._parts if part.first < end and first < part.end]
        own = [column[0].clone() if len(column) == 1 else torch.cat(column) for column in zip(*stretches, strict=True)]
        assert self._spec is not None
        return pytree.tree_unflatten(own, self._spec)

    def drop(self, first: int) -> None:
        """Forget the rows before number `first`, and let go of the batches' own tensors, which may be changed then."""
        self._parts = [
            part
            if part.own
            else _BufferedBatch(max(part.first, first), [leaf.clone() for leaf in part.rows(first, part.end)], True)
            for part in self._parts
            if part.end > first
        ]

    def _check_fit(self, leaves: Sequence[Tensor], spec: pytree.TreeSpec) -> None:
        before = [_kind(leaf) for leaf in self._parts[-1].leaves]
        if spec != self._spec or [_kind(leaf) for leaf in leaves] != before:
            raise PackError(
                f"a batch of {_written(leaves, spec)} cannot follow one of "
                f"{_written(self._parts[-1].leaves, self._spec)}, of which a member keeps rows for its next step; nest "
                "all batches in the same way, or call `end_epoch` in between"
            )


def _length(leaves: Sequence[Any]) -> int:
    """Rows of a batch."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise PackError(
                f"a batch must be a tensor or tensors in lists, tuples and dicts, got {type(leaf).__name__} in it"
            )
        if leaf.dim() == 0:
            raise PackError("a batch's tensors must have its rows as their first axis, got one of shape ()")
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise PackError(f"a batch's tensors must all have its rows as their first axis, got shapes {shapes}")
    return int(lengths.pop())


def _kind(leaf: Tensor) -> tuple[torch.Size, torch.dtype]:
    return leaf.shape[1:], leaf.dtype


def _written(leaves: Sequence[Tensor], spec: pytree.TreeSpec | None) -> str:
    assert spec is not None
    kinds = [f"{leaf.dtype} {tuple(leaf.shape[1:])}".removeprefix("torch.") for leaf in leaves]
    return str(pytree.tree_unflatten(kinds, spec))
