"""What the journal says, for people and programs: progress, tables, a data frame."""

from shoal.report.axis import Axis
from shoal.report.frame import dataframe
from shoal.report.grid import Cell, StudyGrid, grid_json, study_grid
from shoal.report.heat_map import HeatMap
from shoal.report.progress import Progress, progress
from shoal.report.ranking import front, ranked
from shoal.report.snapshot import Best, DeviceUse, Failing, JobUse, Snapshot, snapshot
from shoal.report.table import best_table, snapshot_json, status_table, trial_json, trials_table

__all__ = [
    "Axis",
    "Best",
    "Cell",
    "DeviceUse",
    "Failing",
    "HeatMap",
    "JobUse",
    "Progress",
    "Snapshot",
    "StudyGrid",
    "best_table",
    "dataframe",
    "front",
    "grid_json",
    "progress",
    "ranked",
    "snapshot",
    "snapshot_json",
    "status_table",
    "study_grid",
    "trial_json",
    "trials_table",
]
