"""Which failures end a study, as every other job would end so too."""

from collections.abc import Sequence
from pathlib import Path

from shoal.core.array import Member
from shoal.core.cause import Cause, causes
from shoal.core.errors import ShoalError, StorageFullError, TaskError, UnusableTaskError
from shoal.core.event import ArrayFailed, Ended, Outcome
from shoal.core.job import Purpose
from shoal.remedy import after_mending, command
from shoal.study.trials import TrialTable

__all__ = ["ALIKE", "FirstFailures", "fatal_failure"]

ALIKE = 5
"""So many trials that fail of one cause, each by itself, end a study in which no trial has reported anything."""


def fatal_failure(
    failed: Ended | ArrayFailed,
    purpose: Purpose,
    members: Sequence[Member],
    trials: TrialTable,
    directory: Path,
    *,
    kept: bool,
) -> ShoalError | None:
    """The error that ends the study, if there is to be one.

    A task that breaks its contract does so for all trials, unless one has got past it. What trials that users have
    added meet with, whose configs may be unlike all others, is no matter of the others.

    Args:
        failed: what was said of a job, or of some of its arrays.
        purpose: of the job.
        members: of what failed.
        trials: of the study.
        directory: of the study.
        kept: see `after_mending`.
    """
    if failed.outcome is Outcome.STORAGE_FULL:
        return StorageFullError(
            f"{failed.message}\nEverything recorded is intact; free some space, then: {command('resume', directory)}"
        )
    added = [member.trial for member in members if member.trial.is_added]
    if failed.outcome is Outcome.UNUSABLE and not any(trial.origin for trial in added):
        return UnusableTaskError(f"{failed.message}\nNothing is lost. {after_mending(directory, kept=kept)}")
    for_all = purpose is Purpose.SURVEY or not any(x.epoch for x in trials)
    if failed.outcome is Outcome.REJECTED and for_all and members and not added:
        first, *others = members
        company = f" and {len(others)} more" if others else ""
        config = dict(first.trial.config)
        return TaskError(f"{failed.message}\nIt was met with trial {first.trial.number}{company}: {config}")
    return None


class FirstFailures:
    """Notices that the first trials of a study fail of one cause: `ALIKE` of them, each by itself.

    Once any trial of the study has reported anything it notices nothing more, and failures are a matter of retries. So
    are those of trials that it has ended an earlier run on.

    Args:
        trials: of the study.
    """

    def __init__(self, trials: TrialTable) -> None:
        self._trials = trials
        self._failures: dict[int, str] = {}
        self._over = False

    def reported(self) -> None:
        """A trial has reported a value, so not all fail."""
        self._over = True
        self._failures.clear()

    def note(self, number: int, message: str) -> None:
        """A trial has failed, and nothing but the trial itself can be to blame.

        Args:
            number: the trial's.
            message: all that was said of it.
        """
        if not self._over and number not in self._trials.tried:
            self._failures[number] = message

    def alike(self) -> Cause | None:
        """What the study is to end of; None if it is to go on."""
        most = next(iter(causes(sorted(self._failures.items()))), None)
        return most if most is not None and len(most.trials) >= ALIKE else None
