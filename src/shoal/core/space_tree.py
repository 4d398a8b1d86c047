"""A checked search space as a tree: its checks, its walks and its JSON form.

Inner nodes are dicts and `Choice`s; leaves are other `Domain`s, domains with computed bounds (`Dependent`), computed
values (`Expression`) and constants. A node's path names it, such as "optimizer[0].momentum" for a parameter of the
first option of `optimizer`; in a configuration that leaf is named "optimizer.momentum".
"""

import copy
import itertools
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.distributions import Ordinal, neighbours
from shoal.core.domain import Choice, Constant, Domain, is_finite
from shoal.core.errors import SpaceError
from shoal.core.foreign_spaces import RAY_DOMAINS, from_optuna, from_ray
from shoal.core.plain import plain
from shoal.core.reference import UNIT, Dependent, Expression, UncomputableError, check_expression, evaluate

__all__ = [
    "Leaf",
    "Lookup",
    "Pending",
    "build",
    "check",
    "computed",
    "constant",
    "constants",
    "count",
    "faults",
    "find_picks",
    "given_picks",
    "leaves",
    "lookup_in",
    "parameters",
    "picks",
    "points",
]

_MOST_DIGITS = 4000
"""Most digits of an integer; Python converts at most 4300 to text."""
_MOST_BITS = int(_MOST_DIGITS * 3.32)
_ROUNDING = 1e-11
"""Relative distance up to which a given float stands for a value of a stepped domain."""

Lookup = Callable[[str], Any]
"""A function of a name in a flattened configuration that returns its value, and raises a `SpaceError` without it."""


@dataclass(frozen=True)
class _Given:
    """A value of a configuration that takes the place of what would be computed."""

    value: Any


@dataclass(frozen=True, eq=False)
class Pending:
    """A leaf of a configuration whose value depends on others.

    Args:
        pick: The quantile for a domain, or a `_Given`; None for a computed value.
    """

    node: Dependent | Expression
    path: str
    pick: Any = None

    def value(self, lookup: Lookup) -> Any:
        """The value in a configuration.

        Raises:
            UncomputableError: it cannot be computed.
            SpaceError: a given value is another one or outside the domain.
        """
        known: Any
        if isinstance(self.node, Dependent):
            known = self.node.resolved(lookup, self.path)
            if not isinstance(self.pick, _Given):
                return known.value_at(self.pick)
        else:
            known = evaluate(self.node, lookup, self.path)
            try:
                known = constant(known, self.path)
            except SpaceError as error:
                raise UncomputableError(str(error), f"`{self.path}`: {self.node}") from error
            if not isinstance(self.pick, _Given):
                return known
        (value,) = given_picks(known, self.pick.value, self.path, {}).values() or (known,)
        return value


def lookup_in(row: dict[str, Any]) -> Lookup:
    """A function of a name that returns its value in a flattened configuration, computed at the first request."""

    def lookup(name: str) -> Any:
        if name not in row:
            raise SpaceError(f"the configuration has no `{name}`")
        if isinstance(row[name], Pending):
            row[name] = row[name].value(lookup)
        return row[name]

    return lookup


@dataclass(frozen=True)
class Leaf:
    """Possible values under one name of a flattened configuration.

    Args:
        values: Constants, domains other than choices, and what depends on others, in the order of the space.
        optional: Whether some configurations lack the name.
        choice_name: Name of the choice between constants, such as "optimizer" for `optimizer.name`; else the leaf's own
            name, and "" for a constant without a choice.
    """

    values: tuple[Any, ...]
    optional: bool
    choice_name: str


