"""Domains with a distribution of their own shape: normal, lognormal, stepped on a logarithmic scale, and ordered."""

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.domain import (
    GREATEST_POWER,
    MOST_STEPPED,
    Choice,
    Domain,
    LogRandInt,
    LogUniform,
    QUniform,
    RandInt,
    Uniform,
    decimal,
    float_distribution,
    index_at,
    int_distribution,
    is_finite,
    is_integer,
    log_fault,
    range_fault,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = ["DOMAINS", "LogNormal", "LogRange", "Normal", "Ordinal", "QLogUniform", "neighbours"]

_STANDARD = NormalDist()
_LEAST_QUANTILE = 2.0**-53
"""The least distance of a quantile from 0 and 1, at 8.2 standard deviations from the mean."""
_LEAST_PROBABILITY = 1e-300
_MOST_DEVIATIONS = 8.3
_SIGNIFICANT = 12
"""Significant digits of the values of a `LogRange`, so that 1 to 1000 has 10 and not 9.999999999999998."""


class _ByQuantile(Domain):
    """A domain of floats or the multiples of a step that Optuna gets as a quantile: it has no such distribution."""

    step: float | None

    def quantile_of(self, value: float) -> float:
        """The quantile of the value; with a step, the middle of those of all that are rounded to it."""
        if self.step is None:
            return self._quantile(value)
        return (self._quantile(value - self.step / 2) + self._quantile(value + self.step / 2)) / 2

    @abstractmethod
    def _quantile(self, value: float) -> float:
        """The quantile of any float."""

    def optuna_value(self, value: Any) -> float:
        """The quantile of the value."""
        return self.quantile_of(value)

    def from_optuna_value(self, value: float) -> Any:
        """The value at the quantile."""
        return self.value_at(value)

    def to_optuna(self) -> "BaseDistribution":
        """FloatDistribution(0, 1) of the quantile."""
        return float_distribution(0.0, 1.0)


@dataclass(frozen=True)
class Normal(_ByQuantile):
    """A float with a normal distribution, truncated to [`low`, `high`] if these are given.

    Args:
        mean: Mean before truncation.
        sd: Standard deviation before truncation.
        low: Least value; None for no bound.
        high: Greatest value; None for no bound.
        step: Values are rounded to multiples of it; None for all floats.
    """

    name: ClassVar[str] = "normal"
    mean: float
    sd: float
    low: float | None = None
    high: float | None = None
    step: float | None = None

    def fault(self) -> str | None:
        """An error text on a number that is none, a step or sd that is not above 0, or a range without probability."""
        if not (is_finite(self.mean) and is_finite(self.sd) and self.sd > 0):
            return "mean and sd must be finite numbers, sd above 0"
        if not is_finite(abs(self.mean) + 10 * self.sd):
            return "mean and sd are too large"
        if not all(bound is None or is_finite(bound) for bound in (self.low, self.high)):
            return "low and high must be finite numbers or None"
        if self.low is not None and self.high is not None and self.low >= self.high:
            return "low must be below high"
        start, end = self._range
        if not start < end:
            return "the range from low to high has no probability"
        return _step_fault(self.step)

    def value_at(self, quantile: float) -> float:
        """The value at the quantile, by the inverse of the cumulative distribution."""
        if self.low is None:
            quantile = max(quantile, _LEAST_QUANTILE)
        if self.high is None:
            quantile = min(quantile, 1 - _LEAST_QUANTILE)
        start, end = self._range
        if self._is_mirrored:
            quantile = 1 - quantile
        place = (1 - quantile) * start + quantile * end
        deviations = _STANDARD.inv_cdf(min(max(place, _LEAST_PROBABILITY), 1 - _LEAST_QUANTILE))
        value = self.mean + self.sd * (-deviations if self._is_mirrored else deviations)
        return self.nearest(value)

    def nearest(self, value: float) -> float:
        """The value of the domain that is nearest to a number."""
        low, high = self._bounds
        value = min(max(value, low), high)
        return value if self.step is None else _rounded(value, self.step)

    def contains(self, value: Any) -> bool:
        """Whether a value is a number in the range, and a multiple of the step."""
        if not is_finite(value) or (self.step is not None and _rounded(value, self.step) != value):
            return False
        margin = 0 if self.step is None else self.step / 2  # the multiple nearest to a bound may lie beyond it
        low, high = self._bounds
        return bool(low - margin <= value <= high + margin)

    @property
    def _bounds(self) -> tuple[float, float]:
        return -math.inf if self.low is None else float(self.low), math.inf if self.high is None else float(self.high)

    @property
    def _is_mirrored(self) -> bool:
        """Whether probabilities are counted from above, because those of a range above the mean have more digits so."""
        return self.low is not None and self.low > self.mean

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The probabilities between which values lie, the lesser one first."""
        start, end = map(self._probability, self._bounds)
        return min(start, end), max(start, end)

    def _probability(self, value: float) -> float:
        """The probability of less than a value; of more, if `_is_mirrored`."""
        deviations = (value - self.mean) / self.sd
        return 0.5 * math.erfc((deviations if self._is_mirrored else -deviations) / math.sqrt(2))

    def _quantile(self, value: float) -> float:
        start, end = self._range
        quantile = min(max((self._probability(value) - start) / (end - start), 0.0), 1.0)
        return 1 - quantile if self._is_mirrored else quantile


@dataclass(frozen=True)
class LogNormal(_ByQuantile):
    """A float above 0 whose logarithm has a normal distribution.

    Args:
        median: As many values are above it as below.
        factor: 68 % of the values are between median / factor and median * factor.
        step: Values are rounded to multiples of it, of which 0 is one; None for all floats.
    """

    name: ClassVar[str] = "lognormal"
    median: float
    factor: float
    step: float | None = None

    def fault(self) -> str | None:
        """An error text on a number that is none or out of range."""
        if not (is_finite(self.median) and self.median > 0 and is_finite(self.factor) and self.factor > 1):
            return "median must be a number above 0 and factor one above 1"
        ends = [math.log(self.median) + sign * _MOST_DEVIATIONS * math.log(self.factor) for sign in (-1, 1)]
        if not -GREATEST_POWER < ends[0] < ends[1] < GREATEST_POWER:
            return "median and factor give values beyond the floats"
        return _step_fault(self.step)

    def value_at(self, quantile: float) -> float:
        """The exponential of the normal value at the quantile."""
        return self.nearest(math.exp(self._logarithm.value_at(quantile)))

    def nearest(self, value: float) -> float:
        """The value of the domain that is nearest to a number above 0."""
        return value if self.step is None else _rounded(value, self.step)

    def contains(self, value: Any) -> bool:
        """Whether a value is a number above 0, or a multiple of the step."""
        if self.step is None:
            return is_finite(value) and value > 0
        return is_finite(value) and value >= 0 and _rounded(value, self.step) == value

    @cached_property
    def _logarithm(self) -> Normal:
        return Normal(math.log(self.median), math.log(self.factor))

    def _quantile(self, value: float) -> float:
        return self._logarithm.quantile_of(math.log(value)) if value > 0 else 0.0


@dataclass(frozen=True)
class QLogUniform(Domain):
    """One of the points `low`, `low + step`, ... up to `high`: the one nearest to a loguniform value.

    Args:
        integer: Whether the points are integers; then `low` and `step` are, too.
    """

    name: ClassVar[str] = "qloguniform"
    low: float
    high: float
    step: float
    integer: bool = False

    def fault(self) -> str | None:
        """An error text on a bound or step that is no number or out of range."""
        if fault := self._points.fault() or log_fault(self.low):
            return fault.replace("q must", "step must")
        if self.integer and not (is_integer(self.low) and is_integer(self.step)):
            return "low and step must be integers"
        return None

    def value_at(self, quantile: float) -> float:
        """The point nearest to the loguniform value at the quantile."""
        return self.nearest(self._continuous.value_at(quantile))

    def quantile_of(self, value: float) -> float:
        """The middle of the quantiles of the values to which the point is nearest."""
        ends = (max(value - self.step / 2, self.low), min(value + self.step / 2, self._continuous.high))
        return sum(map(self._continuous.quantile_of, ends)) / 2

    def points(self) -> Iterable[float]:
        """All values, ascending."""
        return map(self._typed, self._points.points())

    def count(self) -> int:
        """Number of steps plus 1."""
        return self._points.count()

    def contains(self, value: Any) -> bool:
        """Whether a value is one of the points."""
        return (is_integer(value) or not self.integer) and self._points.contains(value)

    def nearest(self, value: float) -> float:
        """The point that is nearest to a value in the range."""
        return self._typed(self._points.nearest(value))

    def from_optuna_value(self, value: float) -> float:
        """The nearest point."""
        return self.nearest(value)

    def to_optuna(self) -> "BaseDistribution":
        """FloatDistribution(low, high, log=True) without the step, as Optuna refuses both together."""
        return self._continuous.to_optuna()

    def _typed(self, value: float) -> float:
        return int(value) if self.integer else value

    @cached_property
    def _points(self) -> QUniform:
        return QUniform(self.low, self.high, self.step)

    @cached_property
    def _continuous(self) -> LogUniform:
        return LogUniform(self.low, self._points.value_at(1))


class _ByIndex(Domain):
    """A domain of few values in an order, which Optuna gets as a position."""

    @property
    @abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The values, in order."""

    def sample(self, rng: Random) -> Any:
        """One of the values."""
        return self.values[rng.randrange(len(self.values))]

    def value_at(self, quantile: float) -> Any:
        """The value whose interval holds the quantile."""
        return self.values[index_at(quantile, len(self.values))]

    def quantile_of(self, value: Any) -> float:
        """The middle of the value's interval."""
        return (self.optuna_value(value) + 0.5) / len(self.values)

    def points(self) -> Iterable[Any]:
        """All values, in order."""
        return self.values

    def count(self) -> int:
        """Number of values."""
        return len(self.values)

    def contains(self, value: Any) -> bool:
        """Whether a value is one of the values."""
        return any(type(own) is type(value) and own == value for own in self.values)

    def optuna_value(self, value: Any) -> int:
        """The position of the value."""
        return next(i for i, own in enumerate(self.values) if type(own) is type(value) and own == value)

    def from_optuna_value(self, value: int) -> Any:
        """The value at the position."""
        return self.values[value]

    def to_optuna(self) -> "BaseDistribution":
        """IntDistribution of the position."""
        return int_distribution(0, len(self.values) - 1)


@dataclass(frozen=True)
class LogRange(_ByIndex):
    """One of `size` numbers from `low` to `high`, each the same multiple of the one before.

    Args:
        integer: Whether the numbers are rounded to integers.
    """

    name: ClassVar[str] = "logrange"
    low: float
    high: float
    size: int
    integer: bool = False

    def fault(self) -> str | None:
        """An error text on a bound or size out of range, or on numbers that are equal when rounded."""
        if fault := range_fault(self.low, self.high) or log_fault(self.low):
            return fault
        if not (is_integer(self.size) and 2 <= self.size <= MOST_STEPPED):
            return f"size must be an integer from 2 to {MOST_STEPPED}"
        if self.integer and not (is_integer(self.low) and is_integer(self.high)):
            return "low and high must be integers"
        if len(set(self.values)) < self.size:
            return "two of the numbers are equal when rounded; choose a smaller size"
        return None

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The numbers, ascending."""
        if self.low == self.high:
            return (self.low,)
        log_low, log_high = math.log(self.low), math.log(self.high)
        inner = [math.exp(log_low + (log_high - log_low) * i / (self.size - 1)) for i in range(1, self.size - 1)]
        if self.integer:
            return (self.low, *map(round, inner), self.high)
        return (float(self.low), *(float(f"{each:.{_SIGNIFICANT}g}") for each in inner), float(self.high))


@dataclass(frozen=True)
class Ordinal(_ByIndex):
    """One of some values in an order, all equally likely; values near to each other are expected to do alike."""

    name: ClassVar[str] = "ordinal"
    options: tuple[Any, ...]

    def fault(self) -> str | None:
        """An error text if there is no value, or one twice."""
        if not self.values:
            return "an ordinal must have at least one value"
        if any(self.optuna_value(value) != position for position, value in enumerate(self.values)):
            return "an ordinal must have each value once"
        return None

    @property
    def values(self) -> tuple[Any, ...]:
        """The options."""
        return self.options

    def __str__(self) -> str:
        return f"ordinal({list(self.options)!r})"


DOMAINS: dict[str, type[Domain]] = {
    domain.name: domain
    for domain in (
        Uniform,
        LogUniform,
        QUniform,
        QLogUniform,
        RandInt,
        LogRandInt,
        Normal,
        LogNormal,
        LogRange,
        Ordinal,
        Choice,
    )
}
"""Name of the function that makes a domain, which is its tag in JSON -> its class."""


def neighbours(domain: Domain, number: float) -> Sequence[float]:
    """The values of a stepped domain on both sides of a finite number, the nearest first; () of any other domain."""
    match domain:
        case LogRange():
            above = bisect_left(domain.values, number)
            around = set(domain.values[max(above - 1, 0) : above + 1])
        case QUniform(q=step) | QLogUniform(step=step) | Normal(step=step) | LogNormal(step=step) if step is not None:
            places = (number + step * halves / 2 for halves in range(-2, 3))  # halves, for the middle of two values
            nearest = map(domain.nearest, filter(is_finite, places))
            around = {value for value in nearest if domain.contains(value)}  # not those below 0 of a lognormal
        case _:
            return ()
    return sorted(around, key=lambda value: abs(value - number))[:2]


def _step_fault(step: object) -> str | None:
    return None if step is None or (is_finite(step) and step > 0) else "step must be a finite number above 0"  # type: ignore[operator]


def _rounded(value: float, step: float) -> float:
    """The multiple of the step nearest to a value, in decimal arithmetic."""
    return float(round(decimal(value) / decimal(step)) * decimal(step))
