"""Paths as they stay when the working directory changes."""

from pathlib import Path

from shoal.core.errors import ShoalError

__all__ = ["absolute", "as_given", "here"]

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
