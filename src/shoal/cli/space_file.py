"""Files of search spaces: TOML with ranges and lists, and YAML of a W&B sweep."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.core.distributions import LogRange, QLogUniform
from shoal.core.domain import Constant, LogRandInt, RandInt
from shoal.core.errors import ShoalError, SpaceError
from shoal.core.foreign_spaces import SweepSettings, is_wandb_sweep
from shoal.core.reference import Expression, make_domain, parse
from shoal.core.space import (
    Space,
    choice,
    is_number,
    lognormal,
    loguniform,
    normal,
    ordinal,
    quniform,
    uniform,
)
from shoal.host.toml_file import TomlLocation

__all__ = ["read_space"]

_RANGE = {"low", "high", "log", "step", "size", "integer"}
_NORMAL = {"mean", "sd", "low", "high"}


def read_space(file: Path) -> tuple[Space, SweepSettings]:
    """Read the search space of a TOML file; or of a YAML file (.yaml, .yml) with a sweep of W&B, and its settings.

    `lr = {low = 1e-4, high = 1e-1, log = true}` is a range of floats, `layers = {low = 1, high = 8}` a range of
    integers with `high`; `step` is the distance of their values, and `size` the number of values of a `logrange`.
    `{mean = 0, sd = 1}` is a `normal` distribution, which may have `low` and `high`, `{median = 1e-3, factor = 3}` a
    `lognormal` one. `width = [64, 128]` is a choice, whose options may be tables with parameters of their own;
    `{choice = [64, 128], weights = [3, 1]}` has weights, and `{ordinal = [...]}` is one of values in an order.
    `{ref = "epochs // 10"}` is computed, as a value or as a bound of a range; `where = ["a * b <= 4096"]` and
    `ordered = [["a", "b"]]` of the file are those of `Space`. Any other table nests parameters, `{value = [1, 2]}` is a
    list as a value, and all else is a constant.

    Raises:
        SpaceError: the file cannot be read, or a value is impossible; names the line.
    """
    if file.suffix.lower() in (".yaml", ".yml"):
        return _read_sweep(file)
    whole = TomlLocation.of(file, SpaceError)
    content = dict(whole.content)
    where, ordered = content.pop("where", []), content.pop("ordered", [])
    conditions = [_reference(each, whole / "where" / i) for i, each in enumerate(_items(where, whole / "where"))]
    parameters = {name: _parameter(value, whole / name) for name, value in content.items()}
    try:
        return Space(parameters, where=conditions, ordered=_items(ordered, whole / "ordered")), SweepSettings()
    except SpaceError as error:
        raise SpaceError(f"{file}: {error}") from error


def _read_sweep(file: Path) -> tuple[Space, SweepSettings]:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise SpaceError(f"{file} needs PyYAML. Install it with: pip install pyyaml") from error
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SpaceError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, Mapping) or not is_wandb_sweep(content):
        raise SpaceError(
            f"{file} is no sweep of W&B, which has `method` and `parameters`; write a space of Shoal's as a TOML file"
        )
    try:
        return Space(content), SweepSettings.of(content)
    except SpaceError as error:
        raise SpaceError(f"{file}: {error}") from error


def _items(value: Any, location: TomlLocation) -> list[Any]:
    if not isinstance(value, list):
        raise _error(location, f"must be a list, got {value!r}")
    return value


def _parameter(value: Any, location: TomlLocation) -> Any:
    if isinstance(value, list):
        return choice(_options(value, location))
    if not isinstance(value, dict):
        return value
    keys = value.keys()
    if keys == {"value"}:
        return Constant(value["value"])
    if keys == {"ref"}:
        return _reference(value["ref"], location)
    if keys == {"ordinal"}:
        return ordinal(_items(value["ordinal"], location / "ordinal"))
    if keys == {"choice", "weights"}:
        weights = _items(value["weights"], location / "weights")
        return choice(_options(_items(value["choice"], location), location / "choice"), weights=weights)
    if keys >= {"mean", "sd"} and keys <= _NORMAL:
        return normal(*(_number(value, name, location) for name in ("mean", "sd", "low", "high")))
    if keys == {"median", "factor"}:
        return lognormal(*(_number(value, name, location) for name in ("median", "factor")))
    if not keys & {"low", "high"}:
        return {name: _parameter(inner, location / name) for name, inner in value.items()}
    return _range(value, location)


def _options(items: list[Any], location: TomlLocation) -> list[Any]:
    if any(isinstance(option, list) for option in items):
        raise _error(
            location,
            "a list is a choice of its items, and an item that is a list itself could be a value or a choice; "
            f"write {{value = [...]}} for a list that is a value, got {items!r}",
        )
    return [_parameter(option, location / i) for i, option in enumerate(items)]


def _reference(value: Any, location: TomlLocation) -> Expression:
    """An expression as text, or as nested lists."""
    if not isinstance(value, str):
        return Expression(value)
    try:
        return parse(value)
    except SpaceError as error:
        raise _error(location, str(error)) from error


def _number(table: Mapping[str, Any], name: str, location: TomlLocation) -> Any:
    """A number, or a reference; None if it is missing."""
    value = table.get(name)
    return _reference(value["ref"], location / name) if isinstance(value, dict) and value.keys() == {"ref"} else value


def _range(value: Mapping[str, Any], location: TomlLocation) -> Any:
    if unknown_keys := value.keys() - _RANGE:
        raise _error(location, f"a range has {', '.join(sorted(_RANGE))}, got {sorted(unknown_keys)[0]!r}")
    low, high, step = (_number(value, name, location) for name in ("low", "high", "step"))
    for bound in (low, high):
        if not (is_number(bound) or isinstance(bound, Expression)):
            raise _error(location, f"a range has a number for `low` and for `high`, got {dict(value)!r}")
    for name in ("log", "integer"):
        if not isinstance(value.get(name, False), bool):
            raise _error(location, f"`{name}` must be true or false, got {value[name]!r}")
    log = value.get("log", False)
    integers = value.get("integer", isinstance(low, int) and isinstance(high, int))
    if "size" in value:
        return _log_range(value, location, low, high)
    if step is not None:
        if not (is_number(step) or isinstance(step, Expression)):
            raise _error(location, f"`step` must be a number, got {dict(value)!r}")
        if log:
            return make_domain(QLogUniform, low, high, step, bool(integers and isinstance(step, int)))
        if integers and isinstance(step, int) and step > 0:
            return _stepped(low, high, step)
        return quniform(low, high, step)
    if integers:
        return make_domain(LogRandInt if log else RandInt, low, high + 1)
    return loguniform(low, high) if log else uniform(low, high)


def _stepped(low: Any, high: Any, step: int) -> Any:
    """Integers with a step: a choice, which orders them for no one, unless a bound is computed."""
    if isinstance(low, Expression) or isinstance(high, Expression):
        return make_domain(RandInt, low, high + 1, step)
    return choice(list(range(low, high + 1, step)))


def _log_range(value: Mapping[str, Any], location: TomlLocation, low: Any, high: Any) -> Any:
    if unfit := value.keys() & {"log", "step"}:
        raise _error(location, f"`size` is the number of values on a logarithmic scale, without `{sorted(unfit)[0]}`")
    return make_domain(LogRange, low, high, value["size"], value.get("integer", False))


def _error(location: TomlLocation, fault: str) -> ShoalError:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location.path).removeprefix(".")
    return location.error(f"`{name}`: {fault}")
