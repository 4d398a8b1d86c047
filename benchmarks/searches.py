"""Whole searches as users write them, from the call to the result, in four ways on two cores.

- plain   one configuration after another in one process, with the threads that torch takes by default
- pool    two processes, forked with torch and the data loaded, of one thread each, take configurations from a queue;
          successive halving continues its survivors from files
- empty   Shoal with an empty job history: all that earlier runs measured of models, operators and compilers is deleted
- full    the same search again, with what the run before has measured

All ways have the same configurations, seeds, orders of samples and budgets. Each runs in a process of its own, forked
from one that has imported torch, Shoal and the modules of the tasks. The plain ways index tensors in memory, without a
DataLoader. The ways take turns, the plain loop only in the first round; the table shows medians, and for Shoal what the
time of its two slots was spent on, as `shoal report --accounting` says it. "closing" is the time between the last event
of a study and the return of `tune`.

    python benchmarks/searches.py [--searches "200 linear" LSTM] [--rounds 3] [--data DIR] [--quick]
"""

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, PlainSearch, in_a_loop, in_processes
from search_tasks.registry import SEARCHES
from search_tasks.search import Search

import shoal
from shoal.core.activity import Activity
from shoal.journal.view import JournalView
from shoal.look.accounting import accounting

DATA = Path(__file__).parents[2] / "shared" / "data"
SLOTS = 2
SEED = 1
WAYS = ("plain", "pool", "empty", "full")
QUICK = ["200 linear", "CIFAR CNN, halving", "LSTM"]
"""Of a quick run, one of each kind of data."""

LONG_SECONDS = 10.0
"""Searches that take the pool longer are long."""
EMPTY_OF_POOL, EMPTY_OVER_SHORT_POOL, FULL_OF_POOL = 1.0, 0.5, 0.95
"""Asked: seconds with an empty history of the pool's, of long searches; seconds beyond the pool's, of short ones; and
seconds with a full history of the pool's."""
MEAN_OF_POOL, MEAN_OF_PLAIN = 0.70, 0.40
"""Asked of the geometric means over all searches, with an empty history."""
ACCOUNTED = 0.02
"""Largest relative difference between the sum of all activities and the time of the slots."""


@dataclass
class Run:
    """One run of a search in one way.

    Args:
        seconds: From the call to the result.
        best: Best value that a trial has reported.
        wall: Seconds of running time of the study; 0 in a plain way.
        spent: Seconds of all slots by activity; empty in a plain way.
    """

    seconds: float
    best: float
    wall: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def unaccounted(self) -> float:
        """Relative difference between the sum of all activities and the time of the slots."""
        return abs(sum(self.spent.values()) / (SLOTS * self.wall) - 1) if self.wall else 0.0


def run_plain(search: Search, task: shoal.Task, quick: bool, way: str) -> Run:
    algorithm = (search.quick if quick else search.algorithm)()
    asked = Asked(task, search.space, algorithm, search.metric, search.mode, SEED)
    if way == "plain":
        return _timed(partial(in_a_loop, asked))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return _timed(partial(in_processes, asked, Path(folder), SLOTS))


def _timed(searched: Callable[[], PlainSearch]) -> Run:
    began = time.perf_counter()
    best = searched().best
    return Run(time.perf_counter() - began, best)


def run_shoal(search: Search, task: shoal.Task, quick: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study = shoal.tune(
            task, search.space, metric=search.metric, mode=search.mode,
            algorithm=(search.quick if quick else search.algorithm)(), devices=f"cpu:{SLOTS}",
            backend="inline" if quick else "local", directory=f"{folder}/study", seed=SEED, show_progress=False,
        )  # fmt: skip
        best = study.best_trial.objective
        seconds = time.perf_counter() - began
        with JournalView.read(f"{folder}/study") as journal:
            found = accounting(journal, time.time())
    return Run(seconds, best, found.wall, {str(activity): spent for activity, spent in found.seconds.items()})


def run(search: Search, task: shoal.Task, quick: bool, way: str) -> Run:
    """Run a search in one way; of Shoal's two ways, "empty" drops all that earlier runs have measured."""
    if way in ("plain", "pool"):
        return run_plain(search, task, quick, way)
    if way == "empty":
        shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)
    return run_shoal(search, task, quick)


