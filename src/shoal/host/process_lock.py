"""A file lock that ends with its process, also after a kill; a child process inherits it only where that is meant."""

import fcntl
import os
import weakref
from pathlib import Path

__all__ = ["ProcessLock"]


class ProcessLock:
    """An flock on a file or directory, taken and released by one process.

    The lock belongs to the open file, which every fork of the process shares. Without precaution it would stay while a
    fork (a worker of a DataLoader, of a user's pool) lives. So a fork closes its copy at once; a program started by
    `exec` has one only if it is given `file`, and then holds the lock as well.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT, mode: int = 0o600) -> None:
        self._file: int | None = os.open(path, flags, mode)
        _OPEN.add(self)

    @property
    def file(self) -> int:
        """Descriptor of the file, until the release."""
        assert self._file is not None
        return self._file

    def exclusive(self, *, wait: bool = False) -> bool:
        """Take the lock alone; return False if another process holds it. A shared lock held before is lost."""
        return self._take(fcntl.LOCK_EX, wait)

    def shared(self, *, wait: bool = False) -> bool:
        """Take the lock together with other processes; return False if one holds it alone."""
        return self._take(fcntl.LOCK_SH, wait)

    def release(self) -> None:
        """Release the lock and close the file; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None  # first, since the descriptor is free even if closing it fails
            os.close(file)

    def _take(self, kind: int, wait: bool) -> bool:
        try:
            fcntl.flock(self.file, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


_OPEN: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _release_all() -> None:
    """Close the descriptors in a fork, which does not release the locks of the parent."""
    for lock in list(_OPEN):
        lock.release()


os.register_at_fork(after_in_child=_release_all)
