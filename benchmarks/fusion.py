"""B models trained side by side: one after another, in processes, by `torch.func.vmap`, and as an array of Shoal.

Samples per second of all members together, each rival with its own copies of the models, interleaved in rounds; the
table shows medians, relative to members trained one after another. "Shoal" is an array, by all threads, in the step
mode that Shoal chooses by measurement; "Shoal on slots" an array in a process for each core, as searches run on a CPU.
On a GPU it shows peaks of memory. Without one the models are of reduced sizes, which it says, and the rows of
`papers/hfta.py` say what is asked.

    python benchmarks/fusion.py [--models mlp dcgan] [--sizes 8] [--largest] [--seconds 2] [--dtype bfloat16]
    python benchmarks/fusion.py --resident     # memory of processes: one for each member, and one for all as an array
    python benchmarks/fusion.py --convergence  # losses of an array and of members trained one after another
"""

import argparse
import logging
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from models import WORKLOADS
from papers.experiment import missed_of
from papers.hfta import EXPERIMENTS
from report import report
from rivals.arrays import Chosen, Eager
from rivals.processes import Processes, Slots
from rivals.race import OUT_OF_MEMORY, Finding, difference, race
from rivals.rival import Cell, Rival
from rivals.serial import AdapterTurns, CompiledSerial, Serial
from rivals.vmap import VMap

RIVALS: dict[str, type[Rival]] = {
    rival.name: rival for rival in (Serial, CompiledSerial, Processes, VMap, AdapterTurns, Eager, Chosen, Slots)
}
EVERYWHERE = (Serial.name, Processes.name, VMap.name, Chosen.name, Slots.name)
OURS = (Chosen.name, Eager.name, Slots.name)
"""All have to train every model."""

LARGEST = 1024
"""Members of an array on a GPU, if memory does not end before."""
USED = 0.85
"""Part of a GPU's memory that the largest array may take."""
GPU_GAIN = 4.0
"""Asked of Shoal on a GPU: speed over that of members trained one after another."""
AGREE = {"float32": 5e-3, "bfloat16": 1e-1}
"""Largest relative difference of losses over the first steps; updates amplify rounding."""
CONVERGENCE_STEPS = 100
"""Steps of `--convergence`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--sizes", nargs="*", type=int, default=[8], help="numbers of members B")
    parser.add_argument("--rivals", nargs="*", choices=list(RIVALS), default=EVERYWHERE)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="Shoal may not compile")
    parser.add_argument("--largest", action="store_true", help="on a GPU also the largest power of 2 that it holds")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rival in each cell of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds for all; no larger B is begun after them"
    )
    parser.add_argument("--dtype", choices=list(AGREE), default="float32", help="bfloat16: by autocast")
    parser.add_argument("--resident", action="store_true", help="memory of processes, on a CPU, and nothing else")
    parser.add_argument("--convergence", action="store_true", help="losses of ResNet-18, and nothing else")
    parser.add_argument(
        "--quick", action="store_true", help="B = 2, nothing compiled, one short round, no speed judged"
    )
    options = parser.parse_args()
    if options.quick:
        options.models = ["mlp", "transformer"] if options.models == list(WORKLOADS) else options.models
        options.sizes, options.compile, options.seconds, options.rounds = [2], False, 0.1, 1
    options.threads = 1 if options.quick else os.cpu_count()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    take = resident if options.resident else converged if options.convergence else speeds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures, missed = take(options, device)
    if not options.quick and (device.type, options.sizes, options.dtype) == ("cpu", [8], "float32"):
        rows = (each for each in EXPERIMENTS if ("--no-compile" in each.measurement.command) != options.compile)
        missed += missed_of(rows, None, figures)
    print(f"{options.threads} threads, torch {torch.__version__}, {options.dtype}; "
          f"{options.rounds} rounds of {options.seconds / options.rounds:g} s for each rival, medians")  # fmt: skip
    return report(figures, missed)


def speeds(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Measure all cells; returns the rows and what is missed."""
    full = device.type == "cuda"
    makers: dict[str, Callable[[Cell], Rival]] = {name: RIVALS[name] for name in options.rivals}
    if full:
        makers.pop(Slots.name, None)
    for name in (Processes.name, Slots.name):
        if name in makers and options.quick and not full:
            makers[name] = partial(RIVALS[name], begin="fork")
    if Chosen.name in makers:
        makers[Chosen.name] = partial(Chosen, compiling=options.compile)
    autocast = torch.bfloat16 if options.dtype == "bfloat16" else None
    rows: dict[str, dict[int, Mapping[str, Finding]]] = {}
    missed = []
    end = time.perf_counter() + options.budget
    print(f"{'B':>4}  {'':21} {'samples/s':>10} {'of serial':>9} {'peak MB':>8}")
    for number, name in enumerate(options.models):
        until = time.perf_counter() + (end - time.perf_counter()) / (len(options.models) - number)
        workload = WORKLOADS[name](full)
        print(f"{name}: {workload.sizes}")
        row = rows[name] = {}
        waiting = list(options.sizes)
        while waiting and (not row or time.perf_counter() < until):
            members = waiting.pop(0)
            cell = Cell(workload, members, device, autocast, options.threads)
            findings = race(cell, makers, options.seconds, options.rounds, together=members in options.sizes)
            row[members] = findings
            torch.compiler.reset()
            print(table(members, findings), flush=True)
            dtype = "bfloat16" if workload.bfloat16 else options.dtype
            missed += [f"{name} B={members}: {fault}" for fault in faults(findings, dtype)]
            if options.largest and full and members == options.sizes[-1]:
                most = max(findings.get(each, {}).get("peak_bytes", 0) for each in OURS)
                waiting += largest(members, most, torch.cuda.mem_get_info(device)[1])
        best = max(findings.get(Chosen.name, {}).get("of_serial", 0.0) for findings in row.values())
        if full and not options.quick and best < GPU_GAIN:
            missed.append(f"{name}: Shoal {best:.2f} times serial, asked {GPU_GAIN}")
    return {"rows": rows}, missed


