"""The writer's lock of a study. It is freed when its process ends in any way, even if forked processes still run."""

import fcntl
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import JournalError
from shoal.host.process_lock import ProcessLock

__all__ = ["LockOwner", "WriterLock", "lock_owner"]

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a writer's lock; before it has written its name, `pid` is 0 and `host` is ""."""

    pid: int
    host: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine, as far as is known."""
        return self.host in ("", platform.node())

    @property
    def is_this_process(self) -> bool:
        """Whether it is this process."""
        return (self.pid, self.host) == (os.getpid(), platform.node())

    def __str__(self) -> str:
        return f"process {self.pid}" if self.is_here else f"process {self.pid} on {self.host}"


class WriterLock:
    """An flock on `<directory>/journal.lock`, held from construction until `release`; the file names its owner."""

    def __init__(self, directory: Path) -> None:
        self._lock = ProcessLock(_path(directory), mode=0o644)
        try:
            self._take(directory)
        except BaseException:
            self.release()
            raise

    def directory(self) -> Path | None:
        """Return where the lock's file is now; None if it was removed, or if this system does not tell."""
        try:
            file = Path(os.readlink(f"/proc/self/fd/{self._lock.file}"))
            return file.parent if os.path.samestat(file.stat(), os.fstat(self._lock.file)) else None
        except OSError:
            return None

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
            owner = _owner(directory)
            if owner.is_this_process:
                who, remedy = "this process has it open already", "wait for its end or stop it"
            elif owner.is_here:
                who, remedy = f"another process ({owner.pid}) is running it", "wait for its end or stop it"
            else:
                who = f"{owner} is running it"
                remedy = (
                    "wait for its end or stop it there. If that machine is down, the file server frees the lock by "
                    f"itself (NFS 4: after about 90 seconds); if it does not, delete {_path(directory)} once nothing "
                    f"of the study runs on {owner.host}"
                )
            raise JournalError(f"the study in {directory} has one writer at a time, and {who}; {remedy}")
        name = f"{platform.node()}:{os.getpid()}\n".encode()
        os.ftruncate(self._lock.file, 0)  # first, so that a reader never finds the end of an older name after this one
        os.pwrite(self._lock.file, name, 0)


def lock_owner(directory: Path) -> LockOwner | None:
    """The process that runs the study; None if no process does."""
    try:
        with _path(directory).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _owner(directory)
    return None


def _path(directory: Path) -> Path:
    return directory / "journal.lock"


def _owner(directory: Path) -> LockOwner:
    host, _, pid = _path(directory).read_text(errors="replace").strip().rpartition(":")
    return LockOwner(int(pid), host) if pid.isdecimal() else LockOwner(0)
