"""Axes of the study grid: the values of a parameter one by one, or bins of its range."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import islice, pairwise
from random import Random
from typing import Any

from shoal.core.distributions import LogNormal, LogRange, Normal, QLogUniform
from shoal.core.domain import Domain, LogRandInt, LogUniform, RandInt
from shoal.core.errors import SpaceError
from shoal.core.reference import Dependent, Expression
from shoal.core.space import Space, flatten, is_number
from shoal.core.space_tree import Leaf
from shoal.look.text import leaf_text, rounded

__all__ = ["Axis", "axes"]

_BINS = 6
_MAX_LISTED = 8
"""Numeric domains with more values are cut into bins."""

_MAX_INTEGER_DIGITS = 7
"""Whole numbers with more digits are rounded in labels."""

_MISSING_LABEL = "-"

_LOGARITHMIC = (LogUniform, LogRandInt, QLogUniform, LogNormal, LogRange)
"""Domains whose bins are equally wide on a logarithmic scale."""

_MOST_DRAWN = 256
"""Random configurations by which the range of a parameter with computed bounds is found."""

_TAIL = 1e-3
"""Probability of a normal distribution beyond each end of the bins; values there belong to the last ones."""


@dataclass(frozen=True)
class Axis:
    """One searched parameter. Its positions are its values, then its bins, then one for trials without the parameter.

    Args:
        edges: Edges of the bins, ascending, one more than there are bins; empty without bins. A bin holds its lower
            edge, and the last one both.
        chooser: Name of the choice that decides the parameter, and perhaps others; mostly the parameter itself.
        log: Whether the bins are equally wide on a logarithmic scale.
    """

    name: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]
    edges: tuple[float, ...]
    chooser: str
    log: bool = False

    @cached_property
    def bins(self) -> range:
        """The positions that are bins."""
        return range(len(self.values), len(self.values) + max(len(self.edges) - 1, 0))

    @property
    def has_missing(self) -> bool:
        """Whether the last position is for trials without the parameter."""
        return len(self.labels) > self.bins.stop

    def with_missing(self) -> "Axis":
        """The same axis, with a position for trials without the parameter."""
        return self if self.has_missing else replace(self, labels=(*self.labels, _MISSING_LABEL))

    def position(self, value: Any) -> int:
        """Return the position of a value; the one after the bins, which is that of a missing value, if it has no other.

        A number outside the bins belongs to the nearest one.
        """
        known = self._positions.get(repr(value))
        if known is not None:
            return known
        if self.edges and isinstance(value, int | float) and not isinstance(value, bool):
            last = len(self.edges) - 2
            return self.bins.start + min(max(bisect_right(self.edges, value) - 1, 0), last)
        return self.bins.stop

    def position_in(self, config: Mapping[str, Any]) -> int:
        """Return the position of the parameter's value in a flattened config, or that of a missing value."""
        return self.position(config[self.name]) if self.name in config else self.bins.stop

    @cached_property
    def _positions(self) -> dict[str, int]:
        # Keys are texts, which distinguish True, 1 and 1.0; lists have no hash.
        return {repr(value): position for position, value in enumerate(self.values)}


def axes(space: Space) -> tuple[Axis, ...]:
    """Return an axis for every parameter that can have more than one value, in the order of the space."""
    leaves = space.leaves()
    has_computed_bounds = any(isinstance(value, Dependent) for leaf in leaves.values() for value in leaf.values)
    drawn = _drawn_rows(space) if has_computed_bounds else []
    all_axes = (_axis(name, leaf, drawn) for name, leaf in leaves.items())
    return tuple(axis for axis in all_axes if len(axis.labels) > 1)


def _drawn_rows(space: Space) -> list[dict[str, Any]]:
    """Random configurations, flattened, which show the ranges of parameters with computed bounds."""
    rows = []
    for seed in range(_MOST_DRAWN):
        rng = Random(seed)
        with suppress(SpaceError):  # a bound that cannot be computed
            rows.append(flatten(space.draw(lambda path, domain: domain.sample(rng))))  # noqa: B023
    return rows


@dataclass(frozen=True)
class _AxisRange:
    """Numbers from `low` to `high`; for whole numbers, `high` is excluded."""

    low: float
    high: float
    log: bool
    integer: bool


