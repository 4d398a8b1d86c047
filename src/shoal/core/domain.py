"""Domains: the values of one hyper-parameter and their distribution."""

import math
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.plain import plain_fields

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = [
    "GREATEST_POWER",
    "MOST_STEPPED",
    "Choice",
    "Constant",
    "Domain",
    "LogRandInt",
    "LogUniform",
    "QUniform",
    "RandInt",
    "Uniform",
    "between",
    "decimal",
    "float_distribution",
    "index_at",
    "int_distribution",
    "is_finite",
    "is_integer",
    "log_fault",
    "quantile_between",
    "range_fault",
]

MOST_STEPPED = 10**6
"""Maximum number of points of a domain that is passed to Optuna with a step."""

GREATEST_POWER = 700.0
"""Exponent up to which exp() of a float does not overflow."""


@dataclass(frozen=True)
class Domain(ABC):
    """The values of one hyper-parameter and their distribution.

    The constructor makes Python numbers of NumPy's. It checks nothing, because a domain does not know the name of its
    parameter. The `Space` that contains the domain calls `fault`, and raises an error with the parameter's path. All
    other methods require a valid domain.
    """

    name: ClassVar[str]
    """Name of the function that makes the domain; also its tag in JSON."""

    def __post_init__(self) -> None:
        plain_fields(self)

    @abstractmethod
    def fault(self) -> str | None:
        """An error text on its bounds or options; None if the domain is valid."""

    def sample(self, rng: Random) -> Any:
        """Draw a value, by default at a random quantile; for a `Choice`, the position of an option."""
        return self.value_at(rng.random())

    @abstractmethod
    def value_at(self, quantile: float) -> Any:
        """The value at a quantile in [0, 1] of the distribution; for a `Choice`, a position as in `sample`."""

    @abstractmethod
    def quantile_of(self, value: Any) -> float:
        """The quantile in [0, 1] of a value; for a discrete value, the middle of its interval."""

    def points(self) -> Iterable[Any] | None:
        """All values in order; None for a continuous domain, the default."""
        return None

    def count(self) -> int | None:
        """Number of values; None for a continuous domain."""
        return None

    @abstractmethod
    def contains(self, value: Any) -> bool:
        """Whether a value belongs to the domain."""

    @abstractmethod
    def to_optuna(self) -> "BaseDistribution":
        """The same domain as an Optuna distribution."""

    def optuna_value(self, value: Any) -> Any:
        """What stands for a value, or for the position of an option, in the distribution of `to_optuna`."""
        return value

    def from_optuna_value(self, value: Any) -> Any:
        """The value, or the position of an option, for which `value` stands; for an optimizer's rounded one, too."""
        return value

    def __str__(self) -> str:
        values = [(getattr(self, field.name), field.default) for field in fields(self)]
        return f"{self.name}({', '.join(repr(value) for value, default in values if value != default)})"


@dataclass(frozen=True)
class Uniform(Domain):
    """A float between `low` and `high`, with equal probability."""

    name: ClassVar[str] = "uniform"
    low: float
    high: float

    def fault(self) -> str | None:
        """An error text if a bound is not a number, or if the bounds are in the wrong order."""
        return range_fault(self.low, self.high)

    def value_at(self, quantile: float) -> float:
        """The value at the quantile: linear between `low` and `high`."""
        return between(self.low, self.high, quantile)

    def quantile_of(self, value: float) -> float:
        """The quantile of the value: linear between `low` and `high`."""
        return quantile_between(self.low, self.high, value)

    def contains(self, value: Any) -> bool:
        """Whether a value is a number from `low` to `high`."""
        return is_finite(value) and self.low <= value <= self.high

    def to_optuna(self) -> "BaseDistribution":
        """FloatDistribution(low, high)."""
        return float_distribution(self.low, self.high)


