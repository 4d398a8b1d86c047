"""Five seeds of every configuration beside one: in Shoal, where they are members of one array, and in a process pool.

32 perceptrons are trained for 4 epochs on a table of 4000 rows, which uses a fraction of a core. The ways take turns,
each in a process forked from one with torch and Shoal imported; medians are shown. Before the rounds Shoal runs once,
so that it has measured.

- pool, pool of 5     two processes of one thread take trials from a queue; with one seed of each configuration, or five
- shoal, shoal of 5   `shoal.tune`, and `shoal.tune(repeats=5)`

The trials, seeds, orders of samples and budgets of Shoal's search are those of the pool's.

    python benchmarks/repeats.py [--rounds 3] [--quick]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo  # which torch's optimizers import at their first step
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, in_processes
from search_tasks.tabular import Tabular

import shoal
from shoal.algorithms.repeated import Repeated
from shoal.core.repeats import Repeats

SEEDS, SLOTS, SEED = 5, 2, 1
OF_ONE, OF_POOL = 1.8, 1.0
"""Asked: time of five seeds relative to that of one, and to that of the pool's five."""
SPACE = {"lr": shoal.loguniform(1e-4, 1e-2), "width": shoal.choice([64, 128, 256]), "batch_size": 32}
WAYS = ("pool", "pool of 5", "shoal", "shoal of 5")


def searched(way: str, quick: bool) -> float:
    """Seconds of the search."""
    warnings.simplefilter("ignore")
    task, seeds = Tabular(500 if quick else 4000), SEEDS if way.endswith("5") else 1
    algorithm = shoal.Random(4, epochs=1) if quick else shoal.Random(32, epochs=4)
    with tempfile.TemporaryDirectory() as folder:
        if way.startswith("pool"):
            torch.set_num_threads(1)
            asked = Asked(task, SPACE, Repeated(algorithm, Repeats(seeds)), "accuracy", "max", SEED)
            began = time.perf_counter()
            in_processes(asked, Path(folder), SLOTS)
            return time.perf_counter() - began
        began = time.perf_counter()
        shoal.tune(
            task, SPACE, metric="accuracy", mode="max", repeats=seeds, seed=SEED, algorithm=algorithm,
            devices=f"cpu:{SLOTS}", directory=f"{folder}/study", show_progress=False,
        )  # fmt: skip
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="4 trials of one epoch, one round; checks no figure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = f"{cache}/shoal"
        rounds = [] if options.quick else [{way: in_a_fork(searched, way, False) for way in WAYS[2:]}]
        for _ in range(1 if options.quick else options.rounds):
            rounds.append({way: in_a_fork(searched, way, options.quick) for way in WAYS})
    seconds = {way: round(statistics.median(each[way] for each in rounds if "pool" in each), 3) for way in WAYS}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    for way, took in seconds.items():
        print(f"{way:12} {took:8.2f} s {took / seconds[way.removesuffix(' of 5')]:8.2f} times as long as one seed")
    figures = {
        "of_one": seconds["shoal of 5"] / seconds["shoal"],
        "of_pool": seconds["shoal of 5"] / seconds["pool of 5"],
    }
    asked = {"of_one": OF_ONE, "of_pool": OF_POOL}
    missed = [
        f"{name}: {figures[name]:.2f}, asked at most {most}" for name, most in asked.items() if figures[name] > most
    ]
    print(json.dumps({"seconds": seconds, **figures, "missed": [] if options.quick else missed}))
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
