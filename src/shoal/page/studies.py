"""The studies below a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.journal.schema import FILE_NAME
from shoal.paths import absolute

__all__ = ["find_studies"]

_DEPTH = 3
"""Folders between the given one and a study, at most."""
_MOST = 1000
"""Studies that are shown, at most."""


def find_studies(root: Path) -> dict[str, Path]:
    """Return the studies of a folder: its path below the folder, or the folder's own name -> directory.

    Args:
        root: Directory of a study, or a folder of studies.

    Raises:
        ShoalError: The folder does not exist.
    """
    root = absolute(root)
    if not root.is_dir():
        raise ShoalError(f"there is no folder {root}; name the directory of a study, or a folder of studies")
    if (root / FILE_NAME).is_file():
        return {root.resolve().name: root}
    return {str(path.relative_to(root)): path for path in sorted(_below(root, _DEPTH))[:_MOST]}


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the directories of studies below a folder; links to folders are not followed."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # removed meanwhile, or not readable by this user: it shows no study
        return
    for entry in entries:
        path = Path(entry.path)
        if (path / FILE_NAME).is_file():
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)
