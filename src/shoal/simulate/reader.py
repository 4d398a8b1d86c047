"""Reads a TOML file key by key, so that every mistake can be told with its line and the nearest valid key."""

import re
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from shoal.core.errors import ScenarioError

__all__ = ["MOST", "Table", "read_toml"]

MOST = 1e12
"""Beyond it, a number is a mistake, and sums of such numbers are no longer exact."""

_HEADER = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")


_File = tuple[Path, str]
"""A file and its text."""


class Table:
    """A table of the file. Keys are taken out of it; what is left at the end nobody knows.

    Args:
        content: what TOML made of it.
        where: how the file calls it: "[[studies]] 2"; empty for the top of the file.
        path: keys and positions that lead to it.
        file: the file and its text.
        inherited: key -> the file and text that it comes from, of those that come from another.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        where: str,
        path: tuple[str | int, ...],
        file: _File,
        inherited: Mapping[str, _File] = MappingProxyType({}),
    ) -> None:
        self._content = content
        self._where = where
        self._path = path
        self._file = file
        self._inherited = inherited
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def take(self, key: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        """The value of a key; an integer will do for a float.

        Raises:
            ScenarioError: it is not there and has no default, or is of another type.
        """
        self._known.append(key)
        if key not in self._content:
            if default is ...:
                unknown = get_close_matches(key, self._content.keys() - set(self._known), n=1)
                hint = f"; is {unknown[0]!r} meant for it?" if unknown else ""
                self.fail(unknown[0] if unknown else key, f"{self._place()}`{key}` is missing{hint}")
            return default
        value = self._content[key]
        if isinstance(value, int | float) and not abs(value) <= MOST:
            self.fail(key, f"`{key}` must be between -{MOST:g} and {MOST:g}, got {value!r}")
        if isinstance(value, str) and not (value.isprintable() or key == "description"):
            self.fail(key, f"`{key}` must be printable, got {value!r}")
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(_NAMES[kind] for kind in kinds)
            self.fail(key, f"`{key}` must be {names}, got {value!r}")
        return value

    def number(self, key: str, default: Any = ..., *, least: float = 0.0, above: bool = False) -> float:
        """A finite number of at least `least`, or above it."""
        value = self.take(key, (float,), default)
        if value is not default and not ((value > least if above else value >= least) and value < float("inf")):
            self.fail(key, f"`{key}` must be finite and {'above' if above else 'at least'} {least:g}, got {value!r}")
        return float(value)

    def whole(self, key: str, default: Any = ..., *, least: int = 0, most: float = MOST) -> int:
        """An integer from `least` to `most`."""
        value = self.take(key, (int,), default)
        if value is not default and not least <= value <= most:
            bounds = f"at least {least}" if value < least else f"at most {most:,}"
            self.fail(key, f"`{key}` must be {bounds}, got {value!r}")
        return int(value)

    def one_of(self, key: str, names: Collection[str], default: Any) -> str:
        """One of several names."""
        value: str = self.take(key, (str,), default)
        if value not in names:
            self.fail(key, f"`{key}` is {value!r}{_hint(value, names)}; it must be one of {', '.join(names)}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings, or one string; empty if it is not there."""
        value = self.take(key, (list, str), [])
        items = [value] if isinstance(value, str) else value
        if not all(isinstance(item, str) for item in items):
            self.fail(key, f"`{key}` must be a list of strings, got {value!r}")
        return tuple(items)

    def table(self, key: str) -> "Table | None":
        """A table within this one; None if it is not there."""
        value = self.take(key, (dict,), None)
        return None if value is None else Table(value, f"`{key}`", (*self._path, key), self._file_of(key))

    def tables(self, key: str) -> list["Table"]:
        """A list of tables, [[key]]; empty if it is not there."""
        values = self.take(key, (list,), [])
        if not all(isinstance(value, dict) for value in values):
            self.fail(key, f"`{key}` must be tables, each under [[{key}]], got {values!r}")
        return [
            Table(value, f"[[{key}]] {index + 1}", (*self._path, key, index), self._file_of(key))
            for index, value in enumerate(values)
        ]

    def rest(self) -> dict[str, Any]:
        """What was not taken; all of it is known from now on."""
        left = {key: value for key, value in self._content.items() if key not in self._known}
        self._known.extend(left)
        return left

    def done(self) -> None:
        """Everything was looked at.

        Raises:
            ScenarioError: a key is left; the error names its line and the nearest valid key.
        """
        for key in self._content:
            if key not in self._known:
                known = ", ".join(self._known)
                self.fail(key, f"{self._place()}there is no key {key!r}{_hint(key, self._known)}; valid are {known}")

    def fail(self, key: str, fault: str) -> NoReturn:
        """Raise an error about the value of a key."""
        path, text = self._file_of(key)
        raise ScenarioError(f"{path}:{_line(text, (*self._path, key))}: {fault}")

    def _file_of(self, key: str) -> _File:
        return self._inherited.get(key, self._file)

    def _place(self) -> str:
        return f"in {self._where}, " if self._where else ""


