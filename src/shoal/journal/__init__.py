"""The journal of a study, in SQLite: every change of state is recorded before it takes effect."""

from shoal.journal.audit import Overcommitment, overcommitments
from shoal.journal.rows import DeviceRow, JobRow, Reservation, Run, TrialRow
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal

__all__ = [
    "DeviceRow",
    "JobRow",
    "Journal",
    "JournalView",
    "Overcommitment",
    "Reservation",
    "Run",
    "StudyStatistics",
    "TrialRow",
    "overcommitments",
]
