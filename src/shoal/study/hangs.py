"""Detection of jobs that hang."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.core.event import Event, Heartbeat
from shoal.core.job import HANG_SECONDS, Job

__all__ = ["HangDetector"]

PATIENCE = 10
"""Factor applied to the longest step so far, or to the limit while a job prepares."""

MAX_POLL_SECONDS = 5.0
"""Upper bound of the seconds counted between two polls, because the engine or the machine may have been suspended."""


@dataclass
class _JobProgress:
    settled: bool = False
    seconds: float = 0.0
    longest: float = 0.0


class HangDetector:
    """Detects running jobs that make no progress, from their events.

    Loading data and compiling may take long. So a job that prepares may take `PATIENCE` times the limit (in
    seconds). A job that takes steps may take the limit, or `PATIENCE` times its longest step if that is more.
    """

    def __init__(self, hang_seconds: float = HANG_SECONDS) -> None:
        self._hang_seconds = hang_seconds
        self._jobs: dict[str, _JobProgress] = {}
        self._last_poll: float | None = None

    def begin(self, job: Job) -> None:
        """Start to watch a job."""
        self._jobs[job.id] = _JobProgress()

    def on_event(self, event: Event) -> None:
        """Record the progress of the job that sent an event."""
        progress = self._jobs.get(event.job)
        if progress is None:
            return
        if progress.settled:
            progress.longest = max(progress.longest, progress.seconds)
        progress.seconds = 0.0
        if isinstance(event, Heartbeat):
            progress.settled = event.settled

    def end(self, job: str) -> None:
        """Stop to watch a job that has ended."""
        self._jobs.pop(job, None)

    def poll(self, now: float) -> Iterator[tuple[str, float]]:
        """The jobs that hang, each with its seconds without progress. Call it after all events were handled."""
        passed = 0.0 if self._last_poll is None else min(now - self._last_poll, MAX_POLL_SECONDS)
        self._last_poll = now
        for job, progress in self._jobs.items():
            progress.seconds += passed
            patience = PATIENCE * (progress.longest if progress.settled else self._hang_seconds)
            if progress.seconds >= max(self._hang_seconds, patience):
                yield job, progress.seconds