@dataclass(frozen=True)
class Measured:
    """All runs of one search, and their medians.

    Args:
        search: The search.
        runs: Way -> runs, one for each round.
    """

    search: Search
    runs: dict[str, list[Run]]

    def seconds(self, way: str) -> float:
        """Median seconds of a way."""
        return statistics.median(run.seconds for run in self.runs[way])

    def of(self, way: str, other: str) -> float:
        """Seconds of one way relative to another's."""
        return self.seconds(way) / self.seconds(other)

    def shares(self, way: str) -> dict[str, float]:
        """Mean share of each activity in the time of Shoal's slots from the call to the result."""
        runs = self.runs[way]
        total = SLOTS * sum(run.seconds for run in runs)
        shares = {str(each): sum(run.spent[each] for run in runs) / total for each in Activity}
        shares["closing"] = SLOTS * sum(run.seconds - run.wall for run in runs) / total
        return shares

    def figures(self) -> dict[str, Any]:
        """Values for the line of JSON."""
        return {
            "seconds": {way: round(self.seconds(way), 3) for way in WAYS},
            "best": {way: self.runs[way][-1].best for way in WAYS},
            "of_pool": {way: round(self.of(way, "pool"), 3) for way in ("empty", "full")},
            "of_plain": {way: round(self.of(way, "plain"), 3) for way in ("empty", "full")},
            "shares": {
                way: {name: round(share, 4) for name, share in self.shares(way).items()} for way in ("empty", "full")
            },
        }

    def missed(self) -> list[str]:
        """What is asked of a search and was not reached."""
        said = []
        empty, full, pool = map(self.seconds, ("empty", "full", "pool"))
        if pool > LONG_SECONDS and empty > EMPTY_OF_POOL * pool:
            said.append(f"empty history {empty / pool:.2f} of the pool, asked {EMPTY_OF_POOL}")
        if pool <= LONG_SECONDS and empty > pool + EMPTY_OVER_SHORT_POOL:
            said.append(f"empty history {empty - pool:.2f} s over the pool, asked {EMPTY_OVER_SHORT_POOL}")
        if full > FULL_OF_POOL * pool:
            said.append(f"full history {full / pool:.2f} of the pool, asked {FULL_OF_POOL}")
        unaccounted = max(run.unaccounted for way in ("empty", "full") for run in self.runs[way])
        if unaccounted > ACCOUNTED:
            said.append(f"activities differ by {unaccounted:.1%} from the time of the slots, asked {ACCOUNTED:.0%}")
        best = [run.best for way in WAYS for run in self.runs[way]]
        if max(best) - min(best) > self.search.tolerance:
            said.append(
                f"best {self.search.metric} from {min(best):.4f} to {max(best):.4f}, asked {self.search.tolerance}"
            )
        return said

    def table(self, name: str) -> str:
        """Rows of the ways, and what Shoal spent its time on."""
        lines = [
            f"{name if way == WAYS[0] else '':20} {way:6} {self.seconds(way):8.2f} {self.of(way, 'pool'):8.2f} "
            f"{self.of(way, 'plain'):9.2f} {self.runs[way][-1].best:10.4f}"
            for way in WAYS
        ]
        for way in ("empty", "full"):
            shares = ", ".join(f"{each} {share:.1%}" for each, share in self.shares(way).items() if share >= 0.001)
            lines.append(f"{'':20} {way:6} {shares}")
        return "\n".join(lines)


def means(found: dict[str, Measured]) -> dict[str, float]:
    """Geometric means over all searches."""
    return {
        f"{way}_of_{other}": round(statistics.geometric_mean(each.of(way, other) for each in found.values()), 3)
        for way in ("empty", "full")
        for other in ("pool", "plain")
    }


def measured(name: str, data: Path, rounds: int, quick: bool) -> Measured:
    """Run a search in all ways, in turns. Quick ones stay in this process, so that torch is imported once."""
    search = SEARCHES[name]
    search.import_all()
    task = search.task(data, quick)
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[1:] if number else WAYS:
            given = (search, task, quick, way)
            runs[way].append(run(*given) if quick else in_a_fork(run, *given))
    return Measured(search, runs)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--searches", nargs="*", choices=list(SEARCHES), metavar="NAME",
                        help=f"some of: {'; '.join(SEARCHES)}; all of them without a name")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest versions of a few, one round, all in this process; checks no figure",
    )
    given = parser.parse_args()
    given.searches = given.searches or (QUICK if given.quick and given.searches is None else list(SEARCHES))
    missing = {SEARCHES[name].file for name in given.searches if not (given.data / SEARCHES[name].file).exists()}
    if missing and not given.quick:
        parser.error(f"{', '.join(sorted(missing))} missing in {given.data}; name the folder with --data")
    if missing:
        given.searches = [name for name in given.searches if SEARCHES[name].file not in missing]
        print(f"left out for want of {', '.join(sorted(missing))} in {given.data}")
    return given


def main() -> int:
    given = options()
    rounds = 1 if given.quick else given.rounds
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}; {SLOTS} slots, median of {rounds}")  # fmt: skip
    print(f"{'':20} {'way':6} {'seconds':>8} {'of pool':>8} {'of plain':>9} {'best':>10}")
    found: dict[str, Measured] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = f"{cache}/shoal"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/shoal/inductor"
        for name in given.searches:
            found[name] = measured(name, given.data, rounds, given.quick)
            print(found[name].table(name), flush=True)
            missed += [f"{name}: {fault}" for fault in found[name].missed()]
    figures = means(found) if found else {}
    print("geometric means: " + ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in figures.items()))
    if figures and len(found) == len(SEARCHES):
        for name, most in (("empty_of_pool", MEAN_OF_POOL), ("empty_of_plain", MEAN_OF_PLAIN)):
            missed += [f"geometric mean {name.replace('_', ' ')} {figures[name]}, asked {most}"] * (
                figures[name] > most
            )
    if given.quick:
        missed.clear()
    searches = {name: each.figures() for name, each in found.items()}
    print(json.dumps({"searches": searches, "geometric_means": figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
