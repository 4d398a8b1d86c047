"""The directory of a GPU's MPS daemon, and the lock by which studies know whether others use the daemon too."""

import hashlib
import os
import tempfile
import time
from pathlib import Path

from shoal.cluster.process_lock import ProcessLock
from shoal.core.errors import MpsError

__all__ = ["MpsDirectory", "default_directory"]

_LONGEST_PIPE = 80
"""Bytes of a pipe directory: the path of a UNIX socket has at most 108, and MPS puts names of its own behind it."""

_PAUSE_SECONDS = 0.02

_LOCK = "users.lock"


def default_directory(uuid: str) -> Path:
    """Where the daemon of a GPU has its directories: one place for all studies of a user, and a short one."""
    digest = hashlib.sha256(uuid.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"shoal-mps-{os.geteuid()}" / digest


class MpsDirectory:
    """Where a daemon has its pipes and logs. Whoever uses the daemon holds an flock there, which vanishes with him.

    Args:
        path: of one GPU alone; made when it is entered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pipe = path / "pipe"
        self.log = path / "log"
        self._lock: ProcessLock | None = None

    def enter(self, patience: float) -> bool:
        """Take part in its use; whether nobody else does, who then stays out until `share`.

        Args:
            patience: seconds to wait for another who is just starting the daemon.

        Raises:
            MpsError: it is too long a path, cannot be made, belongs to another user, or the other does not get done.
        """
        if self._lock is None:
            self._make()
            self._lock = ProcessLock(self.path / _LOCK)
        if self.alone():
            return True
        deadline = time.monotonic() + patience
        while not self._lock.shared():  # the failed attempt has given up what was held
            if time.monotonic() > deadline:
                self.leave()
                raise MpsError(
                    f"another process has been starting the MPS daemon of {self.path} for more than {patience:g} s; "
                    "wait for it or end it, or share the GPU without MPS: sharing='plain'"
                )
            time.sleep(_PAUSE_SECONDS)
        return False

    def claim(self) -> bool:
        """Take part in its use if nobody does, who then stays out until `leave`; whether that was so."""
        try:
            self._lock = ProcessLock(self.path / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # it was never used, or is no such directory
            return False
        if not self.alone():
            self.leave()
        return self.entered

    def alone(self) -> bool:
        """Whether nobody else uses it, who then stays out until `share` or `leave`."""
        assert self._lock is not None
        return self._lock.exclusive()

    def others(self) -> list["MpsDirectory"]:
        """Those beside it, of other GPUs."""
        return [MpsDirectory(lock.parent) for lock in self.path.parent.glob(f"*/{_LOCK}") if lock.parent != self.path]

    def share(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.shared(wait=True)

    def leave(self) -> None:
        """Use it no more; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def entered(self) -> bool:
        """Whether its use has been taken part in, and not yet been left."""
        return self._lock is not None

    def _make(self) -> None:
        if len(os.fsencode(self.pipe)) > _LONGEST_PIPE:
            raise MpsError(
                f"the pipe directory {self.pipe} has {len(os.fsencode(self.pipe))} bytes, MPS takes at most "
                f"{_LONGEST_PIPE}; let the variable TMPDIR name a directory with a shorter path, such as /tmp"
            )
        try:
            for each in (self.path.parent, self.path, self.pipe, self.log):
                each.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise MpsError(
                f"the directory {self.path} of an MPS daemon cannot be made: {error}; remove what is there, or let the "
                "variable TMPDIR name another place"
            ) from error
        for each in (self.path.parent, self.path):
            if (owner := each.lstat().st_uid) != os.geteuid():
                raise MpsError(
                    f"{each} belongs to user {owner}, so the MPS daemon in it is not ours to use; have it removed, let "
                    "the variable TMPDIR name another place, or share the GPU without MPS: sharing='plain'"
                )
