"""A search space in a TOML file."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.domain import LogRandInt
from shoal.core.errors import SpaceError
from shoal.core.space import Constant, Space, choice, is_number, loguniform, quniform, randint, uniform

__all__ = ["read_space"]

_RANGE = {"low", "high", "log", "step"}


def read_space(file: Path) -> Space:
    """The space that a file describes.

    `lr = {low = 1e-4, high = 1e-1, log = true}` is a range of floats, `layers = {low = 1, high = 8}` one of integers,
    `high` included; `step` leaves out what is between. `width = [64, 128]` is a choice, whose options may be tables
    with parameters of their own. Any other table nests parameters, `{value = [1, 2]}` is a list that is not chosen
    from, and all else is a constant.

    Raises:
        SpaceError: the file is no TOML, or no space; names the file, the key and the value.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # a byte order mark, which some editors write
        return Space({name: _parameter(value, name) for name, value in content.items()})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpaceError(f"{file}: {error}") from error
    except SpaceError as error:
        raise SpaceError(f"{file}: {error}") from error


def _parameter(value: Any, path: str) -> Any:
    if isinstance(value, list):
        if any(isinstance(option, list) for option in value):
            raise SpaceError(
                f"`{path}`: a list is a choice of its items, and an item that is a list itself could be a value or a "
                f"choice; write {{value = [...]}} for a list that is a value, got {value!r}"
            )
        return choice([_parameter(option, f"{path}[{i}]") for i, option in enumerate(value)])
    if not isinstance(value, dict):
        return value
    if value.keys() == {"value"}:
        return Constant(value["value"])
    if not value.keys() & {"low", "high"}:
        return {name: _parameter(inner, f"{path}.{name}") for name, inner in value.items()}
    return _range(value, path)


def _range(value: Mapping[str, Any], path: str) -> Any:
    if odd := value.keys() - _RANGE:
        raise SpaceError(f"`{path}`: a range has {', '.join(sorted(_RANGE))}, got {sorted(odd)[0]!r}")
    for name in ("low", "high"):
        if not is_number(value.get(name)):
            raise SpaceError(f"`{path}`: a range has a number for `low` and for `high`, got {dict(value)!r}")
    low, high, log, step = value["low"], value["high"], value.get("log", False), value.get("step")
    if not isinstance(log, bool):
        raise SpaceError(f"`{path}`: `log` must be true or false, got {log!r}")
    if step is not None and (log or not is_number(step)):
        raise SpaceError(f"`{path}`: `step` must be a number, and goes without `log`, got {dict(value)!r}")
    whole = isinstance(low, int) and isinstance(high, int)
    if step is not None:
        return choice(list(range(low, high + 1, step))) if whole and _is_step(step) else quniform(low, high, step)
    if whole:
        return LogRandInt(low, high + 1) if log else randint(low, high + 1)
    return loguniform(low, high) if log else uniform(low, high)


def _is_step(step: object) -> bool:
    return isinstance(step, int) and step > 0
