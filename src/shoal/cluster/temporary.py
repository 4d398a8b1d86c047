"""Temporary directories of processes that may be killed: the next run removes what dead ones have left."""

import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.cluster.process_lock import ProcessLock

__all__ = ["TemporaryFolder", "remove_abandoned"]

_LONGEST = 60
"""Bytes of a path to which the name of a directory and of a socket in it are added; 107 in all are allowed."""


class TemporaryFolder:
    """A new directory of this process alone, with a short path; removed by `close`, or by whoever runs Shoal next.

    Its process holds a lock on it, by which others know that it is in use.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_place()))
            try:
                self._lock = _lock(self.path)
            except FileNotFoundError:  # it was taken for abandoned before it was locked
                continue
            self._lock.exclusive(wait=True)
            if self.path.exists():
                return
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove it; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_abandoned() -> None:
    """Remove the directories that killed processes of this user have left; those of living ones are locked."""
    for path in _place().glob(f"{_prefix()}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = _lock(path)
        except OSError:  # somebody else has removed it, or it cannot be: no reason not to run
            continue
        if lock.exclusive():
            shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _place() -> Path:
    """Where temporary directories are, unless sockets in them would have longer paths than there may be."""
    place = tempfile.gettempdir()
    return Path(place if len(os.fsencode(place)) <= _LONGEST else "/tmp")


def _prefix() -> str:
    return f"shoal-run-{os.geteuid()}-"


def _lock(path: Path) -> ProcessLock:
    """Raises FileNotFoundError where there is no such directory."""
    return ProcessLock(path / "lock")  # a file and not the directory: NFS locks only what is open for writing
