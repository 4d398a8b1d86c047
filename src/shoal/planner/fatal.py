"""Which failures end a study, as every other job would end so too."""

from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ShoalError, StorageFullError, TaskError, UnusableTaskError
from shoal.planner.event import Dropped, Ended, Outcome
from shoal.planner.job import Member, Purpose
from shoal.planner.standings import Standings

__all__ = ["fatal"]


def fatal(
    failed: Ended | Dropped, purpose: Purpose, members: Sequence[Member], trials: Standings, directory: Path
) -> ShoalError | None:
    """The error that ends the study, if there is to be one.

    A task that breaks its contract does so for all trials, unless one has got past it.

    Args:
        failed: what was said of a job, or of some of its arrays.
        purpose: of the job.
        members: of what failed.
        trials: of the study.
        directory: of the study.
    """
    if failed.outcome is Outcome.STORAGE_FULL:
        return StorageFullError(
            f"{failed.message}\nEverything recorded is intact; free some space, then: shoal resume {directory}"
        )
    if failed.outcome is Outcome.UNUSABLE:
        return UnusableTaskError(
            f"{failed.message}\nNothing is lost; once that is mended, go on with: shoal resume {directory}"
        )
    for_all = purpose is Purpose.SURVEY or not any(x.epoch for x in trials)
    if failed.outcome is Outcome.REJECTED and for_all and members:
        first, *others = members
        company = f" and {len(others)} more" if others else ""
        config = dict(first.trial.config)
        return TaskError(f"{failed.message}\nIt was met with trial {first.trial.number}{company}: {config}")
    return None
