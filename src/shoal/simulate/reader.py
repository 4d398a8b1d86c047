"""Reads a TOML scenario file into dataclasses, with checks of keys, types and bounds."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from shoal.core.errors import ScenarioError, ShoalError
from shoal.core.names import nearest_name_hint
from shoal.host.toml_file import TomlLocation, unknown_name_text
from shoal.plan.schedule.registry import BASELINES, baseline_text

__all__ = ["Bounds", "Table", "read_toml", "reading"]


class Bounds(NamedTuple):
    """Bounds of a number, `Annotated[float, Bounds(0)]`; above 10^12 sums are no longer exact."""

    minimum: float
    maximum: float = 1e12

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.minimum <= value <= self.maximum


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a file. The other fields of a subclass are its keys, and their types are the valid values.

    Types are str, bool, int, float (or an integer), `Annotated` with `Bounds` or with the valid strings, tuples of
    these (non-empty lists, or one value), mappings from any keys, Tables, and unions.
    """

    place: TomlLocation = field(repr=False, compare=False)

    def error(self, key: str, fault: str) -> ShoalError:
        """Return the error of the value of a key."""
        return (self.place / key).error(fault)


_T = TypeVar("_T", bound=Table)


def read_toml(path: Path, kind: type[_T]) -> _T:
    """Read a file as a Table; if it `extends` another file, keys that it lacks come from the other."""
    place = TomlLocation.of(path, ScenarioError)
    if (name := place.content.get("extends")) is not None:
        at = place / "extends"
        other_path = path.parent / _read(str, name, at)
        try:
            other = TomlLocation.of(other_path, ScenarioError)
        except ScenarioError as error:
            raise at.error(str(error)) from error
        if "extends" in other.content:
            raise at.error(f"{other_path} extends a file itself; extend one that stands by itself")
        place = place.with_fallback(other)
    return _table(kind, place.content, place)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors from reading a table of measurements within into a `ScenarioError`."""
    if not path.is_file():
        needs = "is not there, and this scenario needs it; name the folder of the tables with --data DIR"
        raise ScenarioError(f"{path} {needs}")
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ScenarioError(f"{path} is not the table that it should be: {type(error).__name__}: {error}") from error


def _table(kind: type[_T], content: Mapping[str, Any], place: TomlLocation) -> _T:
    keys = {each.name: each for each in fields(kind) if each.name != "place"}
    types = get_type_hints(kind, include_extras=True)
    for key in content:
        if key not in keys:
            raise (place / key).error(f"in {place.name} {unknown_name_text('key', key, keys)}")
    for key, each in keys.items():
        if key not in content and each.default is each.default_factory is MISSING:
            raise place.error(f"`{key}` is missing in {place.name}")
    return kind(place=place, **{key: _read(types[key], value, place / key) for key, value in content.items()})


def _read(kind: Any, value: Any, place: TomlLocation) -> Any:
    union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    options = [option for option in union if option is not NoneType]
    for option in options:
        base, bounds = get_args(option) if get_origin(option) is Annotated else (option, None)
        shape = get_origin(base) or base
        if issubclass(shape, Table) and isinstance(value, dict):
            return _table(shape, value, place)
        if shape is Mapping and isinstance(value, dict):
            return {key: _read(get_args(base)[1], each, place / key) for key, each in value.items()}
        if shape is tuple and value != []:
            items = value if isinstance(value, list) else [value]
            return tuple(_read(get_args(base)[0], each, place / index) for index, each in enumerate(items))
        type_matches = type(value) is shape or (shape is float and type(value) is int)
        if type_matches and (value in bounds if bounds else shape is not str or value.isprintable()):
            return shape(value)
    names = [name for option in options for name in _valid_strings(option)]
    expected = " or ".join(_describe_type(option) for option in options)
    hint = f"; {baseline_text(value)}" if names and value in BASELINES else nearest_name_hint(value, names)
    raise place.error(f"{place.name} must be {expected}, got {short(value)}{hint}")


def _valid_strings(option: Any) -> Collection[str]:
    return get_args(option)[1] if get_origin(option) is Annotated and get_args(option)[0] is str else ()


def _describe_type(option: Any) -> str:
    if names := _valid_strings(option):
        return " or ".join(map(repr, names))
    if get_origin(option) is Annotated:
        kind, bounds = get_args(option)
        return f"{_describe_type(kind)} from {bounds.minimum:,.13g} to {bounds.maximum:,.13g}"
    if get_origin(option) is tuple:
        return f"{_describe_type(get_args(option)[0])} or a list of such"
    return _TYPE_NAMES.get(option, "a table")


_TYPE_NAMES = {float: "a number", int: "an integer", str: "a string without control characters", bool: "true or false"}
