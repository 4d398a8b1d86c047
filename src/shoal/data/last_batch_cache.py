"""The batch that was made last, for lanes of its size that keep abreast."""

from typing import Any

from shoal.data.samples import plain
from shoal.data.source import BatchRequest
from shoal.data.stream_sync import StreamSync
from shoal.fuse.copy_on_write import lazily_copied

__all__ = ["LastBatchCache"]

_Place = tuple[int | None, int, list[int]]
"""A walk's seed, the place of a batch's first sample in it, and the indices of its samples."""


class LastBatchCache:
    """Hands a batch on to those who come to the same place, and tells whether anybody needs its samples beside them.

    Args:
        stream_sync: told of what is kept.
    """

    def __init__(self, stream_sync: StreamSync) -> None:
        self._stream_sync = stream_sync
        self._kept: tuple[_Place, Any, int] | None = None  # a batch, where it comes, and how often it is wanted
        self._last: tuple[int | None, int] | None = None  # walk's seed and place of the batch that was made last

    def take(self, cut: BatchRequest, indices: list[int]) -> Any | None:
        """The batch, if it is the one that was made last; who is the last to want it need not have a copy."""
        if self._kept is None or self._kept[0] != (cut.seed, cut.first, indices):
            return None
        place, batch, wanted = self._kept
        self._stream_sync.read(batch)
        self._kept = (place, batch, wanted - 1) if wanted > 1 else None
        return lazily_copied(batch) if wanted > 1 else batch

    def hand_on(self, cut: BatchRequest, indices: list[int], batch: Any) -> bool:
        """Keep a batch for those who want it as well.

        Returns:
            Whether nobody needs its samples but who takes the batch: all walks are of its size, and all have taken the
            one before it. In the first batch of an epoch others may have yet to begin.
        """
        last, self._last = self._last, (cut.seed, cut.first)
        if cut.walks == 1:  # who wanted what is kept has gone
            self._kept = None
        goes_on = last is not None and last[0] == cut.seed is not None and last[1] != cut.first
        alone = goes_on and cut.alike == cut.walks and self._kept is None
        if cut.alike > 1:
            if not plain(batch):
                return False
            self._kept = (cut.seed, cut.first, indices), lazily_copied(batch), cut.alike - 1
            self._stream_sync.written()
        return alone

    def forget(self) -> None:
        """Nobody is abreast of anybody."""
        self._kept = self._last = None
