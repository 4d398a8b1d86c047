"""Requests to a running job (stop, change), and its heartbeat."""

import threading
from collections import deque

from shoal.core.job import JobUpdate

__all__ = ["JobControl"]


class JobControl:
    """Requests of the engine to one job, added from any thread of the back end, polled between steps.

    If `prompt`, the engine handles each event before the job continues, so that waiting for requests is useless.
    """

    def __init__(self, prompt: bool = False) -> None:
        self.stop_noticed = False
        self.beats = 0
        self.settled = False
        """Whether the job only takes steps, as of the last heartbeat."""
        self.prompt = prompt
        self._stop = False
        self._changes: deque[JobUpdate] = deque()
        self._requested = threading.Event()

    def stop(self) -> None:
        """Ask the job to checkpoint and return."""
        self._stop = True
        self._requested.set()

    def change(self, change: JobUpdate) -> None:
        """Ask the job for a change."""
        self._changes.append(change)
        self._requested.set()

    def beat(self, settled: bool) -> None:
        """Record progress, cheaply; `settled` if the job only takes steps, without loading, building or compiling."""
        self.settled = settled
        self.beats += 1

    def stopping(self) -> bool:
        """Return whether the job must checkpoint and return. Cheap: call it between steps."""
        if self._stop:
            self.stop_noticed = True
        return self._stop

    def changes(self) -> list[JobUpdate]:
        """Return the changes since the last call, in order. Cheap: call it between steps."""
        self._requested.clear()
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a request since the last call of `changes`; return whether there is one."""
        return self._requested.wait(0.0 if self.prompt else max(0.0, seconds))
