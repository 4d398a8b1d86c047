"""What a running job is asked from outside, and how it shows that it makes progress."""

import threading
from collections import deque

from shoal.core.job import JobUpdate

__all__ = ["JobControl"]


class JobControl:
    """What the engine asks of one job; the back end fills it, perhaps in another thread than the job's own.

    Args:
        prompt: whether the engine has given its answer to an event whenever the job goes on after it.
    """

    def __init__(self, prompt: bool = False) -> None:
        self.noticed = False
        """Whether the job has seen that it is to stop."""
        self.beats = 0
        """How often the job has shown progress."""
        self.settled = False
        """Whether it only takes steps now, as it last said."""
        self._prompt = prompt
        self._stop = False
        self._changes: deque[JobUpdate] = deque()
        self._news = threading.Event()

    def stop(self) -> None:
        """Let the job checkpoint and return."""
        self._stop = True
        self._news.set()

    def change(self, change: JobUpdate) -> None:
        """Let the job's members change."""
        self._changes.append(change)
        self._news.set()

    def beat(self, settled: bool) -> None:
        """Say that the job makes progress; quick, to be called at every step, and before and after what takes long.

        Args:
            settled: whether it only takes steps now, and does not load, build or compile anything.
        """
        self.settled = settled
        self.beats += 1

    def stopping(self) -> bool:
        """Whether the job is to checkpoint and return; quick, to be asked between steps."""
        if self._stop:
            self.noticed = True
        return self._stop

    def changes(self) -> list[JobUpdate]:
        """Those that came since the last call, in order; quick, to be asked between steps."""
        self._news.clear()
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def wait(self, seconds: float) -> bool:
        """Wait so long at most until there is anything new since the last look at the changes; whether there is."""
        return self._news.wait(0.0 if self._prompt else max(0.0, seconds))
