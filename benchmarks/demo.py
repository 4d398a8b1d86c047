"""The search of `examples/digits.py` by Shoal, by a pool of two forked processes and by a plain loop.

128 configurations of an MLP and a small CNN, each way from the call to the result, with torch and the task imported.
The pool and the loop are those of `searches.py`: they index tensors in memory, without a DataLoader, and the processes
of the pool have one thread each and take configurations from a queue.

    python benchmarks/demo.py [--quick] [--check]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rivals.forked import in_a_fork
from search_tasks.search import Search
from searches import SEED, SLOTS, run

import shoal

EXAMPLES = Path(__file__).parents[1] / "examples"
OF_POOL, OF_LOOP = 1.3, 4.0
"""Asked: the seconds of the pool and of the loop, relative to Shoal's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two configurations of one epoch; judges nothing")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure is missed, else always 0")
    arguments = parser.parse_args()
    quick = arguments.quick
    sys.path.insert(0, str(EXAMPLES))
    import digits

    task = digits.Digits()
    algorithm = partial(shoal.Random, 2, epochs=1) if quick else partial(shoal.Random, 128, epochs=10)
    search = Search(lambda data, quick: task, digits.SPACE, algorithm, algorithm)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study = shoal.tune(
            task,
            search.space,
            metric="accuracy",
            mode="max",
            algorithm=algorithm(),
            directory=f"{folder}/study",
            seed=SEED,
        )
        seconds = {"Shoal": time.perf_counter() - began}
        accuracy = study.best_trial.objective  # while the directory of the study is there
    print(f"Shoal: {seconds['Shoal']:.1f} s. The same search by plain PyTorch, which takes longer:", flush=True)
    asked = {f"a pool of {SLOTS} forked processes": ("pool", OF_POOL), "a loop": ("plain", OF_LOOP)}
    missed = []
    for way, (name, least) in asked.items():
        seconds[way] = in_a_fork(run, search, task, quick, name).seconds
        times = seconds[way] / seconds["Shoal"]
        print(f"{way}: {seconds[way]:.1f} s, {times:.1f} times as long", flush=True)
        missed += [f"{way} takes {times:.2f} times as long, asked {least}"] * (times < least and not quick)
    figures = {way: round(value, 2) for way, value in seconds.items()}
    print(json.dumps({"seconds": figures, "accuracy": accuracy, "missed": missed}))
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: stopped; nothing is kept")
