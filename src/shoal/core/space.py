"""Search space: parsing of a user's parameters, sampling, enumeration and JSON.

Example:
    A learning rate, a width, and a momentum that exists only for one optimizer::

        {
            "lr": loguniform(1e-4, 1e-1),
            "width": choice([64, 128]),
            "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 0.99)}, {"name": "adam"}]),
        }
"""

import copy
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from shoal.core import space_tree as tree
from shoal.core.distributions import LogNormal, LogRange, Normal, Ordinal, QLogUniform
from shoal.core.domain import Choice, Domain, LogUniform, QUniform, RandInt, Uniform
from shoal.core.errors import SpaceError
from shoal.core.foreign_spaces import from_wandb, is_wandb_sweep
from shoal.core.reference import Dependent, Expression, UncomputableError, make_domain
from shoal.core.rules import Rules, check_references
from shoal.core.space_json import decode, encode
from shoal.core.trial import derive_seed

__all__ = [
    "Space",
    "choice",
    "config_text",
    "flatten",
    "grid",
    "is_number",
    "lognormal",
    "logrange",
    "loguniform",
    "normal",
    "ordinal",
    "qloguniform",
    "quniform",
    "randint",
    "uniform",
]

_MOST_POINTS = 10**6
"""Most configurations of a grid."""
_MOST_ATTEMPTS = 1000
"""Most random configurations of which one must be accepted."""

_Number = float | Expression


def uniform(low: _Number, high: _Number) -> Domain | Dependent:
    """A float between `low` and `high`, all equally likely."""
    return make_domain(Uniform, low, high)


def loguniform(low: _Number, high: _Number) -> Domain | Dependent:
    """A float between `low` and `high`, both above 0, all orders of magnitude equally likely."""
    return make_domain(LogUniform, low, high)


def quniform(low: _Number, high: _Number, q: _Number) -> Domain | Dependent:
    """One of the floats `low`, `low + q`, `low + 2 q`, ... up to `high` inclusive, all equally likely."""
    return make_domain(QUniform, low, high, q)


def qloguniform(low: _Number, high: _Number, step: _Number) -> Domain | Dependent:
    """The nearest of the floats `low`, `low + step`, ... up to `high` inclusive to a `loguniform(low, high)`."""
    return make_domain(QLogUniform, low, high, step)


def randint(low: int | Expression, high: int | Expression) -> Domain | Dependent:
    """An integer of `range(low, high)`, all equally likely."""
    return make_domain(RandInt, low, high)


def normal(mean: _Number, sd: _Number, low: _Number | None = None, high: _Number | None = None) -> Domain | Dependent:
    """A float with a normal distribution.

    Args:
        mean: Mean.
        sd: Standard deviation, above 0.
        low: Least value; the distribution is cut off there, so that no value is more likely for being a bound.
        high: Greatest value.
    """
    return make_domain(Normal, mean, sd, low, high)


def lognormal(median: _Number, factor: _Number) -> Domain | Dependent:
    """A float above 0 whose logarithm has a normal distribution.

    Args:
        median: As many values are above it as below.
        factor: 68 % of the values are between `median / factor` and `median * factor`; above 1.
    """
    return make_domain(LogNormal, median, factor)


def logrange(low: _Number, high: _Number, size: int, integer: bool = False) -> Domain | Dependent:
    """One of `size` numbers, each the same multiple of the one before: logrange(1, 8, 4) has 1.0, 2.0, 4.0 and 8.0.

    Args:
        low: The first number, above 0.
        high: The last number.
        size: How many numbers, at least 2.
        integer: Whether they are rounded to integers.
    """
    return make_domain(LogRange, low, high, size, integer)


def ordinal(values: Iterable[Any]) -> Ordinal:
    """One of some values in an order, all equally likely.

    Unlike for a `choice`, samplers and PBT expect that neighbours do alike, as of ["none", "weak", "strong"].

    Raises:
        SpaceError: `values` is not a list, tuple or other ordered collection.
    """
    return Ordinal(_ordered_tuple("ordinal", values))


