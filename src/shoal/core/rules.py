"""Rules between the parameters of a space: conditions, groups in an order, and references without circles."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shoal.core import space_tree as tree
from shoal.core.domain import Choice, Domain
from shoal.core.errors import SpaceError
from shoal.core.reference import Expression, check_expression, evaluate, refers_to
from shoal.core.space_json import encode

__all__ = ["Rules", "check_references"]

_CONDITIONS = ("<", "<=", ">", ">=", "==", "!=", "&", "|", "~")


@dataclass(frozen=True, eq=False)
class Rules:
    """What all configurations of a space meet.

    Args:
        where: Conditions.
        ordered: Groups of names whose values ascend.
        domains: The domain of each group.
    """

    where: tuple[Expression, ...]
    ordered: tuple[tuple[str, ...], ...]
    domains: tuple[Domain, ...]

    @staticmethod
    def of(where: Any, ordered: Any, root: Any) -> "Rules":
        """The rules of a checked space, as a user gives them.

        Raises:
            SpaceError: a condition is none, or a name is not a parameter that can be compared.
        """
        if isinstance(ordered, str) or not isinstance(ordered, Sequence) or any(isinstance(x, str) for x in ordered):
            raise SpaceError(f"`ordered` must be a list of groups of names, such as [('low', 'high')], got {ordered!r}")
        conditions = _checked_conditions(where, tree.leaves(root))
        domains = dict(tree.parameters(root, "", conditional=False)) if ordered else {}
        groups = tuple(_checked_group(group, domains) for group in ordered)
        return Rules(conditions, tuple(map(tuple, ordered)), groups)

    def sorted(self, picked: dict[str, Any]) -> dict[str, Any]:
        """Picks with the values of each group sorted."""
        for group, domain in zip(self.ordered, self.domains, strict=True):
            values = sorted((picked[name] for name in group), key=domain.optuna_value)
            picked = picked | dict(zip(group, values, strict=True))
        return picked

    def broken(self, row: dict[str, Any]) -> str | None:
        """The text of the first rule that a flattened configuration does not meet; None if it meets all."""
        for group, domain in zip(self.ordered, self.domains, strict=True):
            places = [domain.optuna_value(row[name]) for name in group]
            if places != sorted(places):
                return " <= ".join(group)
        lookup = tree.lookup_in(row)
        return next((str(each) for each in self.where if not evaluate(each, lookup, "where")), None)

    def explained(self, rule: str, row: Mapping[str, Any]) -> str:
        """A rule in words, with the values to which it does not apply."""
        names = {" <= ".join(group): group for group in self.ordered} | {str(x): refers_to(x) for x in self.where}
        return f"`{rule}` does not hold for {', '.join(f'{name} = {row[name]!r}' for name in names[rule])}"


def check_references(leaves: Mapping[str, tree.Leaf], name: str, node: Any) -> None:
    """Refuse a value that depends on what some of its configurations lack, or on itself."""
    done: set[str] = set()

    def follow(trail: tuple[str, ...], part: Any) -> None:
        for other in refers_to(part):
            _check_name(leaves, other, trail[-1])
            if other in trail:
                circle = " -> ".join((*trail[trail.index(other) :], other))
                raise SpaceError(f"`{other}` depends on itself: {circle}")
            if other not in done:
                for value in leaves[other].values:
                    follow((*trail, other), value)
                done.add(other)

    follow((name,), node)


def _check_name(leaves: Mapping[str, tree.Leaf], name: str, path: str) -> None:
    if name not in leaves:
        near = get_close_matches(name, leaves, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(leaves) or 'none'}"
        raise SpaceError(f"`{path}` refers to {name!r}, which is no parameter; {hint}")
    if leaves[name].optional:
        raise SpaceError(f"`{path}` refers to {name!r}, which only some configurations have")


def _checked_conditions(where: Any, leaves: Mapping[str, tree.Leaf]) -> tuple[Expression, ...]:
    if isinstance(where, Expression) or not isinstance(where, Sequence):
        raise SpaceError(f"`where` must be a list of conditions, got {where!r}; write where=[...]")
    for condition in where:
        if not isinstance(condition, Expression):
            raise SpaceError(f"a condition of `where` compares refs, as in ref('a') <= ref('b'), got {condition!r}")
        check_expression(condition, "where")
        if not isinstance(condition.data, list) or condition.data[0] not in _CONDITIONS:
            raise SpaceError(f"a condition of `where` is true or false, as ref('a') <= 8 is, got {condition}")
        for name in refers_to(condition):
            _check_name(leaves, name, f"where: {condition}")
    return tuple(where)


def _checked_group(group: Any, domains: Mapping[str, tuple[Domain, bool]]) -> Domain:
    """The domain of all parameters of a group."""
    for name in group:
        domain, conditional = domains.get(name, (None, False))
        if domain is None or conditional or isinstance(domain, Choice):
            raise SpaceError(
                f"`ordered` takes parameters with numbers or an order, which all configurations have; got {name!r} of "
                f"{tuple(group)!r}"
            )
    kinds = {json.dumps(encode(domains[name][0])) for name in group}
    if len(group) < 2 or len(set(group)) < len(group) or len(kinds) > 1:
        raise SpaceError(
            f"`ordered` takes two or more parameters with the same domain, got {tuple(group)!r}; for others write a "
            "condition in `where`, such as ref('low') <= ref('high')"
        )
    return domains[group[0]][0]
