"""The experiments of the packing paper (Liu et al., arXiv:2002.02885) on CIFAR-10, with small networks.

- improvement  seconds of a step of 2 and 8 equal networks, and of 2 MLP-3 or ResNets with batches of 32 and 100
- ablation     the same of members that have all in common but one factor, or nothing; preprocessing left out (tensors),
               or in the step: PNG files that are decoded and augmented
- memory       peak of tensors of two members, from their making to the end of the second epoch after the choices
- switching    what another model adds to a search on one core, beyond its epoch
- hyperband    the search among 1056 configurations; "original" trains one after another, with all cores

seq: members one after another in a plain loop. pack: the paper's, one loop, one backward pass over the sum of losses.
Ways run interleaved and the first round is dropped; the tables show medians, and as "speed" that of Shoal against the
better of seq and pack, the median of what the rounds showed.

    python benchmarks/packing.py [--parts ablation hyperband] [--cases none] [--searches MLP-3] [--quick]
"""

import argparse
import json
import logging
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from packs import ours
from packs.cases import ABLATION, Case, Cell
from packs.original import original
from packs.pictures import look_for_data, write
from packs.tasks import METRIC, SPACE, Cifar
from packs.ways import Paper, Sequential, Way, measured, speed_of
from rivals.forked import in_a_fork
from rivals.memory import peak_of_step
from rivals.plain_search import Asked, in_processes

import shoal
from shoal.core.trial import Report

WAYS: dict[str, Callable[[Cell], Way]] = {"seq": Sequential, "pack": Paper, "shoal": ours.Chosen}
NETWORKS = ("MLP-3", "CNN", "MobileNet", "ResNet", "DenseNet")
LEAST = 0.97
"""Of the speed of the better of seq and pack, in every cell."""
SAMPLES = dict.fromkeys(NETWORKS, 300) | {"MLP-3": 1250, "CNN": 1250}
"""Of a member's training set."""
SEARCHES = {
    "MLP-3": ("MLP-3", "pictures", 27, 2500),
    "MLP-3, tensors": ("MLP-3", "tensors", 27, 2500),
    "CNN": ("CNN", "pictures", 9, 2500),
    **{name: (name, "pictures", 9, 400) for name in NETWORKS[2:]},
}
"""Title -> network, pipeline, R (the paper has 81), pictures to train on."""
LEAST_GAIN = {"MLP-3": 2.7, "MLP-3, tensors": 1.0, "CNN": 1.7, "MobileNet": 1.7, "ResNet": 1.4, "DenseNet": 1.2}
"""Over the faster of original and pool, of Hyperband with the packing `cost`."""
SAME_LOSS = 0.02
"""Relative difference between the best losses of two searches that rounding explains: at rates of 0.1 it grows fast."""
MODELS_MORE = 8
"""Models by which the longer search of the part "switching" has more."""


def main() -> int:
    options = arguments()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)  # fmt: skip
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        options.folder = Path(folder)
        for part in options.parts:
            figures[part] = PARTS[part](options, missed)
    missed = [] if options.quick else missed
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, help="of all parts but two")
    parser.add_argument("--pipelines", nargs="*", choices=("tensors", "png"), default=("tensors", "png"))
    names = list(dict.fromkeys(case.name for case in ABLATION))
    parser.add_argument("--cases", nargs="*", choices=names, default=names, help="of the ablation")
    parser.add_argument("--searches", nargs="*", choices=list(SEARCHES), default=list(SEARCHES), help="of hyperband")
    parser.add_argument("--sizes", nargs="*", type=int, default=(2, 8), help="members of a pack")
    parser.add_argument("--rounds", type=int, default=4, help="of a cell, at least")
    parser.add_argument("--seconds", type=float, default=4.0, help="in which more rounds of a cell are made")
    parser.add_argument("--device", default="cpu", help="of improvement and ablation; other parts use CPU slots")
    parser.add_argument(
        "--quick", action="store_true", help="100 samples, 2 members, 1 thread, one network and case; judges nothing"
    )
    options = parser.parse_args()
    look_for_data(parser, quick=options.quick)
    if options.quick:
        torch.set_num_threads(1)
        WAYS["shoal"] = partial(ours.Chosen, settled=1, planned=100)
        SAMPLES.update(dict.fromkeys(SAMPLES, 100))
        SEARCHES.update({name: (*search[:2], 3, 100) for name, search in SEARCHES.items()})
        ours.PACKINGS = {"cost": "cost", "none": "none"}
        options.sizes, options.rounds, options.seconds = [2], 1, 0.0
        options.networks, options.searches, options.cases = ["MLP-3"], options.searches[:2], ["all"]
    return options


