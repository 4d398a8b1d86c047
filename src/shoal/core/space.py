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
import itertools
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from shoal.core.domain import (
    DOMAINS,
    RAY_DOMAINS,
    Choice,
    Domain,
    LogUniform,
    QUniform,
    RandInt,
    Uniform,
    from_optuna,
    from_ray,
)
from shoal.core.errors import SpaceError

__all__ = ["Constant", "Leaf", "Space", "choice", "flatten", "grid", "loguniform", "quniform", "randint", "uniform"]

_MOST_DIGITS = 4000
"""Most digits of an integer; Python converts at most 4300 to text."""
_MOST_BITS = int(_MOST_DIGITS * 3.32)
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


@dataclass(frozen=True)
class Constant:
    """A value that is not searched, even if it is a list, as in a journal and in `{value = [64, 32]}` of a file.

    Args:
        value: None, bool, int, float or str, or lists or dicts of these.
    """

    value: Any


@dataclass(frozen=True)
class Leaf:
    """Possible values under one name of a flattened configuration.

    Args:
        values: Constants and domains other than choices, in the order of the space.
        optional: Whether some configurations lack the name.
        choice_name: Name of the choice between constants, such as "optimizer" for `optimizer.name`; else the leaf's own
            name, and "" for a constant without a choice.
    """

    values: tuple[Any, ...]
    optional: bool
    choice_name: str


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
            self._root = _check(parameters, "")
        except RecursionError as error:
            raise SpaceError("a search space is nested too deeply, or a part of it holds itself") from error

    def sample(self, seed: int | Random) -> dict[str, Any]:
        """Sample a configuration; equal seeds give equal configurations."""
        rng = seed if isinstance(seed, Random) else Random(seed)
        return self.draw(lambda path, domain: domain.sample(rng))

    def draw(self, pick: Callable[[str, Domain], Any]) -> dict[str, Any]:
        """Make a configuration with values that a function picks.

        Args:
            pick: Function of a parameter's path, such as "optimizer[0].momentum", and its domain; returns a value, or
                for a `Choice` the position of an option. It is called in a fixed order, and for parameters within an
                option only if that option was picked.
        """
        config: dict[str, Any] = _draw(self._root, "", pick)
        return config

    def parameters(self, config: Mapping[str, Any]) -> dict[str, tuple[Domain, Any]]:
        """The picks with which `draw` makes this configuration: path -> domain and value.

        The value of a `Choice` is the position of the first option that can give the configuration.

        Raises:
            SpaceError: the configuration does not belong to this space.
        """
        found = _find_picks(self._root, config, "")
        if found is None:
            raise SpaceError(f"{config!r} is not a configuration of {self!r}")
        return found

    def faults(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Reasons why a configuration does not belong to this space, one line for each value; empty if it belongs."""
        return tuple(_faults(self._root, config, ""))

    def constants(self) -> dict[str, Any]:
        """The constants of all configurations, nested as in the space."""
        found: dict[str, Any] = _constants(self._root)
        return found

    def domains(self) -> dict[str, tuple[Domain, bool]]:
        """All parameters: path -> domain, and whether the parameter exists only under some option."""
        return dict(_parameters(self._root, "", conditional=False))

    def grid(self) -> list[dict[str, Any]]:
        """All configurations; the last parameter changes fastest.

        Raises:
            SpaceError: a parameter has infinitely many values, or there are more than a million configurations.
        """
        if (count := _count(self._root, "")) > _MOST_POINTS:
            raise SpaceError(
                f"the space has {count} configurations, and at most {_MOST_POINTS} are tried one by one; choose the "
                "algorithm Random, or coarser domains"
            )
        # Points share their nested dicts until they are copied.
        return [copy.deepcopy(point) for point in _enumerate(self._root, "")]

    def leaves(self) -> dict[str, Leaf]:
        """Name in a flattened configuration -> its possible values, over all options."""
        return _leaves(self._root, "", "")

    def axes(self) -> dict[str, tuple[Any, ...]]:
        """Name of each choice of numbers -> these numbers, ascending."""
        found = {}
        for name, (domain, _) in self.domains().items():
            if isinstance(domain, Choice) and all(is_number(option) for option in domain.options):
                found[name] = tuple(sorted(domain.options))
        return found

    def to_json(self) -> str:
        """Encode the space as JSON text; equal spaces give equal texts."""
        return json.dumps(_encode(self._root), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Space":
        """Decode a text of `to_json`."""
        return cls(_decode(json.loads(text)))

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


# A checked space is a tree. Inner nodes are dicts and Choices; leaves are other Domains and constants.


def _check(node: Any, path: str) -> Any:
    node = from_optuna(node) or from_ray(node) or node
    match node:
        case Domain():
            if fault := node.fault():
                raise SpaceError(f"`{path}`: {fault}, got {node}")
            if isinstance(node, Choice):
                return Choice(tuple(_option(option, f"{path}[{i}]") for i, option in enumerate(node.options)))
            return node
        case Constant():
            return _constant(node.value, path)
        case Mapping():
            return {_name(name, path): _check(value, _join(path, name)) for name, value in node.items()}
        case list():
            if any(isinstance(item, list | tuple) for item in node):
                raise SpaceError(
                    f"`{path}`: a list is a choice of its items, and an item that is a list itself could be a value or "
                    f"a choice; write choice({reprlib.repr(node)}) if lists are chosen from, got {reprlib.repr(node)}"
                )
            return _check(Choice(tuple(node)), path)
        case tuple() | set() | frozenset():
            what = "a tuple" if isinstance(node, tuple) else "a set, which has no order,"
            items = reprlib.repr(list(node))
            raise SpaceError(
                f"`{path}`: {what} could be a value or a choice, got {reprlib.repr(node)}; write choice({items}) to "
                f"choose one of these, choice([{items}]) if the list is the value"
            )
        case _:
            return _constant(node, path)


def _option(node: Any, path: str) -> Any:
    """Check an option of a choice; a list in it is a value, not a choice."""
    return _constant(node, path) if isinstance(node, list | tuple) else _check(node, path)


def _name(name: object, path: str) -> str:
    where = f"in `{path}`, " if path else ""
    if not isinstance(name, str):
        raise SpaceError(f"{where}a parameter's name must be a string, got {name!r}")
    if not name or "." in name:
        raise SpaceError(f"{where}a parameter's name must not be empty or hold a dot, got {name!r}; nest dicts instead")
    return str.__str__(name)


def _constant(value: Any, path: str) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)  # a string Enum becomes its text
        case numbers.Integral() if int(value).bit_length() > _MOST_BITS:
            raise SpaceError(
                f"`{path}`: an integer must be below 10^{_MOST_DIGITS}, because a journal stores it as text"
            )
        case numbers.Integral():
            return int(value)
        case numbers.Real() if math.isfinite(value):
            return float(value)
        case numbers.Real():
            raise SpaceError(f"`{path}`: a value must be finite, got {value!r}; use None and let the task translate it")
        case list() | tuple():
            return [_constant(item, f"{path}[{i}]") for i, item in enumerate(value)]
        case Mapping():
            return {_name(name, path): _constant(item, _join(path, name)) for name, item in value.items()}
        case Domain():
            raise SpaceError(
                f"`{path}`: an option that is a list is a value and cannot hold {value}; use a dict, or a choice of "
                "lists"
            )
    raise SpaceError(
        f"`{path}`: a value must be None, bool, int, float or str, or a list or dict of those, because configurations "
        f"are recorded as JSON; got {reprlib.repr(value)} of type {type(value).__name__}. " + _remedy(value)
    )


def _remedy(value: object) -> str:
    if type(value).__module__ == RAY_DOMAINS:
        return (
            "Write this domain of Ray Tune as one of Shoal's, such as shoal.loguniform, shoal.quniform or shoal.grid; "
            "what sample_from computes, let the function compute"
        )
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | set | frozenset | Mapping):
        return "Write choice(...) around it to choose one of its items"
    return "Give it a name here and look the name up in the task"


def _draw(node: Any, path: str, pick: Callable[[str, Domain], Any]) -> Any:
    match node:
        case Choice():
            position = pick(path, node)
            return _draw(node.options[position], f"{path}[{position}]", pick)
        case Domain():
            return pick(path, node)
        case dict():
            return {name: _draw(value, _join(path, name), pick) for name, value in node.items()}
        case _:
            return copy.deepcopy(node)


def _find_picks(node: Any, value: Any, path: str) -> dict[str, tuple[Domain, Any]] | None:
    """The picks below a node that produce a value; None if no picks do."""
    match node:
        case Choice():
            for position, option in enumerate(node.options):
                inner = _find_picks(option, value, f"{path}[{position}]")
                if inner is not None:
                    return {path: (node, position), **inner}
            return None
        case Domain():
            return {path: (node, value)} if node.contains(value) else None
        case dict():
            if not isinstance(value, Mapping) or value.keys() != node.keys():
                return None
            parts = [_find_picks(inner, value[name], _join(path, name)) for name, inner in node.items()]
            if None in parts:
                return None
            return {key: found for part in parts if part is not None for key, found in part.items()}
        case _:
            return {} if _is_constant(value, node) else None


def _is_constant(value: Any, node: object) -> bool:
    """Return whether a value is a constant of the space. JavaScript writes 1.0 as 1, which stands for the float."""
    return value == node and (type(value) is type(node) or (type(value) is int and type(node) is float))


def _faults(node: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(node, dict):
        if _find_picks(node, value, path) is None:
            yield f"`{path}` is {value!r}, and the space has {node!s}"
    elif not isinstance(value, Mapping):
        yield f"`{path}` is {value!r}, and the space has a dict of {', '.join(node) or 'nothing'}"
    else:
        yield from (f"`{_join(path, name)}` is missing" for name in node if name not in value)
        yield from (f"`{_join(path, name)}` is not in the space" for name in value if name not in node)
        for name, inner in node.items():
            if name in value:
                yield from _faults(inner, value[name], _join(path, name))


def _constants(node: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _constants(value) if isinstance(value, dict) else copy.deepcopy(value)
        for name, value in node.items()
        if not isinstance(value, Domain)
    }


def _parameters(node: Any, path: str, *, conditional: bool) -> Iterator[tuple[str, tuple[Domain, bool]]]:
    match node:
        case Domain():
            yield path, (node, conditional)
            for position, option in enumerate(node.options if isinstance(node, Choice) else ()):
                yield from _parameters(option, f"{path}[{position}]", conditional=True)
        case dict():
            for name, value in node.items():
                yield from _parameters(value, _join(path, name), conditional=conditional)


def _count(node: Any, path: str) -> int:
    match node:
        case Choice():
            return sum(_count(option, f"{path}[{i}]") for i, option in enumerate(node.options))
        case Domain():
            count = node.count()
            if count is None:
                raise SpaceError(
                    f"`{path}`: {node} has infinitely many values and cannot be tried one by one; name the values with "
                    "grid([...]), use quniform, or choose the algorithm Random"
                )
            return count
        case dict():
            return math.prod(_count(value, _join(path, name)) for name, value in node.items())
        case _:
            return 1


def _enumerate(node: Any, path: str) -> Iterator[Any]:
    match node:
        case Domain():
            for i, point in enumerate(node.points() or ()):
                yield from _enumerate(point, f"{path}[{i}]")
        case dict():
            columns = [list(_enumerate(value, _join(path, name))) for name, value in node.items()]
            for row in itertools.product(*columns):
                yield dict(zip(node, row, strict=True))
        case _:
            yield node


def _leaves(node: Any, path: str, choice_name: str) -> dict[str, Leaf]:
    match node:
        case Choice():
            options = [_leaves(option, path, path) for option in node.options]
            names = dict.fromkeys(name for option in options for name in option)
            return {name: _merge_leaves(name, [option.get(name) for option in options]) for name in names}
        case Domain():
            return {path: Leaf((node,), optional=False, choice_name=path)}
        case dict():
            parts = [_leaves(value, _join(path, name), choice_name) for name, value in node.items()]
            return {name: leaf for part in parts for name, leaf in part.items()}
        case _:
            return {path: Leaf((node,), optional=False, choice_name=choice_name)}


def _merge_leaves(name: str, leaves: list[Leaf | None]) -> Leaf:
    """Merge the leaves of a name over all options of a choice; None stands for an option without the name."""
    there = [leaf for leaf in leaves if leaf is not None]
    choice_names = {leaf.choice_name for leaf in there}
    return Leaf(
        values=tuple(value for leaf in there for value in leaf.values),
        optional=len(there) < len(leaves) or any(leaf.optional for leaf in there),
        choice_name=choice_names.pop() if len(choice_names) == 1 else name,
    )


def _encode(node: Any) -> dict[str, Any]:
    match node:
        case Choice():
            return {node.name: [_encode(option) for option in node.options]}
        case Domain():
            return {node.name: [getattr(node, field.name) for field in fields(node)]}
        case dict():
            return {"dict": {name: _encode(value) for name, value in node.items()}}
        case _:
            return {"value": node}


def _decode(node: dict[str, Any]) -> Any:
    ((kind, content),) = node.items()
    match kind:
        case "value":
            return Constant(content)
        case "dict":
            return {name: _decode(value) for name, value in content.items()}
        case "choice":
            return Choice(tuple(_decode(option) for option in content))
        case _ if kind in DOMAINS:
            return DOMAINS[kind](*content)
    raise SpaceError(f"this version has no domain {kind!r}; it has {', '.join(DOMAINS)}")


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
