"""The experiments of the packing paper (Liu et al., arXiv:2002.02885) on CIFAR-10, with small networks.

- ablation     seconds of a step of equal networks, and of members that have all in common but one factor, or nothing;
               preprocessing left out (tensors), or in the step: PNG files that are decoded and augmented
- memory       growth of a process's resident memory by two members, from their making to the end of the second epoch
- switching    seconds that another model adds to a search on one core, and of its epoch
- hyperband    the search among 1056 configurations; "original" trains one after another, with all cores

seq: members one after another in a plain loop. pack: the paper's, one loop, one backward pass over the sum of losses.
Interleaved; medians without the first round. Speed is that of Shoal against the better of both, the median of rounds.
The rows of `papers/pack.py` say what is asked; besides, the best losses of searches have to agree.

    python benchmarks/packing.py [--parts ablation hyperband] [--cases none] [--searches MLP-3] [--quick]
"""

import argparse
import logging
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import baselines
import torch
from packs.pictures import look_for_data, write
from packs.tasks import CASES, METRIC, SPACE, Case, Cifar, equal
from packs.ways import Chosen, Paper, Sequential, Way, measured, speed_of
from papers.experiment import missed_of
from papers.pack import EXPERIMENTS
from report import report
from rivals.first import first_search
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, PlainSearch, in_a_loop, in_processes

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.trial import Report
from shoal.journal.view import JournalView
from shoal.plan.packing.base import Packing

Figures = dict[str, Any]
WAYS: dict[str, Callable[[Case], Way]] = {"seq": Sequential, "pack": Paper, "shoal": Chosen}
PACKINGS = ("original", "cost", "knn", "batch_size", "random")
SEARCHES = {
    "MLP-3": ("MLP-3", "pictures", 27, 2500, (*PACKINGS, "knn, measured")),
    "MLP-3, tensors": ("MLP-3", "tensors", 27, 2500, ("original", "pool", "cost")),
    **{name: (name, "pictures", 9, 400, PACKINGS) for name in ("MobileNet", "ResNet", "DenseNet")},
}
"""Title -> network, pipeline, R (the paper has 81), pictures to train on, who searches."""
SAME_LOSS = 0.02
"""Relative difference between the best losses of two searches that rounding explains: at rates of 0.1 it grows fast."""