def compared(options: argparse.Namespace, missed: list[str], cells: Sequence[Cell]) -> dict[str, Any]:
    """T_s in milliseconds of each way in each cell; gains are (seq - other) / seq, as the paper has them."""
    print(f"milliseconds for as many samples of each member as the largest batch has, medians\n{'':28} members "
          f"{'seq':>8} {'pack':>8} {'shoal':>8} {'pack gains':>11} {'shoal gains':>11} {'speed':>7}")  # fmt: skip
    figures = {}
    for cell in cells:
        ways = {name: make(cell) for name, make in WAYS.items()}
        taken = measured(ways, options.rounds, options.seconds)
        steps = {name: 1000 * cell.per_step(median(each)) for name, each in taken.items()}
        gains = {name: 1 - steps[name] / steps["seq"] for name in ("pack", "shoal")}
        speed = min(speed_of(taken["shoal"], taken[rival]) for rival in ("seq", "pack"))
        title = f"{cell.case.pipeline}, {cell.case.name}"
        print(f"{title:28} {cell.members:7} " + " ".join(f"{each:8.2f}" for each in steps.values())
              + f" {gains['pack']:11.0%} {gains['shoal']:11.0%} {speed:6.2f}x", flush=True)  # fmt: skip
        name = f"{title}, {cell.members}"
        figures[name] = {
            **{way: round(each, 4) for way, each in steps.items()},
            "speed": round(speed, 3), "decoded": {name: way.decoded for name, way in ways.items()},
        }  # fmt: skip
        if speed < LEAST:
            missed.append(f"{name}: {speed:.2f}x of the better of seq and pack, asked {LEAST}x")
    return figures


def cell_of(options: argparse.Namespace, network: str, members: int, batch_size: int = 50) -> Cell:
    """Equal networks."""
    case = Case(f"{network}, {batch_size}", models=(network,), batch_sizes=(batch_size,))
    return Cell(case, members, SAMPLES[network], options.folder, torch.device(options.device))


