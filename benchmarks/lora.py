"""Adapters of `peft` on one frozen Llama, trained side by side: five ways, interleaved in one run.

On a GPU the Llama has the sizes of Llama 3.2 1B, random weights and bfloat16, and the ways come one after another, so
that each has the memory for itself.

Members differ in nothing but their learning rates, in ranks, or in ranks and batch sizes (2, 4 and 8 samples, of which
an array of Shoal computes two at a time; a step is eight samples of each member).

One after another; in a pool of processes, one for each core, whose members take turns; by `torch.func.vmap`, where it
can; with `peft`'s own several adapters on one base, in turns; and as an array of Shoal. Samples per second of all
members together, and the memory that tensors take in a step at most.

With `--words` only the memory of a step on a model of 32,000 words is measured, whose layers are checkpointed: that
of an array, and of a pool with one member in each process at a time.

    python benchmarks/lora.py [--words] [--adapters mixed batches]
        [--dtype bfloat16] [--checkpointing] [--sizes 4 16] [--seconds 6] [--quick]
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from fusion import machine
from fusion_figures import table
from models import WORKLOADS, Phase, peft_llama
from rivals.adapter_turns import AdapterTurns
from rivals.arrays import Chosen, Eager
from rivals.predicted import predicted_bytes
from rivals.processes import Processes
from rivals.race import race
from rivals.rival import Cell
from rivals.serial import Serial
from rivals.vmap import VMap

LEAST_GAIN, MOST_MEMORY, MOST_OVER_SUM, MOST_OFF_PREDICTED, JUDGED = 2.0, 1 / 3, 1.15, 0.1, 16
"""Asked of arrays of so many members: samples per second over the best rival's, memory over the pool's, memory over
`sum_of_parts`, and the difference of memory and prediction."""


def main() -> int:
    options = arguments()
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    full = device.type == "cuda"
    figures: dict[str, Any] = {}
    missed: list[str] = []
    if options.words:
        return print_words(options, device)
    before = None
    for kind in options.adapters:
        adapters, _ = peft_llama.ADAPTERS[kind]
        base = peft_llama.Base(full, getattr(torch, options.dtype), options.checkpointing)
        name = peft_llama.name_of(kind, options.dtype, options.checkpointing)
        workload = WORKLOADS[name](full)
        makers: dict[str, Any] = {
            Serial.name: Serial,
            Processes.name: partial(
                Processes,
                workload=name,
                full=full,
                begin="fork" if options.quick and device.type == "cpu" else "forkserver",
            ),
            VMap.name: VMap,
            AdapterTurns.name: partial(AdapterTurns, adapters=adapters, base=base),
            Chosen.name: partial(Chosen, compiling=options.compile),
        }
        for members in options.sizes:
            cell = Cell(workload, members, device, None, options.threads)
            findings = {
                key: each.as_dict()
                for key, each in race(cell, makers, options.seconds, options.rounds, together=not full).items()
            }
            torch.compiler.reset()
            row = {"workload": name, "title": workload.name, "sizes": workload.sizes, "members": members}
            print(table({**row, "rivals": findings}, after=before), flush=True)
            before = {**row, "rivals": findings}
            found = compared(findings)
            if "peak_bytes" in findings[Chosen.name]:
                found["memory_over_sum"] = round(findings[Chosen.name]["peak_bytes"] / sum_of_parts(cell), 3)
                found |= against_prediction(cell, base, adapters)
            figures[f"{kind} B={members}"] = found
            if members == JUDGED and not options.quick:
                missed += [f"{kind} B={members}: {fault}" for fault in faults(found)]
    print(machine(options, device))
    print(json.dumps({"figures": figures, "missed": missed}))
    return 1 if missed else 0


def print_words(options: argparse.Namespace, device: torch.device) -> int:
    """Print the memory of steps over a long vocabulary; return the exit status."""
    workload = WORKLOADS["peft-words"](False)
    cell = Cell(workload, 2 if options.quick else JUDGED, device, None, options.threads)
    alone = Serial(cell, [cell.members - 1])
    alone.step()
    pool = min(cell.members, os.cpu_count() or 1) * (alone.peak_bytes() or 0)
    del alone
    bounded = replace(workload, phases=(Phase(peft_llama.bounded_loss, workload.phases[0].optimizer),))
    array = Eager(replace(cell, workload=bounded))
    array.step()
    ours = array.peak_bytes() or 0
    figures = {"members": cell.members, "array_mb": round(ours / 1e6, 1), "pool_mb": round(pool / 1e6, 1)}
    figures["memory_over_pool"] = round(ours / pool, 3)
    print(
        f"{workload.name}, {workload.sizes}; {cell.members} members of an array, {os.cpu_count()} processes of a pool"
    )
    print(f"  array {figures['array_mb']} MB, pool {figures['pool_mb']} MB: {figures['memory_over_pool']}")
    print(machine(options, device))
    missed = (
        [] if options.quick or ours <= pool * MOST_MEMORY else [f"{ours / pool:.2f} of the pool's memory, asked 0.33"]
    )
    print(json.dumps({"figures": figures, "missed": missed}))
    return 1 if missed else 0


def compared(findings: dict[str, Any]) -> dict[str, float]:
    """Shoal's samples per second over the best rival's, and its memory over others'; nothing of what failed."""
    ours = findings[Chosen.name]
    others = [
        each["samples_per_second"] for name, each in findings.items() if name != Chosen.name and "seconds" in each
    ]
    found = {"over_best": round(ours.get("samples_per_second", 0.0) / max(others), 3)} if others else {}
    for key, name in (("memory_over_pool", Processes.name), ("memory_over_turns", AdapterTurns.name)):
        if "peak_bytes" in ours and "peak_bytes" in findings[name]:
            found[key] = round(ours["peak_bytes"] / findings[name]["peak_bytes"], 3)
    return found


