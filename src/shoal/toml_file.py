"""What is wrong with a TOML file that a user wrote, told with its line and what would be valid."""

import tomllib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import ShoalError

__all__ = ["TomlLocation", "hint", "unknown"]


class _File(NamedTuple):
    path: Path
    text: str
    content: dict[str, Any]


@dataclass(frozen=True)
class TomlLocation:
    """Where a value stands.

    Args:
        files: the file, and the one that it extends if there is one.
        fault: what is raised of a mistake.
        path: keys and positions that lead to it.
    """

    files: tuple[_File, ...]
    fault: type[ShoalError]
    path: tuple[str | int, ...] = ()

    @staticmethod
    def of(path: Path, fault: type[ShoalError]) -> "TomlLocation":
        """A whole file.

        Raises:
            ShoalError: a `fault`; it is not there, or no TOML.
        """
        if not path.is_file():
            raise fault(f"{path} cannot be read: there is no such file")
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
            content = tomllib.loads(text)
            repr(content)  # of an integer of thousands of digits not even a message can be made
        except (OSError, ValueError, RecursionError) as error:  # no text, no TOML, or nested too deep
            raise fault(f"{path} cannot be read: {error}") from error
        return TomlLocation((_File(path, text, content),), fault)

    @property
    def content(self) -> Mapping[str, Any]:
        """What the files say, the first one first."""
        return {key: value for file in reversed(self.files) for key, value in file.content.items()}

    def extending(self, other: "TomlLocation") -> "TomlLocation":
        """The whole of a file that extends another."""
        return replace(self, files=(*self.files, *other.files))

    def __truediv__(self, part: str | int) -> "TomlLocation":
        """What stands there under a key or at a position."""
        return replace(self, path=(*self.path, part))

    @property
    def name(self) -> str:
        """The last key that leads to it."""
        return next((f"`{part}`" for part in reversed(self.path) if isinstance(part, str)), "the file")

    def error(self, fault: str) -> ShoalError:
        """That something is wrong there, with file and line."""
        file = next((each for each in self.files if self.path[:1] and self.path[0] in each.content), self.files[0])
        return self.fault(f"{file.path}:{_line(file, self.path)}: {fault}")


def unknown(what: str, name: object, names: Collection[str]) -> str:
    """That there is no such thing of a name, which one may have been meant, and which there are."""
    return f"there is no {what} {name!r}{hint(name, names)}; there are {', '.join(names)}"


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


def hint(name: object, names: Collection[str]) -> str:
    """Which of some names may have been meant, in words; "" if none is close."""
    close = get_close_matches(str(name), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
