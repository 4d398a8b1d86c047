"""A first search of handwritten digits, and then what a search gains beside plain PyTorch on this machine.

The first search has 16 configurations of an MLP and a small CNN; its study stays. Then 64 configurations are searched
by Shoal, by a pool of two forked processes and by a plain loop, each way from the call to the result, with torch and
the task imported. The ways take turns, once in this and once in the opposite order. Shoal has an empty history each
time. The pool and the loop are those of `searches.py`: they index tensors in memory, without a DataLoader, and the
processes of the pool have one thread each and take configurations from a queue.

    python benchmarks/demo.py [--quick] [--check]
"""

import argparse
import os
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

from papers.experiment import missed_of
from papers.rivals import DEMO, EXPERIMENTS
from report import machine, report
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two configurations of one epoch; judges nothing")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure is missed, else always 0")
    given = parser.parse_args()
    quick = given.quick
    sys.path.insert(0, str(EXAMPLES))
    import digits

    task = digits.Digits()
    few, many = ((2, 1), (2, 1)) if quick else ((16, 5), (64, 10))  # configurations and epochs
    print(f"{machine('torch')}\n\nA first search", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        study = first_search(task, digits.SPACE, shoal.Random(*few), f"{folder}/study" if quick else None)
        commands = next_commands(study)
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"  # which `run` empties
        print(f"\n{many[0]} other configurations of {many[1]} epochs, by three ways in turn", flush=True)
        algorithm = partial(shoal.Random, *many)
        seconds = compare(Search(lambda data, quick: task, digits.SPACE, algorithm, algorithm), task, quick)
    print(f"\nAll together: {SHOAL} {seconds[SHOAL]:.1f} s", flush=True)
    for way in (POOL, LOOP):
        print(f"  {way}: {seconds[way]:.1f} s, {seconds[way] / seconds[SHOAL]:.1f} times as long")
    if given.check:
        figures = {"seconds": {way: round(value, 2) for way, value in seconds.items()}}
        return report(figures, [] if quick else missed_of(EXPERIMENTS, DEMO, figures))
    if not quick:
        print("\nNext, with the first search:", *commands, sep="\n  ")
    return 0


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
