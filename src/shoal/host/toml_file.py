"""TOML files of users, with errors that name the line and the valid values."""

import tomllib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import ShoalError
from shoal.core.names import nearest_name_hint

__all__ = ["TomlLocation", "unknown_name_text"]


class _File(NamedTuple):
    path: Path
    text: str
    content: dict[str, Any]


@dataclass(frozen=True)
class TomlLocation:
    """Location of a value in a TOML file.

    Args:
        files: The file, and the file that it extends, if any.
        fault: Class of the errors.
    """

    files: tuple[_File, ...]
    fault: type[ShoalError]
    path: tuple[str | int, ...] = ()

    @staticmethod
    def of(path: Path, fault: type[ShoalError]) -> "TomlLocation":
        """Return the location of a whole file."""
        try:
            text = path.read_text(encoding="utf-8-sig")  # a pipe, too; some editors write a byte order mark
            content = tomllib.loads(text)
            repr(content)  # fails for integers of thousands of digits, which no message could show
        except FileNotFoundError as error:
            raise fault(f"{path} cannot be read: there is no such file") from error
        except OSError as error:
            raise fault(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # not text, not TOML, or nested too deeply
            raise fault(f"{path} cannot be read: {error}") from error
        return TomlLocation((_File(path, text, content),), fault)

    @property
    def content(self) -> Mapping[str, Any]:
        """The contents of the files merged; the first file takes precedence."""
        return {key: value for file in reversed(self.files) for key, value in file.content.items()}

    def with_fallback(self, other: "TomlLocation") -> "TomlLocation":
        """Return the location of a file that extends another."""
        return replace(self, files=(*self.files, *other.files))

    def __truediv__(self, part: str | int) -> "TomlLocation":
        """Return the location of the value under a key or at a position."""
        return replace(self, path=(*self.path, part))

    @property
    def name(self) -> str:
        """The last key of the path."""
        return next((f"`{part}`" for part in reversed(self.path) if isinstance(part, str)), "the file")

    def error(self, fault: str) -> ShoalError:
        """Return an error about this location, with file and line."""
        file = next((each for each in self.files if self.path[:1] and self.path[0] in each.content), self.files[0])
        return self.fault(f"{file.path}:{_line_number(file, self.path)}: {fault}")


def unknown_name_text(what: str, name: object, names: Collection[str]) -> str:
    """Return a message for an unknown name, with the closest name and all valid names."""
    return f"there is no {what} {name!r}{nearest_name_hint(name, names)}; there are {', '.join(names)}"


def _line_number(file: _File, path: Sequence[str | int]) -> int:
    """Return the number of the line on which the statement of a value begins, or else its table."""
    lines = file.text.split("\n")

    def contains_value(end: int) -> bool:
        """Return whether the value is in the first lines, completed to the end of their last statement."""
        while True:
            with suppress(tomllib.TOMLDecodeError):
                found: Any = tomllib.loads("\n".join(lines[:end]))
                break
            end += 1
        with suppress(LookupError, TypeError):  # a single value in place of a list has no positions
            for part in path:
                found = found[part]
            return True
        return False

    while path and not contains_value(len(lines)):
        path = path[:-1]
    return max(1, bisect_left(range(len(lines)), True, key=contains_value))
