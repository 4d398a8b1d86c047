"""What five seeds of every configuration cost: in Shoal, where they are members of one array, and in a process pool.

Four runs of each search take turns, each in a process of its own that is forked from one with torch, Shoal and the
modules of the data imported; medians are shown. Before the rounds Shoal runs once, so that it has measured.

- pool, pool of 5     two processes of one thread take trials from a queue; with one seed of each configuration, or five
- shoal, shoal of 5   `shoal.tune`, and `shoal.tune(repeats=5)`, each with what earlier runs have measured

The trials, seeds, orders of samples and budgets of a search are those of the pool's: both ask the same algorithm.
"tabular" is a perceptron on 8000 rows, which uses a fraction of a core. "MNIST CNN" fills a core by itself, so that
nothing can be gained but what the pool gains. On a GPU both are measured and not judged; there is no pool.

    python benchmarks/repeats.py [--searches tabular "MNIST CNN"] [--rounds 3] [--data DIR] [--device cuda] [--quick]
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, in_processes
from search_tasks.registry import SEARCHES
from search_tasks.search import Search

import shoal
from shoal.algorithms.repeated import Repeated
from shoal.core.repeats import Repeats

DATA = Path(__file__).parents[2] / "shared" / "data"
SEEDS = 5
SLOTS = 2
SEED = 1
SMALL, FILLING = "tabular", "MNIST CNN"
OF_ONE = 1.8
"""Asked of the tabular search: time of five seeds relative to that of one."""
OF_POOL = 1.0
"""Asked of the CNN: time of five seeds relative to the pool's."""

WAYS = ("pool", "pool of 5", "shoal", "shoal of 5")


def pool(search: Search, task: shoal.Task, quick: bool, seeds: int) -> float:
    """Seconds of the search in a pool."""
    torch.set_num_threads(1)
    algorithm = Repeated((search.quick if quick else search.algorithm)(), Repeats(seeds))
    asked = Asked(task, search.space, algorithm, search.metric, search.mode, SEED)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        in_processes(asked, Path(folder), SLOTS)
        return time.perf_counter() - began


def shoals(search: Search, task: shoal.Task, quick: bool, seeds: int, device: str) -> float:
    """Seconds of the search in Shoal."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        shoal.tune(
            task, search.space, metric=search.metric, mode=search.mode, repeats=seeds, seed=SEED, show_progress=False,
            algorithm=(search.quick if quick else search.algorithm)(), devices=device, directory=f"{folder}/study",
        )  # fmt: skip
        return time.perf_counter() - began


def measured(name: str, given: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each way."""
    search = SEARCHES[name]
    search.import_all()
    task = search.task(given.data, given.quick)
    ways = WAYS if given.device.startswith("cpu") else WAYS[2:]
    rounds = [() if given.quick else WAYS[2:], *[ways] * (1 if given.quick else given.rounds)]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number, tried in enumerate(rounds):
        for way in tried:
            seeds = SEEDS if way.endswith("5") else 1
            if way.startswith("pool"):
                took = in_a_fork(pool, search, task, given.quick, seeds)
            else:
                took = in_a_fork(shoals, search, task, given.quick, seeds, given.device)
            if number:
                seconds[way].append(took)
    return {way: statistics.median(found) for way, found in seconds.items()}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--searches", nargs="+", choices=list(SEARCHES), metavar="NAME", default=[SMALL, FILLING])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--device", default=f"cpu:{SLOTS}")
    parser.add_argument("--quick", action="store_true", help="the smallest versions, one round; checks no figure")
    given = parser.parse_args()
    given.searches = [name for name in given.searches if (given.data / SEARCHES[name].file).exists()]
    return given


def main() -> int:
    given = options()
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}; {given.device}, {SEEDS} seeds")  # fmt: skip
    print(f"{'':20} {'way':12} {'seconds':>8} {'of one seed':>12}")
    figures: dict[str, dict[str, float]] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = f"{cache}/shoal"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/shoal/inductor"
        for name in given.searches:
            seconds = measured(name, given)
            for way, took in seconds.items():
                print(f"{name:20} {way:12} {took:8.2f} {took / seconds[way.removesuffix(' of 5')]:12.2f}", flush=True)
            found = {"shoal_of_one": seconds["shoal of 5"] / seconds["shoal"]}
            if "pool" in seconds:
                found["pool_of_one"] = seconds["pool of 5"] / seconds["pool"]
                found["shoal_of_pool"] = seconds["shoal of 5"] / seconds["pool of 5"]
            figures[name] = {"seconds": seconds, **{key: round(value, 3) for key, value in found.items()}}  # type: ignore[dict-item]
            if name == SMALL and found["shoal_of_one"] > OF_ONE:
                missed.append(f"{name}: five seeds take {found['shoal_of_one']:.2f} times one, asked {OF_ONE}")
            if name == FILLING and found.get("shoal_of_pool", 0.0) > OF_POOL:
                missed.append(f"{name}: five seeds take {found['shoal_of_pool']:.2f} of the pool's, asked {OF_POOL}")
    if given.quick or not given.device.startswith("cpu"):
        missed.clear()
    print(json.dumps({"searches": figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
