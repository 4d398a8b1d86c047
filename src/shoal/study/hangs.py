"""Detection of jobs that hang."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from shoal.core.errors import ShoalError
from shoal.core.event import Event, Heartbeat
from shoal.core.job import Job

__all__ = ["HANG_SECONDS", "HangDetector", "check_hang_seconds"]

HANG_SECONDS = 300.0
"""Default limit, in seconds without progress, of a job that takes steps."""

LEAST = 3.0
"""Least limit in seconds: jobs send a heartbeat once a second."""

PATIENCE = 10
"""Factor on the longest step so far, or on the limit while a job prepares."""

LONGEST_LOOK = 5.0
"""Seconds that count at most between two looks: the engine or the machine may have been asleep."""


def check_hang_seconds(seconds: object) -> None:
    """Check the setting `hang_seconds`.

    Raises:
        ShoalError: the value is not a finite number of at least `LEAST`.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not LEAST <= seconds < inf:
        raise ShoalError(
            f"`hang_seconds` must be a finite number of at least {LEAST:g}, because a job sends a heartbeat once a "
            f"second, got {seconds!r}"
        )


@dataclass
class _SilentJob:
    """Progress of a watched job.

    Args:
        settled: Whether the job only takes steps now; before that it loads data, builds or compiles.
        seconds: Seconds since its last progress.
        longest: Longest such time between steps so far.
    """

    settled: bool = False
    seconds: float = 0.0
    longest: float = 0.0


class HangDetector:
    """Watches running jobs by their events, on a clock that is passed in.

    Loading data and compiling may take long, and nothing bounds them in advance. So a job that prepares is given
    `PATIENCE` times the limit. A job that takes steps is given the limit, or `PATIENCE` times its longest step if that
    is more.

    Args:
        limit: Seconds without progress.
    """

    def __init__(self, limit: float = HANG_SECONDS) -> None:
        self._limit = limit
        self._jobs: dict[str, _SilentJob] = {}
        self._looked: float | None = None

    def begin(self, job: Job) -> None:
        """Watch a job that starts."""
        self._jobs[job.id] = _SilentJob()

    def on_event(self, event: Event) -> None:
        """Note the progress that an event of a job shows."""
        quiet = self._jobs.get(event.job)
        if quiet is None:
            return
        if quiet.settled:
            quiet.longest = max(quiet.longest, quiet.seconds)
        quiet.seconds = 0.0
        if isinstance(event, Heartbeat):
            quiet.settled = event.settled

    def end(self, job: str) -> None:
        """Forget a job that has ended."""
        self._jobs.pop(job, None)

    def look(self, now: float) -> Iterator[tuple[str, float]]:
        """The jobs that hang, each with its seconds without progress. Call it after all events were handled.

        Args:
            now: Time of a monotonic clock, in seconds.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        for job, quiet in self._jobs.items():
            quiet.seconds += passed
            limit = max(self._limit, PATIENCE * quiet.longest) if quiet.settled else PATIENCE * self._limit
            if quiet.seconds >= limit:
                yield job, quiet.seconds
