"""Fluid's comparison on real processes (Figures 7 and 8): five searches of four tasks on two CPU slots, in three ways.

- fifo           a trial a slot, first in, first out: the execution without Fluid
- water_filling  Fluid's policy: a slot has up to c jobs, and a job grows into a slot that is idle; c and d are measured
- defaults       Shoal as it comes: policy "auto", trials fused, jobs packed

Without fusing and packing the policies train the same trials to the same values but for rounding, and but for ASHA,
whose promotions depend on the order of reports. A job with the cores of two slots adds up in another order; a few
epochs of convolutions make another loss of that, and halving may then promote another trial. Each search has a job
history of its own, empty at first. The tasks are those of `search_tasks/fluid.py`. The first three are bound by
arithmetic, so that two jobs on a slot take twice as long; the samples of "stored" come after a `time.sleep`, during
which another job can train.

    python benchmarks/groups_live.py [--tasks cifar wikitext dcgan stored] [--quick]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from papers.experiment import missed_of
from papers.fluid import EXPERIMENTS, LIVE
from report import report
from search_tasks.fluid import DCGAN, WIKITEXT, AlexNet, FromStorage, Words
from search_tasks.pictures import CIFAR, MNIST
from search_tasks.search import Search

import shoal
from shoal.algorithms.base import Algorithm

__all__ = ["TASKS", "run"]

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
        lambda data, quick: DCGAN(data / MNIST, 32 if quick else 250),
        {"lr_d": shoal.uniform(1e-4, 5e-4), "lr_g": shoal.uniform(1e-4, 5e-4), "batch_size": 32},
        *(*RANDOM, "gap", "min"),
        file=MNIST,
    ),
    "stored": Search(
        lambda data, quick: FromStorage(data / MNIST, *((20, 10) if quick else (500, 250))),
        {"lr": shoal.loguniform(1e-4, 1e-2), "width": 64, "batch_size": 16},
        *RANDOM,
        file=MNIST,
    ),
}


def run(task: Search, algorithm: Algorithm, way: str, *, quick: bool) -> tuple[float, float]:
    """Search in a new folder; return the seconds from the call to the result, and the best value."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        began = time.perf_counter()
        study = shoal.tune(
            task.task(DATA, quick), task.space, metric=task.metric, mode=task.mode, algorithm=algorithm,
            devices=f"cpu:{SLOTS}", directory=f"{folder}/study", show_progress=False, **WAYS[way],
        )  # fmt: skip
        return time.perf_counter() - began, study.best_trial.objective


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="few samples and one search a task; nothing is asked")
    options = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    missed = []
    print(f"{'task':9} {'search':9} {'way':14} {'s':>6} {'speed-up':>8} best")
    for name in options.tasks:
        task = TASKS[name]
        if not (DATA / task.file).exists():
            print(f"{name} is left out for want of {DATA / task.file}")
            continue
        run(task, shoal.Random(2, epochs=1), "defaults", quick=True)  # does what a process does once: imports above all
        figures[name] = {}
        for search, algorithm in list(SEARCHES.items())[: 1 if options.quick else None]:
            order = list(WAYS) if len(figures[name]) % 2 == 0 else list(WAYS)[::-1]
            runs = {way: run(task, algorithm(), way, quick=options.quick) for way in order}
            speed_ups = figures[name][search] = {way: round(runs["fifo"][0] / runs[way][0], 4) for way in WAYS}
            for way, speed_up in speed_ups.items():
                seconds, best = runs[way]
                print(f"{name:9} {search:9} {way:14} {seconds:6.2f} {speed_up:7.2f}x {best:.4f}", flush=True)
            if search != "ASHA" and runs["fifo"][1] != runs["water_filling"][1]:
                missed.append(f"{name}, {search}: water_filling found another value")
        missed += missed_of(EXPERIMENTS, LIVE[name], figures)
    if not figures:
        return report({"skipped": f"no {', '.join(sorted({TASKS[name].file for name in options.tasks}))}"}, [])
    return report(figures, [] if options.quick else missed)


if __name__ == "__main__":
    sys.exit(main())
