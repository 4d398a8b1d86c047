"""One writer a study: a lock that vanishes with its process, however that dies, whatever that has forked."""

import fcntl
import os
import time
from pathlib import Path

from shoal.cluster.process_lock import ProcessLock
from shoal.core.errors import JournalError

__all__ = ["WriterLock", "holder"]

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.02


class WriterLock:
    """An flock on `<directory>/journal.lock`, held from construction until `release`; the file names the process.

    Args:
        directory: of the study; must exist.

    Raises:
        JournalError: another process (or another journal of this one) holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._lock = ProcessLock(_path(directory), mode=0o644)
        try:
            self._take(directory)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let another process write; may be called twice."""
        self._lock.release()

    def _take(self, directory: Path) -> None:
        for attempt in range(_ATTEMPTS):
            if self._lock.exclusive():
                break
            # `holder` of a reader takes the lock for an instant; a writer keeps it for good.
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


def holder(directory: Path) -> int | None:
    """The id of the process that is running the study, or None when nobody is."""
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
    return int(text) if text else 0  # 0: it has the lock, and is about to write its name
