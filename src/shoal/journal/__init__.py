"""What happened in a study, in SQLite: every change of state is recorded before it is acted on."""

from shoal.journal.rows import Ask, JobRow, Run, TrialRow
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal

__all__ = ["Ask", "JobRow", "Journal", "JournalView", "Run", "TrialRow"]
