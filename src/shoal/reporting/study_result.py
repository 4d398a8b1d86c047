"""What a study ends with in which every trial has failed, or the first ones have."""

from shoal.core.cause import Cause, causes
from shoal.core.errors import StudyFailedError
from shoal.core.trial import TrialState
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.remedy import after_mending, command
from shoal.reporting.device_text import cause_line, cause_lines

__all__ = ["check_results", "first_failed"]


def check_results(journal: JournalView) -> None:
    """Refuse to hand back a study that brought nothing.

    Args:
        journal: of a study that has ended.

    Raises:
        StudyFailedError: every trial has failed.
    """
    states = StudyStatistics(journal).states()
    count = states[TrialState.FAILED]
    if not count or count < sum(states.values()):
        return
    found = causes(journal.failed())
    lines = "\n".join(f"  {line}" for line in cause_lines(found))
    raise _failed(
        journal,
        f"{'the only trial' if count == 1 else f'all {count} trials'} failed:\n{lines}",
        found[0],
        f"Look at all of them with: {command('trials', journal.directory)}",
        lost=True,
    )


def first_failed(cause: Cause, journal: JournalView) -> StudyFailedError:
    """What a study ends with whose first trials fail alike.

    Args:
        cause: what they failed of.
        journal: of the study, in which that is recorded.
    """
    return _failed(
        journal,
        f"{len(cause.trials)} trials failed alike, and no trial has reported anything:\n  {cause_line(cause)}",
        cause,
        "Nothing is lost: the other trials stay open. The study tries those first when it goes on, and ends so again "
        "if as many of them fail alike.",
        lost=StudyStatistics(journal).states()[TrialState.FAILED] > 0,
    )


def _failed(journal: JournalView, what: str, cause: Cause, then: str, *, lost: bool) -> StudyFailedError:
    remedy = after_mending(journal.directory, kept=journal.study.get("kept", False), lost=lost)
    first = f"Trial {cause.trials[0]}: {cause.reason}"
    return StudyFailedError(f"{what}\n\n{first}\n\n{then}\n{remedy}", journal.directory)
