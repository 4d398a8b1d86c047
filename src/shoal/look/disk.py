"""The disk of a study: what is free of it, and a warning when it is nearly full."""

import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.core.resources import bytes_text
from shoal.host.remedy import command
from shoal.journal.view import JournalView

__all__ = ["DiskUsage", "DiskWatch", "free_text", "nearly_full_text"]

_LEAST_FREE = 0.1, 20 * 10**9
"""Fraction of the disk, and bytes; users are warned below both, for a tenth of a large disk is room enough."""
_KEPT = 5
"""Number of configurations that the remedy keeps."""
_CHECK_SECONDS = 10.0

_log = logging.getLogger("shoal.look.disk")


class DiskUsage(Protocol):
    """The result of `shutil.disk_usage`, in bytes."""

    @property
    def total(self) -> int:
        """Size of the disk."""

    @property
    def free(self) -> int:
        """Bytes that the user may still write."""


def free_text(usage: DiskUsage) -> str:
    """Return what is free of a disk: "4.2 GB free of 500.1 GB"."""
    return f"{bytes_text(usage.free)} free of {bytes_text(usage.total)}"


def nearly_full_text(journal: JournalView, usage: DiskUsage) -> str | None:
    """Return a warning with a remedy if the disk of a study is nearly full."""
    fraction, least = _LEAST_FREE
    if usage.free >= min(fraction * usage.total, least):
        return None
    if journal.keep == "all" or (isinstance(journal.keep, int) and journal.keep > _KEPT):
        shorter = command("keep", journal.directory, str(_KEPT))
        remedy = f"{shorter} deletes the weights of ended trials but the best {_KEPT}"
    else:
        remedy = "delete other files on it, or stop the study and move its directory to another disk"
    return f"the disk is nearly full, {free_text(usage)}; {remedy}"


class DiskWatch:
    """Warns that the disk of a study is nearly full, and again whenever less than half is left of what was free then.

    It asks every ten seconds.

    Args:
        find: Function of a path that returns the use of its disk.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        journal: JournalView,
        find: Callable[[Path], DiskUsage] = shutil.disk_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._find, self._clock = journal, find, clock
        self._due = clock()
        self._free = math.inf  # at the last warning

    def update(self) -> None:
        """Look at the disk if that is due; the engine calls it in each turn of its loop."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + _CHECK_SECONDS
        try:
            usage = self._find(self._journal.directory)
        except OSError:  # a file system that does not answer for a moment; a directory that is gone ends the study
            return
        if usage.free < self._free / 2 and (warning := nearly_full_text(self._journal, usage)):
            _log.warning("%s", warning)
            self._free = usage.free