def against_prediction(cell: Cell, base: peft_llama.Base, adapters: Sequence[peft_llama.Adapter]) -> dict[str, float]:
    """What Shoal predicts of an array's memory before it starts, in MB, and the memory of its eager steps over that.

    Every array takes a few eager steps to begin with. A step mode that is chosen later may take less.
    """
    predicted = predicted_bytes(cell, base, adapters)
    array = Chosen(cell, compiling=False) if cell.workload.batch_sizes else Eager(cell)
    array.step()
    found = {"predicted_mb": round(predicted / 1e6, 1), "memory_over_predicted": array.peak_bytes() / predicted}
    return {key: round(value, 3) for key, value in found.items()}


def sum_of_parts(cell: Cell) -> float:
    """Bytes of one base, and for each member of its adapter with gradients and optimizer state, and its activations.

    The latter are those of single members that take a step alone: one of each kind, in the members' shares.
    """
    base, own = 0, []
    for member in range(min(cell.members, 1 + len(cell.workload.others))):
        alone = Serial(cell, [member])
        frozen = [each for each in alone.models[0].parameters() if not each.requires_grad]
        base = sum(each.nbytes for each in frozen)
        for _ in range(2):
            alone.step()
        own.append(alone.peak_bytes() - base)
    return base + cell.members * fmean(own)


def faults(found: dict[str, float]) -> list[str]:
    said = []
    if found.get("over_best", LEAST_GAIN) < LEAST_GAIN:
        said.append(f"{found['over_best']:.2f} times the best rival, asked {LEAST_GAIN}")
    if found.get("memory_over_pool", 0.0) > MOST_MEMORY:
        said.append(f"{found['memory_over_pool']:.2f} of the pool's memory, asked {MOST_MEMORY:.2f}")
    if found.get("memory_over_sum", 0.0) > MOST_OVER_SUM:
        said.append(f"{found['memory_over_sum']:.2f} of the sum of its parts' memory, asked {MOST_OVER_SUM}")
    if abs(found.get("memory_over_predicted", 1.0) - 1) > MOST_OFF_PREDICTED:
        said.append(f"{found['memory_over_predicted']:.2f} of the predicted memory, asked within {MOST_OFF_PREDICTED}")
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--adapters",
        nargs="*",
        choices=list(peft_llama.ADAPTERS),
        default=list(peft_llama.ADAPTERS),
        help="what members differ in: nothing, ranks, ranks and batch sizes",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the base; on a GPU bfloat16")
    parser.add_argument("--checkpointing", action="store_true", help="compute layers again in the backward pass")
    parser.add_argument("--sizes", nargs="*", type=int, default=[4, 16], help="numbers of members B")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each way in each cell of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, for ways in one process")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="whether Shoal may compile"
    )
    parser.add_argument("--words", action="store_true", help="memory over a vocabulary of 32,000 words alone")
    parser.add_argument(
        "--quick", action="store_true", help="mixed ranks and batches, B = 3, nothing compiled; judges nothing"
    )
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    if options.device.startswith("cuda") and options.dtype != "bfloat16":
        parser.error("on a GPU the base is of bfloat16")
    if options.quick:
        options.adapters, options.sizes, options.compile = ["batches"], [3], False
        options.seconds, options.rounds, options.threads = 0.1, 1, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
