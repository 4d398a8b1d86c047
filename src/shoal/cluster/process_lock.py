"""A lock on a file that vanishes with its process, however that dies, and that no child process keeps."""

import fcntl
import os
import weakref
from pathlib import Path

__all__ = ["ProcessLock"]


class ProcessLock:
    """An flock on a file or directory, to be taken and given back by one process.

    The lock belongs to the open file, which every fork of the process shares: it would outlive the process for as long
    as one of its forks (a worker of a DataLoader, of a user's pool) lives. So a fork closes its copy first of all; what
    is started by `exec` never has one.

    Args:
        path: of the file.
        flags: as of `os.open`; by default the file is made if need be.
        mode: of a file that is made.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT, mode: int = 0o600) -> None:
        self._file: int | None = os.open(path, flags, mode)
        _OPEN.add(self)

    @property
    def file(self) -> int:
        """The descriptor of the file, for as long as it is not released."""
        assert self._file is not None
        return self._file

    def exclusive(self, *, wait: bool = False) -> bool:
        """Let nobody else hold it; false if somebody does. What was held before is given up in either case.

        Args:
            wait: until nobody else does.
        """
        return self._take(fcntl.LOCK_EX, wait)

    def shared(self, *, wait: bool = False) -> bool:
        """Hold it beside others who share it; false if one holds it alone.

        Args:
            wait: until nobody holds it alone.
        """
        return self._take(fcntl.LOCK_SH, wait)

    def release(self) -> None:
        """Give it back and close the file; may be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take(self, kind: int, wait: bool) -> bool:
        try:
            fcntl.flock(self.file, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


_OPEN: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _release_all() -> None:
    """In a fork: closing a copy of the descriptor leaves the lock to the process that took it."""
    for lock in list(_OPEN):
        lock.release()


os.register_at_fork(after_in_child=_release_all)
