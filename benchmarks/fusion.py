"""B models trained side by side: one after another, in processes, by `torch.func.vmap`, and as an array of Shoal.

Samples per second of all members together, each rival with its own copies of the models, interleaved in rounds; the
table shows medians, relative to members trained one after another. "Shoal" is what Shoal itself chooses by measurement.
Without a GPU the models are of reduced sizes, which the table says.

    python benchmarks/fusion.py [--models mlp dcgan] [--sizes 8] [--largest] [--seconds 2] [--dtype bfloat16]
    python benchmarks/fusion.py --resident     # memory of processes: one for each member, and one for all as an array
    python benchmarks/fusion.py --convergence  # losses of an array and of members trained one after another
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
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from models import WORKLOADS
from rivals.adapter_turns import AdapterTurns
from rivals.arrays import Chosen, Eager
from rivals.memory import peak_of_process
from rivals.processes import Processes
from rivals.race import OUT_OF_MEMORY, difference, race
from rivals.rival import Cell, Rival
from rivals.serial import CompiledSerial, Serial
from rivals.vmap import VMap

RIVALS: dict[str, type[Rival]] = {
    rival.name: rival for rival in (Serial, CompiledSerial, Processes, VMap, AdapterTurns, Eager, Chosen)
}
EVERYWHERE = (Serial.name, Processes.name, VMap.name, Chosen.name)
OURS = (Chosen.name, Eager.name)
"""What has to train every model."""

LARGEST = 1024
"""Members of an array on a GPU, if memory does not end before."""
USED = 0.85
"""Part of a GPU's memory that the largest array may take."""
NOISE = 0.97
"""Asked of Shoal: speed over that of the fastest rival."""
GPU_GAIN = 4.0
"""Asked of Shoal on a GPU: speed over that of members trained one after another."""
AGREE = {"float32": 5e-3, "bfloat16": 1e-1}
"""Largest relative difference of losses over the first steps; updates amplify rounding."""
CONVERGENCE_STEPS, CONVERGED_APART = 100, 1e-6
"""Steps of `--convergence`, and the largest relative difference of losses in float64 that is asked."""

Findings = Mapping[str, dict[str, Any]]
"""Rival -> what was found; for each B, and for each workload, in the line of JSON."""


def main() -> int:
    options = arguments()
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    take = resident if options.resident else converged if options.convergence else speeds
    figures, missed = take(options, device)
    print(machine(options, device))
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--sizes", nargs="*", type=int, default=[8], help="numbers of members B")
    parser.add_argument("--rivals", nargs="*", choices=list(RIVALS), help=f"by default {', '.join(EVERYWHERE)}")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="whether Shoal may compile"
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
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, for rivals in one process")
    parser.add_argument("--resident", action="store_true", help="memory of processes, on a CPU, and nothing else")
    parser.add_argument("--convergence", action="store_true", help="losses of ResNet-18, and nothing else")
    parser.add_argument(
        "--quick", action="store_true", help="B = 2, nothing compiled, one short round; no speed judged"
    )
    options = parser.parse_args()
    options.rivals = options.rivals or EVERYWHERE
    if options.quick:
        options.models = ["mlp", "transformer"] if options.models == list(WORKLOADS) else options.models
        options.sizes, options.compile, options.threads = [2], False, 1
        options.seconds, options.rounds = min(options.seconds, 0.1), 1
    return options


