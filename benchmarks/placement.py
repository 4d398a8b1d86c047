"""Jobs that share a machine: one per device, several side by side, trials as one model, packs of models; in one run.

HyperSack's search spaces, reduced: a job trains for a second on a CPU slot. With a GPU the models are HyperSack's.

- sp1       24 jobs: ShuffleNet, MobileNet, ViT, DeiT and two ResNets on CIFAR-10, two batch sizes, two learning rates
- sp2       24 jobs: BERT and two Pythias on IMDB, four batch sizes
- sp3       24 jobs: one ResNet, four batch sizes, six learning rates
- sp4       sp1 with twice as many learning rates
- arithmetic, memory, input, mixed    twelve trainings bound by one of these, or equally many by each

The rows of a search space follow one another:

- plain processes      without Shoal: a pool of as many processes as slots, each trains one job at a time
- one job per device   policy "fifo", nothing fused or packed
- ff, ffd, wf, wfd     the knapsack policies; on a GPU also "mps + ff" ..., which CPU slots do not know
- by trial             policy "water_filling", which tries whether jobs gain by sharing a slot (Fluid, section 4.2.2)
- fusion               trials as one model, one job per device
- fusion + packing     everything: policy "auto", packing "cost", sharing "auto"

Each study measures models anew. The last line is one JSON object; the exit status is 1 if a row fails, or misses what
`papers/hypersack.py` asks on two CPU slots, or `placed/spaces.py` on a GPU.

    python benchmarks/placement.py [sp1 sp2 ... mixed] [--rows ...] [--devices cpu:2] [--quick]
"""

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from packs.pictures import look_for_data
from papers.experiment import missed_of
from papers.hypersack import EXPERIMENTS
from placed.sharing import gap, side_by_side
from placed.spaces import BY_TRIAL, EVERYTHING, MIXES, ONE_JOB, PLAIN, Jobs, jobs
from report import report
from rivals.plain_search import Asked, in_processes

import shoal
from shoal.core.errors import ShoalError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.host.discover import discover
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.overview import overview

NAMES = ("sp1", "sp2", "sp3", "sp4", *MIXES)
KNAPSACKS = ("ff", "ffd", "wf", "wfd")
ROWS: Mapping[str, Mapping[str, Any]] = {
    ONE_JOB: {"policy": "fifo"},
    **{policy: {"policy": policy} for policy in KNAPSACKS},
    **{f"mps + {policy}": {"policy": policy, "sharing": "mps"} for policy in KNAPSACKS},
    BY_TRIAL: {"policy": "water_filling"},
    "fusion": {"policy": "fifo", "fuse": True},
    EVERYTHING: {"policy": "auto", "packing": "cost", "fuse": True, "sharing": "auto"},
}
"""Way of Shoal -> arguments of `shoal.tune`, which by default neither packs nor fuses nor limits."""
COLUMNS = ("makespan", "speed_up", "occupancy", "sampling", "jobs", "side_by_side", "gap", "failed")
"""Seconds from the call to the last result; times as fast as one job per device; mean part of the compute that was
reserved; part of the busy seconds in which models were inspected and measured; jobs that trained; the most trainings
that a device held at a time; median milliseconds between two jobs of a device; configurations that failed."""
Figures = dict[str, float]