def choice(options: Iterable[Any], *, weights: Iterable[float] = ()) -> Choice:
    """One of the options, all equally likely without `weights`.

    Args:
        options: Options in a fixed order, so not a set. An option may be a domain, or a dict that holds domains; they
            are sampled only if that option is chosen. An option that is a list is that list as a value:
            `choice([[64, 32], [128]])` chooses between two, and `choice([[64, 32]])` is always [64, 32].
        weights: A number above 0 for each option: how likely it is, relative to the others. They hold wherever Shoal
            draws; Optuna's samplers know no weights.

    Raises:
        SpaceError: `options` is not a list, tuple or other ordered collection.
    """
    if not isinstance(weights, Iterable):
        raise SpaceError(f"the weights of a choice are a list with a number for each option, got {weights!r}")
    return Choice(_ordered_tuple("choice", options), tuple(weights))


def grid(options: Iterable[Any]) -> Choice:
    """The same as `choice`, under the usual name for values to enumerate.

    The algorithm `Grid` tries all options of a `grid` or a `choice`; other algorithms draw one at random.
    """
    return choice(options)


def _ordered_tuple(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | set | frozenset | Mapping):
        raise SpaceError(f"{name} takes a list of options, got {reprlib.repr(values)}; write {name}([...])")
    return tuple(values)


