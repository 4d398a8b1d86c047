"""Temporary directories of processes that may be killed: the next run removes those of dead processes."""

import os
import shutil
import stat
import tempfile
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.host.process_lock import ProcessLock

__all__ = ["TemporaryFolder", "remove_abandoned"]

_MAX_PATH_BYTES = 60
"""Longest path in bytes, before the names of a directory and of a socket in it; a socket's path may have 107 bytes."""


class TemporaryFolder:
    """A new directory of this process, with a short path; `close`, or the next run of Shoal, removes it.

    Its process holds a lock on it, which marks it as in use.

    Args:
        most_bytes: Longest path of its parent; if the usual one is longer, the directory is in /tmp.
    """

    def __init__(self, most_bytes: int = _MAX_PATH_BYTES) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_parent_folder(most_bytes)))
            try:
                self._lock = _lock(self.path)
            except FileNotFoundError:  # another process removed it as abandoned before the lock
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
        """Remove the directory; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_abandoned() -> None:
    """Remove the directories of killed processes of this user; those of running processes are locked."""
    parents = {_parent_folder(_MAX_PATH_BYTES), Path("/tmp")}
    for path in chain.from_iterable(parent.glob(f"{_prefix()}*") for parent in parents):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = _lock(path)
        except OSError:  # another process has removed it, or it cannot be removed
            continue
        if lock.exclusive():
            shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _parent_folder(most_bytes: int) -> Path:
    """Return the folder of temporary directories; /tmp if sockets in the usual one would have too long paths."""
    place = tempfile.gettempdir()
    return Path(place if len(os.fsencode(place)) <= most_bytes else "/tmp")


def _prefix() -> str:
    return f"shoal-run-{os.geteuid()}-"


def _lock(path: Path) -> ProcessLock:
    """Open the lock of a directory; raise FileNotFoundError if the directory does not exist."""
    return ProcessLock(path / "lock")  # not the directory itself: NFS locks only files that are open for writing