def speeds(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Measure all cells; returns the rows and what is missed."""
    rows: dict[str, dict[int, Findings]] = {}
    missed = []
    print(f"{'B':>4}  {'':21} {'samples/s':>10} {'of serial':>9} {'peak MB':>8}")
    for name, members, findings in measured(options, device):
        workload = WORKLOADS[name](device.type == "cuda")
        if name not in rows:
            print(f"{workload.name}: {workload.sizes}")
        rows.setdefault(name, {})[members] = findings
        print(table(members, findings), flush=True)
        dtype = "bfloat16" if workload.bfloat16 else options.dtype
        missed += [f"{name} B={members}: {fault}" for fault in faults(findings, dtype, not options.quick)]
    if device.type == "cuda" and not options.quick:
        for name, row in rows.items():
            best = max(findings.get(Chosen.name, {}).get("of_serial", 0.0) for findings in row.values())
            missed += [f"{name}: Shoal {best:.2f} times serial, asked {GPU_GAIN}"] * (best < GPU_GAIN)
    return {"rows": rows}, missed


def measured(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, int, Findings]]:
    """One cell of the table after another: workload, B, and what was found."""
    makers: dict[str, Any] = {name: RIVALS[name] for name in options.rivals}
    if Processes.name in makers and options.quick and device.type == "cpu":
        makers[Processes.name] = partial(Processes, begin="fork")
    if Chosen.name in makers:
        makers[Chosen.name] = partial(Chosen, compiling=options.compile)
    autocast = torch.bfloat16 if options.dtype == "bfloat16" else None
    end = time.perf_counter() + (options.budget or math.inf)
    for number, name in enumerate(options.models):
        now = time.perf_counter()
        until = now + (end - now) / (len(options.models) - number)
        waiting = list(options.sizes)
        while waiting:
            members = waiting.pop(0)
            cell = Cell(WORKLOADS[name](device.type == "cuda"), members, device, autocast, options.threads)
            given = members in options.sizes
            findings = {
                key: finding.as_dict()
                for key, finding in race(cell, makers, options.seconds, options.rounds, together=given).items()
            }
            torch.compiler.reset()
            yield name, members, findings
            ours = [findings[key] for key in OURS if key in findings]
            if options.largest and device.type == "cuda" and members == options.sizes[-1]:
                most = max((finding.get("peak_bytes", 0) for finding in ours), default=0)
                waiting += largest(members, most, torch.cuda.mem_get_info(device)[1])
            if time.perf_counter() > until or (ours and all(each.get("fails") == OUT_OF_MEMORY for each in ours)):
                break


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


def table(members: int, findings: Findings) -> str:
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


def faults(findings: Findings, dtype: str, judge_speed: bool) -> list[str]:
    """What was asked of a cell and is not so, in words; nothing is judged that was not measured."""
    found = []
    for name in OURS:
        finding = findings.get(name, {})
        if finding.get("fails", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            found.append(f"{name} fails: {finding['fails']}")
        if finding.get("off", 0.0) > AGREE[dtype]:
            found.append(f"losses of {name} differ from the serial ones by {finding['off']:.1e}")
    own = findings.get(Chosen.name, {}).get("of_serial")
    rivals = {name: each["of_serial"] for name, each in findings.items() if name not in OURS and "of_serial" in each}
    if judge_speed and own is not None and own < NOISE * max(rivals.values()):
        best = max(rivals, key=lambda name: rivals[name])
        found.append(f"Shoal {own:.2f} times serial, {best} {rivals[best]:.2f}")
    return found


def resident(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Measure the memory of a process of an array, and of as many processes of one member each."""
    figures: dict[str, Any] = {}
    missed = []
    members = options.sizes[0]
    print(f"{'':24} {'one process MB':>14} {'array MB':>9} {'times as many fit':>18}")
    for name in options.models:
        cell = Cell(WORKLOADS[name](False), members, device, None, threads=1)
        one = peak_of_process(partial(Serial, which=[0]), cell, steps=3)
        array = peak_of_process(Eager, cell, steps=3)
        found = {"one_mb": one / 1e6, "array_mb": array / 1e6, "more_fit": members * one / array}
        figures[name] = {key: round(value, 3) for key, value in found.items()}
        print(f"{name:24} {one / 1e6:14.1f} {array / 1e6:9.1f} {members * one / array:18.2f}", flush=True)
        if found["more_fit"] < 1.0:
            missed.append(f"{name}: an array of {members} takes more memory than {members} processes")
    return {"resident": figures}, missed


def converged(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Train three ResNet-18 of different learning rates one after another and as an array; compare all losses."""
    steps = 3 if options.quick else CONVERGENCE_STEPS
    figures: dict[str, float] = {}
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        torch.set_default_dtype(dtype)
        cell = Cell(WORKLOADS["resnet18"](False), 3, device, None, options.threads)
        serial, fused = ([rival.step() for _ in range(steps)] for rival in (Serial(cell), Eager(cell)))
        figures[name] = difference(fused, serial)
        print(f"{name}: mean loss {serial[0].mean():.4f} -> {serial[-1].mean():.4f} in {steps} steps, "
              f"at most {figures[name]:.1e} apart")  # fmt: skip
    apart = figures["float64"]
    missed = [f"losses in float64 differ by {apart:.1e}, asked {CONVERGED_APART}"] * (apart > CONVERGED_APART)
    return {"apart": figures}, missed


def machine(options: argparse.Namespace, device: torch.device) -> str:
    """The machine of the figures, and how they were measured."""
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return (
        f"{where}, {options.threads} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{options.dtype}; {options.rounds} rounds of {options.seconds / options.rounds:g} s for each rival, medians"
    )


if __name__ == "__main__":
    sys.exit(main())
