"""Units: consecutive samples of an order that are fetched together."""

from itertools import islice
from typing import NamedTuple

__all__ = ["BLOCK", "Unit", "blocks"]

BLOCK = 32
"""Number of consecutive samples of a block. A check for drawn random numbers after each sample would take long compared
with decoding a small image."""


class Unit(NamedTuple):
    """Consecutive samples of an order that are fetched together: a block or a batch.

    Args:
        seed: Seed of the iterator, which determines the order.
        number: Number of the unit in the order.
        first: Position of its first sample in the order.
        end: Position after its last sample.
    """

    seed: int
    number: int
    first: int
    end: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.end - self.first

    def next_units(self, samples: int, order: int) -> list["Unit"]:
        """Return the next units in an order of `order` samples, with at most `samples` samples in total."""
        after = enumerate(range(self.end, order, self.samples), start=self.number + 1)
        units = (Unit(self.seed, number, first, min(first + self.samples, order)) for number, first in after)
        return list(islice(units, samples // self.samples))


def blocks(seed: int, first: int, end: int, order: int) -> list[Unit]:
    """Return the blocks that contain the samples between two positions, in an order of `order` samples."""
    starts = range(first - first % BLOCK, end, BLOCK)
    return [Unit(seed, start // BLOCK, start, min(start + BLOCK, order)) for start in starts]