def check(node: Any, path: str) -> Any:
    """Check a part of a space; turn lists into choices, foreign domains into own ones, constants into JSON values."""
    foreign = from_optuna(node) or from_ray(node)
    node = node if foreign is None else foreign
    match node:
        case Domain():
            if fault := node.fault():
                raise SpaceError(f"`{path}`: {fault}, got {node}")
            if isinstance(node, Choice):
                options = tuple(_option(option, f"{path}[{i}]") for i, option in enumerate(node.options))
                return Choice(options, node.weights)
            return Ordinal(tuple(constant(node.values, path))) if isinstance(node, Ordinal) else node
        case Expression():
            check_expression(node, path)
            return node
        case Dependent():
            for expression in node.expressions:
                check_expression(expression, path)
            return node
        case Constant():
            return constant(node.value, path)
        case Mapping():
            return {_name(name, path): check(value, _join(path, name)) for name, value in node.items()}
        case list():
            if any(isinstance(item, list | tuple) for item in node):
                raise SpaceError(
                    f"`{path}`: a list is a choice of its items, and an item that is a list itself could be a value or "
                    f"a choice; write choice({reprlib.repr(node)}) if lists are chosen from, got {reprlib.repr(node)}"
                )
            return check(Choice(tuple(node)), path)
        case tuple() | set() | frozenset():
            what = "a tuple" if isinstance(node, tuple) else "a set, which has no order,"
            items = reprlib.repr(list(node))
            raise SpaceError(
                f"`{path}`: {what} could be a value or a choice, got {reprlib.repr(node)}; write choice({items}) to "
                f"choose one of these, choice([{items}]) if the list is the value"
            )
        case _:
            return constant(node, path)


def _option(node: Any, path: str) -> Any:
    """Check an option of a choice; a list in it is a value, not a choice."""
    return constant(node, path) if isinstance(node, list | tuple) else check(node, path)


def _name(name: object, path: str) -> str:
    where = f"in `{path}`, " if path else ""
    if not isinstance(name, str):
        raise SpaceError(f"{where}a parameter's name must be a string, got {name!r}")
    if not name or "." in name:
        raise SpaceError(f"{where}a parameter's name must not be empty or hold a dot, got {name!r}; nest dicts instead")
    return str.__str__(name)


def constant(value: Any, path: str) -> Any:
    """A value as JSON has it: numbers of NumPy become Python's, tuples lists. What JSON lacks is a SpaceError."""
    match value := plain(value):
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
            return [constant(item, f"{path}[{i}]") for i, item in enumerate(value)]
        case Mapping():
            return {_name(name, path): constant(item, _join(path, name)) for name, item in value.items()}
        case Domain() | Dependent() | Expression():
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
            "Write this domain of Ray Tune as one of Shoal's; in place of sample_from, whose function a journal cannot "
            "hold, compute with shoal.ref, as in shoal.ref('epochs') // 10"
        )
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | set | frozenset | Mapping):
        return "Write choice(...) around it to choose one of its items"
    return "Give it a name here and look the name up in the task"


def picks(node: Any, path: str, pick: Callable[[str, Domain], Any]) -> dict[str, Any]:
    """What a function picks for each parameter below a node; see `Space.draw`."""
    match node:
        case Choice():
            position = pick(path, node)
            return {path: position, **picks(node.options[position], f"{path}[{position}]", pick)}
        case Domain():
            return {path: pick(path, node)}
        case Dependent():
            return {path: pick(path, UNIT)}
        case dict():
            parts = [picks(value, _join(path, name), pick) for name, value in node.items()]
            return {key: picked for part in parts for key, picked in part.items()}
        case _:
            return {}


def build(node: Any, path: str, picked: Mapping[str, Any]) -> Any:
    """The part of a configuration below a node, by the picks for it; leaves that depend on others are `Pending`."""
    match node:
        case Choice():
            position = picked[path]
            return build(node.options[position], f"{path}[{position}]", picked)
        case Domain():
            return picked[path]
        case Dependent() | Expression():
            return Pending(node, path, picked.get(path))
        case dict():
            return {name: build(value, _join(path, name), picked) for name, value in node.items()}
        case _:
            return copy.deepcopy(node)


