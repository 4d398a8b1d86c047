"""The disk of a study: what is free of it, and a warning when it is nearly full."""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.core.resources import bytes_text
from shoal.host.remedy import command

__all__ = ["DiskUsage", "DiskWatch", "free_text", "nearly_full_text"]

_LEAST_FREE = 0.1
"""Fraction of the disk below which users are warned."""
_CHECK_SECONDS = 10.0

_log = logging.getLogger("shoal.look.disk")


class DiskUsage(Protocol):
    """What `shutil.disk_usage` returns, in bytes."""

    @property
    def total(self) -> int:
        """Size of the disk."""

    @property
    def free(self) -> int:
        """Bytes that the user may still write."""


def free_text(usage: DiskUsage) -> str:
    """Return what is free of a disk: "4.2 GB free of 500.1 GB"."""
    return f"{bytes_text(usage.free)} free of {bytes_text(usage.total)}"


def nearly_full_text(directory: Path, usage: DiskUsage) -> str | None:
    """Return a warning with a remedy if the disk of a study is nearly full."""
    if usage.free >= _LEAST_FREE * usage.total:
        return None
    remedy = command("keep", directory, "5")
    return (
        f"the disk is nearly full, {free_text(usage)}; {remedy} deletes the weights of ended trials but the best five"
    )


class DiskWatch:
    """Warns once in a run of a study that its disk is nearly full; it asks every ten seconds.

    Args:
        find: Function of a path that returns the use of its disk.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        directory: Path,
        find: Callable[[Path], DiskUsage] = shutil.disk_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._find, self._clock = directory, find, clock
        self._due: float | None = clock()

    def update(self) -> None:
        """Look at the disk if that is due; the engine calls it in each turn of its loop."""
        if self._due is None or self._clock() < self._due:
            return
        self._due = self._clock() + _CHECK_SECONDS
        try:
            usage = self._find(self._directory)
        except FileNotFoundError:  # the journal says that its directory was moved
            return
        if warning := nearly_full_text(self._directory, usage):
            _log.warning("%s", warning)
            self._due = None
