"""Jobs that share a machine: one per device, several side by side, trials as one model, packs of models; in one run.

HyperSack's search spaces, reduced: a job trains for a second on a CPU slot. With a GPU the models are HyperSack's.

- sp1       24 jobs: ShuffleNet, MobileNet, ViT, DeiT and two ResNets on CIFAR-10, two batch sizes, two learning rates
- sp2       24 jobs: BERT and two Pythias on IMDB, four batch sizes
- sp3       24 jobs: one ResNet, four batch sizes, six learning rates
- sp4       sp1 with twice as many learning rates
- arithmetic, memory, input, mixed    twelve trainings bound by one of these, or equally many by each

The rows of a search space take turns, in another order each round:

- plain processes      without Shoal: a pool of as many processes as devices, each trains one job at a time
- one job per device   policy "fifo", nothing fused or packed
- ff, ffd, wf, wfd     the knapsack policies; on a GPU also "mps + ff" ..., which CPU slots do not know
- by trial             policy "water_filling", which tries whether jobs gain by sharing a slot (Fluid, section 4.2.2)
- fusion               trials as one model, one job per device
- fusion + packing     everything: policy "auto", packing "cost", sharing "auto"

Each study measures models anew. The last line is one JSON object; the exit status is 1 if a figure is missed.

    python benchmarks/placement.py [sp1 sp2 ... mixed] [--rows ...] [--devices cpu:2] [--rounds 1] [--quick]
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from packs.pictures import look_for_data
from placed.figures import Figures, middle
from placed.mixes import MIXES
from placed.ours import ONE_JOB, ROWS, study
from placed.plain import PLAIN, plain_processes
from placed.spaces import Jobs, jobs

from shoal.core.errors import ShoalError
from shoal.host.discover import discover

NAMES = ("sp1", "sp2", "sp3", "sp4", *MIXES)
LEAST = 0.97
"""Least speed-up over one job per device."""


def main() -> int:
    options = arguments()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    found = [f"{device.name} ({device.kind})" for _, device in discover(options.devices)]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}; {', '.join(found)}")
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name in options.names:
        chosen = jobs(name, gpu=not options.devices.startswith("cpu"), quick=options.quick)
        print(f"\n{name}: {len(chosen.configs)} jobs, median of {options.rounds}")
        taken = measured(chosen, options, missed)
        table(taken)
        missed += judged(name, {row: each.makespan for row, each in taken.items()}, chosen.asked)
        figures[name] = {row: {key: round(x, 3) for key, x in asdict(each).items()} for row, each in taken.items()}
    missed = [] if options.quick else missed
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--devices", default="cuda" if torch.cuda.is_available() else "cpu:2")
    parser.add_argument("--rows", nargs="+", choices=(PLAIN, *ROWS), metavar="ROW", help="others than usual")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="SP1 with a few jobs of 24 samples; judges nothing")
    options = parser.parse_args()
    look_for_data(parser, quick=options.quick)
    options.names = options.names or (["sp1"] if options.quick else NAMES)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(NAMES)}")
    return options


def measured(chosen: Jobs, options: argparse.Namespace, missed: list[str]) -> dict[str, Figures]:
    """Run all rows in rounds; one that cannot be had is missed."""
    names = options.rows or chosen.rows
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(options.rounds):
            first = turn * len(names) // options.rounds
            for name in (*names[first:], *names[:first]):
                folder = Path(place) / f"{turn} {name}"
                try:
                    run = (
                        plain_processes(
                            chosen.task, chosen.configs, chosen.epochs, discover(options.devices), fork=options.quick
                        )
                        if name == PLAIN
                        else study(
                            ROWS[name], chosen.task, chosen.space, chosen.epochs, options.devices,
                            folder / "study", folder / "cache",
                        )
                    )  # fmt: skip
                except ShoalError as error:
                    missed.append(f"{name}: {error}")
                    continue
                runs[name].append(run)
                print(f" {name} {run.makespan:.1f} s,", end="", flush=True)
    print()
    return {name: middle(some) for name, some in runs.items() if some}


def table(taken: Mapping[str, Figures]) -> None:
    base = taken[ONE_JOB].makespan if ONE_JOB in taken else None
    print(f"{'':20} {'makespan':>9} {'speed-up':>8} {'occupancy':>9} {'sampling':>8} {'jobs':>5} {'on a device':>11} "
          f"{'gap ms':>6} {'failed':>6}")  # fmt: skip
    for name, row in taken.items():
        gain = f"{base / row.makespan:7.2f}x" if base else ""
        print(f"{name:20} {row.makespan:9.1f} {gain:>8} {row.occupancy:9.0%} {row.sampling:8.0%} {row.jobs:5.0f} "
              f"{row.side_by_side:11.0f} {row.gap:6.1f} {row.failed:6.0f}", flush=True)  # fmt: skip


def judged(name: str, makespans: Mapping[str, float], asked: Mapping[str, float]) -> list[str]:
    """Return what rows lack over one job per device; nothing where that was not measured."""
    gains = {row: makespans[ONE_JOB] / seconds for row, seconds in makespans.items() if ONE_JOB in makespans}
    return [
        f"{name}: {row} {gain:.2f}x of {ONE_JOB}, asked {asked.get(row, LEAST)}x"
        for row, gain in gains.items()
        if row != PLAIN and gain < asked.get(row, LEAST)
    ]


if __name__ == "__main__":
    sys.exit(main())
