"""Units: samples of a walk that are fetched together."""

from itertools import islice
from typing import NamedTuple

__all__ = ["BLOCK", "Unit", "blocks"]

BLOCK = 32
"""Number of consecutive samples of a walk that are fetched together. Checking for draws after each sample would take
long compared with decoding a small picture."""


class Unit(NamedTuple):
    """Samples of a walk that are fetched together: a block or a batch.

    Args:
        seed: Seed of the walk, which determines its order.
        number: Number of the unit in the walk.
        first: Place of its first sample in the order.
        end: Place after its last sample.
    """

    seed: int
    number: int
    first: int
    end: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.end - self.first

    def followers(self, samples: int, order: int) -> list["Unit"]:
        """The next units with up to `samples` samples together, in an order of `order` samples."""
        after = enumerate(range(self.end, order, self.samples), start=self.number + 1)
        units = (Unit(self.seed, number, first, min(first + self.samples, order)) for number, first in after)
        return list(islice(units, samples // self.samples))


def blocks(seed: int, first: int, end: int, order: int) -> list[Unit]:
    """The blocks with the samples between two places, in an order of `order` samples."""
    starts = range(first - first % BLOCK, end, BLOCK)
    return [Unit(seed, start // BLOCK, start, min(start + BLOCK, order)) for start in starts]
