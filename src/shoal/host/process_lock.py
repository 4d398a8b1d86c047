"""File locks that end with their process, also after a kill, and temporary directories, each with such a lock."""

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ProcessLock", "TemporaryFolder", "remove_abandoned"]

_MAX_PATH_BYTES = 60
"""Longest path in bytes, before the names of a directory and of a socket in it; a socket's path may have 107 bytes."""


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
