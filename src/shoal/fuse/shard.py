"""`Shard`: the rows of a batch that one of several processes computes, for functions that need the whole batch.

The processes run the same functions in the same order. Most functions treat rows separately. Batch norm and means over
labels sum over all processes, and a dropout mask is cut out of the mask of the whole batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["IndivisibleStepError", "MaskRows", "Shard", "active_shard", "recorded_shard", "use_shard"]

Shape = tuple[int, ...]


class IndivisibleStepError(Exception):
    """The gradients of a step cannot be computed shard by shard; the message says why.

    It is no `RuntimeError`, which would let a function run in another way instead.
    """


@dataclass
class MaskRows:
    """Positions of the rows of the batch in each dropout mask of a step, by the order of the masks.

    The axis of the rows of a mask is the one whose size differs between the whole batch and a shard; None for a mask
    without rows.
    """

    shapes: list[Shape] = field(default_factory=list)
    axes: list[int | None] = field(default_factory=list)

    def axis(self, number: int, shape: Shape) -> int | None:
        """Axis of the rows of a mask whose shape is that for the rows of a shard; `IndivisibleStepError` if unknown."""
        if number >= len(self.shapes) or len(shape) != len(self.shapes[number]):
            raise IndivisibleStepError(f"mask {number} of a step, of shape {shape}, is drawn in some steps only")
        if number == len(self.axes):
            differing = (axis for axis, size in enumerate(self.shapes[number]) if size != shape[axis])
            self.axes.append(next(differing, None))
        return self.axes[number]


@dataclass
class Shard:
    """The rows `first` to `first + rows` of a batch of `total` rows.

    A shard of all rows only records the masks of the step.

    Args:
        all_reduce: Function that replaces a tensor by its sum over the shards.
        masks: Rows of the masks, shared by all steps of the same function.
    """

    first: int
    rows: int
    total: int
    all_reduce: Callable[[Tensor], None]
    masks: MaskRows
    drawn: int = 0

    @property
    def whole(self) -> bool:
        """Whether the shard is the whole batch."""
        return self.rows == self.total

    def mask_rows(self, shape: Shape) -> tuple[Shape, int, int]:
        """Find the rows of the shard in a whole mask, from the shape of one member's mask for these rows.

        Returns the shape of the whole mask, the axis of its rows, and the index along this axis of the shard's first
        element.
        """
        number, self.drawn = self.drawn, self.drawn + 1
        if self.whole:
            if number == len(self.masks.shapes):  # else a checkpointed part runs again
                self.masks.shapes.append(shape)
            return shape, 0, 0
        axis = self.masks.axis(number, shape)
        if axis is None:
            return shape, 0, 0
        each, rest = divmod(shape[axis], self.rows)
        if rest:
            raise IndivisibleStepError(f"a dropout mask of shape {shape} is not one of {self.rows} rows")
        return (*shape[:axis], each * self.total, *shape[axis + 1 :]), axis, each * self.first


_active: ContextVar[Shard | None] = ContextVar("active_shard", default=None)


@contextmanager
def use_shard(shard: Shard | None) -> Iterator[None]:
    """Context manager in which functions run for the rows of a shard; None: for the whole batch."""
    token = _active.set(shard)
    try:
        yield
    finally:
        _active.reset(token)


def active_shard() -> Shard | None:
    """The shard of the current step; None if the step is computed by one process."""
    shard = _active.get()
    return None if shard is None or shard.whole else shard


def recorded_shard() -> Shard | None:
    """As `active_shard`, but also a shard of the whole batch, which records the masks."""
    return _active.get()
