"""B models trained side by side: one after another, in processes, by `torch.func.vmap`, and as an array of Shoal.

Samples per second of all members together, each rival with its own copies of the models, interleaved in rounds; the
table shows medians, relative to members trained one after another. "Shoal" is what Shoal itself chooses by measurement.
Without a GPU the models are of reduced sizes, which the table says.

    python benchmarks/fusion.py [--models mlp lstm] [--sizes 1 2 4 8 16] [--largest] [--seconds 2]
                                [--dtype bfloat16] [--quick] [--output fusion.json] [--plot fusion.png]
    python benchmarks/fusion.py --overhead  # microseconds of a small step in a search's loop and in a plain one
"""

import argparse
import json
import logging
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fusion_figures import draw, gains, missed, table
from models import WORKLOADS
from rivals.arrays import Chosen, Compiled, Eager
from rivals.overhead import overhead
from rivals.processes import Processes
from rivals.race import OUT_OF_MEMORY, race
from rivals.rival import Cell, Rival
from rivals.serial import CompiledSerial, Serial
from rivals.vmap import VMap

RIVALS: dict[str, type[Rival]] = {
    rival.name: rival for rival in (Serial, CompiledSerial, Processes, VMap, Eager, Compiled, Chosen)
}
QUICK = ("mlp", "transformer")
MOST_OVERHEAD = 60.0
"""Microseconds asked of a step in a search's loop, beyond those of a plain loop."""
LARGEST = 1024
"""Members of an array on a GPU, if memory does not end before."""
USED = 0.85
"""Part of a GPU's memory that the largest array may take."""


def main() -> int:
    options = arguments()
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    if options.overhead:
        return tell_overhead(options, device)
    found = []
    for row in measured(options, device):
        print(table(row, after=found[-1] if found else None), flush=True)
        found.append(row)
        if options.output:
            options.output.write_text(json.dumps({"machine": machine(options, device), "cells": found}, indent=1))
    print(machine(options, device))
    if options.plot:
        draw(found, options.plot, machine(options, device))
    failures = missed(found, device.type, options.dtype, judge_speed=not options.quick)
    print(json.dumps({"of_serial": gains(found), "missed": failures}))
    return 1 if failures else 0


def tell_overhead(options: argparse.Namespace, device: torch.device) -> int:
    """Print what a small step takes in a search's loop; returns the exit status."""
    found = overhead(options.rounds * (1 if options.quick else 4))
    print(f"{'us a step':12} {'plain':>8} {'Shoal':>8} {'more':>8}")
    for name, row in found.items():
        print(f"{name:12} " + " ".join(f"{value:8.1f}" for value in row.values()))
    print(machine(options, device))
    failures = [
        f"{name}: {row['more']:.1f} us more than a plain loop, asked at most {MOST_OVERHEAD:.0f}"
        for name, row in found.items()
        if row["more"] > MOST_OVERHEAD and not options.quick
    ]
    print(json.dumps({"microseconds": found, "missed": failures}))
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", choices=list(WORKLOADS), help="by default all")
    parser.add_argument("--sizes", nargs="*", type=int, help="numbers of members B")
    parser.add_argument(
        "--rivals",
        nargs="*",
        choices=list(RIVALS),
        help="by default all that repay the time; without 'Shoal compiled', 'Shoal' does not compile either",
    )
    parser.add_argument(
        "--largest", action="store_true", help="after these, on a GPU, the largest power of 2 that its memory holds"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rival in each cell of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, help="seconds, shared evenly by the models; no larger B is begun after them"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: by autocast")
    parser.add_argument("--device", default=device)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, for rivals in one process")
    parser.add_argument("--reduced", action="store_true", help="small models on a GPU as well")
    parser.add_argument("--output", type=Path, help="a JSON file, written after each cell")
    parser.add_argument("--plot", type=Path, help="a PNG file")
    parser.add_argument("--overhead", action="store_true", help="of a small step in a search's loop, and nothing else")
    parser.add_argument("--quick", action="store_true", help="two models, B = 2, nothing compiled; judges no speed")
    options = parser.parse_args()
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it with: pip install matplotlib")
    if options.quick:
        options.models, options.sizes = options.models or QUICK, options.sizes or [2]
        options.seconds, options.rounds, options.threads = min(options.seconds, 0.1), 1, 1
    if not options.rivals:
        left_out = {Compiled} if options.quick else set()
        if options.quick or not options.device.startswith("cuda"):
            left_out.add(CompiledSerial)  # one thing more to compile for each cell
        options.rivals = [name for name, rival in RIVALS.items() if rival not in left_out]
    return options


def measured(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One cell of the table after another."""
    full = device.type == "cuda" and not options.reduced
    upward = [2**power for power in range(LARGEST.bit_length())]
    sizes = options.sizes or (upward if device.type == "cuda" else [1, 2, 4, 8, 16])
    names = options.models or list(WORKLOADS)
    end = time.perf_counter() + (options.budget or math.inf)
    for number, name in enumerate(names):
        now = time.perf_counter()
        until = now + (end - now) / (len(names) - number)
        workload = WORKLOADS[name](full)
        makers: dict[str, Any] = {key: RIVALS[key] for key in options.rivals}
        if Processes.name in makers:
            makers[Processes.name] = partial(
                Processes,
                workload=name,
                full=full,
                begin="fork" if options.quick and device.type == "cpu" else "forkserver",
            )
        if Chosen.name in makers:
            makers[Chosen.name] = partial(Chosen, compiling=Compiled.name in makers)
        waiting = list(sizes)
        while waiting:
            members = waiting.pop(0)
            autocast = torch.bfloat16 if options.dtype == "bfloat16" else None
            cell = Cell(workload, members, device, autocast, options.threads)
            findings = race(cell, makers, options.seconds, options.rounds, together=members in sizes)
            torch.compiler.reset()
            yield {
                "workload": name,
                "title": workload.name,
                "sizes": workload.sizes,
                "members": members,
                "rivals": {key: finding.as_dict() for key, finding in findings.items()},
            }
            ours = [finding for key, finding in findings.items() if issubclass(RIVALS[key], Eager)]
            if options.largest and device.type == "cuda" and members == sizes[-1]:
                most = max((finding.peak_bytes or 0 for finding in ours), default=0)
                waiting += largest(members, most, torch.cuda.mem_get_info(device)[1])
            if time.perf_counter() > until or (ours and all(finding.fails == OUT_OF_MEMORY for finding in ours)):
                break


def largest(members: int, peak_bytes: int, memory: int) -> list[int]:
    """The largest power of two of members that memory holds, if it is more than there were.

    Args:
        members: that were measured.
        peak_bytes: that they took at most; 0 if they failed.
        memory: of the device, in bytes.
    """
    fits = int(USED * memory * members / peak_bytes) if peak_bytes else 0
    found = 1 << fits.bit_length() >> 1
    return [min(found, LARGEST)] if found > members else []


def machine(options: argparse.Namespace, device: torch.device) -> str:
    """What the figures were measured on, and how."""
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return (
        f"{where}, {options.threads} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{options.dtype}; {options.rounds} rounds of {options.seconds / options.rounds:g} s for each rival, medians"
    )


if __name__ == "__main__":
    sys.exit(main())
