"""Where jobs run: one job per device, several side by side, trials as one model, packs of models; in one run.

96 jobs like those of HyperSack's first search space: six vision models, four batch sizes, four learning rates, on
CIFAR-10. Without a GPU models, pictures and training sets are so small that a job takes a second.

- plain processes      without Shoal: a pool of as many processes as devices, each trains one job at a time
- one job per device   policy "fifo", nothing fused or packed
- concurrent           policy "ff", several jobs on a GPU, without MPS
- mps + ff, ffd, ...   the knapsack policies, MPS. CPU slots know neither: there the rows are "ff", "ffd", "wf", "wfd"
- fusion               trials as one model, one job per device
- fusion + packing     everything: policy "auto", packing "cost", sharing "auto"
- second study         the same again, with the job history of the row before; all other rows measure models anew
- dispatch             500 starts of jobs that do nothing: what lies between two jobs of a slot
- mixes                on CPU slots: trainings bound by arithmetic, by memory or by input (slow storage), and mixes of
                       these, with sharing found by trial and with one job per slot; see `placed/mixes.py`

Rows take turns, in another order each round; figures are medians. The last line is one JSON object; the exit status is
1 if a figure is missed.

    python benchmarks/placement.py [--devices cpu:2] [--jobs 96] [--rounds 1] [--rows ...] [--quick]
    python benchmarks/placement.py --mixes "input" "arithmetic + input" [--devices cpu:2] [--rounds 1]
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch
from packs.pictures import look_for_data
from placed import mixes
from placed.dispatch import gaps
from placed.figures import Figures, middle
from placed.jobs import FULL, QUICK, SMALL, Pictures, space
from placed.ours import FUSION_AND_PACKING, ONE_JOB, PACKED, SECOND, rows, study
from placed.plain import plain_processes

from shoal.core.errors import ShoalError
from shoal.host.discover import discover

PLAIN, DISPATCH, MIXES = "plain processes", "dispatch", "mixes"
LEAST = 0.97
"""Of the speed of one job per slot, for every row on CPU slots."""
LEAST_ON_GPU = {"packing": 2.8, "fusion and packing": 6.0}
"""Over one job per device: the best of `PACKED`, and everything."""
MOST_SECONDS = 0.050
"""Of deciding and dispatching, per start."""
STARTS = 500
QUICK_ROWS = [PLAIN, FUSION_AND_PACKING, DISPATCH]
"""Of a quick run."""


def main() -> int:
    options = arguments()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    sizes = options.sizes
    print(machine(options), flush=True)
    figures: dict[str, Any] = {}
    missed: list[str] = []
    if not {DISPATCH, MIXES}.issuperset(options.rows):
        print(f"{sizes.jobs} jobs: {', '.join(sizes.models)}; batches of {', '.join(map(str, sizes.batch_sizes))}; "
              f"{sizes.rates} learning rates; {sizes.epochs} epochs of {sizes.samples} pictures of {sizes.pixels} x "
              f"{sizes.pixels}, {sizes.valid} to validate; median of {options.rounds}")  # fmt: skip
        taken = measured(options, missed)
        table(taken)
        figures = {name: {key: round(value, 3) for key, value in asdict(row).items()} for name, row in taken.items()}
        missed += judged({name: row.makespan for name, row in taken.items()}, options.gpu)
    if DISPATCH in options.rows:
        figures[DISPATCH] = dispatched(options, missed)
    if MIXES in options.rows:
        figures[MIXES] = mixed(options, missed)
    missed = [] if options.quick else missed
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", default="cuda" if torch.cuda.is_available() else "cpu:2")
    parser.add_argument("--jobs", type=int, default=96, help="a multiple of models times batch sizes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, help="of the training set")
    parser.add_argument("--epochs", type=int, help="of each job")
    parser.add_argument("--batch-sizes", nargs="*", type=int, help="others than HyperSack's")
    parser.add_argument("--rows", nargs="*", help="some of them, by name")
    parser.add_argument("--mixes", nargs="+", choices=mixes.MIXES, metavar="MIX", help="of the row mixes, alone")
    parser.add_argument(
        "--quick", action="store_true", help="4 jobs of 24 pictures, 10 starts, few rows; judges nothing"
    )
    options = parser.parse_args()
    look_for_data(parser, quick=options.quick)
    options.gpu = not options.devices.startswith("cpu")
    known = [PLAIN, *rows(options.gpu), DISPATCH, *([] if options.gpu else [MIXES])]
    options.rows = options.rows or ([MIXES] if options.mixes else QUICK_ROWS if options.quick else known)
    if unknown := [name for name in options.rows if name not in known]:
        parser.error(f"--rows: there is no {unknown[0]!r} on {options.devices}; there are {', '.join(known)}")
    if SECOND in options.rows and FUSION_AND_PACKING not in options.rows:
        parser.error(f"--rows: {SECOND!r} goes on with the history of {FUSION_AND_PACKING!r}; name that too")
    options.mixes = options.mixes or (mixes.QUICK if options.quick else list(mixes.MIXES))
    try:
        sizes = FULL if options.gpu else SMALL
        sizes = replace(sizes, batch_sizes=tuple(options.batch_sizes or sizes.batch_sizes))
        options.sizes = QUICK if options.quick else sizes.with_jobs(options.jobs)
    except ValueError as error:
        parser.error(f"--jobs {error}")
    options.sizes = options.sizes.changed(samples=options.samples, epochs=options.epochs)
    options.rounds = 1 if options.quick else options.rounds
    return options


def machine(options: argparse.Namespace) -> str:
    """What the figures are measured on."""
    found = [f"{device.name} ({device.kind})" for _, device in discover(options.devices)]
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}; {', '.join(found)}"
    )


def measured(options: argparse.Namespace, missed: list[str]) -> dict[str, Figures]:
    """All rows but dispatch, in rounds; one that cannot be had is missed."""
    task = Pictures(options.sizes)
    asked = rows(options.gpu)
    names = [name for name in (PLAIN, *asked) if name in options.rows]
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    leading = [name for name in names if name != SECOND]
    sizes = options.sizes
    shoal_study = partial(study, task=task, space=space(sizes), epochs=sizes.epochs, devices=options.devices)
    with tempfile.TemporaryDirectory() as place:
        for turn in range(options.rounds):
            print(f"round {turn + 1} of {options.rounds}:", end="", flush=True)
            folder = Path(place) / str(turn)
            first = turn * len(leading) // options.rounds
            for name in (*leading[first:], *leading[:first]):
                cache = folder / f"history of {name}"
                for row in (name, SECOND) if name == FUSION_AND_PACKING and SECOND in names else (name,):
                    try:
                        run = (
                            plain_processes(task, discover(options.devices), fork=options.quick and not options.gpu)
                            if row == PLAIN
                            else shoal_study(asked[row], directory=folder / row, cache=cache)
                        )
                    except ShoalError as error:
                        missed.append(f"{row}: {error}")
                        continue
                    runs[row].append(run)
                    print(f" {row} {run.makespan:.1f} s,", end="", flush=True)
            print()
    return {name: middle(some) for name, some in runs.items() if some}


def table(taken: Mapping[str, Figures]) -> None:
    base = taken[ONE_JOB].makespan if ONE_JOB in taken else None
    print(f"{'':20} {'makespan':>9} {'speed-up':>8} {'occupancy':>9} {'device s':>9} {'looking s':>9} "
          f"{'profiling s':>11} {'jobs':>5} {'failed':>6}")  # fmt: skip
    for name, row in taken.items():
        gain = f"{base / row.makespan:7.2f}x" if base else ""
        print(f"{name:20} {row.makespan:9.1f} {gain:>8} {100 * row.occupancy:8.0f}% {row.device_seconds:9.1f} "
              f"{row.looking:9.1f} {row.profiling:11.1f} {row.jobs:5.0f} {row.failed:6.0f}", flush=True)  # fmt: skip


def judged(makespans: Mapping[str, float], gpu: bool) -> list[str]:
    """What rows lack over one job per device; nothing where that was not measured."""
    if ONE_JOB not in makespans:
        return []
    gains = {name: makespans[ONE_JOB] / seconds for name, seconds in makespans.items() if name != PLAIN}
    if not gpu:
        return [f"{name}: {gain:.2f}x of {ONE_JOB}, asked {LEAST}x" for name, gain in gains.items() if gain < LEAST]
    best = {
        "packing": max((gains[name] for name in PACKED if name in gains), default=None),
        "fusion and packing": gains.get(FUSION_AND_PACKING),
    }
    return [
        f"{what}: {best[what]:.2f}x over {ONE_JOB}, asked {least}x"
        for what, least in LEAST_ON_GPU.items()
        if best[what] is not None and best[what] < least
    ]


def dispatched(options: argparse.Namespace, missed: list[str]) -> dict[str, float]:
    """What lies between two jobs of a slot, in milliseconds."""
    starts = 10 if options.quick else STARTS
    with tempfile.TemporaryDirectory() as folder:
        found = gaps(starts, "auto", Path(folder))
    columns = {
        "until the engine hears of the end": [gap.heard for gap in found],
        "until it tells the back end to start": [gap.decided for gap in found],
        "until the runner's first line": [gap.begun for gap in found],
        "decision and dispatch": [gap.overhead for gap in found],
    }
    print(f"\ndispatch: {len(found)} starts on two CPU slots, policy auto; milliseconds")
    print(f"{'':38} {'median':>7} {'mean':>7} {'p99':>7}")
    for name, seconds in columns.items():
        print(f"{name:38} {1e3 * median(seconds):7.2f} {1e3 * fmean(seconds):7.2f} {1e3 * last_percent(seconds):7.2f}")
    overhead = columns["decision and dispatch"]
    if fmean(overhead) > MOST_SECONDS:
        missed.append(f"dispatch: {1e3 * fmean(overhead):.1f} ms a start, asked {1e3 * MOST_SECONDS:.0f} ms")
    kinds = {"median": median(overhead), "mean": fmean(overhead), "p99": last_percent(overhead)}
    return {name: round(1e3 * seconds, 3) for name, seconds in kinds.items()}


def mixed(options: argparse.Namespace, missed: list[str]) -> dict[str, dict[str, float]]:
    """Median seconds of each mix and policy."""
    with tempfile.TemporaryDirectory() as folder:
        found = mixes.measured(options.mixes, options.devices, options.rounds, Path(folder), quick=options.quick)
    print(f"\nmixes: median of {options.rounds}; machine's load {os.getloadavg()[0]:.1f}")
    mixes.table(found, discover(options.devices))
    seconds = mixes.makespans(found)
    missed += mixes.judged(seconds)
    return {name: {policy: round(each, 3) for policy, each in runs.items()} for name, runs in seconds.items()}


def last_percent(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[-1]


if __name__ == "__main__":
    sys.exit(main())
