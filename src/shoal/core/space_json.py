"""Nodes of a space as JSON values."""

from dataclasses import fields
from typing import Any

from shoal.core.distributions import DOMAINS
from shoal.core.domain import Choice, Constant, Domain
from shoal.core.errors import SpaceError
from shoal.core.reference import Dependent, Expression, make_domain

__all__ = ["decode", "encode"]


def encode(node: Any) -> dict[str, Any]:
    """A node as JSON values."""
    match node:
        case Choice(weights=()):
            return {node.name: [encode(option) for option in node.options]}
        case Choice():
            return {"weighted": [[encode(option) for option in node.options], list(node.weights)]}
        case Domain():
            return {node.name: [getattr(node, field.name) for field in fields(node)]}
        case Dependent():
            return {node.kind.name: [encode(each) if isinstance(each, Expression) else each for each in node.arguments]}
        case Expression():
            return {"expression": node.data}
        case dict():
            return {"dict": {name: encode(value) for name, value in node.items()}}
        case _:
            return {"value": node}


def decode(node: dict[str, Any]) -> Any:
    """A node of JSON values, not yet checked."""
    ((kind, content),) = node.items()
    match kind:
        case "value":
            return Constant(content)
        case "dict":
            return {name: decode(value) for name, value in content.items()}
        case "choice":
            return Choice(tuple(decode(option) for option in content))
        case "weighted":
            return Choice(tuple(decode(option) for option in content[0]), tuple(content[1]))
        case "expression":
            return Expression(content)
        case _ if kind in DOMAINS:
            return make_domain(DOMAINS[kind], *map(_decoded_argument, content))
    raise SpaceError(f"this version has no domain {kind!r}; it has {', '.join(DOMAINS)}")


def _decoded_argument(argument: Any) -> Any:
    if isinstance(argument, dict):
        return decode(argument)
    return tuple(argument) if isinstance(argument, list) else argument
