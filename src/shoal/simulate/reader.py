"""Reads a TOML file into dataclasses, so that a mistake is told with its line and what would be valid."""

import tomllib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from shoal.core.errors import ScenarioError

__all__ = ["Limits", "Place", "Table", "read_toml", "reading", "unknown"]


class Limits(NamedTuple):
    """Of a number, `Annotated[float, Limits(0)]`; beyond 10^12 it is a mistake, and sums are no longer exact."""

    least: float
    most: float = 1e12

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.least <= value <= self.most


class _File(NamedTuple):
    path: Path
    text: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a value stands.

    Args:
        files: the file, and the one that it extends if there is one.
        path: keys and positions that lead to it.
    """

    files: tuple[_File, ...]
    path: tuple[str | int, ...] = ()

    def __truediv__(self, part: str | int) -> "Place":
        """What stands there under a key or at a position."""
        return Place(self.files, (*self.path, part))

    @property
    def name(self) -> str:
        """The last key that leads to it."""
        return next((f"`{part}`" for part in reversed(self.path) if isinstance(part, str)), "the file")

    def error(self, fault: str) -> ScenarioError:
        """That something is wrong there, with file and line."""
        file = next((each for each in self.files if self.path[:1] and self.path[0] in each.content), self.files[0])
        return ScenarioError(f"{file.path}:{_line(file, self.path)}: {fault}")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a file. The other fields of a subclass are its keys, their types what is valid.

    Types are str, bool, int, float (an integer will do), `Annotated` with `Limits` or with the names that a string may
    be, tuples of such (lists that are not empty; one value will do), mappings from any keys, Tables, and unions.
    """

    place: Place = field(repr=False, compare=False)

    def error(self, key: str, fault: str) -> ScenarioError:
        """That something is wrong with the value of a key."""
        return (self.place / key).error(fault)


_T = TypeVar("_T", bound=Table)


def read_toml(path: Path, kind: type[_T]) -> _T:
    """A file as a Table; where it `extends` another, with those keys of the other that it has not itself.

    Raises:
        ScenarioError: it cannot be read, says something that is not valid, or extends a file that extends another.
    """
    place = Place((_parsed(path),))
    content = place.files[0].content
    if "extends" in content:
        at = place / "extends"
        name = _read(str, content["extends"], at)
        try:
            other = _parsed(path.parent / name)
        except ScenarioError as error:
            raise at.error(str(error)) from error
        if "extends" in other.content:
            raise at.error(f"{other.path} extends a file itself; extend one that stands by itself")
        place, content = Place((*place.files, other)), {**other.content, **content}
    return _table(kind, content, place)


def unknown(what: str, name: object, names: Collection[str]) -> str:
    """That there is no such thing of a name, which one may have been meant, and which there are."""
    return f"there is no {what} {name!r}{_hint(name, names)}; there are {', '.join(names)}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within, a table of measurements is read, and what is wrong with it is told as that.

    Raises:
        ScenarioError: it is not there, or is not what it should be.
    """
    if not path.is_file():
        needs = "is not there, and this scenario needs it; name the folder of the tables with --data DIR"
        raise ScenarioError(f"{path} {needs}")
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ScenarioError(f"{path} is not the table that it should be: {type(error).__name__}: {error}") from error


def _parsed(path: Path) -> _File:
    if not path.is_file():
        raise ScenarioError(f"{path} cannot be read: there is no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text)
        repr(content)  # of an integer of thousands of digits not even a message can be made
    except (OSError, ValueError, RecursionError) as error:  # no text, no TOML, or nested too deep
        raise ScenarioError(f"{path} cannot be read: {error}") from error
    return _File(path, text, content)


def _table(kind: type[_T], content: Mapping[str, Any], place: Place) -> _T:
    keys = {each.name: each for each in fields(kind) if each.name != "place"}
    types = get_type_hints(kind, include_extras=True)
    for key in content:
        if key not in keys:
            raise (place / key).error(f"in {place.name} {unknown('key', key, keys)}")
    for key, each in keys.items():
        if key not in content and each.default is each.default_factory is MISSING:
            raise place.error(f"`{key}` is missing in {place.name}")
    return kind(place=place, **{key: _read(types[key], value, place / key) for key, value in content.items()})


def _read(kind: Any, value: Any, place: Place) -> Any:
    """A value as what it should be, a type or a union of some."""
    union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    options = [option for option in union if option is not NoneType]
    for option in options:
        base, limits = get_args(option) if get_origin(option) is Annotated else (option, None)
        shape = get_origin(base) or base
        if issubclass(shape, Table) and isinstance(value, dict):
            return _table(shape, value, place)
        if shape is Mapping and isinstance(value, dict):
            return {key: _read(get_args(base)[1], each, place / key) for key, each in value.items()}
        if shape is tuple and value != []:
            items = value if isinstance(value, list) else [value]
            return tuple(_read(get_args(base)[0], each, place / index) for index, each in enumerate(items))
        right = type(value) is shape or (shape is float and type(value) is int)
        if right and (value in limits if limits else shape is not str or value.isprintable()):
            return shape(value)
    names = [name for option in options for name in _names(option)]
    words = " or ".join(_words(option) for option in options)
    raise place.error(f"{place.name} must be {words}, got {short(value)}{_hint(value, names)}")


def _names(option: Any) -> Collection[str]:
    """Those that a string may be."""
    return get_args(option)[1] if get_origin(option) is Annotated and get_args(option)[0] is str else ()


def _words(option: Any) -> str:
    if names := _names(option):
        return " or ".join(map(repr, names))
    if get_origin(option) is Annotated:
        kind, limits = get_args(option)
        return f"{_words(kind)} from {limits.least:,.13g} to {limits.most:,.13g}"
    if get_origin(option) is tuple:
        return f"{_words(get_args(option)[0])} or a list of such"
    return _WORDS.get(option, "a table")


_WORDS = {float: "a number", int: "an integer", str: "a string without control characters", bool: "true or false"}


def _line(file: _File, path: Sequence[str | int]) -> int:
    """Where the statement begins that gives a value, or else the table that it is in."""
    lines = file.text.split("\n")

    def is_there(end: int) -> bool:
        """Whether it is in so many lines, and those that their last statement goes on for."""
        while True:
            with suppress(tomllib.TOMLDecodeError):
                found: Any = tomllib.loads("\n".join(lines[:end]))
                break
            end += 1
        with suppress(LookupError, TypeError):  # where one value does for a list, it has no positions
            for part in path:
                found = found[part]
            return True
        return False

    while path and not is_there(len(lines)):
        path = path[:-1]
    return max(1, bisect_left(range(len(lines)), True, key=is_there))


def _hint(name: object, names: Collection[str]) -> str:
    close = get_close_matches(str(name), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
