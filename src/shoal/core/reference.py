"""Arithmetic with parameters as data: `ref`, its expressions, their interpreter, and domains with such bounds.

An expression is kept as nested lists, as in `["//", ["ref", "epochs"], 10]`, so that a journal can hold it and reading
a journal runs no code.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

from shoal.core.domain import Domain, Uniform
from shoal.core.errors import SpaceError

__all__ = [
    "UNIT",
    "Dependent",
    "Expression",
    "UncomputableError",
    "check_expression",
    "evaluate",
    "make_domain",
    "parse",
    "ref",
    "references",
    "refers_to",
]

_MOST_DEPTH = 32
"""Most operations within each other."""

_MOST_NODES = 1000
"""Most references, constants and operations of one expression."""

_MOST_DIGITS = 308
"""Most digits that `round` keeps; no float has more places."""

_MOST_CHARACTERS = 10_000
"""Most characters of an expression that is written as text."""

UNIT = Uniform(0.0, 1.0)
"""The domain that is sampled for a domain with bounds that depend on other parameters: a quantile."""


class UncomputableError(SpaceError):
    """A value of one configuration cannot be computed, or a domain with computed bounds has no values there.

    Args:
        text: What cannot be computed of which values, and the remedy.
        rule: What is computed, without the values.
    """

    def __init__(self, text: str, rule: str) -> None:
        super().__init__(text, rule)
        self.rule = rule

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class _Operation:
    """An operation of the interpreter, with the least and the greatest number of its operands."""

    function: Callable[..., Any]
    least: int = 2
    most: int = 2
    of_numbers: bool = True


def _minus(*operands: Any) -> Any:
    return operator.sub(*operands) if len(operands) == 2 else operator.neg(*operands)


def _rounded(value: Any, digits: Any = None) -> Any:
    if digits is not None and not (isinstance(digits, int) and abs(digits) <= _MOST_DIGITS):
        raise TypeError(f"round takes a whole number of digits, at most {_MOST_DIGITS}, not {digits!r}")
    return round(value, digits)


_OPERATIONS = {
    "+": _Operation(operator.add),
    "-": _Operation(_minus, least=1),
    "*": _Operation(operator.mul),
    "/": _Operation(operator.truediv),
    "//": _Operation(operator.floordiv),
    "%": _Operation(operator.mod),
    "min": _Operation(min, most=_MOST_NODES),
    "max": _Operation(max, most=_MOST_NODES),
    "round": _Operation(_rounded, least=1),
    "<": _Operation(operator.lt),
    "<=": _Operation(operator.le),
    ">": _Operation(operator.gt),
    ">=": _Operation(operator.ge),
    "==": _Operation(operator.eq, of_numbers=False),
    "!=": _Operation(operator.ne, of_numbers=False),
    "&": _Operation(lambda a, b: bool(a) and bool(b), of_numbers=False),
    "|": _Operation(lambda a, b: bool(a) or bool(b), of_numbers=False),
    "~": _Operation(operator.not_, least=1, most=1, of_numbers=False),
}
_LEAST_PRECEDENCE, _OF_ONE_OPERAND = 1, 6
_PRECEDENCE = {"|": 2, "&": 3, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5}
_NAMED = ("min", "max", "round")
_SYNTAX = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.USub: "-",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.And: "&",
    ast.Or: "|",
    ast.Not: "~",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.Invert: "~",
}


def _infix(name: str) -> Callable[["Expression", Any], "Expression"]:
    return lambda left, right: _operation(name, left, right)


def _reflected(name: str) -> Callable[["Expression", Any], "Expression"]:
    return lambda right, left: _operation(name, left, right)


@final
class Expression:
    """Arithmetic with values of a configuration, as `ref` makes it.

    It takes + - * / // % with numbers and other expressions, `round(x)`, `x.min(...)` and `x.max(...)`; compared by
    < <= > >= == != it becomes a condition, and conditions are joined by & | ~.
    """

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    def min(self, *others: Any) -> "Expression":
        """The least of this and other values."""
        return _operation("min", self, *others)

    def max(self, *others: Any) -> "Expression":
        """The greatest of this and other values."""
        return _operation("max", self, *others)

    __add__, __radd__ = _infix("+"), _reflected("+")
    __sub__, __rsub__ = _infix("-"), _reflected("-")
    __mul__, __rmul__ = _infix("*"), _reflected("*")
    __truediv__, __rtruediv__ = _infix("/"), _reflected("/")
    __floordiv__, __rfloordiv__ = _infix("//"), _reflected("//")
    __mod__, __rmod__ = _infix("%"), _reflected("%")
    __and__, __rand__ = _infix("&"), _reflected("&")
    __or__, __ror__ = _infix("|"), _reflected("|")
    __lt__, __le__, __gt__, __ge__ = map(_infix, ("<", "<=", ">", ">="))
    __eq__, __ne__ = _infix("=="), _infix("!=")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> "Expression":
        return _operation("-", self)

    def __round__(self, digits: int | None = None) -> "Expression":
        return _operation("round", self) if digits is None else _operation("round", self, digits)

    def __invert__(self) -> "Expression":
        return _operation("~", self)

    def __bool__(self) -> NoReturn:
        raise SpaceError(
            f"`{self}` has no value before a configuration is drawn; write a.min(b) and a.max(b) for min and max, "
            "(a < b) & (b < c) for a < b < c, & | ~ for and, or, not, and an option of a choice for if"
        )

    def __float__(self) -> NoReturn:
        raise SpaceError(f"`{self}` has no value before a configuration is drawn, so no function can take it")

    __int__ = __index__ = __float__

    def __str__(self) -> str:
        return _text(self.data)

    def __repr__(self) -> str:
        return f"<{self}>"


def ref(name: str) -> Expression:
    """The value of another parameter, for arithmetic that is computed for each configuration.

    Args:
        name: Name of a parameter or constant, with dots where it is nested: `ref("optimizer.lr")`.

    Raises:
        SpaceError: `name` is not a string.
    """
    if not isinstance(name, str):
        raise SpaceError(f"ref takes the name of a parameter, got {name!r}")
    return Expression(["ref", name])


@dataclass(frozen=True, eq=False)
class Dependent:
    """A domain with arguments that are expressions. What is sampled for it is a quantile, in `UNIT`.

    So samplers and PBT see the same range in all trials.
    """

    kind: type[Domain]
    arguments: tuple[Any, ...]

    @property
    def expressions(self) -> list[Expression]:
        """The arguments that are expressions."""
        return [argument for argument in self.arguments if isinstance(argument, Expression)]

    def resolved(self, lookup: Callable[[str], Any], path: str) -> Domain:
        """The domain with its bounds for one configuration.

        Args:
            lookup: Function of a name that returns the value in the configuration.
            path: Path of the parameter, for the error.

        Raises:
            UncomputableError: a bound cannot be computed, or the domain has no values.
        """
        values = [evaluate(each, lookup, path) if isinstance(each, Expression) else each for each in self.arguments]
        domain = self.kind(*values)
        if fault := domain.fault():
            text = f"`{path}`: {fault}, got {domain}, which is {self} there; exclude it by a condition in `where`"
            raise UncomputableError(text, f"`{path}`: {self}")
        return domain

    def __str__(self) -> str:
        return f"{self.kind.name}({', '.join(map(str, self.arguments))})"


def make_domain(kind: type[Domain], *arguments: Any) -> Domain | Dependent:
    """A domain, or a `Dependent` if an argument is an expression."""
    return Dependent(kind, arguments) if any(isinstance(each, Expression) for each in arguments) else kind(*arguments)


def check_expression(expression: Expression, path: str) -> None:
    """Refuse an expression that is no nested list of known operations, is too long or is nested too deeply."""
    nodes = 0

    def check(data: Any, depth: int) -> None:
        nonlocal nodes
        nodes += 1
        if nodes > _MOST_NODES or depth > _MOST_DEPTH:
            raise SpaceError(
                f"`{path}`: an expression has at most {_MOST_NODES} parts, and operations {_MOST_DEPTH} deep"
            )
        if not isinstance(data, list):
            if not (data is None or isinstance(data, bool | int | float | str)):
                raise SpaceError(f"`{path}`: an expression consists of numbers, text and lists, got {data!r}")
            if isinstance(data, float) and not math.isfinite(data):
                raise SpaceError(f"`{path}`: a number of an expression must be finite, got {data!r}")
            return
        if not data or not isinstance(data[0], str):
            raise SpaceError(f"`{path}`: a list of an expression begins with an operation, got {data!r}")
        name, *operands = data
        if name == "ref":
            if len(operands) != 1 or not isinstance(operands[0], str):
                raise SpaceError(f"`{path}`: a reference has the name of one parameter, got {data!r}")
            return
        if name not in _OPERATIONS:
            raise SpaceError(f"`{path}`: there is no operation {name!r}; there are ref, {', '.join(_OPERATIONS)}")
        known = _OPERATIONS[name]
        if not known.least <= len(operands) <= known.most:
            raise SpaceError(f"`{path}`: {name!r} takes {known.least} to {known.most} operands, got {len(operands)}")
        for operand in operands:
            check(operand, depth + 1)

    check(expression.data, 0)


def references(expression: Expression) -> Iterator[str]:
    """Names to which a checked expression refers, in order, each once."""

    def walk(data: Any) -> Iterator[str]:
        if isinstance(data, list):
            name, *operands = data
            if name == "ref":
                yield operands[0]
            else:
                for operand in operands:
                    yield from walk(operand)

    return iter(dict.fromkeys(walk(expression.data)))


def refers_to(node: Any) -> list[str]:
    """Names to which an expression or the arguments of a domain refer; none for anything else."""
    if isinstance(node, Expression):
        return list(references(node))
    return [name for each in node.expressions for name in references(each)] if isinstance(node, Dependent) else []


def evaluate(expression: Expression, lookup: Callable[[str], Any], path: str) -> Any:
    """The value of a checked expression.

    Args:
        lookup: Function of a name that returns the value in the configuration.
        path: Path of the parameter that is computed, for the error.

    Raises:
        UncomputableError: it divides by zero, calculates with what is no number, or its result is not finite.
    """

    def value(data: Any) -> Any:
        if not isinstance(data, list):
            return data
        name, *operands = data
        if name == "ref":
            return lookup(operands[0])
        operation, values = _OPERATIONS[name], [value(operand) for operand in operands]
        if operation.of_numbers and not all(isinstance(each, bool | int | float) for each in values):
            raise TypeError(f"{_text([name, *values])} needs numbers")
        result = operation.function(*values)
        if isinstance(result, float) and not math.isfinite(result):
            raise OverflowError(f"{_text([name, *values])} is {result}")
        return result

    try:
        return value(expression.data)
    except (ArithmeticError, TypeError) as error:
        known = {name: lookup(name) for name in references(expression)}
        values = ", ".join(f"{name} = {value!r}" for name, value in known.items()) or "its constants"
        text = f"`{path}`: {expression} has no value for {values} ({error})"
        if known:
            name = next((name for name, value in known.items() if value == 0), next(iter(known)))
            text += f"; exclude it by a condition, such as where=[shoal.ref({name!r}) != {known[name]!r}]"
        raise UncomputableError(text, f"`{path}`: {expression}") from error


def parse(text: str) -> Expression:
    """The expression that a text such as "a * b // 2" or "min(width, 64) <= 4 * optimizer.lr" means.

    Raises:
        SpaceError: the text is not arithmetic with names and constants.
    """
    try:
        if len(text) > _MOST_CHARACTERS:
            raise SyntaxError(f"it has more than {_MOST_CHARACTERS} characters")
        return Expression(_parsed(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise SpaceError(f"{text!r} is no arithmetic with names of parameters: {why}") from error


def _parsed(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            return ["ref", name]
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value, attr=name):
            return ["ref", f"{_parsed(value)[1]}.{name}"]
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _SYNTAX:
            return [_SYNTAX[type(kind)], _parsed(left), _parsed(right)]
        case ast.UnaryOp(op=kind, operand=operand) if type(kind) in _SYNTAX:
            return [_SYNTAX[type(kind)], _parsed(operand)]
        case ast.BoolOp(op=kind, values=values):
            return _joined(_SYNTAX[type(kind)], [_parsed(value) for value in values])
        case ast.Compare(left=left, ops=kinds, comparators=others) if all(type(kind) in _SYNTAX for kind in kinds):
            places = [_parsed(left), *map(_parsed, others)]
            return _joined("&", [[_SYNTAX[type(kind)], *places[i : i + 2]] for i, kind in enumerate(kinds)])
        case ast.Call(func=ast.Name(id=name), args=operands, keywords=[]) if name in _NAMED:
            return [name, *map(_parsed, operands)]
    raise SyntaxError(f"{ast.unparse(node)!r} is neither a name, a constant nor one of {', '.join(_OPERATIONS)}")


def _joined(name: str, parts: Sequence[Any]) -> Any:
    joined = parts[0]
    for part in parts[1:]:
        joined = [name, joined, part]
    return joined


def _operation(name: str, *operands: Any) -> Expression:
    return Expression([name, *(each.data if isinstance(each, Expression) else _number(each) for each in operands)])


def _number(value: Any) -> Any:
    """A constant of an expression; numbers of other libraries become Python's."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def _text(data: Any, outer: int = 0) -> str:
    """An expression as Python writes it; `outer` is the precedence of the operation around it."""
    if not isinstance(data, list):
        return repr(data)
    name, *operands = data
    if name == "ref":
        return str(operands[0])
    if name in _NAMED:
        return f"{name}({', '.join(map(_text, operands))})"
    precedence = _PRECEDENCE.get(name, _LEAST_PRECEDENCE) if len(operands) > 1 else _OF_ONE_OPERAND
    parts = [_text(operand, precedence) for operand in operands]
    text = f" {name} ".join(parts) if len(parts) > 1 else "".join((name, *parts))
    return f"({text})" if precedence <= outer else text
