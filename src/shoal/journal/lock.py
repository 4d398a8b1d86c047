"""The writer's lock of a study. It is freed when its process ends in any way, even if forked processes still run."""

import fcntl
import os
import time
from pathlib import Path

from shoal.cluster.process_lock import ProcessLock
from shoal.core.errors import JournalError

__all__ = ["WriterLock", "lock_owner"]

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.02


class WriterLock:
    """An flock on `<directory>/journal.lock`, held from construction until `release`; the file names the process.

    Args:
        directory: Directory of the study, which must exist.

    Raises:
        JournalError: another process, or another journal of this process, holds the lock.
    """

    def __init__(self, directory: Path) -> None:
        self._lock = ProcessLock(_path(directory), mode=0o644)
        try:
            self._take(directory)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free the lock; may be called twice."""
        self._lock.release()

    def _take(self, directory: Path) -> None:
        for attempt in range(_ATTEMPTS):
            if self._lock.exclusive():
                break
            # `lock_owner` in a reader takes the lock briefly; a writer keeps it.
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_SECONDS)
        else:
            pid = _pid(directory)
            who = "this process has it open already" if pid == os.getpid() else f"another process ({pid}) is running it"
            raise JournalError(
                f"the study in {directory} has one writer at a time, and {who}; wait for its end or stop it"
            )
        name = f"{os.getpid()}\n".encode()
        os.pwrite(self._lock.file, name, 0)
        os.ftruncate(self._lock.file, len(name))


def lock_owner(directory: Path) -> int | None:
    """Id of the process that runs the study; None if no process does."""
    try:
        with _path(directory).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _pid(directory)
    return None


def _path(directory: Path) -> Path:
    return directory / "journal.lock"


def _pid(directory: Path) -> int:
    text = _path(directory).read_text().strip()
    return int(text) if text else 0  # 0: the process has the lock but has not written its id yet
