"""Whole searches as users write them, from the call to the result, in four ways on two cores or on one GPU.

- plain   one configuration after another in one process, with the threads that torch takes by default
- pool    two processes, forked with torch and the data loaded, of one thread each, take configurations from a queue,
          and continue survivors from files. Eight share a GPU by MPS, or by time slices where MPS does not start.
- empty   Shoal with an empty job history: all that earlier runs measured of models, operators and compilers is deleted
- full    the same search again, with what the run before has measured

All ways have the same configurations, seeds, orders of samples and budgets. Each runs in a process of its own, forked
from one that has imported torch, Shoal and the modules of the tasks and has not used the GPU. The plain ways index
tensors in the memory of the device, without a DataLoader. The ways take turns, the plain loop only in the first round;
the table shows medians, and for Shoal what the time of a slot was spent on, as `shoal report --accounting` says it.
"closing" is the time between the last event of a study and the return of `tune`, overhead the time without steps.

What is asked of speeds on a CPU is in `papers`, and on a GPU in `search_tasks/registry.py`.

    python benchmarks/searches.py [--searches "200 linear" LSTM] [--ways pool empty] [--rounds 3] [--data DIR] [--quick]
    python benchmarks/searches.py --searches "32 ResNet-18" --device cuda:0 --rounds 1
"""

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from papers import hfta, rivals, searches
from papers.experiment import missed_of
from report import machine, report
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, in_a_loop, in_processes
from search_tasks.registry import OTHERS, SEARCHES
from search_tasks.search import Search

import shoal
from shoal.algorithms.repeated import Repeated
from shoal.core.device import Device
from shoal.core.errors import MpsError
from shoal.core.repeats import Repeats
from shoal.host.discover import discover
from shoal.journal.view import JournalView
from shoal.look.accounting import accounting
from shoal.run.mps import MpsDaemon

DATA = Path(os.environ.get("CIFAR10") or Path(__file__).absolute().parents[2] / "shared" / "data" / "any").parent
"""The variable names a file in the folder of the data sets."""
ALL = SEARCHES | OTHERS
SLOTS, SHARING = 2, 8
"""Slots of the CPU, and processes of the pool that share a GPU."""
SEED = 1
OURS, PLAIN_WAYS = ("empty", "full"), ("plain", "pool")
WAYS = (*PLAIN_WAYS, *OURS)
QUICK = ["200 linear", "CIFAR CNN, halving", "LSTM", "PointNet, random", "32 perceptrons, five seeds"]
"""Searches of a quick run, one of each kind."""

EXPERIMENTS = (*searches.EXPERIMENTS, *hfta.EXPERIMENTS, *rivals.EXPERIMENTS)
ACTIVITIES_APART = 0.02
"""Largest part of the time by which the activities of a slot may differ from all of it."""


@dataclass
class Run:
    """One run of a search in one way.

    Args:
        seconds: From the call to the result.
        best: Best value that a trial has reported.
        spent: Seconds of a slot by activity, the mean of all slots; empty in a plain way.
        note: On the processes of the pool.
    """

    seconds: float
    best: float
    spent: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def overhead(self) -> float:
        """Seconds without training steps."""
        return self.seconds - self.spent.get("steps", 0.0)

    @property
    def shown(self) -> dict[str, float]:
        """Activities that took a hundredth of a second."""
        return {name: shown for name, seconds in self.spent.items() if (shown := round(seconds, 2))}


def run(search: Search, task: shoal.Task, quick: bool, way: str, device: str = f"cpu:{SLOTS}") -> Run:
    """Run a search in one way; of Shoal's two ways, "empty" drops all that earlier runs have measured."""
    if way in PLAIN_WAYS:
        return run_plain(search, task, quick, way, [each for _, each in discover(device)])
    if way == "empty":
        shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study = shoal.tune(
            task, search.space, metric=search.metric, mode=search.mode, repeats=search.repeats,
            algorithm=(search.quick if quick else search.algorithm)(), devices=device,
            backend="inline" if quick else "local", directory=f"{folder}/study", seed=SEED, show_progress=False,
        )  # fmt: skip
        best = study.best_trial.objective
        seconds = time.perf_counter() - began
        if search.repeats > 1:  # of a configuration it is a mean
            best = (max if search.mode == "max" else min)(trial.objective for trial in study.trials)
        with JournalView.read(f"{folder}/study") as journal:
            found = accounting(journal, time.time())
    spent = {str(activity): each / len(found.devices) for activity, each in found.seconds.items()}
    return Run(seconds, best, spent | {"closing": seconds - found.wall})


