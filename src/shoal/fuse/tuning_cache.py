"""The autotuner's cache file: the fastest lowerings measured on this machine, so that each is measured only once."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.cost.history import cache_directory

__all__ = ["TuningCache"]

_log = logging.getLogger("shoal.fuse")


class TuningCache:
    """The fastest lowering by key, stored across processes.

    The file holds one JSON object per line. Each line is appended by one write, so several processes may append at
    once. The last line of a key counts. An unreadable line is skipped and logged. A file that cannot be read or written
    is not used again; results are then kept in memory for this process.

    Args:
        path: Path of the file; by default in the user's cache directory, next to the job history.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else cache_directory() / "lowerings-1.jsonl"
        self._lowerings: dict[str, str] | None = None
        self._usable = True

    def get(self, key: str) -> str | None:
        """The fastest lowering of a key, or None if the key was never measured."""
        if self._lowerings is None:
            self._lowerings = self._load()
        return self._lowerings.get(key)

    def put(self, key: str, lowering: str, seconds: Mapping[str, float]) -> None:
        """Store a result.

        Args:
            key: Description of the measured function, its tensors and the machine.
            lowering: Fastest lowering.
            seconds: Seconds of each lowering.
        """
        if self._lowerings is None:
            self._lowerings = self._load()
        self._lowerings[key] = lowering
        if not self._usable:
            return
        line = json.dumps(
            {"key": key, "way": lowering, "seconds": {name: float(f"{s:.3g}") for name, s in seconds.items()}}
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, f"\n{line}\n".encode())  # the first ends a line that another process left unfinished
            finally:
                os.close(file)
        except OSError as error:
            self._disable(error)

    def _load(self) -> dict[str, str]:
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._disable(error)
            return {}
        found = {}
        torn = 0
        for line in filter(None, lines):
            try:
                entry = json.loads(line)
                found[str(entry["key"])] = str(entry["way"])
            except (ValueError, KeyError, TypeError):
                torn += 1
        if torn:
            _log.warning("%d lines of %s cannot be read; their lowerings are measured anew", torn, self.path)
        return found

    def _disable(self, error: OSError) -> None:
        self._usable = False
        _log.warning(
            "the autotuner's file %s cannot be used (%s); its findings are kept in memory only. Set SHOAL_CACHE to a "
            "directory that can be written.",
            self.path,
            error,
        )
