"""Code of compiled steps that all processes of this machine share, and the right of one of them to compile a step.

Inductor keeps compiled code in a directory, and finds it again by the graph of the step, the versions and its settings.
Only a process that has traced the step can look there, which takes seconds. A `CompileRecord` says beforehand whether
the code is there, and lets one process at a time compile a step.
"""

import hashlib
import logging
import os
import platform
from errno import EACCES
from functools import cache
from pathlib import Path

from shoal.host.process_lock import ProcessLock
from shoal.plan.cost.history import cache_directory, environment

__all__ = ["COMPILED", "CompileRecord", "use_shared_directory"]

_log = logging.getLogger("shoal.fuse")

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

COMPILED = b"compiled\n"
"""Contents of the file of a step that was compiled."""


def use_shared_directory() -> Path | None:
    """Let Inductor keep its files in Shoal's cache directory, unless `$TORCHINDUCTOR_CACHE_DIR` names another one.

    Inductor's keys omit the processor, so the directory is one for this processor: a home directory may be that of
    several machines. It is one for this user too, since others must not choose the code that runs here. Returns None if
    it cannot be written; Inductor then uses its own.
    """
    if _VARIABLE not in os.environ:
        directory = cache_directory() / f"inductor-{os.getuid()}-{_processor()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(EACCES, os.strerror(EACCES), str(directory))
        except OSError as error:
            _warn_once(
                f"compiled steps are not kept for later studies, since {directory} cannot be used ({error}). Set "
                "SHOAL_CACHE to a directory that can be written."
            )
            return None
        os.environ[_VARIABLE] = str(directory)
    return Path(os.environ[_VARIABLE])


_environment = cache(environment)


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    text = "\n".join(named[:2]) or platform.processor() or platform.machine()
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class CompileRecord:
    """Whether a process of this machine has compiled a step, and the right to compile it.

    It is a file next to Inductor's: locked by the process that compiles the step, and not empty once it has done so. A
    process that is killed leaves the right to another one. If the file cannot be used, nothing counts as compiled,
    every process has the right, and a warning is logged once.

    Args:
        step: Everything that the graph of the step depends on, as a text, besides the versions.
    """

    def __init__(self, step: str) -> None:
        self._name = hashlib.blake2b(f"{_environment()}, {step}".encode(), digest_size=12).hexdigest()
        self._lock: ProcessLock | None = None

    @property
    def exists(self) -> bool:
        """Whether a process has compiled the step."""
        try:
            return (path := self._path()) is not None and path.stat().st_size > 0
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn(error)
            return False

    def begin(self) -> bool:
        """Take the right to compile the step, until `end`; return False if another process compiles it now."""
        if (path := self._path()) is None:
            return True
        lock = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = ProcessLock(path)
            free = lock.exclusive()
        except OSError as error:  # the file cannot be created, or its file system has no locks
            self._warn(error)
            if lock is not None:
                lock.release()
            return True
        if free:
            self._lock = lock
        else:
            lock.release()
        return free

    @property
    def lock(self) -> int | None:
        """Descriptor of the locked file, by which a program inherits the right; None without the right or the file."""
        return None if self._lock is None else self._lock.file

    def end(self, compiled: bool) -> None:
        """Give the right back, and record whether the step was compiled; no effect without the right."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            try:
                if compiled:
                    os.write(lock.file, COMPILED)
            finally:
                lock.release()
        except OSError as error:  # such as a full disk, for which the training must not end
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        _warn_once(f"other processes do not learn which steps this one compiles: {error}")

    def _path(self) -> Path | None:
        directory = use_shared_directory()
        return None if directory is None else directory / "shoal" / self._name
