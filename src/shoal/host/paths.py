"""Absolute paths, which stay valid when the working directory changes."""

import reprlib
import sys
from collections.abc import Iterable
from pathlib import Path

from shoal.core.errors import ShoalError

__all__ = ["absolute", "as_given", "check_path", "extend_module_path", "working_directory"]

_GIVEN: dict[Path, Path] = {}
"""Each path that `absolute` made -> the path that the user gave."""


def working_directory() -> Path:
    """Return the working directory; a ShoalError says that it was removed, or that this user may not enter it."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ShoalError(
            f"the working directory of this process is gone ({error.strerror}), so relative paths cannot be "
            "resolved; change to an existing directory (cd, os.chdir), or give absolute paths"
        ) from error


def check_path(path: object) -> None:
    """Check that a value can be the path of a directory, whether or not the directory exists."""
    try:
        text = str(Path(path)) if path else ""  # type: ignore[arg-type]
        text.encode(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
    except (TypeError, UnicodeEncodeError):  # UnicodeEncodeError: a lone surrogate
        text = ""
    if not text or "\0" in text:
        raise ShoalError(
            "`directory` must be the path of a directory, without a NUL character in it or one that no file system "
            f"takes, got {reprlib.repr(path)}"
        )


def absolute(path: Path | str) -> Path:
    """Return the absolute path of a path; "~" and "~user" at its beginning are home directories."""
    try:
        path = Path(path).expanduser() if str(path).startswith("~") else Path(path)  # Path("./~") is Path("~")
    except RuntimeError as error:
        raise ShoalError(
            f"{str(path)!r} begins with a home directory that is not there; write ./~ for a name"
        ) from error
    if path.is_absolute():
        return path
    whole = working_directory() / path
    _GIVEN[whole] = path
    return whole


def as_given(path: Path) -> Path:
    """Return the path that the user gave for a path of `absolute`; it is valid in the directory of the user's shell."""
    return _GIVEN.get(path, path)


def extend_module_path(paths: Iterable[str]) -> None:
    """Let this process import the modules of a study; `paths` is the `sys.path` of the process that began it."""
    sys.path.extend(path for path in paths if path not in sys.path)
