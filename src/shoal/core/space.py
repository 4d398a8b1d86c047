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
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from shoal.core import space_tree as tree
from shoal.core.domain import Choice, Domain, LogUniform, QUniform, RandInt, Uniform
from shoal.core.errors import SpaceError

__all__ = ["Space", "choice", "flatten", "grid", "is_number", "loguniform", "quniform", "randint", "uniform"]

_MOST_POINTS = 10**6
"""Most configurations of a grid."""


def uniform(low: float, high: float) -> Uniform:
    """A float between `low` and `high`, all equally likely."""
    return Uniform(low, high)


def loguniform(low: float, high: float) -> LogUniform:
    """A float between `low` and `high`, both above 0, all orders of magnitude equally likely."""
    return LogUniform(low, high)


def quniform(low: float, high: float, q: float) -> QUniform:
    """One of the floats `low`, `low + q`, `low + 2 q`, ... up to `high` inclusive, all equally likely."""
    return QUniform(low, high, q)


def randint(low: int, high: int) -> RandInt:
    """An integer of `range(low, high)`, all equally likely."""
    return RandInt(low, high)


def choice(options: Iterable[Any]) -> Choice:
    """One of the options, all equally likely.

    Args:
        options: Options in a fixed order, so not a set. An option may be a domain, or a dict that holds domains; they
            are sampled only if that option is chosen. An option that is a list is that list as a value:
            `choice([[64, 32], [128]])` chooses between two, and `choice([[64, 32]])` is always [64, 32].

    Raises:
        SpaceError: `options` is not a list, tuple or other ordered collection.
    """
    if not isinstance(options, Iterable) or isinstance(options, str | bytes | set | frozenset | Mapping):
        raise SpaceError(f"choice takes a list of options, got {reprlib.repr(options)}; write choice([...])")
    return Choice(tuple(options))


def grid(options: Iterable[Any]) -> Choice:
    """The same as `choice`, under the usual name for values to enumerate.

    The algorithm `Grid` tries all options of a `grid` or a `choice`; other algorithms draw one at random.
    """
    return choice(options)


class Space:
    """A search space that can be sampled, enumerated and stored in a journal.

    Args:
        parameters: Name -> a domain (`uniform`, ..., or one of Optuna or Ray Tune), a list, which is a choice of
            its items, a constant, or a dict of these, nested at will. Configurations are recorded as JSON, so constants
            and options are None, bool, int, float or str. An option of `choice` may also be a list of these; a tuple
            there becomes a list, as after reading from JSON.

    Raises:
        SpaceError: a parameter cannot be sampled; the message names its path, its value and the remedy.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        if not isinstance(parameters, Mapping):
            raise SpaceError(f"a search space is a dict of names to values, got {reprlib.repr(parameters)}")
        try:
            self._root = tree.check(parameters, "")
        except RecursionError as error:
            raise SpaceError("a search space is nested too deeply, or a part of it holds itself") from error

    def sample(self, seed: int | Random, given: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Sample a configuration; equal seeds give equal configurations.

        Args:
            seed: Seed, or the generator to draw from.
            given: Part of a configuration, nested as in the space. Its leaves have the given values; all others have
                the values that they have without `given`. A given value decides which option of a choice is taken:
                the sampled one if it allows the value, else the first that does. Parameters of an option that would
                not have been sampled are drawn as well.

        Raises:
            SpaceError: a given name is not in the space, or a given value is outside its domain.
        """
        rng = seed if isinstance(seed, Random) else Random(seed)
        drawn: dict[str, Any] = {}

        def pick(path: str, domain: Domain) -> Any:
            drawn[path] = domain.sample(rng)
            return drawn[path]

        config = self.draw(pick)
        if not given:
            return config
        fixed = tree.given_picks(self._root, given, "", drawn)
        picks = {**drawn, **fixed}
        return self.draw(lambda path, domain: picks[path] if path in picks else domain.sample(rng))

    def draw(self, pick: Callable[[str, Domain], Any]) -> dict[str, Any]:
        """Make a configuration with values that a function picks.

        Args:
            pick: Function of a parameter's path, such as "optimizer[0].momentum", and its domain; returns a value, or
                for a `Choice` the position of an option. It is called in a fixed order, and for parameters within an
                option only if that option was picked.
        """
        config: dict[str, Any] = tree.draw(self._root, "", pick)
        return config

    def parameters(self, config: Mapping[str, Any]) -> dict[str, tuple[Domain, Any]]:
        """The picks with which `draw` makes this configuration: path -> domain and value.

        The value of a `Choice` is the position of the first option that can give the configuration.

        Raises:
            SpaceError: the configuration does not belong to this space.
        """
        found = tree.find_picks(self._root, config, "")
        if found is None:
            raise SpaceError(f"{config!r} is not a configuration of {self!r}")
        return found

    def faults(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Reasons why a configuration does not belong to this space, one line for each value; empty if it belongs."""
        return tuple(tree.faults(self._root, config, ""))

    def constants(self) -> dict[str, Any]:
        """The constants of all configurations, nested as in the space."""
        found: dict[str, Any] = tree.constants(self._root)
        return found

    def domains(self) -> dict[str, tuple[Domain, bool]]:
        """All parameters: path -> domain, and whether the parameter exists only under some option."""
        return dict(tree.parameters(self._root, "", conditional=False))

    def grid(self) -> list[dict[str, Any]]:
        """All configurations; the last parameter changes fastest.

        Raises:
            SpaceError: a parameter has infinitely many values, or there are more than a million configurations.
        """
        if (count := tree.count(self._root, "")) > _MOST_POINTS:
            raise SpaceError(
                f"the space has {count} configurations, and at most {_MOST_POINTS} are tried one by one; choose the "
                "algorithm Random, or coarser domains"
            )
        # Points share their nested dicts until they are copied.
        return [copy.deepcopy(point) for point in tree.points(self._root, "")]

    def leaves(self) -> dict[str, tree.Leaf]:
        """Name in a flattened configuration -> its possible values, over all options."""
        return tree.leaves(self._root, "", "")

    def axes(self) -> dict[str, tuple[Any, ...]]:
        """Name of each choice of numbers -> these numbers, ascending."""
        found = {}
        for name, (domain, _) in self.domains().items():
            if isinstance(domain, Choice) and all(is_number(option) for option in domain.options):
                found[name] = tuple(sorted(domain.options))
        return found

    def to_json(self) -> str:
        """Encode the space as JSON text; equal spaces give equal texts."""
        return json.dumps(tree.encode(self._root), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Space":
        """Decode a text of `to_json`."""
        return cls(tree.decode(json.loads(text)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Space({self._root!r})"


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a flat dict: {"optimizer": {"name": "sgd"}} gives {"optimizer.name": "sgd"}."""
    row: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            row.update({f"{name}.{inner}": leaf for inner, leaf in flatten(value).items()})
        else:
            row[name] = value
    return row


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
