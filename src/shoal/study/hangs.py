"""How long jobs have shown no progress, and which of them hang."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from shoal.core.errors import ShoalError
from shoal.core.event import Event, Heartbeat
from shoal.core.job import Job

__all__ = ["HANG_SECONDS", "HangDetector", "check_hang_seconds"]

HANG_SECONDS = 300.0
"""A job that takes steps and shows no progress for so long hangs, by default."""

LEAST = 3.0
"""Fewer seconds would say nothing: a job tells of its progress once a second."""

PATIENCE = 10
"""So many times as long as its longest step so far, or as the limit while it prepares, a job may be silent."""

LONGEST_LOOK = 5.0
"""What counts at most between two looks, so that nothing hangs because the engine, or the machine, was asleep."""


def check_hang_seconds(seconds: object) -> None:
    """Refuse what is no time to wait.

    Raises:
        ShoalError: shows it.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not LEAST <= seconds < inf:
        raise ShoalError(
            f"`hang_seconds` must be a finite number of at least {LEAST:g}, as a job says once a second that it is "
            f"alive, got {seconds!r}"
        )


@dataclass
class _SilentJob:
    """A job that is watched.

    Args:
        settled: whether it only takes steps now; until it says so it loads data, builds, or compiles.
        seconds: without any progress.
        longest: such time of its steps so far.
    """

    settled: bool = False
    seconds: float = 0.0
    longest: float = 0.0


class HangDetector:
    """Watches running jobs by their events, on a clock that is passed in.

    What comes before a job's first step, and whenever it prepares other ones, has no measure of its own: loading data
    or compiling may take long. So a job that prepares is given `PATIENCE` times the limit, one that takes steps the
    limit, or `PATIENCE` times its longest step where that is more.

    Args:
        limit: seconds.
    """

    def __init__(self, limit: float = HANG_SECONDS) -> None:
        self._limit = limit
        self._jobs: dict[str, _SilentJob] = {}
        self._looked: float | None = None

    def begin(self, job: Job) -> None:
        """A job starts."""
        self._jobs[job.id] = _SilentJob()

    def on_event(self, event: Event) -> None:
        """A job said something: it makes progress."""
        quiet = self._jobs.get(event.job)
        if quiet is None:
            return
        if quiet.settled:
            quiet.longest = max(quiet.longest, quiet.seconds)
        quiet.seconds = 0.0
        if isinstance(event, Heartbeat):
            quiet.settled = event.settled

    def end(self, job: str) -> None:
        """A job is over."""
        self._jobs.pop(job, None)

    def look(self, now: float) -> Iterator[tuple[str, float]]:
        """The jobs that hang, each with its seconds without progress; to be called after all that came was heard.

        Args:
            now: seconds of a clock that never goes back.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        for job, quiet in self._jobs.items():
            quiet.seconds += passed
            limit = max(self._limit, PATIENCE * quiet.longest) if quiet.settled else PATIENCE * self._limit
            if quiet.seconds >= limit:
                yield job, quiet.seconds