def main() -> int:
    options = arguments()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        options.folder = Path(folder)
        for part in options.parts:
            figures[part] = PARTS[part](options)
    missed = [] if options.quick else other_losses(figures.get("hyperband", {}))
    if not options.quick and options.device.type == "cpu" and options.sizes is None:
        missed += missed_of(EXPERIMENTS, None, figures)
    return report(figures, missed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--pipelines", nargs="*", choices=("tensors", "png"), default=("tensors", "png"))
    names = list(dict.fromkeys(case.name for case in CASES))
    parser.add_argument("--cases", nargs="*", choices=names, default=names, help="of the ablation")
    parser.add_argument("--searches", nargs="*", choices=list(SEARCHES), default=list(SEARCHES), help="of hyperband")
    parser.add_argument("--sizes", nargs="*", type=int, help="members of a pack, instead of each case's own number")
    parser.add_argument("--rounds", type=int, default=4, help="of a case, at least")
    parser.add_argument("--seconds", type=float, default=4.0, help="in which more rounds of a case are made")
    parser.add_argument("--device", type=torch.device, default="cpu", help="of the ablation")
    parser.add_argument(
        "--quick", action="store_true", help="few samples, networks and cases, 1 thread; judges nothing"
    )
    options = parser.parse_args()
    look_for_data(parser, quick=options.quick)
    options.networks = ("MLP-3", "ResNet")
    if options.quick:
        torch.set_num_threads(1)
        WAYS["shoal"] = partial(Chosen, settled=1, planned=100)
        SEARCHES.update({name: (*some[:2], 3, 100, some[4][:3]) for name, some in SEARCHES.items()})
        options.sizes, options.rounds, options.seconds = [2], 1, 0.0
        options.networks, options.searches, options.cases = ["MLP-3"], options.searches[:2], ["all"]
    return options


def ablation(options: argparse.Namespace) -> Figures:
    """Figures 4 and 6 of the paper: milliseconds for as many samples of each member as the largest batch has."""
    print(f"\nmilliseconds of a step, medians\n{'':28} {'seq':>8} {'pack':>8} {'shoal':>8}   speed")
    if "png" in options.pipelines:
        write(options.folder, 400 if options.quick else None)
    given = {"folder": options.folder, "device": options.device, **({"samples": 100} if options.quick else {})}
    cases = [case for case in CASES if case.pipeline in options.pipelines and case.name in options.cases]
    figures = {}
    for case in (replace(one, members=size, **given) for one in cases for size in options.sizes or [one.members]):
        title = f"{case.pipeline}, {case.name}, {case.members}"
        ways = {name: make(case) for name, make in WAYS.items()}
        taken = measured(ways, options.rounds, options.seconds)
        steps = {name: 1000 * case.per_step(median(each)) for name, each in taken.items()}
        speed = min(speed_of(taken["shoal"], taken[rival]) for rival in ("seq", "pack"))
        print(f"{title:28} {' '.join(f'{each:8.2f}' for each in steps.values())} {speed:6.2f}x", flush=True)
        found = steps | {"gain": steps["seq"] / steps["shoal"], "speed": speed}
        figures[title] = {name: round(each, 4) for name, each in found.items()}
    return figures


def memory(options: argparse.Namespace) -> Figures:
    """Figure 5 of the paper: megabytes by which the training of two networks grows a process that has imported torch;
    those of two processes are twice those of one."""
    print(f"\nmemory of two, MB\n{'':28} processes  pack shoal")
    figures = {}
    for network in options.networks:
        one, two = equal(network, 1), equal(network, 2)
        runs = {"processes": (Sequential, one), "pack": (Paper, two), "shoal": (WAYS["shoal"], two)}
        peaks = {name: in_a_fork(grown, *run) for name, run in runs.items()}
        peaks["processes"] *= 2
        print(f"{network:28} " + " ".join(f"{each:8.1f}" for each in peaks.values()), flush=True)
        figures[network] = {name: round(each, 2) for name, each in peaks.items()}
    return figures


def grown(make: Callable[[Case], Way], case: Case) -> float:
    """Megabytes by which two epochs grow this process at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    way = make(case)
    way.run()
    way.run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


def switching(options: argparse.Namespace) -> Figures:
    """Table 1 of the paper: seconds that a model adds to a search of models one after another, and of its epoch."""
    print(f"\nswitching, seconds\n{'':28}    epoch    model")
    figures = {}
    for network in options.networks:
        task = Cifar(network, "pictures", 400 if options.quick else 4 * equal(network, 1).samples, 100)
        (few, _), (many, reports) = (
            in_a_fork(searched, task, shoal.Random(count, epochs=1), "none", "cpu:1") for count in (2, 10)
        )
        found = {"epoch": fmean(report.seconds for report in reports if report.trial >= 2), "model": (many - few) / 8}
        print(f"{network:28} {found['epoch']:8.3f} {found['model']:8.3f}", flush=True)
        figures[network] = {name: round(each, 4) for name, each in found.items()}
    return figures


def hyperband(options: argparse.Namespace) -> Figures:
    """Table 4 of the paper: seconds of whole searches, and the best loss."""
    plain = {"original": in_a_loop, "pool": partial(in_processes, folder=options.folder, slots=os.cpu_count() or 1)}
    packings = {"knn, measured": baselines.KNN(metric="measured")}
    figures: Figures = {}
    for title in options.searches:
        network, pipeline, most, samples, rows = SEARCHES[title]
        print(f"\nhyperband, {title}: R = {most}, {samples} samples\n{'':28} seconds speed-up best {METRIC}")
        task = Cifar(network, pipeline, samples, min(1000, samples // 2))
        seconds, losses = {}, {}
        for name in rows:
            run = (plainly, plain[name]) if name in plain else (searched, packings.get(name, name))
            algorithm = shoal.Hyperband(max_epochs=most, eta=3)
            seconds[name], reports = in_a_fork(run[0], task, algorithm, run[1])
            losses[name] = min(filter(math.isfinite, (report.metrics[METRIC] for report in reports)))
            print(f"{name:28} {seconds[name]:7.1f} {seconds['original'] / seconds[name]:7.2f}x {losses[name]:9.4f}",
                  flush=True)  # fmt: skip
        figures[title] = {name: round(value, 2) for name, value in seconds.items()}
        figures[title]["best"] = {name: round(value, 4) for name, value in losses.items()}
    return figures


def plainly(task: Cifar, algorithm: Algorithm, search: Callable[[Asked], PlainSearch]) -> tuple[float, list[Report]]:
    """A search by plain loops: its seconds, and a report for each epoch."""
    began = time.perf_counter()
    timeline = search(Asked(task, SPACE, algorithm, METRIC, "min", seed=0)).timeline
    return time.perf_counter() - began, [Report(0, 0, {METRIC: value}) for _, value in timeline]


def searched(
    task: Cifar, algorithm: Algorithm, packing: str | Packing, devices: str = f"cpu:{os.cpu_count()}"
) -> tuple[float, list[Report]]:
    """A search by Shoal, which fuses only with the packing `cost`: its seconds, and a report for each epoch."""
    baselines.register()
    shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)
    first_search()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        shoal.tune(
            task, SPACE, metric=METRIC, mode="min", algorithm=algorithm, packing=packing, fuse=packing == "cost",
            devices=devices, directory=f"{folder}/study", seed=0, show_progress=False,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        with JournalView.read(f"{folder}/study") as journal:
            return seconds, [report for row in journal.trials() for report in journal.curve(row.number)]


def other_losses(searches: Figures) -> list[str]:
    """Name the searches in which the best loss of the packing `cost` is not that of the original."""
    return [
        f"{title}: best loss {best['cost']:.4f}, of the original {best['original']:.4f}"
        for title, best in ((title, found["best"]) for title, found in searches.items())
        if abs(best["cost"] / best["original"] - 1) > SAME_LOSS
    ]


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    part.__name__: part for part in (hyperband, switching, ablation, memory)
}

if __name__ == "__main__":
    sys.exit(main())
