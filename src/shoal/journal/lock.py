"""One writer a study: a lock that vanishes with its process, however that dies."""

import fcntl
import os
import time
from pathlib import Path

from shoal.errors import JournalError

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
        self._file: int | None = os.open(_path(directory), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(directory, self._file)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let another process write; may be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take(self, directory: Path, file: int) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
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
        os.pwrite(file, name, 0)
        os.ftruncate(file, len(name))


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
