"""A first search of handwritten digits, and then what a search gains beside plain PyTorch on this machine.

The first search has 16 configurations of an MLP and a small CNN; its study stays. Then 64 configurations are searched
by Shoal, by a pool of two forked processes and by a plain loop, each way from the call to the result, with torch and
the task imported. The ways take turns, once in this and once in the opposite order. Shoal has an empty history each
time. The pool and the loop are those of `searches.py`: they index tensors in memory, without a DataLoader, and the
processes of the pool have one thread each and take configurations from a queue.

    python benchmarks/demo.py [--quick] [--check]
"""

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    print("demo: importing torch and Shoal", flush=True)

import torch
from rivals.forked import in_a_fork
from search_tasks.search import Search
from searches import SLOTS, run

import shoal
from shoal.host.remedy import command

EXAMPLES = Path(__file__).parents[1] / "examples"
POOL, LOOP = f"a pool of {SLOTS} forked processes", "a loop"
SHOAL = f"Shoal on {SLOTS} slots"
WAYS = {SHOAL: "empty", POOL: "pool", LOOP: "plain"}
"""Way -> its name in `searches.py`."""
ASKED = {POOL: 1.3, LOOP: 4.0}
"""Asked: seconds of a way, relative to Shoal's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two configurations of one epoch; judges nothing")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure is missed, else always 0")
    arguments = parser.parse_args()
    quick = arguments.quick
    sys.path.insert(0, str(EXAMPLES))
    import digits

    task = digits.Digits()
    few, many = ((2, 1), (2, 1)) if quick else ((16, 5), (64, 10))  # configurations and epochs
    name = platform.processor() or platform.machine()
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}\n\nA first search", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        study = first_search(task, digits.SPACE, shoal.Random(*few), f"{folder}/study" if quick else None)
        commands = next_commands(study)
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"  # which `run` empties
        print(f"\n{many[0]} other configurations of {many[1]} epochs, by three ways in turn", flush=True)
        algorithm = partial(shoal.Random, *many)
        seconds = compare(Search(lambda data, quick: task, digits.SPACE, algorithm, algorithm), task, quick)
    print(f"\nAll together: {SHOAL} {seconds[SHOAL]:.1f} s", flush=True)
    missed = []
    for way, least in ASKED.items():
        times = seconds[way] / seconds[SHOAL]
        print(f"  {way}: {seconds[way]:.1f} s, {times:.1f} times as long")
        missed += [f"{way} takes {times:.2f} times as long, asked {least}"] * (times < least and not quick)
    if arguments.check:
        print(json.dumps({"seconds": {way: round(value, 2) for way, value in seconds.items()}, "missed": missed}))
    elif not quick:
        print("\nNext, with the first search:", *commands, sep="\n  ")
    return 1 if missed and arguments.check else 0


def first_search(task: shoal.Task, space: Mapping[str, Any], algorithm: shoal.Random, place: str | None) -> shoal.Study:
    """Search, and print the best trial."""
    began = time.perf_counter()
    study = shoal.tune(task, space, metric="accuracy", mode="max", algorithm=algorithm, directory=place)
    seconds, best = time.perf_counter() - began, study.best_trial
    print(f"The best of {algorithm.n} is trial {best.number}, accuracy {best.objective:.3f}, after {seconds:.1f} s")
    return study


def next_commands(study: shoal.Study) -> list[str]:
    """Return commands for a study, with the path of `shoal` in this environment."""
    folder = shlex.quote(os.path.relpath(Path(sys.executable).parent))
    best = str(study.best_trial.number)
    verbs: dict[str, list[str]] = {"status": [], "page": [], "best": [], "export": [best]}
    return [f"{folder}/{command(verb, study.directory, *given)}" for verb, given in verbs.items()]


def compare(search: Search, task: shoal.Task, quick: bool) -> dict[str, float]:
    """Search by each way, and unless `quick` again in the opposite order; print the seconds, and return their sums."""
    seconds = dict.fromkeys(WAYS, 0.0)
    for way in [*WAYS] if quick else [*WAYS, *reversed(WAYS)]:
        found = in_a_fork(run, search, task, quick, WAYS[way])
        seconds[way] += found.seconds
        print(f"  {way}: {found.seconds:.1f} s, accuracy {found.best:.3f}", flush=True)
    return seconds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: stopped")