def run_plain(search: Search, task: shoal.Task, quick: bool, way: str, devices: list[Device]) -> Run:
    algorithm = (search.quick if quick else search.algorithm)()
    if search.repeats > 1:
        algorithm = Repeated(algorithm, Repeats(search.repeats))
    first = devices[0]
    asked = Asked(task, search.space, algorithm, search.metric, search.mode, SEED, torch.device(first.torch_name))
    began = time.perf_counter()
    if way == "plain":
        best = in_a_loop(asked).best
        return Run(time.perf_counter() - began, best)
    torch.set_num_threads(1)
    slots, daemon, note = len(devices), None, ""
    if first.is_cuda:
        slots, daemon, note = SHARING, MpsDaemon(first.uuid), "MPS"
        try:
            daemon.start()
        except MpsError as error:
            daemon, note = None, f"time slices: {error}"
    with tempfile.TemporaryDirectory() as folder:
        best = in_processes(asked, Path(folder), slots, environment=daemon and daemon.environment()).best
        seconds = time.perf_counter() - began
    if daemon is not None:
        daemon.stop()
    return Run(seconds, best, note=note)


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

    def compared(self) -> dict[str, float]:
        """Return the ratios and differences of the ways that ran, of which some are asked for."""
        ours, plain = ([way for way in ways if way in self.runs] for ways in (OURS, PLAIN_WAYS))
        found = {f"{way} of {other}": self.seconds(way) / self.seconds(other) for way in ours for other in plain}
        if len(ours) == 2:
            empty, full = (self.runs[way][-1].overhead for way in OURS)
            found["overhead of full of empty"] = full / empty
        best = [run.best for runs in self.runs.values() for run in runs]
        runs = [run for way in ours for run in self.runs[way]]
        apart = (abs(sum(run.spent.values()) / run.seconds - 1) for run in runs)
        return found | {"best apart": max(best) - min(best), "activities apart": max(apart, default=0.0)}

    def missed(self, on_gpu: bool = False) -> list[str]:
        """Describe results that differ and time without activity; on a GPU, ratios above what is asked instead."""
        asked = {"best apart": self.search.tolerance, "activities apart": ACTIVITIES_APART}
        return exceeding(self.compared(), self.search.asked if on_gpu else asked)

    def figures(self) -> dict[str, Any]:
        """Values for the line of JSON."""
        return {
            "seconds": {way: round(self.seconds(way), 3) for way in self.runs},
            "best": {way: runs[-1].best for way, runs in self.runs.items()},
            "compared": {name: round(value, 4) for name, value in self.compared().items()},
            "spent": {way: self.runs[way][-1].shown for way in OURS if way in self.runs},
        }

    def table(self, name: str) -> str:
        """Rows of the ways, and what Shoal spent its time on."""
        lines, compared = [], self.compared()
        for way, runs in self.runs.items():
            last, ratios = runs[-1], [compared.get(f"{way} of {other}") for other in PLAIN_WAYS]
            shown = " ".join(" " * 8 if ratio is None else f"{ratio:8.2f}" for ratio in ratios)
            lines.append(f"{name:26} {way:6} {self.seconds(way):8.2f} {shown} {last.best:10.4f} {last.note}".rstrip())
            if last.spent:
                activities = ", ".join(f"{each} {seconds:.2f}" for each, seconds in last.shown.items())
                lines.append(f"{'':33} overhead {last.overhead:.2f} s; seconds of a slot: {activities}")
            name = ""
        return "\n".join(lines)


def exceeding(found: Mapping[str, float], asked: Mapping[str, float]) -> list[str]:
    """Describe the figures that are above what is asked at most."""
    return [f"{name} {found[name]:.3g}, asked {most}" for name, most in asked.items() if found.get(name, 0.0) > most]


def measured(name: str, given: argparse.Namespace) -> Measured:
    """Run a search in all ways, in turns. Quick ones stay in this process, so that torch is imported once."""
    search = ALL[name]
    search.import_all()
    task = search.task(given.data, given.quick)
    runs: dict[str, list[Run]] = {way: [] for way in given.ways}
    for number in range(given.rounds):
        for way in given.ways:
            if way != "plain" or number == 0:
                of_run = (search, task, given.quick, way, given.device)
                runs[way].append(run(*of_run) if given.quick and not given.on_gpu else in_a_fork(run, *of_run))
    return Measured(search, runs)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--searches", nargs="*", choices=list(ALL), metavar="NAME",
                        help=f"some of: {'; '.join(ALL)}; all of them without a name")  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default=f"cpu:{SLOTS}", help="as of shoal.tune: CPU slots, or one GPU")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--quick", action="store_true", help="the smallest versions, one round, in this process")
    given = parser.parse_args()
    usual = QUICK if given.quick else list(SEARCHES)
    given.searches = usual if given.searches is None else given.searches or list(ALL)
    given.ways = [way for way in WAYS if way in given.ways]
    if "full" in given.ways and "empty" not in given.ways:
        parser.error("--ways: 'full' goes on with the history of 'empty'; name that too")
    given.rounds = 1 if given.quick else given.rounds
    # Nothing here may look for the GPU: a process that has opened its driver cannot be forked.
    given.on_gpu = not given.device.startswith("cpu")
    absent = {name: file for name in given.searches if (file := ALL[name].file) and not (given.data / file).exists()}
    files = ", ".join(sorted({*absent.values()}))
    if absent and not given.quick:
        parser.error(f"{files} missing in {given.data}; name the folder with --data")
    if absent:
        given.searches = [name for name in given.searches if name not in absent]
        print(f"left out for want of {files} in {given.data}: {'; '.join(absent)}")
    return given


def main() -> int:
    given = options()
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    import_module("torch._dynamo")  # takes seconds, which each process would pay that makes its first optimizer
    print(f"{machine('torch')}; {given.device}, median of {given.rounds}")
    print(f"{'':26} {'way':6} {'seconds':>8} {'of plain':>8} {'of pool':>8} {'best':>10}")
    found: dict[str, Measured] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = f"{cache}/shoal"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/shoal/inductor"
        for name in given.searches:
            found[name] = measured(name, given)
            print(found[name].table(name), flush=True)
            missed += [f"{name}: {fault}" for fault in found[name].missed(given.on_gpu)]
    figures = {"searches": {name: each.figures() for name, each in found.items()}}
    missed += [] if given.on_gpu else missed_of(EXPERIMENTS, None, figures)
    return report(figures, [] if given.quick else missed)


if __name__ == "__main__":
    sys.exit(main())
