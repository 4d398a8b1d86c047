"""Axes of the study grid: the values of a parameter one by one, or bins of its range."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from shoal.core.domain import Domain, LogRandInt, LogUniform, RandInt
from shoal.core.space import Leaf, Space
from shoal.reporting.text import leaf_text, rounded

__all__ = ["Axis", "axes"]

_BINS = 6
_MOST_POINTS = 8
"""Numeric domains with more values are cut into bins."""

_WHOLE_DIGITS = 7
"""Whole numbers with more digits are rounded in labels."""

_LACKING = "-"


@dataclass(frozen=True)
class Axis:
    """One searched parameter. Its positions are its values, then its bins, then one for trials without the parameter.

    Args:
        name: Name of the parameter, dotted if it is nested.
        labels: Readable label of each position.
        values: Values with a position each.
        edges: Edges of the bins, ascending, one more than there are bins; empty without bins. A bin holds its lower
            edge, and the last one both.
        chooser: Name of the choice that decides the parameter, and perhaps others; mostly the parameter itself.
    """

    name: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]
    edges: tuple[float, ...]
    chooser: str

    @cached_property
    def bins(self) -> range:
        """The positions that are bins."""
        return range(len(self.values), len(self.values) + max(len(self.edges) - 1, 0))

    @property
    def has_lack(self) -> bool:
        """Whether the last position is for trials without the parameter."""
        return len(self.labels) > self.bins.stop

    def with_lack(self) -> "Axis":
        """The same axis, with a position for trials without the parameter."""
        return self if self.has_lack else replace(self, labels=(*self.labels, _LACKING))

    def position(self, value: Any) -> int:
        """The position of a value; the one after the bins if there is no other, for which the axis should have a lack.

        A number outside the bins belongs to the nearest one.
        """
        known = self._positions.get(repr(value))
        if known is not None:
            return known
        if self.edges and isinstance(value, int | float) and not isinstance(value, bool):
            last = len(self.edges) - 2
            return self.bins.start + min(max(bisect_right(self.edges, value) - 1, 0), last)
        return self.bins.stop

    @cached_property
    def _positions(self) -> dict[str, int]:
        # Keys are texts: they tell True, 1 and 1.0 apart, and lists have no hash.
        return {repr(value): position for position, value in enumerate(self.values)}


def axes(space: Space) -> tuple[Axis, ...]:
    """An axis for every parameter that can have more than one value, in the order of the space."""
    every = (_axis(name, leaf) for name, leaf in space.leaves().items())
    return tuple(axis for axis in every if len(axis.labels) > 1)


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`; for whole numbers, `high` is excluded."""

    low: float
    high: float
    log: bool
    whole: bool


def _axis(name: str, leaf: Leaf) -> Axis:
    points: dict[str, Any] = {}
    ranges = []
    for value in leaf.values:
        if (few := _few_points(value)) is not None:
            points |= {repr(point): point for point in few}
        else:
            ranges.append(_range(value))
    values = tuple(points.values())
    texts = [leaf_text(value) for value in values]
    apart = len({*texts}) == len(texts) and all(text and text.isprintable() for text in texts)
    labels = texts if apart else list(points)
    edges, bins = _cut(ranges) if ranges else ((), [])
    axis = Axis(name, (*labels, *bins), values, edges, leaf.choice_name)
    return axis.with_lack() if leaf.optional else axis


def _few_points(value: Any) -> Sequence[Any] | None:
    """The values of a domain, if they are few enough to be listed."""
    if not isinstance(value, Domain):
        return [value]
    points = value.points()
    if points is None:
        low, high = _bounds(value)
        return [float(low)] if low == high else None
    few = list(islice(points, _MOST_POINTS + 1))
    return few if len(few) <= _MOST_POINTS else None


def _range(domain: Domain) -> _Range:
    whole = isinstance(domain, RandInt | LogRandInt)
    return _Range(*_bounds(domain), log=isinstance(domain, LogUniform | LogRandInt), whole=whole)


def _bounds(domain: Any) -> tuple[float, float]:
    return domain.low, domain.high


def _cut(ranges: Sequence[_Range]) -> tuple[tuple[float, ...], list[str]]:
    """Edges and labels of bins of about equal width on the scale of the ranges, all of which they cover."""
    low, high = min(each.low for each in ranges), max(each.high for each in ranges)
    log, whole = (all(getattr(each, name) for each in ranges) for name in ("log", "whole"))
    if whole:
        edges = (low, *_whole_cuts(low, high, log), high)
        return edges, [_whole_text(start, end - 1) for start, end in pairwise(edges)]
    exact = (float(low), *_cuts(low, high, log), float(high))
    # Edges are rounded as in their labels, to the fewest digits that keep the bins about equally wide.
    for digits in range(2, 18):
        shown = [float(f"{edge:.{digits}g}") for edge in exact]
        edges = (exact[0], *shown[1:-1], exact[-1])
        if _are_even(edges, log) and all(start < end for start, end in pairwise(shown)):
            texts = [rounded(edge, digits) for edge in exact]
            break
    else:  # a range with few floats in it
        edges = tuple(sorted(set(exact)))
        texts = [repr(edge) for edge in edges]
    return edges, [f"{start}..{end}" for start, end in pairwise(texts)]


def _cuts(low: float, high: float, log: bool) -> Iterator[float]:
    start, end = (math.log(low), math.log(high)) if log else (low, high)
    for cut in range(1, _BINS):
        # Not start + cut / bins * (end - start): that difference overflows for the widest ranges.
        value = (1 - cut / _BINS) * start + cut / _BINS * end
        yield min(max(math.exp(value) if log else value, low), high)


def _whole_cuts(low: float, high: float, log: bool) -> list[float]:
    if log:
        cuts: list[float] = [round(cut) for cut in _cuts(low, high, log)]
    else:
        cuts = [low + (high - low) * cut // _BINS for cut in range(1, _BINS)]  # exact beyond the floats, too
    return sorted({cut for cut in cuts if low < cut < high})


def _are_even(edges: Sequence[float], log: bool) -> bool:
    """Whether the bins are still about equally wide after rounding."""
    scale = [math.log(edge) if edge > 0 else -math.inf for edge in edges] if log else edges
    widths = [end / _BINS - start / _BINS for start, end in pairwise(scale)]
    return 0 < max(widths) <= 1.25 * min(widths)


def _whole_text(first: float, last: float) -> str:
    if first == last:
        return str(first)
    if max(-first, last) < 10**_WHOLE_DIGITS:
        return f"{first}..{last}"
    # Decimals, as integers can exceed the floats.
    return "..".join(f"{Decimal(value):.2e}" if value else "0" for value in (first, last))
