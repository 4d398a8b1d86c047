"""What a study ends with in which every trial has failed."""

from shoal.errors import StudyFailedError
from shoal.journal.view import JournalView
from shoal.planner.fatal import remedy
from shoal.report.causes import causes
from shoal.report.device_text import cause_lines
from shoal.trial import TrialState

__all__ = ["check_results"]


def check_results(journal: JournalView) -> None:
    """Refuse to hand back a study that brought nothing.

    Args:
        journal: of a study that has ended.

    Raises:
        StudyFailedError: every trial has failed.
    """
    count = journal.states()[TrialState.FAILED]
    if not count or count < sum(journal.states().values()):
        return
    found = causes(journal.failed())
    lines = "\n".join(f"  {line}" for line in cause_lines(found))
    raise StudyFailedError(
        f"{'the only trial' if count == 1 else f'all {count} trials'} failed:\n{lines}\n\n"
        f"Trial {found[0].trials[0]}: {found[0].reason}\n\n"
        f"Look at all of them with: shoal trials {journal.directory}\n"
        f"{remedy(journal.directory, kept=journal.study.get('kept', False), lost=True)}",
        journal.directory,
    )
