"""Reports on a study from its journal: progress, tables, grid, data frame."""

from shoal.reporting.axis import Axis
from shoal.reporting.grid import Cell, HeatMap, StudyGrid, grid_json, study_grid
from shoal.reporting.progress import Progress, progress
from shoal.reporting.ranking import front, ranked
from shoal.reporting.snapshot import Best, DeviceUse, Failing, JobUse, Snapshot, snapshot
from shoal.reporting.table import best_table, dataframe, snapshot_json, status_table, trial_json, trials_table

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