def improvement(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Figure 4 of the paper."""
    print("\nimprovement, by network and batch size")
    cells = [cell_of(options, name, members) for name in options.networks for members in options.sizes]
    varied = [name for name in ("MLP-3", "ResNet") if name in options.networks]
    cells += [cell_of(options, name, 2, batch_size) for name in varied for batch_size in (32, 100)]
    return compared(options, missed, cells)


def ablation(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Figure 6 of the paper."""
    print("\nablation, by pipeline and what differs")
    if "png" in options.pipelines:
        write(options.folder, 400 if options.quick else None)
    cells = [
        Cell(case, members, SAMPLES["MLP-3"], options.folder, torch.device(options.device))
        for case in ABLATION if case.pipeline in options.pipelines and case.name in options.cases
        for members in options.sizes
    ]  # fmt: skip
    return compared(options, missed, cells)


def memory(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Figure 5 of the paper: megabytes of tensors of two networks; those of two processes are twice those of one."""
    print(f"\nmemory of two\n{'':28} {'processes':>9} {'pack':>8} {'shoal':>8}")
    figures = {}
    for network in options.networks:
        two, one = (cell_of(options, network, members) for members in (2, 1))
        peaks = {
            "processes": 2 * peak(Sequential, one),
            "pack": peak(Paper, two),
            "shoal": peak(WAYS["shoal"], two),
        }
        print(f"{network:28} " + " ".join(f"{each:8.1f}" for each in peaks.values()), flush=True)
        figures[network] = {name: round(each, 2) for name, each in peaks.items()}
        if peaks["shoal"] > peaks["processes"]:
            missed.append(f"{network}: a pack takes more memory than two processes")
    return figures


def peak(make: Callable[[Cell], Way], cell: Cell) -> float:
    """Megabytes."""

    def train() -> None:
        way = make(cell)
        way.run()
        way.run()

    return peak_of_step(train, (), cell.device) / 1e6


def switching(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Table 1 of the paper: seconds that a model adds to a search of models one after another, beyond its epoch."""
    print(f"\nswitching\n{'':28} {'epoch, s':>9} {'SwOH, s':>8}")
    space = {**SPACE, "batch_size": 50, "optimizer": "Momentum", "activation": "ReLU"}
    figures = {}
    for network in options.networks:
        task = Cifar(network, "pictures", train=4 * SAMPLES[network], test=100)
        (few, _), (many, reports) = (
            in_a_fork(ours.searched, task, shoal.Random(count, epochs=1), "none", "cpu:1", space)
            for count in (2, 2 + MODELS_MORE)
        )
        epoch = fmean(report.seconds for report in reports)
        overhead = (many - few) / MODELS_MORE - epoch
        print(f"{network:28} {epoch:9.3f} {overhead:8.3f}", flush=True)
        figures[network] = {"epoch": round(epoch, 4), "overhead": round(overhead, 4)}
    return figures


def hyperband(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Table 4 of the paper: seconds of whole searches, and the best loss."""
    figures: dict[str, Any] = {}
    for title in options.searches:
        network, pipeline, most, samples = SEARCHES[title]
        print(f"\nhyperband, {title}: R = {most}, {samples} samples\n{'':28} seconds speed-up best {METRIC}")
        task = Cifar(network, pipeline, train=samples, test=min(1000, samples // 2))
        rows = {"original": (original, task, most)}
        if pipeline == "tensors":
            rows["pool"] = (pool, task, most, options.folder)
        for packing in ours.PACKINGS if pipeline == "pictures" else ("cost",):
            rows[packing] = (ours.searched, task, shoal.Hyperband(max_epochs=most, eta=3), packing)
        seconds, losses = {}, {}
        for name, run in rows.items():
            seconds[name], reports = in_a_fork(*run)
            losses[name] = min(filter(math.isfinite, (report.metrics[METRIC] for report in reports)))
            print(f"{name:28} {seconds[name]:7.1f} {seconds['original'] / seconds[name]:7.2f}x {losses[name]:9.4f}",
                  flush=True)  # fmt: skip
        missed += judged(title, seconds, losses)
        figures[title] = {name: round(value, 2) for name, value in seconds.items()}
        figures[title]["best"] = {name: round(value, 4) for name, value in losses.items()}
    return figures


def pool(task: Cifar, most: int, folder: Path) -> tuple[float, list[Report]]:
    """As many processes of one thread as there are cores, which take trials from a queue."""
    torch.set_num_threads(1)
    asked = Asked(task, SPACE, shoal.Hyperband(max_epochs=most, eta=3), METRIC, "min", seed=0)
    began = time.perf_counter()
    search = in_processes(asked, folder, os.cpu_count() or 1)
    return time.perf_counter() - began, [Report(0, 0, {METRIC: value}) for _, value in search.timeline]


def judged(title: str, seconds: dict[str, float], losses: dict[str, float]) -> list[str]:
    """What the packing `cost` lacks."""
    cost = seconds["cost"]
    rivals = [seconds[name] for name in ("original", "pool") if name in seconds]
    gain = min(rivals) / cost
    found = [
        f"{title}: {name} takes {taken:.1f} s, cost {cost:.1f} s" for name, taken in seconds.items() if taken < cost
    ]
    if gain < LEAST_GAIN[title]:
        found.append(f"{title}: {gain:.2f}x over the faster rival, asked {LEAST_GAIN[title]}x")
    if abs(losses["cost"] / losses["original"] - 1) > SAME_LOSS:
        found.append(f"{title}: best loss {losses['cost']:.4f}, of the original {losses['original']:.4f}")
    return found


PARTS: dict[str, Callable[[argparse.Namespace, list[str]], dict[str, Any]]] = {
    part.__name__: part for part in (hyperband, switching, improvement, ablation, memory)
}

if __name__ == "__main__":
    sys.exit(main())
