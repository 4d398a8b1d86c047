"""The ways of Shoal itself to get jobs done."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import shoal
from placed.figures import Figures
from placed.sharing import gap, side_by_side
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.overview import overview

__all__ = ["BY_TRIAL", "FUSION_AND_PACKING", "ONE_JOB", "ROWS", "Row", "study"]

ONE_JOB, FUSION_AND_PACKING, BY_TRIAL = "one job per device", "fusion + packing", "by trial"
KNAPSACKS = ("ff", "ffd", "wf", "wfd")


@dataclass(frozen=True)
class Row:
    """Arguments of `shoal.tune`."""

    policy: str
    packing: str = "none"
    fuse: bool = False
    sharing: str = "plain"


ROWS: Mapping[str, Row] = {
    ONE_JOB: Row("fifo"),
    **{policy: Row(policy) for policy in KNAPSACKS},
    **{f"mps + {policy}": Row(policy, sharing="mps") for policy in KNAPSACKS},
    BY_TRIAL: Row("water_filling"),
    "fusion": Row("fifo", fuse=True),
    FUSION_AND_PACKING: Row("auto", "cost", fuse=True, sharing="auto"),
}
"""By name. CPU slots know no MPS."""


def study(
    row: Row, task: shoal.Task, space: Mapping[str, Any], epochs: int, devices: str, directory: Path, cache: Path
) -> Figures:
    """Run all jobs as a study.

    Args:
        row: How.
        task: What to train.
        space: All jobs as a search space.
        epochs: Epochs of each job.
        devices: Devices, as of `shoal.tune`.
        directory: Folder of the study.
        cache: Folder of the job history and of the findings of fusion, empty at first.
    """
    os.environ["SHOAL_CACHE"] = str(cache)
    began = time.perf_counter()
    shoal.tune(
        task,
        space,
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs=epochs),
        policy=row.policy,
        packing=row.packing,
        fuse=row.fuse,
        devices=devices,
        sharing=row.sharing,
        directory=directory,
        show_progress=False,
    )
    makespan = time.perf_counter() - began
    with JournalView.read(directory) as journal:
        usages = overview(journal, time.time()).usage
        jobs = journal.jobs()
        trained = [job for job in jobs if job.purpose is Purpose.TRAIN]
        failed = StudyStatistics(journal).states()[TrialState.FAILED]
    spent = {purpose: sum(usage.seconds.get(purpose, 0.0) for usage in usages) for purpose in Purpose}
    return Figures(
        makespan,
        fmean(usage.occupancy for usage in usages),
        (spent[Purpose.SIGNATURE] + spent[Purpose.PROFILE]) / sum(spent.values()),
        len(trained),
        side_by_side(trained),
        1e3 * gap(jobs),
        failed,
    )