def find_picks(node: Any, value: Any, path: str, lookup: Lookup) -> dict[str, tuple[Domain, Any]] | None:
    """The picks below a node that produce a value; None if no picks do."""
    match node:
        case Choice():
            for position, option in enumerate(node.options):
                inner = find_picks(option, value, f"{path}[{position}]", lookup)
                if inner is not None:
                    return {path: (node, position), **inner}
            return None
        case Domain():
            return {path: (node, value)} if node.contains(value) else None
        case Dependent() | Expression():
            try:
                Pending(node, path, _Given(value)).value(lookup)
                place = node.resolved(lookup, path).quantile_of(value) if isinstance(node, Dependent) else None
            except SpaceError:
                return None
            return {} if place is None else {path: (UNIT, place)}
        case dict():
            if not isinstance(value, Mapping) or value.keys() != node.keys():
                return None
            parts = [find_picks(inner, value[name], _join(path, name), lookup) for name, inner in node.items()]
            if None in parts:
                return None
            return {key: found for part in parts if part is not None for key, found in part.items()}
        case _:
            return {} if _is_constant(value, node) else None


def given_picks(node: Any, given: Any, path: str, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The picks below a node, by path, that the given part of a configuration needs; `drawn` are those without it.

    Raises:
        SpaceError: a name is not in the space, or a value is outside its domain.
    """
    match node:
        case dict():
            if not isinstance(given, Mapping):
                raise SpaceError(f"`{path}` is given as {given!r}, and the space has a dict of {_names(node)}")
            if unknown := [name for name in given if name not in node]:
                raise SpaceError(
                    f"`{_join(path, unknown[0])}` is given, and is not in the space, which has {_names(node)}"
                )
            parts = [given_picks(node[name], value, _join(path, name), drawn) for name, value in given.items()]
            return {key: pick for part in parts for key, pick in part.items()}
        case Choice():
            sampled = drawn.get(path)
            positions = range(len(node.options))
            for position in sorted(positions, key=lambda each: each != sampled):
                try:
                    inner = given_picks(node.options[position], given, f"{path}[{position}]", drawn)
                except SpaceError:
                    continue  # the error below names all options
                return {path: position, **inner}
        case Domain():
            value = _without_rounding(constant(given, path), node)
            if node.contains(value):
                return {path: float(value) if isinstance(node.value_at(0.5), float) else value}
            if is_finite(value) and (near := neighbours(node, value)):
                nearest = " and ".join(map(repr, sorted(near)))
                raise SpaceError(
                    f"`{path}` is given as {given!r}, and the space has {node!s}; nearest to it: {nearest}"
                )
        case Dependent() | Expression():
            return {path: _Given(constant(given, path))}
        case _:
            if _is_constant(constant(given, path), node):
                return {}
    raise SpaceError(f"`{path}` is given as {given!r}, and the space has {node!s}")


def _without_rounding(value: Any, domain: Domain) -> Any:
    """The float of a stepped domain that a given number equals but for rounding, as 0.1 + 0.2 does 0.3; else itself."""
    near = neighbours(domain, value) if is_finite(value) else ()
    if not near or not isinstance(near[0], float):
        return value
    scale = max(abs(value), abs(near[0] - near[-1]))  # the distance of two values is that of a 0
    return near[0] if abs(near[0] - value) <= _ROUNDING * scale else value


def _names(node: Mapping[str, Any]) -> str:
    return ", ".join(node) or "nothing"


def _is_constant(value: Any, node: object) -> bool:
    """Return whether a value is a constant of the space. JavaScript writes 1.0 as 1, which stands for the float."""
    return value == node and (type(value) is type(node) or (type(value) is int and type(node) is float))


def faults(node: Any, value: Any, path: str, lookup: Lookup) -> Iterator[str]:
    """Reasons why a value does not belong to a node."""
    if not isinstance(node, dict):
        if find_picks(node, value, path, lookup) is None:
            yield f"`{path}` is {value!r}, and the space has {node!s}"
    elif not isinstance(value, Mapping):
        yield f"`{path}` is {value!r}, and the space has a dict of {_names(node)}"
    else:
        yield from (f"`{_join(path, name)}` is missing" for name in node if name not in value)
        yield from (f"`{_join(path, name)}` is not in the space" for name in value if name not in node)
        for name, inner in node.items():
            if name in value:
                yield from faults(inner, value[name], _join(path, name), lookup)


def constants(node: dict[str, Any]) -> dict[str, Any]:
    """The constants below a node."""
    return {
        name: constants(value) if isinstance(value, dict) else copy.deepcopy(value)
        for name, value in node.items()
        if not isinstance(value, Domain | Dependent | Expression)
    }


def computed(node: Any, path: str, name: str, pins: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, int], Any]]:
    """All computed values and bounds below a node: name in a flattened configuration, the options of choices under
    which it is there (path of the choice -> position), and the `Expression` or `Dependent`.
    """
    match node:
        case Choice():
            for position, option in enumerate(node.options):
                yield from computed(option, f"{path}[{position}]", name, {**pins, path: position})
        case dict():
            for key, value in node.items():
                yield from computed(value, _join(path, key), _join(name, key), pins)
        case Dependent() | Expression():
            yield name, pins, node


def parameters(node: Any, path: str, *, conditional: bool) -> Iterator[tuple[str, tuple[Domain, bool]]]:
    """Path -> domain, and whether it exists only under some option, of all domains below a node."""
    match node:
        case Domain():
            yield path, (node, conditional)
            for position, option in enumerate(node.options if isinstance(node, Choice) else ()):
                yield from parameters(option, f"{path}[{position}]", conditional=True)
        case Dependent():
            yield path, (UNIT, conditional)
        case dict():
            for name, value in node.items():
                yield from parameters(value, _join(path, name), conditional=conditional)


def count(node: Any, path: str) -> int:
    """Number of values of a node."""
    match node:
        case Choice():
            return sum(count(option, f"{path}[{i}]") for i, option in enumerate(node.options))
        case Domain():
            values = node.count()
            if values is None:
                raise SpaceError(
                    f"`{path}`: {node} has infinitely many values and cannot be tried one by one; name the values with "
                    "grid([...]), use quniform, or choose the algorithm Random"
                )
            return values
        case Dependent():
            raise SpaceError(
                f"`{path}`: {node} has other values in each configuration and cannot be tried one by one; write a "
                "domain with fixed bounds and a condition in `where`, or choose the algorithm Random"
            )
        case dict():
            return math.prod(count(value, _join(path, name)) for name, value in node.items())
        case _:
            return 1


def points(node: Any, path: str) -> Iterator[Any]:
    """All values of a node, in order."""
    match node:
        case Domain():
            for i, point in enumerate(node.points() or ()):
                yield from points(point, f"{path}[{i}]")
        case dict():
            columns = [list(points(value, _join(path, name))) for name, value in node.items()]
            for row in itertools.product(*columns):
                yield dict(zip(node, row, strict=True))
        case Expression():
            yield Pending(node, path)
        case _:
            yield node


def leaves(
    node: Any, path: str = "", name: str = "", choice_name: str = "", pins: Mapping[str, int] | None = None
) -> dict[str, Leaf]:
    """Name in a flattened configuration -> its possible values; `pins` fixes options: path of a choice -> position."""
    pins = pins or {}
    match node:
        case Choice() if path in pins:
            position = pins[path]
            return leaves(node.options[position], f"{path}[{position}]", name, name, pins)
        case Choice():
            options = [leaves(option, f"{path}[{i}]", name, name, pins) for i, option in enumerate(node.options)]
            names = dict.fromkeys(key for option in options for key in option)
            return {key: _merge_leaves(key, [option.get(key) for option in options]) for key in names}
        case Domain() | Dependent():
            return {name: Leaf((node,), optional=False, choice_name=name)}
        case dict():
            parts = [
                leaves(value, _join(path, key), _join(name, key), choice_name, pins) for key, value in node.items()
            ]
            return {key: leaf for part in parts for key, leaf in part.items()}
        case _:
            return {name: Leaf((node,), optional=False, choice_name=choice_name)}


def _merge_leaves(name: str, leaves: list[Leaf | None]) -> Leaf:
    """Merge the leaves of a name over all options of a choice; None stands for an option without the name."""
    there = [leaf for leaf in leaves if leaf is not None]
    choice_names = {leaf.choice_name for leaf in there}
    return Leaf(
        values=tuple(value for leaf in there for value in leaf.values),
        optional=len(there) < len(leaves) or any(leaf.optional for leaf in there),
        choice_name=choice_names.pop() if len(choice_names) == 1 else name,
    )


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
