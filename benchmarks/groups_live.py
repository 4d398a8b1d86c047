"""Fluid's comparison on real processes (Figures 7 and 8): five searches of four tasks on two CPU slots, in three ways.

- fifo           a trial a slot, first in, first out: the execution without Fluid
- water_filling  Fluid's policy: a slot has up to c jobs, and a job grows into a slot that is idle; c and d are measured
- defaults       Shoal as it comes: policy "auto", trials fused, jobs packed

Without fusing and packing the policies train the same trials to the same values, but for ASHA, whose promotions depend
on the order of reports. Each search has a job history of its own, empty at first. The tasks are those of
`search_tasks/fluid.py`. The first three are bound by arithmetic, so that two jobs on a slot take twice as long; the
samples of "stored" come after a `time.sleep`, during which another job can train.

    python benchmarks/groups_live.py [--tasks cifar wikitext dcgan stored] [--quick]

The last line is one JSON object; the exit status is 1 if a way is too slow, or finds another value.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from placed.sharing import busy_seconds, side_by_side
from search_tasks.fluid import DCGAN, WIKITEXT, AlexNet, FromStorage, Words
from search_tasks.pictures import CIFAR, MNIST
from search_tasks.search import Search

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.job import Purpose
from shoal.journal.view import JournalView

__all__ = ["TASKS", "lacks", "run"]

DATA = Path(__file__).parents[2] / "shared" / "data"
SLOTS = 2
APART = {"fuse": False, "packing": "none"}
WAYS = {"fifo": {"policy": "fifo", **APART}, "water_filling": {"policy": "water_filling", **APART}, "defaults": {}}

SEARCHES = {
    "random": lambda: shoal.Random(9, epochs=3),
    "SHA": lambda: shoal.SuccessiveHalving(n=9, max_epochs=9, eta=3),
    "SyncBOHB": lambda: shoal.SyncBOHB(max_epochs=9, eta=3, brackets=2),
    "ASHA": lambda: shoal.ASHA(12, max_epochs=9, eta=3, concurrency=4),
    "PBT": lambda: shoal.PBT(4, epochs=8, interval=2),
}


RANDOM = (SEARCHES["random"], SEARCHES["random"])
"""Algorithms that the tasks name; each is searched by all of `SEARCHES`."""
TASKS = {
    "cifar": Search(
        lambda data, quick: AlexNet(data / CIFAR, *((80, 40) if quick else (640, 250))),
        {
            "lr": shoal.loguniform(1e-3, 1.0),
            "momentum": shoal.uniform(0.1, 0.9),
            "conv_1": shoal.choice([8, 16, 32]),
            "conv_2": shoal.choice([16, 32, 64]),
            "dropout_1": shoal.uniform(0.01, 0.1),
            "dropout_2": shoal.uniform(0.05, 0.2),
            "dense_1": shoal.choice([16, 32, 64, 128]),
            "batch_size": 64,
        },
        *RANDOM,
        file=CIFAR,
    ),
    "wikitext": Search(
        lambda data, quick: Words(data / WIKITEXT, *((1000, 250) if quick else (8000, 2000))),
        {
            "kind": shoal.choice(["tanh", "relu", "LSTM", "GRU"]),
            "layers": shoal.choice([2, 3, 4]),
            "hidden": shoal.choice([20, 40, 60]),
            "batch_size": shoal.choice([10, 20, 30]),
            "bptt": shoal.choice([30, 35, 40]),
            "clip": shoal.uniform(0.1, 0.5),
            "dropout": shoal.uniform(0.1, 0.5),
            "lr": shoal.uniform(10.0, 30.0),
        },
        *(*RANDOM, "valid_loss", "min"),
        file=WIKITEXT,
    ),
    "dcgan": Search(
        lambda data, quick: DCGAN(data / MNIST, 100 if quick else 1000),
        {"lr_d": shoal.uniform(1e-4, 5e-4), "lr_g": shoal.uniform(1e-4, 5e-4), "batch_size": 32},
        *(*RANDOM, "inception", "max"),
        file=MNIST,
    ),
    "stored": Search(
        lambda data, quick: FromStorage(data / MNIST, *((20, 10) if quick else (500, 250))),
        {"lr": shoal.loguniform(1e-4, 1e-2), "width": 64, "batch_size": 16},
        *RANDOM,
        file=MNIST,
    ),
}
LEAST = {"cifar": 0.95, "wikitext": 0.95, "dcgan": 0.95, "stored": 1.1}
"""Task -> least speed of `water_filling` over `fifo`."""


def run(task: Search, algorithm: Algorithm, way: str, *, quick: bool) -> dict[str, float]:
    """Search in a new folder; return the seconds from the call to the result, and more."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        began = time.perf_counter()
        study = shoal.tune(
            task.task(DATA, quick), task.space, metric=task.metric, mode=task.mode, algorithm=algorithm,
            devices=f"cpu:{SLOTS}", directory=f"{folder}/study", show_progress=False, **WAYS[way],
        )  # fmt: skip
        seconds, best = time.perf_counter() - began, study.best_trial.objective
        with JournalView.read(f"{folder}/study") as journal:
            jobs = journal.jobs()
    return {
        "seconds": seconds,
        "idle": 1 - busy_seconds(jobs) / (SLOTS * seconds),
        "on a slot": side_by_side(jobs),
        "helpers": sum(job.purpose is Purpose.ASSIST for job in jobs),
        "best": best,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="few samples and one search a task; nothing is asked")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    missed = []
    print(
        f"{'task':9} {'search':9} {'way':14} {'s':>6} {'speed-up':>8} {'idle':>5} {'on a slot':>9} {'helpers':>7} best"
    )
    for name in options.tasks:
        task, figures[name] = TASKS[name], {}
        if not (DATA / task.file).exists():
            print(f"{name} is left out for want of {DATA / task.file}")
            continue
        for search, algorithm in list(SEARCHES.items())[: 1 if options.quick else None]:
            order = list(WAYS) if len(figures[name]) % 2 == 0 else list(WAYS)[::-1]
            runs = {way: run(task, algorithm(), way, quick=options.quick) for way in order}
            for way in WAYS:
                each = runs[way]
                each["speed_up"] = runs["fifo"]["seconds"] / each["seconds"]
                print(
                    f"{name:9} {search:9} {way:14} {each['seconds']:6.2f} {each['speed_up']:7.2f}x {each['idle']:5.0%} "
                    f"{each['on a slot']:9} {each['helpers']:7} {each['best']:.4f}",
                    flush=True,
                )
            figures[name][search] = {way: {k: round(v, 4) for k, v in each.items()} for way, each in runs.items()}
            missed += [f"{name}, {search}: {lack}" for lack in lacks(name, search, runs)]
    missed = [] if options.quick else missed
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def lacks(task: str, search: str, runs: dict[str, dict[str, float]]) -> list[str]:
    """Return what is missed, in words."""
    asked = {"water_filling": LEAST[task], "defaults": 1.0}
    missed = [
        f"{way} {runs[way]['speed_up']:.2f}x, asked {least}x"
        for way, least in asked.items()
        if runs[way]["speed_up"] < least
    ]
    if search != "ASHA" and runs["fifo"]["best"] != runs["water_filling"]["best"]:
        missed.append("water_filling found another value")
    return missed


if __name__ == "__main__":
    sys.exit(main())
