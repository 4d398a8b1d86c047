"""Fluid's comparison on real processes: five searches on CPU slots, with and without Fluid's policy.

Grid search, successive halving, Hyperband, ASHA and PBT train perceptrons on MNIST, or on handwritten digits where the
file of MNIST is missing; one trial a job, none of them fused or packed. Without Fluid a slot has one job (`fifo`); with
it the policy is `water_filling`: StaticFluid when trials begin, DynamicFluid when slots have become free, and c, the
number of jobs on a slot, by measured demand or by trial. There are three trainings:

- in memory          a task whose samples are tensors: bound by arithmetic, so that there is nothing to share
- stored             the same, but each sample comes from slow storage, for which a `time.sleep` in its data set stands
                     (`search_tasks/stored.py`): bound by waiting for input, so that sharing a slot can help
- stored, a program  the same as a plain PyTorch program that reports; its demand is measured from outside
- on two nodes       a wide perceptron with batches of 500, whose steps can be divided, on the slots of two nodes, whose
                     agents are processes of this machine; SHA and Hyperband, only if `--trainings` names it

Both policies train the same trials to the same values, except that promotions of ASHA depend on the order of reports.
Policies take turns, and the table shows medians over the rounds. Every search begins with what one epoch or two under
`fifo` have measured of its training, and finds c by itself. "idle" is the part of the slots' time without a training.

d, the number of slots of a job, is found by trial: a job grows into a slot that the last trials of a rung leave idle,
and gives it back if its steps are not faster; "helpers" counts both. Where slots are more than cores, they slow each
other down. The last lines say what was measured of jobs that shared a slot, and of jobs on several.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from placed.sharing import busy_seconds, demand_text, profiles, side_by_side, why_alone
from search_tasks.divided import Divided
from search_tasks.pictures import MNIST
from search_tasks.stored import FromStorage, program

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.demand import Profile
from shoal.core.device import Cluster
from shoal.core.job import Purpose
from shoal.host.discover import discover
from shoal.journal.view import JournalView
from shoal.plan.cost.history import history_path
from shoal.run.registry import BACKENDS

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.pipes import PipeNodes

__all__ = ["SEARCHES", "TRAININGS", "Run", "compare", "other_values", "too_slow"]

WITHOUT, WITH = "fifo", "water_filling"
IN_MEMORY, STORED, PROGRAM = "in memory", "stored", "stored, a program"
NODES = "on two nodes"
TRAININGS = (IN_MEMORY, STORED, PROGRAM, NODES)
GROUPS = ("SHA", "Hyperband")
"""Searches on two nodes."""
SECONDS = 1e-3
"""Wait for a sample from storage."""
LEAST, LEAST_OF_STORED = 0.95, 1.1
"""Asked of the speed with Fluid's policy relative to `fifo`: of trainings in memory, for which sharing gains nothing,
and of those that wait for input (the least that Fluid has published, 10 %)."""
RATE = shoal.loguniform(0.003, 0.3)
RATES = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Search:
    """A search, in full and in its smallest version.

    Args:
        algorithm: Makes the algorithm.
        quick: Makes the algorithm of a quick run.
        has_order: Whether its result depends on the order of reports.
        lr: Domain of the learning rate.
    """

    algorithm: Callable[[], Algorithm]
    quick: Callable[[], Algorithm]
    has_order: bool = False
    lr: Any = RATE


SEARCHES: Mapping[str, Search] = {
    "grid": Search(lambda: shoal.Grid(12), lambda: shoal.Grid(1), lr=shoal.choice(RATES)),
    "SHA": Search(
        lambda: shoal.SuccessiveHalving(n=12, max_epochs=24, eta=2, min_epochs=6),
        lambda: shoal.SuccessiveHalving(n=2, max_epochs=2, eta=2),
    ),
    "Hyperband": Search(lambda: shoal.Hyperband(max_epochs=16, eta=4), lambda: shoal.Hyperband(max_epochs=2, eta=2)),
    "ASHA": Search(
        lambda: shoal.ASHA(12, max_epochs=24, eta=2, min_epochs=6, concurrency=6),
        lambda: shoal.ASHA(2, max_epochs=2, eta=2, concurrency=2),
        has_order=True,
    ),
    "PBT": Search(lambda: shoal.PBT(6, epochs=24, interval=6), lambda: shoal.PBT(2, epochs=2)),
}


class TwoNodes(PipeNodes):
    """Two nodes that are processes of this machine, each with all slots that a study asks for."""

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        (node,) = discover(devices).nodes
        return Cluster(
            tuple(
                replace(node, name=name, devices=tuple(replace(x, name=f"{name}/{x.name}") for x in node.devices))
                for name in ("ash", "beech")
            )
        )


@dataclass(frozen=True)
class Run:
    """A search under one policy.

    Args:
        seconds: Seconds from the call to the result.
        idle: Part of the slots' time without a training.
        side_by_side: Largest number of jobs that a slot held at a time.
        suspensions: Number of times that a job was suspended.
        helpers: Number of helpers that jobs had on further slots.
        best: Best accuracy.
        profile: What is known of the training after it.
    """

    seconds: float
    idle: float
    side_by_side: int
    suspensions: int
    helpers: int
    best: float
    profile: Profile


@dataclass(frozen=True)
class Setting:
    """What all searches of a training have in common.

    Args:
        training: The task or the program.
        slots: Number of slots.
        folder: Folder of the studies.
        batch_size: Samples of a batch.
        backend: Back end of the studies; one of nodes has half of the slots on each of two nodes.
    """

    training: shoal.Task | Callable[[Any], None]
    slots: int
    folder: Path
    batch_size: int = 16
    backend: str = "local"

    def fill_history(self) -> None:
        """Measure the training under `fifo`, in the history with which all searches begin."""
        (self.folder / "first").mkdir()
        self.run(shoal.Grid(2), shoal.choice(RATES[:2]), WITHOUT, "filling")

    def run(self, algorithm: Algorithm, lr: Any, policy: str, name: str) -> Run:
        """Run a search in a folder of its own, with a job history of its own that begins with the first one."""
        directory = self.folder / name
        cache = self.folder / ("first" if name == "filling" else f"history of {name}")
        if name != "filling":
            shutil.copytree(self.folder / "first", cache)
        os.environ["SHOAL_CACHE"] = str(cache)
        began = time.time()
        study = shoal.tune(
            self.training, {"lr": lr, "batch_size": self.batch_size}, metric="accuracy", mode="max",
            algorithm=algorithm, policy=policy, fuse=False, packing="none", backend=self.backend,
            devices=f"cpu:{self.slots if self.backend == 'local' else self.slots // 2}",
            directory=directory, show_progress=False,
        )  # fmt: skip
        seconds = time.time() - began
        with JournalView.read(directory) as journal:
            jobs = journal.jobs()
        idle = 1 - busy_seconds(jobs) / (self.slots * seconds)
        suspensions = sum(job.outcome == "suspended" for job in jobs)
        helpers = sum(job.purpose is Purpose.ASSIST for job in jobs)
        (profile,) = profiles(history_path()).values()  # all trials have one structure
        trains = [job for job in jobs if job.purpose is not Purpose.ASSIST]
        return Run(seconds, idle, side_by_side(trains), suspensions, helpers, study.best_trial.objective, profile)


def compare(options: argparse.Namespace) -> int:
    """Print the table and the line of JSON; return the exit status."""
    mnist = options.data / MNIST
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}; {options.slots} slots, "
        f"{'MNIST' if mnist.is_file() else 'digits'}, median of {options.rounds}"
    )
    print(f"{'training':18} {'search':10} {'policy':14} {'s':>7} {'speed-up':>8} {'idle':>5} {'on a slot':>9} "
          f"{'suspended':>9} {'helpers':>7} {'accuracy':>8}")  # fmt: skip
    found: dict[tuple[str, str], Mapping[str, Sequence[Run]]] = {}
    for training in options.trainings:
        searches = [
            name for name in options.searches if not options.quick or training in (IN_MEMORY, NODES) or name == "grid"
        ]
        searches = [name for name in searches if training != NODES or name in GROUPS]
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(task_of(training, mnist, quick=options.quick), options.slots, Path(folder))
            if training == NODES:
                BACKENDS["two nodes"] = TwoNodes
                setting = replace(setting, batch_size=500, backend="two nodes")
            setting.fill_history()
            for name in searches:
                found[training, name] = measured(setting, name, options.rounds, quick=options.quick)
                show(training, name, found[training, name])
    cluster = discover(f"cpu:{options.slots}")
    for training in options.trainings:
        runs = [run for (of, _), some in found.items() if of == training for run in some[WITH]]
        print(f"{training}: {learnt(training, runs, cluster)}")
    ratios = {key: speed_up(runs) for key, runs in found.items()}
    missed = [] if options.quick else [*too_slow(ratios), *other_values(found)]
    figures: dict[str, dict[str, float]] = {}
    for (training, search), ratio in ratios.items():
        figures.setdefault(training, {})[search] = round(ratio, 3)
    print(json.dumps({"speed_up": figures, "slots": options.slots, "missed": missed}))
    return 1 if missed else 0


def task_of(training: str, mnist: Path, *, quick: bool) -> shoal.Task | Callable[[Any], None]:
    """Make the task or the program of one of `TRAININGS`."""
    if training == IN_MEMORY:
        return FromStorage(mnist, 200 if quick else 5000, 500, 0.0)
    if training == NODES:
        return Divided(mnist, 500 if quick else 5000, 500, 0.0)
    task = FromStorage(mnist, 20 if quick else 160, 10 if quick else 80, SECONDS)
    return partial(program, task) if training == PROGRAM else task


def measured(setting: Setting, search: str, rounds: int, *, quick: bool) -> dict[str, list[Run]]:
    """Run a search under both policies; the first one changes from round to round."""
    which = SEARCHES[search]
    found: dict[str, list[Run]] = {WITHOUT: [], WITH: []}
    for number in range(rounds):
        for policy in (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT):
            algorithm = (which.quick if quick else which.algorithm)()
            found[policy].append(setting.run(algorithm, which.lr, policy, f"{search}-{policy}-{number}"))
    return found


def show(training: str, search: str, runs: Mapping[str, Sequence[Run]]) -> None:
    """Print the rows of a search."""
    for policy, some in runs.items():
        ratio = speed_up(runs) if policy == WITH else 1.0
        seconds, idle = median(x.seconds for x in some), 100 * median(x.idle for x in some)
        print(
            f"{training:18} {search:10} {policy:14} {seconds:7.2f} {ratio:7.2f}x {idle:4.0f}% "
            f"{max(x.side_by_side for x in some):9} {median(x.suspensions for x in some):9.0f} "
            f"{median(x.helpers for x in some):7.0f} "
            f"{median(x.best for x in some):8.4f}",
            flush=True,
        )


def learnt(training: str, runs: Sequence[Run], cluster: Cluster) -> str:
    """Return in words what was measured with Fluid's policy, and what it could not do."""
    profile = max((run.profile for run in runs), key=lambda profile: len(profile.crowding))
    words = [demand_text(profile)]
    if training in (STORED, PROGRAM) and max(run.side_by_side for run in runs) < 2:
        words.append(f"NO JOB SHARED A SLOT, though all wait: {why_alone(profile, cluster) or 'nothing was tried'}")
    times = [run.profile.spreading for run in runs if run.profile.spreading]
    words += [f"a step on {n} slots took {time:.2f} of that on one" for each in times[-1:] for n, time in each.items()]
    if not times:
        words.append("no job was tried on several slots")
    return "; ".join(words)


def speed_up(runs: Mapping[str, Sequence[Run]]) -> float:
    """Return the speed with Fluid's policy relative to that without: the median over rounds."""
    return median(old.seconds / new.seconds for old, new in zip(runs[WITHOUT], runs[WITH], strict=True))


def too_slow(ratios: Mapping[tuple[str, str], float]) -> list[str]:
    """Return what the speed-ups lack, by training and search."""
    missed = []
    for (training, search), ratio in ratios.items():
        asked = LEAST if training in (IN_MEMORY, NODES) else LEAST_OF_STORED
        if ratio < asked:
            missed.append(f"{training}, {search}: {ratio:.2f}x with Fluid's policy, asked {asked}x")
    return missed


def other_values(found: Mapping[tuple[str, str], Mapping[str, Sequence[Run]]]) -> list[str]:
    """Return the searches that found another best accuracy with Fluid's policy, though reports' order is nothing to
    them.
    """
    return [
        f"{training}, {search}: the policies found other accuracies"
        for (training, search), runs in found.items()
        if not SEARCHES[search].has_order and len({run.best for some in runs.values() for run in some}) > 1
    ]