_NAMES = {
    float: "a number", int: "an integer", str: "a string", bool: "true or false", list: "a list", dict: "a table"
}  # fmt: skip


def read_toml(path: Path) -> Table:
    """The top of a file; of one that `extends` another, with those keys of the other that it has not itself.

    Raises:
        ScenarioError: it cannot be read, is not TOML, or extends a file that extends another.
    """
    content, text = _parsed(path)
    own = Table(content, "", (), (path, text))
    name = own.take("extends", (str,), None)
    if name is None:
        return own
    other = path.parent / name
    try:
        theirs, their_text = _parsed(other)
    except ScenarioError as error:
        own.fail("extends", str(error))
    if "extends" in theirs:
        own.fail("extends", f"{other} extends a file itself; extend one that stands by itself")
    inherited = dict.fromkeys(theirs.keys() - content.keys(), (other, their_text))
    whole = Table({**theirs, **content}, "", (), (path, text), inherited)
    whole.take("extends", (str,))
    return whole


def _parsed(path: Path) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        raise ScenarioError(f"{path} cannot be read: there is no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text)
        if _has_huge(content):
            raise ScenarioError(f"{path} cannot be read: it has an integer of more than 64 bits")
        return content, text
    except (OSError, ValueError, RecursionError) as error:  # no text, no TOML, or nested too deep
        raise ScenarioError(f"{path} cannot be read: {error}") from error


def _has_huge(value: Any) -> bool:
    """Whether there is an integer of which not even a message can be made."""
    if isinstance(value, dict | list):
        return any(map(_has_huge, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value.bit_length() > 64


def _hint(name: str, names: Collection[str]) -> str:
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _line(text: str, path: tuple[str | int, ...]) -> int:
    """The line that a key stands on; that of its table, if it stands on none."""
    *tables, key = path
    lines = text.splitlines()
    headers = _headers(lines)
    begin, end, depth = 0, headers[0][0] if headers else len(lines), 0
    for depth in range(len(tables), 0, -1):
        found = next((i for i, (_, place) in enumerate(headers) if place == tuple(tables[:depth])), None)
        if found is not None:
            begin = headers[found][0]
            end = headers[found + 1][0] if found + 1 < len(headers) else len(lines)
            break
    else:
        depth = 0
    for part in (*tables[depth:], key):  # inline tables, and the key itself
        pattern = re.compile(rf"(?:^|[{{,\s])[\"']?{re.escape(str(part))}[\"']?\s*=")
        begin = next((number for number in range(begin, end) if pattern.search(lines[number])), begin)
    return begin + 1


def _headers(lines: list[str]) -> list[tuple[int, tuple[str | int, ...]]]:
    """Every [table] and [[table]] with its line, and the path that leads to it."""
    found: list[tuple[int, tuple[str | int, ...]]] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(lines):
        if not (match := _HEADER.match(line)):
            continue
        name = match[1]
        parts: list[str | int] = []
        if line.lstrip().startswith("[["):
            counts[name] = counts.get(name, -1) + 1
        for part in name.split("."):
            parts.append(part.strip(" \"'"))
            joined = ".".join(str(each) for each in parts if isinstance(each, str))
            if joined in counts:
                parts.append(counts[joined])
        found.append((number, tuple(parts)))
    return found