@dataclass(frozen=True)
class LogUniform(Domain):
    """A float between `low` and `high` whose logarithm is uniform."""

    name: ClassVar[str] = "loguniform"
    low: float
    high: float

    def fault(self) -> str | None:
        """An error text if a bound is not a number or not above 0, or if the bounds are in the wrong order."""
        return range_fault(self.low, self.high) or log_fault(self.low)

    def value_at(self, quantile: float) -> float:
        """The value at the quantile: linear in the logarithm."""
        value = math.exp(between(math.log(self.low), math.log(self.high), quantile))
        return min(max(value, float(self.low)), float(self.high))

    def quantile_of(self, value: float) -> float:
        """The quantile of the value: linear in the logarithm."""
        return quantile_between(math.log(self.low), math.log(self.high), math.log(value))

    def contains(self, value: Any) -> bool:
        """Whether a value is a number from `low` to `high`."""
        return is_finite(value) and self.low <= value <= self.high

    def to_optuna(self) -> "BaseDistribution":
        """FloatDistribution(low, high, log=True)."""
        return float_distribution(self.low, self.high, log=True)


@dataclass(frozen=True)
class QUniform(Domain):
    """One of the floats `low`, `low + q`, `low + 2 q`, ... up to `high`, with equal probability.

    Values are computed in decimal arithmetic: the third value of quniform(0.1, 1, 0.1) is 0.3.
    """

    name: ClassVar[str] = "quniform"
    low: float
    high: float
    q: float

    def fault(self) -> str | None:
        """An error text if a bound or the step is not a number, or out of range."""
        if fault := range_fault(self.low, self.high):
            return fault
        return None if is_finite(self.q) and self.q > 0 else "q must be a finite number above 0"

    def sample(self, rng: Random) -> float:
        """One of the points."""
        return self._value(rng.randrange(self.count()))

    def value_at(self, quantile: float) -> float:
        """The point whose interval holds the quantile."""
        return self._value(index_at(quantile, self.count()))

    def quantile_of(self, value: float) -> float:
        """The middle of the nearest point's interval."""
        return (2 * self._steps(value) + 1) / (2 * self.count())

    def points(self) -> Iterable[float]:
        """All values, ascending."""
        return map(self._value, range(self.count()))

    def count(self) -> int:
        """Number of steps plus 1."""
        return int((decimal(self.high) - decimal(self.low)) // decimal(self.q)) + 1

    def contains(self, value: Any) -> bool:
        """Whether a value is one of the points."""
        return is_finite(value) and self.nearest(value) == value

    def to_optuna(self) -> "BaseDistribution":
        """FloatDistribution with a step, ending at the last point, as Optuna wants it.

        With very many points it has no step: Optuna 5 counts the steps up to a value in floats and requires an integer
        up to 1e-8, so it would refuse valid values.
        """
        step = self.q if self.count() <= MOST_STEPPED else None
        return float_distribution(self.low, self._value(self.count() - 1), step=step)

    def from_optuna_value(self, value: float) -> float:
        """The nearest point."""
        return self.nearest(value)

    def nearest(self, value: float) -> float:
        """The point that is nearest to a value in the range."""
        return self._value(self._steps(value))

    def _steps(self, value: float) -> int:
        steps = round((decimal(value) - decimal(self.low)) / decimal(self.q))
        return min(max(steps, 0), self.count() - 1)

    def _value(self, index: int) -> float:
        return float(decimal(self.low) + index * decimal(self.q))


@dataclass(frozen=True)
class RandInt(Domain):
    """One of the integers `low`, `low + step`, ... below `high`, with equal probability."""

    name: ClassVar[str] = "randint"
    low: int
    high: int
    step: int = 1

    def fault(self) -> str | None:
        """An error text if a bound or the step is not an integer, or out of range."""
        if fault := _integer_fault(self.low, self.high):
            return fault
        return None if is_integer(self.step) and self.step > 0 else "step must be an integer above 0"

    def sample(self, rng: Random) -> int:
        """One of the points."""
        return rng.randrange(self.low, self.high, self.step)

    def value_at(self, quantile: float) -> int:
        """The point whose interval holds the quantile."""
        return self.low + self.step * index_at(quantile, self.count())

    def quantile_of(self, value: int) -> float:
        """The middle of the point's interval."""
        return (2 * ((value - self.low) // self.step) + 1) / (2 * self.count())

    def points(self) -> range:
        """All values, ascending."""
        return range(self.low, self.high, self.step)

    def count(self) -> int:
        """Length of the range; `len` itself fails above sys.maxsize."""
        return (self.high - self.low + self.step - 1) // self.step

    def contains(self, value: Any) -> bool:
        """Whether a value is one of the points."""
        return is_integer(value) and value in range(self.low, self.high, self.step)

    def to_optuna(self) -> "BaseDistribution":
        """IntDistribution with a step, whose upper bound is included."""
        return int_distribution(self.low, range(self.low, self.high, self.step)[-1], step=self.step)


@dataclass(frozen=True)
class LogRandInt(Domain):
    """An integer from `low` to below `high` whose logarithm is about uniform: Optuna's IntDistribution(log=True)."""

    name: ClassVar[str] = "lograndint"
    low: int
    high: int

    def fault(self) -> str | None:
        """Bounds that are not integers, not above 0, or in the wrong order."""
        return _integer_fault(self.low, self.high) or log_fault(self.low)

    def value_at(self, quantile: float) -> int:
        """The floor of the loguniform value at the quantile."""
        power = between(math.log(self.low), math.log(self.high), quantile)
        doublings = max(math.ceil((power - GREATEST_POWER) / math.log(2)), 0)  # beyond the floats
        value = int(math.exp(power - doublings * math.log(2))) << doublings
        return min(max(value, self.low), self.high - 1)

    def quantile_of(self, value: int) -> float:
        """The middle between the logarithms of the value and of the next."""
        middle = (math.log(value) + math.log(value + 1)) / 2
        return quantile_between(math.log(self.low), math.log(self.high), middle)

    def points(self) -> Iterable[int]:
        """All values, ascending."""
        return range(self.low, self.high)

    def count(self) -> int:
        """As many as there are integers."""
        return self.high - self.low

    def contains(self, value: Any) -> bool:
        """Whether a value is one of the points."""
        return is_integer(value) and self.low <= value < self.high

    def to_optuna(self) -> "BaseDistribution":
        """IntDistribution(log=True), whose upper bound is included."""
        return int_distribution(self.low, self.high - 1, log=True)


@dataclass(frozen=True)
class Choice(Domain):
    """One of the options; an option may be a value, a domain, or a dict that holds domains.

    Args:
        options: The options, in order.
        weights: How likely each option is, relative to the others; empty if all are equally likely.
    """

    name: ClassVar[str] = "choice"
    options: tuple[Any, ...]
    weights: tuple[float, ...] = ()

    def fault(self) -> str | None:
        """An error text if there is no option, or not one weight above 0 for each."""
        if not self.options:
            return "a choice must have at least one option"
        if not self.weights:
            return None
        if len(self.weights) != len(self.options):
            return f"a choice of {len(self.options)} options has as many weights, not {len(self.weights)}"
        return None if all(is_finite(each) and each > 0 for each in self.weights) else "weights are numbers above 0"

    def sample(self, rng: Random) -> int:
        """The position of one option; the `Space` samples the domains inside it."""
        return self.value_at(rng.random()) if self.weights else rng.randrange(len(self.options))

    def value_at(self, quantile: float) -> int:
        """The position of the option whose interval holds the quantile."""
        if self.weights:
            return min(bisect_right(self._ends, quantile), len(self.options) - 1)
        return index_at(quantile, len(self.options))

    def quantile_of(self, value: int) -> float:
        """The middle of the interval of the option at that position."""
        if self.weights:
            return ((self._ends[value - 1] if value else 0.0) + self._ends[value]) / 2
        return (value + 0.5) / len(self.options)

    @cached_property
    def _ends(self) -> list[float]:
        """The quantiles at which the intervals of weighted options end."""
        ends = list(accumulate(Fraction(each) for each in self.weights))
        return [float(end / ends[-1]) for end in ends]

    @property
    def is_plain(self) -> bool:
        """Whether Optuna gets the options themselves instead of their positions.

        This requires that all options are None, bool, int, float or str, and that no two options of different types are
        equal, such as 1, True and 1.0, because Optuna cannot distinguish them.
        """
        if not all(option is None or isinstance(option, bool | int | float | str) for option in self.options):
            return False
        types: dict[Any, type] = {}
        return all(types.setdefault(option, type(option)) is type(option) for option in self.options)

    def optuna_value(self, value: int) -> Any:
        """The value that stands for the option at a position in Optuna."""
        return self.options[value] if self.is_plain else value

    def from_optuna_value(self, value: Any) -> int:
        """The position of the option for a value in Optuna; the first of equal options of the same type."""
        if not self.is_plain:
            return int(value)
        return next(i for i, own in enumerate(self.options) if type(own) is type(value) and own == value)

    def points(self) -> Iterable[Any]:
        """All options, in order."""
        return self.options

    def count(self) -> int:
        """Number of options."""
        return len(self.options)

    def contains(self, value: Any) -> bool:
        """Whether a value is one of the options."""
        return any(type(own) is type(value) and own == value for own in self.options)

    def to_optuna(self) -> "BaseDistribution":
        """CategoricalDistribution over the options, or over their positions if `is_plain` is false.

        Optuna has no weights.
        """
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.options if self.is_plain else range(len(self.options)))

    def __str__(self) -> str:
        weights = f", weights={list(self.weights)!r}" if self.weights else ""
        return f"choice({list(self.options)!r}{weights})"


@dataclass(frozen=True)
class Constant:
    """A value that is not searched, even if it is a list, as in a journal and in `{value = [64, 32]}` of a file.

    Args:
        value: None, bool, int, float or str, or lists or dicts of these.
    """

    value: Any


def float_distribution(low: float, high: float, **settings: Any) -> "BaseDistribution":
    """A distribution of floats, made by Optuna."""
    from optuna.distributions import FloatDistribution

    return FloatDistribution(low, high, **settings)


def int_distribution(low: int, high: int, **settings: Any) -> "BaseDistribution":
    """A distribution of integers, made by Optuna."""
    from optuna.distributions import IntDistribution

    return IntDistribution(low, high, **settings)


def is_finite(value: object) -> bool:
    """Whether a value is an int or a float, and finite as a float."""
    # NaN, infinities and integers beyond the floats fail the comparison.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_integer(value: object) -> bool:
    """Whether a value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def range_fault(low: object, high: object) -> str | None:
    """An error text on the bounds of a range of floats."""
    if not (is_finite(low) and is_finite(high)):
        return "low and high must be finite numbers (int or float)"
    return None if low <= high else "low must not be above high"  # type: ignore[operator]


def _integer_fault(low: object, high: object) -> str | None:
    if not (is_integer(low) and is_integer(high)):
        return "low and high must be integers"
    return None if low < high else "low must be below high, which is excluded"  # type: ignore[operator]


def log_fault(low: float) -> str | None:
    """An error text on the lower bound of a range on a logarithmic scale."""
    return None if low > 0 else "low must be above 0, where a logarithm exists (use uniform for a range with 0 in it)"


def between(low: float, high: float, fraction: float) -> float:
    """The number at a fraction of the way from `low` to `high`."""
    # Not low + fraction * (high - low): that difference overflows for the widest ranges.
    return float(min(max((1 - fraction) * low + fraction * high, low), high))


def quantile_between(low: float, high: float, value: float) -> float:
    """The fraction of the way from `low` to `high` at which a number is."""
    # Halves, because the difference of the ends of the widest ranges overflows.
    width = high / 2 - low / 2
    return min(max((value / 2 - low / 2) / width, 0.0), 1.0) if width > 0 else 0.5


def index_at(quantile: float, count: int) -> int:
    """The position, of `count` equally likely ones, whose interval holds a quantile."""
    # Fractions for more points than floats distinguish or count.
    return min(int(quantile * count if count <= sys.maxsize else Fraction(quantile) * count), count - 1)


def decimal(value: float) -> Fraction:
    """The exact number that the shortest decimals of a float name."""
    return Fraction(str(float(value)))