def _axis(name: str, leaf: Leaf, drawn: Sequence[Mapping[str, Any]]) -> Axis:
    points: dict[str, Any] = {}
    ranges = []
    for value in leaf.values:
        if isinstance(value, Expression):
            continue  # it follows from other parameters
        if isinstance(value, Dependent):
            numbers = [row[name] for row in drawn if is_number(row.get(name))]
            if numbers and min(numbers) < max(numbers):
                ranges.append(_dependent_range(value, min(numbers), max(numbers)))
        elif (listed := _listed_values(value)) is not None:
            points |= {repr(point): point for point in listed}
        else:
            ranges.append(_range(value))
    values = tuple(points.values())
    texts = [leaf_text(value) for value in values]
    distinct = len({*texts}) == len(texts) and all(text and text.isprintable() for text in texts)
    labels = texts if distinct else list(points)
    edges, bins = _binned(ranges) if ranges else ((), [])
    log = bool(ranges) and all(each.log for each in ranges)
    axis = Axis(name, (*labels, *bins), values, edges, leaf.choice_name, log)
    return axis.with_missing() if leaf.optional else axis


def _listed_values(value: Any) -> Sequence[Any] | None:
    """The values of a domain, if they are few enough to be listed."""
    if not isinstance(value, Domain):
        return [value]
    points = value.points()
    if points is None:
        low, high = _bounds(value)
        return [float(low)] if low == high else None
    listed = list(islice(points, _MAX_LISTED + 1))
    return listed if len(listed) <= _MAX_LISTED else None


def _range(domain: Domain) -> _AxisRange:
    integer = isinstance(domain, RandInt | LogRandInt)
    return _AxisRange(
        *_bounds(domain),
        log=isinstance(domain, _LOGARITHMIC),
        integer=integer,
    )


def _dependent_range(dependent: Dependent, low: float, high: float) -> _AxisRange:
    """The range of a domain with computed bounds, by its values in random configurations."""
    integer = issubclass(dependent.kind, RandInt | LogRandInt)
    log = issubclass(dependent.kind, _LOGARITHMIC) and low > 0
    return _AxisRange(low, high + 1 if integer else high, log, integer)


def _bounds(domain: Domain) -> tuple[float, float]:
    """The range of a domain; of a normal distribution, that of all but its last thousandth on either side."""
    if isinstance(domain, Normal | LogNormal):
        return domain.value_at(_TAIL), domain.value_at(1 - _TAIL)
    low, high = getattr(domain, "low"), getattr(domain, "high")  # noqa: B009  (of all domains without points)
    return low, high


def _binned(ranges: Sequence[_AxisRange]) -> tuple[tuple[float, ...], list[str]]:
    """Return the edges and labels of bins of about equal width on the scale of the ranges, all of which they cover."""
    low, high = min(each.low for each in ranges), max(each.high for each in ranges)
    log, integer = (all(getattr(each, name) for each in ranges) for name in ("log", "integer"))
    if integer:
        edges = (low, *_integer_cuts(low, high, log), high)
        return edges, [_integer_range_text(start, end - 1) for start, end in pairwise(edges)]
    exact = (float(low), *_float_cuts(low, high, log), float(high))
    # Edges are rounded as in their labels, to the fewest digits that keep the bins about equally wide.
    for digits in range(2, 18):
        shown = [float(f"{edge:.{digits}g}") for edge in exact]
        edges = (exact[0], *shown[1:-1], exact[-1])
        if _have_even_widths(edges, log) and all(start < end for start, end in pairwise(shown)):
            texts = [rounded(edge, digits) for edge in exact]
            break
    else:  # the range contains few floats
        edges = tuple(sorted(set(exact)))
        texts = [repr(edge) for edge in edges]
    return edges, [f"{start}..{end}" for start, end in pairwise(texts)]


def _float_cuts(low: float, high: float, log: bool) -> Iterator[float]:
    start, end = (math.log(low), math.log(high)) if log else (low, high)
    for cut in range(1, _BINS):
        # start + cut / bins * (end - start) would overflow for the widest ranges.
        value = (1 - cut / _BINS) * start + cut / _BINS * end
        yield min(max(math.exp(value) if log else value, low), high)


def _integer_cuts(low: float, high: float, log: bool) -> list[float]:
    if log:
        cuts: list[float] = [round(cut) for cut in _float_cuts(low, high, log)]
    else:
        cuts = [low + (high - low) * cut // _BINS for cut in range(1, _BINS)]  # exact for integers beyond the floats
    return sorted({cut for cut in cuts if low < cut < high})


def _have_even_widths(edges: Sequence[float], log: bool) -> bool:
    """Whether the bins are still about equally wide after rounding."""
    scale = [math.log(edge) if edge > 0 else -math.inf for edge in edges] if log else edges
    widths = [end / _BINS - start / _BINS for start, end in pairwise(scale)]
    return 0 < max(widths) <= 1.25 * min(widths)


def _integer_range_text(first: float, last: float) -> str:
    if first == last:
        return str(first)
    if max(-first, last) < 10**_MAX_INTEGER_DIGITS:
        return f"{first}..{last}"
    # Decimals, as integers can exceed the floats.
    return "..".join(f"{Decimal(value):.2e}" if value else "0" for value in (first, last))
