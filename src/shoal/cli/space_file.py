"""A search space in a TOML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.domain import LogRandInt
from shoal.core.errors import ShoalError, SpaceError
from shoal.core.space import Constant, Space, choice, is_number, loguniform, quniform, randint, uniform
from shoal.toml_file import TomlLocation

__all__ = ["read_space"]

_RANGE = {"low", "high", "log", "step"}


def read_space(file: Path) -> Space:
    """The space that a file describes.

    `lr = {low = 1e-4, high = 1e-1, log = true}` is a range of floats, `layers = {low = 1, high = 8}` one of integers,
    `high` included; `step` leaves out what is between. `width = [64, 128]` is a choice, whose options may be tables
    with parameters of their own. Any other table nests parameters, `{value = [1, 2]}` is a list that is not chosen
    from, and all else is a constant.

    Raises:
        SpaceError: the file is no TOML, or no space; names the file, the line, the key and the value.
    """
    whole = TomlLocation.of(file, SpaceError)
    parameters = {name: _parameter(value, whole / name) for name, value in whole.content.items()}
    try:
        return Space(parameters)
    except SpaceError as error:
        raise SpaceError(f"{file}: {error}") from error


def _parameter(value: Any, place: TomlLocation) -> Any:
    if isinstance(value, list):
        if any(isinstance(option, list) for option in value):
            raise _error(
                place,
                "a list is a choice of its items, and an item that is a list itself could be a value or a choice; "
                f"write {{value = [...]}} for a list that is a value, got {value!r}",
            )
        return choice([_parameter(option, place / i) for i, option in enumerate(value)])
    if not isinstance(value, dict):
        return value
    if value.keys() == {"value"}:
        return Constant(value["value"])
    if not value.keys() & {"low", "high"}:
        return {name: _parameter(inner, place / name) for name, inner in value.items()}
    return _range(value, place)


def _range(value: Mapping[str, Any], place: TomlLocation) -> Any:
    if odd := value.keys() - _RANGE:
        raise _error(place, f"a range has {', '.join(sorted(_RANGE))}, got {sorted(odd)[0]!r}")
    for name in ("low", "high"):
        if not is_number(value.get(name)):
            raise _error(place, f"a range has a number for `low` and for `high`, got {dict(value)!r}")
    low, high, log, step = value["low"], value["high"], value.get("log", False), value.get("step")
    if not isinstance(log, bool):
        raise _error(place, f"`log` must be true or false, got {log!r}")
    if step is not None and (log or not is_number(step)):
        raise _error(place, f"`step` must be a number, and goes without `log`, got {dict(value)!r}")
    whole = isinstance(low, int) and isinstance(high, int)
    if step is not None:
        return choice(list(range(low, high + 1, step))) if whole and _is_step(step) else quniform(low, high, step)
    if whole:
        return LogRandInt(low, high + 1) if log else randint(low, high + 1)
    return loguniform(low, high) if log else uniform(low, high)


def _error(place: TomlLocation, fault: str) -> ShoalError:
    """That something is wrong with the parameter there."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place.path).removeprefix(".")
    return place.error(f"`{name}`: {fault}")


def _is_step(step: object) -> bool:
    return isinstance(step, int) and step > 0
