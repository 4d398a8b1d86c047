"""Paths as they stay when the working directory changes."""

import reprlib
import sys
from pathlib import Path

from shoal.core.errors import ShoalError

__all__ = ["absolute", "as_given", "check_path", "here"]

_GIVEN: dict[Path, Path] = {}
"""Each path that was made whole -> what was given."""


def here() -> Path:
    """The working directory.

    Raises:
        ShoalError: it was removed, or is closed to this user.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise ShoalError(
            f"the working directory of this process is gone ({error.strerror}), so nothing relative to it can be "
            "found; change to one that is there (cd, os.chdir), or name files and directories by their whole paths"
        ) from error


def check_path(path: object) -> None:
    """Refuse what names no directory, whatever the file system holds.

    Raises:
        ShoalError: shows it.
    """
    try:
        text = str(Path(path)) if path else ""  # type: ignore[arg-type]
        text.encode(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
    except (TypeError, UnicodeEncodeError):  # half of a character
        text = ""
    if not text or "\0" in text:
        raise ShoalError(
            "`directory` must be the path of a directory, without a NUL character in it or one that no file system "
            f"takes, got {reprlib.repr(path)}"
        )


def absolute(path: Path | str) -> Path:
    """A path that means the same whatever the working directory is later.

    Raises:
        ShoalError: it is relative, and there is no working directory.
    """
    path = Path(path)
    if path.is_absolute():
        return path
    whole = here() / path
    _GIVEN[whole] = path
    return whole


def as_given(path: Path) -> Path:
    """What `absolute` made of a path, as its user gave it: that is what a shell understands, which went nowhere."""
    return _GIVEN.get(path, path)