class Space:
    """A search space that can be sampled, enumerated and stored in a journal.

    Args:
        parameters: Name -> a domain (`uniform`, ..., or one of Optuna or Ray Tune), a list, which is a choice of
            its items, a constant, a value computed with `ref`, or a dict of these, nested at will; or a sweep of W&B,
            a dict with `method` and `parameters`. Configurations are recorded as JSON, so constants and options are
            None, bool, int, float or str. An option of `choice` may also be a list of these; a tuple there becomes a
            list, as after reading from JSON.
        where: Conditions on `ref`s, such as `ref("a") * ref("b") <= 4096`, that all configurations meet: a random one
            that does not, or of which a value cannot be computed, is drawn again.
        ordered: Groups of names of parameters with equal domains, such as `[("low", "high")]`. Their values are drawn
            and then sorted.

    Raises:
        SpaceError: a parameter cannot be sampled; the message names its path, its value and the remedy. Or values
            depend on each other in a circle, or a condition is none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        where: Sequence[Expression] = (),
        ordered: Sequence[Sequence[str]] = (),
    ) -> None:
        if not isinstance(parameters, Mapping):
            raise SpaceError(f"a search space is a dict of names to values, got {reprlib.repr(parameters)}")
        try:
            if is_wandb_sweep(parameters):
                parameters = from_wandb(parameters["parameters"])
            self._root = tree.check(parameters, "")
        except RecursionError as error:
            raise SpaceError("a search space is nested too deeply, or a part of it holds itself") from error
        self._computed = list(tree.computed(self._root, "", "", {}))
        for name, pins, node in self._computed:
            check_references(tree.leaves(self._root, pins=pins), name, node)
        self._rules = Rules.of(where, ordered, self._root)

    def sample(self, seed: int | Random, given: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Sample a configuration; equal seeds give equal configurations.

        Args:
            seed: Seed, or the generator to draw from.
            given: Part of a configuration, nested as in the space. Its leaves have the given values; all others have
                the values that they have without `given`, but for those computed from them; where conditions or
                computed bounds do not allow these, all others are drawn again. A given value decides which option of a
                choice is taken: the sampled one if it allows the value, else the first that does.
                Parameters of an option that would not have been sampled are drawn as well.

        Raises:
            SpaceError: a given name is not in the space, or a given value is outside its domain; a condition of `where`
                refuses the given values, or they leave a value that cannot be computed; or 1000 random configurations
                are refused or cannot be computed.
        """
        rng = seed if isinstance(seed, Random) else Random(seed)
        refused: Counter[str] = Counter()
        uncomputed: dict[str, str] = {}  # the first text of each rule
        while True:
            picked = self._picked(lambda path, domain: domain.sample(rng))  # noqa: B023  (called at once)
            try:
                config = self._config(picked)
                rule = self._rules.broken(flatten(config))
            except UncomputableError as error:
                rule = error.rule
                uncomputed.setdefault(rule, str(error))
            if rule is None:
                break
            refused[rule] += 1
            if refused.total() == _MOST_ATTEMPTS:
                rules = "; ".join(
                    f"{count} cannot be computed: {uncomputed[each]}"
                    if each in uncomputed
                    else f"`{each}` refused {count}"
                    for each, count in refused.items()
                )
                raise SpaceError(
                    f"none of {_MOST_ATTEMPTS} random configurations was accepted (less than 0.1 %): {rules}; give "
                    "domains in which more configurations meet the conditions"
                )
            if not isinstance(seed, Random):
                rng = Random(derive_seed(seed, refused.total()))
        return self._completed(given, picked, rng) if given else config

    def draw(self, pick: Callable[[str, Domain], Any]) -> dict[str, Any]:
        """Make a configuration with values that a function picks; whether `where` allows it, `refusal` says.

        Args:
            pick: Function of a parameter's path, such as "optimizer[0].momentum", and its domain; returns a value, or
                for a `Choice` the position of an option. It is called in a fixed order, and for parameters within an
                option only if that option was picked. For a domain with computed bounds it gets uniform(0, 1), and
                picks a quantile.

        Raises:
            UncomputableError: a value cannot be computed.
        """
        return self._config(self._picked(pick))

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """The condition of `where` or the order that a configuration of the space does not meet, with its values; None
        if it meets all.
        """
        row = flatten(config)
        rule = self._rules.broken(row)
        return None if rule is None else self._rules.explained(rule, row)

    def _picked(self, pick: Callable[[str, Domain], Any]) -> dict[str, Any]:
        return self._rules.sorted(tree.picks(self._root, "", pick))

    def _config(self, picked: Mapping[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = tree.build(self._root, "", picked)
        return _resolved(config) if self._computed else config

    def _completed(self, given: Mapping[str, Any], picked: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        """A configuration with given values; the others are drawn again while these and they do not fit together."""
        try:
            return self._with_given(given, picked, rng)
        except SpaceError as error:
            if not self.is_restricted:
                raise
            for _ in range(_MOST_ATTEMPTS // 10):
                with suppress(SpaceError):
                    return self._with_given(given, self._picked(lambda path, domain: domain.sample(rng)), rng)
            raise SpaceError(f"{error}; if it depends on other values, give these, too") from error

    def _with_given(self, given: Mapping[str, Any], picked: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        fixed = {**picked, **tree.given_picks(self._root, given, "", picked)}
        drawn = tree.picks(self._root, "", lambda path, domain: fixed[path] if path in fixed else domain.sample(rng))
        config = self._config({**fixed, **drawn})
        if refusal := self.refusal(config):
            raise SpaceError(f"with the given values {dict(given)!r}, {refusal}")
        return config

    def parameters(self, config: Mapping[str, Any]) -> dict[str, tuple[Domain, Any]]:
        """The picks with which `draw` makes this configuration: path -> domain and value.

        The value of a `Choice` is the position of the first option that can give the configuration.

        Raises:
            SpaceError: the configuration does not belong to this space.
        """
        found = tree.find_picks(self._root, config, "", tree.lookup_in(flatten(config)))
        if found is None:
            raise SpaceError(f"{config!r} is not a configuration of {self!r}")
        return found

    def faults(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Reasons why a configuration does not belong to this space, one line for each value; empty if it belongs."""
        found = tuple(tree.faults(self._root, config, "", tree.lookup_in(flatten(config))))
        if found:
            return found
        try:
            refusal = self.refusal(config)
        except SpaceError as error:
            refusal = str(error)
        return () if refusal is None else (refusal,)

    def recomputed(self, config: Mapping[str, Any], kept: Container[str] = ()) -> dict[str, Any]:
        """A copy of a configuration with all values that the space computes, but for those of some names.

        A computed value of an option of a choice is replaced if it is there, and none is added. What cannot be
        computed, because the configuration lacks a value, stays as it is.
        """
        whole = copy.deepcopy(dict(config))
        found: dict[str, list[tuple[bool, Expression]]] = {}
        for name, pins, node in self._computed:
            if isinstance(node, Expression) and name not in kept:
                found.setdefault(name, []).append((bool(pins), node))
        row = flatten(whole)
        for name, ((conditional, node), *others) in found.items():
            if not others and (name in row or not conditional):
                row[name] = tree.Pending(node, name)
        lookup = tree.lookup_in(row)
        for name in found:
            *outer, last = name.split(".")
            place: Any = whole
            for part in outer:
                place = place.get(part) if isinstance(place, dict) else None
            if isinstance(place, dict) and name in row:
                with suppress(SpaceError):
                    place[last] = lookup(name)
        return whole

    def constants(self) -> dict[str, Any]:
        """The constants of all configurations, nested as in the space."""
        found: dict[str, Any] = tree.constants(self._root)
        return found

    def domains(self) -> dict[str, tuple[Domain, bool]]:
        """All parameters: path -> domain, and whether the parameter exists only under some option."""
        return dict(tree.parameters(self._root, "", conditional=False))

    def grid(self) -> list[dict[str, Any]]:
        """All configurations that no rule refuses and that can be computed; the last parameter changes fastest.

        Raises:
            SpaceError: a parameter has infinitely many values, or there are more than a million configurations.
        """
        if (count := self.count()) > _MOST_POINTS:
            raise SpaceError(
                f"the space has {count} configurations, and at most {_MOST_POINTS} are tried one by one; choose the "
                "algorithm Random, or coarser domains"
            )
        allowed = map(self._allowed, tree.points(self._root, ""))
        return [config for config in allowed if config is not None]

    def _allowed(self, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """A copy of a point, which shares its nested dicts, with computed values; None if it is refused."""
        try:
            config = _resolved(copy.deepcopy(dict(point)))
            return config if self._rules.broken(flatten(config)) is None else None
        except UncomputableError:
            return None

    def count(self) -> int:
        """Number of configurations, with those that `where` and `ordered` refuse.

        Raises:
            SpaceError: a parameter has infinitely many values.
        """
        return tree.count(self._root, "")

    @property
    def size(self) -> int | None:
        """Number of configurations, as of `count`; None if there are infinitely many."""
        try:
            return tree.count(self._root, "")
        except SpaceError:
            return None

    @property
    def is_restricted(self) -> bool:
        """Whether `grid` may leave out points: by conditions, by orders, or for want of a computed value."""
        return bool(self._rules.where or self._rules.ordered or self._computed)

    def leaves(self) -> dict[str, tree.Leaf]:
        """Name in a flattened configuration -> its possible values, over all options."""
        return tree.leaves(self._root)

    def axes(self) -> dict[str, tuple[Any, ...]]:
        """Name of each choice of numbers -> these numbers, ascending."""
        found = {}
        for name, (domain, _) in self.domains().items():
            values = tuple(domain.points() or ()) if isinstance(domain, Choice | Ordinal | LogRange) else ()
            if values and all(is_number(value) for value in values):
                found[name] = tuple(sorted(values))
        return found

    def to_json(self) -> str:
        """Encode the space as JSON text; equal spaces give equal texts."""
        whole = encode(self._root)
        if self._rules.where:
            whole["where"] = [condition.data for condition in self._rules.where]
        if self._rules.ordered:
            whole["ordered"] = self._rules.ordered
        return json.dumps(whole, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Space":
        """Decode a text of `to_json`."""
        whole = json.loads(text)
        where, ordered = whole.pop("where", ()), whole.pop("ordered", ())
        return cls(decode(whole), where=[Expression(each) for each in where], ordered=ordered)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        where = f", where={list(self._rules.where)!r}" if self._rules.where else ""
        ordered = f", ordered={list(self._rules.ordered)!r}" if self._rules.ordered else ""
        return f"Space({self._root!r}{where}{ordered})"


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a flat dict: {"optimizer": {"name": "sgd"}} gives {"optimizer.name": "sgd"}."""
    row: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            row.update({f"{name}.{inner}": leaf for inner, leaf in flatten(value).items()})
        else:
            row[name] = value
    return row


def config_text(config: Mapping[str, Any]) -> str:
    """A configuration as JSON text, which is equal for equal names, types and values: 1, 1.0 and True differ in it."""
    return json.dumps(config, sort_keys=True)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _resolved(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the values of all its leaves that depend on others."""
    lookup = tree.lookup_in(flatten(config))

    def whole(part: Any, name: str) -> Any:
        if isinstance(part, dict):
            return {key: whole(value, f"{name}.{key}" if name else key) for key, value in part.items()}
        return lookup(name) if isinstance(part, tree.Pending) else part

    resolved: dict[str, Any] = whole(config, "")
    return resolved