def largest(members: int, peak_bytes: int, memory: int) -> list[int]:
    """The largest power of two of members that memory holds, if it is more than there were.

    Args:
        members: Members that were measured.
        peak_bytes: Bytes that they took at most; 0 if they failed.
        memory: Bytes of the device.
    """
    fits = int(USED * memory * members / peak_bytes) if peak_bytes else 0
    found = 1 << fits.bit_length() >> 1
    return [min(found, LARGEST)] if found > members else []


def table(members: int, findings: Mapping[str, Finding]) -> str:
    """One line for each rival of a cell."""
    lines = []
    for name, finding in findings.items():
        place = f"{members:4}  {name:21}"
        if "fails" in finding:
            lines.append(f"{place} fails: {finding['fails'][:90]}")
            continue
        memory = f"{finding['peak_bytes'] / 1e6:8.1f}" if "peak_bytes" in finding else f"{'':8}"
        speed = f"{finding['samples_per_second']:10.0f} {finding.get('of_serial', math.nan):9.2f}"
        lines.append(f"{place} {speed} {memory}  {finding.get('note', '')}".rstrip())
    return "\n".join(lines)


def faults(findings: Mapping[str, Finding], dtype: str) -> list[str]:
    """Describe failures of Shoal in a cell, and losses that are not the serial ones."""
    found = []
    for name in OURS:
        finding = findings.get(name, {})
        if finding.get("fails", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            found.append(f"{name} fails: {finding['fails']}")
        if finding.get("off", 0.0) > AGREE[dtype]:
            found.append(f"losses of {name} differ from the serial ones by {finding['off']:.1e}")
    return found


def resident(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Measure the memory of a process of an array, and of as many processes of one member each."""
    figures: dict[str, Any] = {}
    members = options.sizes[0]
    print(f"{'':24} {'one process MB':>14} {'array MB':>9} {'times as many fit':>18}")
    for name in options.models:
        cell = Cell(WORKLOADS[name](False), members, torch.device("cpu"), None, threads=1)
        one, array = in_a_process(Serial, replace(cell, which=[0])), in_a_process(Eager, cell)
        figures[name] = {"one_mb": one, "array_mb": array, "more_fit": members * one / array}
        print(f"{name:24} {one:14.1f} {array:9.1f} {members * one / array:18.2f}", flush=True)
    return {"resident": figures}, []


def in_a_process(make: Callable[[Cell], Rival], cell: Cell) -> float:
    """MB that a new process shares with no other, at their peak, while a rival takes some steps there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(private_peak, make, cell).result()


def private_peak(make: Callable[[Cell], Rival], cell: Cell) -> float:
    """MB of this process, at its peak."""
    torch.set_num_threads(cell.threads)
    make(cell).run(3)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    memory = psutil.Process().memory_full_info()
    return (peak - (memory.rss - memory.uss)) / 1e6


def converged(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Train three ResNet-18 of different learning rates one after another and as an array; compare all losses."""
    steps = 3 if options.quick else CONVERGENCE_STEPS
    torch.set_default_dtype(torch.float64)
    cell = Cell(WORKLOADS["resnet18"](False), 3, device, None, options.threads)
    serial, fused = ([rival.step() for _ in range(steps)] for rival in (Serial(cell), Eager(cell)))
    apart = difference(fused, serial)
    print(f"mean loss {serial[0].mean():.4f} -> {serial[-1].mean():.4f} in {steps} steps, at most {apart:.1e} apart")
    return {"apart": {"float64": apart}}, []


if __name__ == "__main__":
    sys.exit(main())
