"""Requests to a running job (stop, change members), and its heartbeat."""

import threading
from collections import deque

from shoal.core.job import JobUpdate

__all__ = ["JobControl"]


class JobControl:
    """Requests of the engine to one job. The back end adds them, from any thread; the job polls them between steps.

    Args:
        prompt: Whether the engine answers each event before the job goes on, so that waiting is of no use.
    """

    def __init__(self, prompt: bool = False) -> None:
        self.noticed = False
        """Whether the job has read the request to stop."""
        self.beats = 0
        """Number of heartbeats."""
        self.settled = False
        """Whether the job only takes steps, as of the last heartbeat."""
        self._prompt = prompt
        self._stop = False
        self._changes: deque[JobUpdate] = deque()
        self._news = threading.Event()

    def stop(self) -> None:
        """Ask the job to checkpoint and return."""
        self._stop = True
        self._news.set()

    def change(self, change: JobUpdate) -> None:
        """Ask the job to change its members."""
        self._changes.append(change)
        self._news.set()

    def beat(self, settled: bool) -> None:
        """Note progress. Cheap: call it at every step, and before and after anything that takes long.

        Args:
            settled: Whether the job only takes steps now: it does not load, build or compile anything.
        """
        self.settled = settled
        self.beats += 1

    def stopping(self) -> bool:
        """Whether the job must checkpoint and return. Cheap: call it between steps."""
        if self._stop:
            self.noticed = True
        return self._stop

    def changes(self) -> list[JobUpdate]:
        """Changes since the last call, in order. Cheap: call it between steps."""
        self._news.clear()
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a request since the last call of `changes`; returns whether there is one."""
        return self._news.wait(0.0 if self._prompt else max(0.0, seconds))
