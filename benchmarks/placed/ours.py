"""The rows of Shoal itself."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import shoal
from placed.figures import Figures
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.overview import overview

__all__ = ["FUSION", "FUSION_AND_PACKING", "ONE_JOB", "PACKED", "SECOND", "Row", "rows", "study"]

ONE_JOB, FUSION, FUSION_AND_PACKING = "one job per device", "fusion", "fusion + packing"
SECOND = "second study"
KNAPSACKS = ("ff", "ffd", "wf", "wfd")
PACKED = tuple(f"mps + {policy}" for policy in KNAPSACKS)
"""On GPUs; CPU slots know no MPS."""


@dataclass(frozen=True)
class Row:
    """What `shoal.tune` is asked for."""

    policy: str
    packing: str = "none"
    fuse: bool = False
    sharing: str = "plain"


def rows(gpu: bool) -> Mapping[str, Row]:
    """By name, in the order of the table."""
    everything = Row("auto", "cost", fuse=True, sharing="auto")
    knapsacks = (
        {"concurrent": Row("ff")} | {name: Row(name[6:], sharing="mps") for name in PACKED}
        if gpu
        else {policy: Row(policy) for policy in KNAPSACKS}
    )
    return {
        ONE_JOB: Row("fifo"),
        **knapsacks,
        FUSION: Row("fifo", fuse=True),
        FUSION_AND_PACKING: everything,
        SECOND: everything,
    }


def study(
    row: Row,
    task: shoal.Task | Callable[[Any], None],
    space: Mapping[str, Any],
    epochs: int,
    devices: str,
    directory: Path,
    cache: Path,
) -> Figures:
    """All jobs as a study.

    Args:
        row: says how.
        task: what to train, or a program that trains.
        space: all jobs as a search space.
        epochs: of each job.
        devices: as of `shoal.tune`.
        directory: of the study.
        cache: of the job history and of what fusion has found out; there may be none yet.
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
        seen = overview(journal, time.time())
        trained = sum(job.purpose is Purpose.TRAIN for job in journal.jobs())
        failed = StudyStatistics(journal).states()[TrialState.FAILED]
    spent = {purpose: sum(usage.seconds.get(purpose, 0.0) for usage in seen.usage) for purpose in Purpose}
    return Figures(
        makespan,
        fmean(usage.occupancy for usage in seen.usage),
        sum(spent.values()),
        spent[Purpose.SIGNATURE],
        spent[Purpose.PROFILE],
        trained,
        failed,
    )
