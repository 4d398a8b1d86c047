"""How long epochs take of jobs that have a device to themselves, held against what their profiles say."""

from dataclasses import dataclass

from shoal.core.demand import Profile
from shoal.core.event import Reported
from shoal.cost.correct import with_seconds
from shoal.cost.estimate import fetching, seconds

__all__ = ["ProfileDrift"]

ENOUGH = 2
"""Epochs alike that are compared, by the shortest: a single one may have been disturbed by other programs."""


@dataclass
class _Course:
    """Epochs of a job that were alike: of the same trials, beside no other job."""

    trials: frozenset[int]
    counted: int = 0
    least: float = float("inf")


class ProfileDrift:
    """Finds profiles whose times are wrong.

    The first epoch of a job, and each after its members or its company changed, does not count: something is started,
    built or compiled in it.
    """

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}

    def interrupt(self, job: str) -> None:
        """A job is over, or has got company: what it showed so far does not go on."""
        self._courses.pop(job, None)

    def epoch(self, event: Reported, profile: Profile) -> Profile | None:
        """Members of a job have finished an epoch together, beside no other job or array.

        Args:
            event: their reports.
            profile: of their key where they run.

        Returns:
            A profile that is right; None if it is right, or that is not known yet.
        """
        trials = frozenset(report.trial for report in event.reports)
        course = self._courses.get(event.job)
        if course is None or course.trials != trials or len({report.epoch for report in event.reports}) > 1:
            self._courses[event.job] = _Course(trials)
            return None
        took = sum(report.seconds for report in event.reports)
        if not 0 < took < float("inf"):
            return None
        course.counted, course.least = course.counted + 1, min(course.least, took)
        if course.counted < ENOUGH:
            return None
        expected = seconds(profile, [1] * len(trials)) + fetching(profile, [1])
        compiled = max(profile.compiled_gain.values(), default=1.0) > 1
        if course.least < expected and compiled:  # profiles are of steps that are not
            return None
        return with_seconds(profile, expected, course.least)
