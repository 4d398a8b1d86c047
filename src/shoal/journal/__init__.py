"""What happened in a study, in SQLite: every change of state is recorded before it is acted on."""

from shoal.journal.audit import Violation, over_promised
from shoal.journal.rows import Ask, DeviceRow, JobRow, Promise, Run, TrialRow
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal

__all__ = [
    "Ask",
    "DeviceRow",
    "JobRow",
    "Journal",
    "JournalView",
    "Promise",
    "Run",
    "TrialRow",
    "Violation",
    "over_promised",
]