def main() -> int:
    options = arguments()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    import_module("torch._dynamo")  # takes seconds, which each forked process would pay that makes its first optimizer
    found = [f"{device.name} ({device.kind})" for _, device in discover(options.devices)]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}; {', '.join(found)}")
    figures: dict[str, dict[str, Figures]] = {}
    missed: list[str] = []
    for name in options.names:
        chosen = jobs(name, gpu=not options.devices.startswith("cpu"), quick=options.quick)
        rows = figures[name] = {}
        for row in options.rows or chosen.rows:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    rows[row] = run(row, chosen, options, Path(folder))
            except ShoalError as error:
                missed.append(f"{name}: {row}: {error}")
        print(f"\n{name:20}" + "".join(f"{column:>13}" for column in COLUMNS))
        for row, each in rows.items():
            if ONE_JOB in rows:
                each["speed_up"] = rows[ONE_JOB]["makespan"] / each["makespan"]
            each.update({column: round(value, 3) for column, value in each.items()})
            print(f"{row:20}" + "".join(f"{each.get(column, '–'):>13}" for column in COLUMNS), flush=True)
        missed += judged(name, rows, chosen.asked)
    missed += missed_of(EXPERIMENTS, None, figures) if options.devices == "cpu:2" else []
    return report(figures, [] if options.quick else missed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--devices", default="cuda" if torch.cuda.is_available() else "cpu:2")
    parser.add_argument("--rows", nargs="+", choices=(PLAIN, *ROWS), metavar="ROW", help="others than usual")
    parser.add_argument("--quick", action="store_true", help="SP1 with a few jobs of 24 samples; judges nothing")
    options = parser.parse_args()
    look_for_data(parser, quick=options.quick)
    options.names = options.names or (["sp1"] if options.quick else NAMES)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(NAMES)}")
    return options


def run(row: str, chosen: Jobs, options: argparse.Namespace, folder: Path) -> Figures:
    """Get all jobs done in one way."""
    if row == PLAIN:
        return plain(chosen, options.devices, folder)
    os.environ["SHOAL_CACHE"] = str(folder / "cache")
    began = time.perf_counter()
    shoal.tune(
        chosen.task, chosen.space, metric="valid_loss", mode="min", algorithm=shoal.Grid(epochs=chosen.epochs),
        devices=options.devices, directory=folder / "study", show_progress=False,
        **{"packing": "none", "fuse": False, "sharing": "plain", **ROWS[row]},
    )  # fmt: skip
    makespan = time.perf_counter() - began
    with JournalView.read(folder / "study") as journal:
        usages = overview(journal, time.time()).usage
        ran = journal.jobs()
        failed = StudyStatistics(journal).states()[TrialState.FAILED]
    trained = [job for job in ran if job.purpose is Purpose.TRAIN]
    spent = {purpose: sum(usage.seconds.get(purpose, 0.0) for usage in usages) for purpose in Purpose}
    return {
        "makespan": makespan,
        "occupancy": fmean(usage.occupancy for usage in usages),
        "sampling": (spent[Purpose.SIGNATURE] + spent[Purpose.PROFILE]) / sum(spent.values()),
        "jobs": len(trained),
        "side_by_side": side_by_side(trained),
        "gap": 1e3 * gap(ran),
        "failed": failed,
    }


def plain(chosen: Jobs, devices: str, folder: Path) -> Figures:
    """Get all jobs done by a forked process for each slot of the CPU, or by one that begins anew on a GPU."""
    names = [device.torch_name for _, device in discover(devices)]
    if len(set(names)) > 1:
        raise ShoalError("the pool has one GPU at most; leave it out with --rows, or name one with --devices")
    method = "fork" if names[0] == "cpu" else "spawn"  # a process that has used a GPU cannot be forked
    device, grid = torch.device(names[0]), shoal.Grid(epochs=chosen.epochs)
    began = time.perf_counter()
    asked = Asked(chosen.task, chosen.space, grid, "valid_loss", "min", seed=0, device=device)
    losses = [loss for _, loss in in_processes(asked, folder, len(names), method).timeline]  # of one epoch each
    makespan = time.perf_counter() - began
    return {"makespan": makespan, "jobs": len(losses), "failed": sum(not isfinite(loss) for loss in losses)}


def judged(name: str, rows: Mapping[str, Figures], asked: Mapping[str, float]) -> list[str]:
    """Return what ways of Shoal lack over one job per device; nothing where that was not measured."""
    return [
        f"{name}: {row} {rows[row]['speed_up']:.2f}x of {ONE_JOB}, asked {least}x"
        for row, least in asked.items()
        if rows.get(row, {}).get("speed_up", least) < least
    ]


if __name__ == "__main__":
    sys.exit(main())
