"""What the journal says, for people and programs: progress, tables, a data frame."""

from shoal.report.frame import dataframe
from shoal.report.progress import Progress, progress
from shoal.report.snapshot import Best, DeviceUse, Snapshot, snapshot
from shoal.report.table import best_table, ranked, snapshot_json, status_table, trial_json, trials_table

__all__ = [
    "Best",
    "DeviceUse",
    "Progress",
    "Snapshot",
    "best_table",
    "dataframe",
    "progress",
    "ranked",
    "snapshot",
    "snapshot_json",
    "status_table",
    "trial_json",
    "trials_table",
]
