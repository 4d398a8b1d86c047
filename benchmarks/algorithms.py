"""Hyperband and ASHA run in five ways: by arrays that change more or less, and by a process a trial.

- surgery     Shoal: survivors of all arrays go on as full ones, and what waits joins an array that is running
- gathered    survivors of all arrays go on as full ones, but no array changes while it is trained
- fixed       without surgery: the survivors of an array go on by themselves, trials are fused once, when they begin
- forked      the same algorithm object asked for the same trials; each stretch of a trial is a process of its own that
              loads the trial's checkpoint, trains it by a plain PyTorch loop and saves it; one at a time on each core.
              They are forked from one that has torch and the data loaded, and so begin at once, as no launcher's do
- processes   the same, but each is a Python process that begins anew and imports torch, as launchers have it; once

Digits: an MLP 64-W-W-10 on handwritten digits. CIFAR-10: two convolutions and two linear layers on 5,000 pictures. Both
search learning rate, weight decay, dropout and width. Two CPU slots of one core each. All ways run interleaved; the
table shows medians: seconds to finish, and to the first report of the target accuracy.

    python benchmarks/algorithms.py [--tasks digits cifar] [--rounds 3] [--quick]
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rivals.first import first_search
from rivals.plain_search import Asked, in_processes
from search_tasks.search import Supervised
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.device import Device
from shoal.core.event import Event, SignaturesFound
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import derive_seed
from shoal.journal.view import JournalView
from shoal.run.local import Local
from shoal.run.registry import BACKENDS

CIFAR = Path(__file__).parents[2] / "shared" / "data" / "cifar10_5k_1k.npz"
SLOTS = 2
ASKED = {"digits": {"fixed": 1.3, "processes": 3.0}, "cifar": {"processes": 3.0}}
"""Least speed-up of surgery over the other ways."""


class Classifier(Supervised):
    """A task on the first `rows` of its data, or on all.

    Args:
        rows: Number of samples; None for all.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows


class Digits(Classifier):
    def data(self, config):
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        train, valid = order[:1437][: self.rows], order[1437:]
        return TensorDataset(x[train], y[train]), TensorDataset(x[valid], y[valid])

    def model(self, config):
        width, drop = config["width"], config["dropout"]
        return nn.Sequential(
            *(nn.Linear(64, width), nn.ReLU(), nn.Dropout(drop)),
            *(nn.Linear(width, width), nn.ReLU(), nn.Dropout(drop)),
            nn.Linear(width, 10),
        )


class Cifar(Classifier):
    def data(self, config):
        arrays = np.load(CIFAR)
        sets = []
        for part, rows in (("train", self.rows), ("test", self.rows)):
            x = torch.tensor(arrays[f"x_{part}"][:rows], dtype=torch.float32).permute(0, 3, 1, 2) / 255
            sets.append(TensorDataset((x - 0.5).contiguous(), torch.tensor(arrays[f"y_{part}"][:rows].astype("int64"))))
        return tuple(sets)

    def model(self, config):
        width, drop = config["width"], config["dropout"]
        return nn.Sequential(
            *(
                nn.Conv2d(3, width, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, 2 * width, 3, stride=2),
                nn.ReLU(),
            ),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(drop), nn.Linear(18 * width, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


SPACE = {"lr": shoal.loguniform(1e-4, 1e-1), "weight_decay": shoal.loguniform(1e-6, 1e-1), "batch_size": 32}
TASKS: dict[str, tuple[type[Classifier], dict[str, Any], float]] = {
    "digits": (Digits, SPACE | {"dropout": shoal.uniform(0.0, 0.5), "width": shoal.choice([64, 128])}, 0.98),
    "cifar": (Cifar, SPACE | {"dropout": shoal.uniform(0.0, 0.5), "width": shoal.choice([8, 16])}, 0.45),
}
"""The task, its space, and the target accuracy."""

ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "Hyperband": lambda most: shoal.Hyperband(max_epochs=most, eta=3),
    "ASHA": lambda most: shoal.ASHA(n=128 if most > 3 else 9, max_epochs=most, eta=3),
}


class Gathered(Local):
    """The local back end as if its jobs could not be changed."""

    elastic = False


class Fixed(Gathered):
    """One under which trials that were trained together are fused with nobody else again.

    When a job begins, its trials get a key of their own, as if a signature job had found it; what is known of their
    cost stays.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        self._found: list[Event] = []

    def start(self, job: Job, device: Device) -> None:
        super().start(job, device)
        if job.purpose is Purpose.TRAIN:
            key = replace(job.arrays[0].key, order=derive_seed("home", job.id))
            self._found.append(SignaturesFound(job.id, {member.trial.number: key for member in job.members}))

    def poll(self, timeout: float) -> list[Event]:
        found, self._found = self._found, []
        return [*found, *super().poll(0.0 if found else timeout)]


Timeline = list[tuple[float, float]]
"""(seconds since the start, accuracy), one for each epoch of each trial, in the order they were reported."""


def with_shoal(name: str, algorithm: Algorithm, seed: int, rows: int | None, backend: str) -> tuple[float, Timeline]:
    task, space, _ = TASKS[name]
    folder = Path(tempfile.mkdtemp())
    first_search()
    began = time.time()
    shoal.tune(
        task(rows), space, metric="accuracy", mode="max", algorithm=algorithm, devices=f"cpu:{SLOTS}",
        backend=backend, directory=folder / "study", seed=seed, show_progress=False,
    )  # fmt: skip
    seconds = time.time() - began
    with JournalView.read(folder / "study") as journal:
        reported = journal.reports_after(0, sys.maxsize)
    shutil.rmtree(folder)
    return seconds, [(at - began, report.metrics["accuracy"]) for _, at, report in reported]


def with_processes(name: str, algorithm: Algorithm, seed: int, rows: int | None, method: str) -> tuple[float, Timeline]:
    """A process for each stretch of each trial."""
    task, space, _ = TASKS[name]
    folder = Path(tempfile.mkdtemp())
    asked = Asked(task(rows), space, algorithm, "accuracy", "max", seed)
    search = in_processes(asked, folder, SLOTS, method, reuse=False)
    seconds = time.time() - search.began
    shutil.rmtree(folder)
    return seconds, search.timeline


WAYS: dict[str, Callable[..., tuple[float, Timeline]]] = {
    "surgery": lambda *args: with_shoal(*args, backend="local"),
    "gathered": lambda *args: with_shoal(*args, backend="gathered"),
    "fixed": lambda *args: with_shoal(*args, backend="fixed"),
    "forked": lambda *args: with_processes(*args, method="fork"),
    "processes": lambda *args: with_processes(*args, method="spawn"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS))
    parser.add_argument("--algorithms", nargs="*", choices=list(ALGORITHMS))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Hyperband on digits unless named, one round, 3 epochs, 64 samples, no new processes; checks no figure",
    )
    options = parser.parse_args()
    options.tasks = options.tasks or (["digits"] if options.quick else list(TASKS))
    options.algorithms = options.algorithms or (["Hyperband"] if options.quick else list(ALGORITHMS))
    if "cifar" in options.tasks and not CIFAR.exists():
        if not options.quick:
            parser.error(f"{CIFAR} is missing; leave CIFAR-10 out with --tasks digits")
        options.tasks.remove("cifar")
    if options.quick and "processes" in options.ways:
        options.ways.remove("processes")
    rounds, most, rows = (1, 3, 64) if options.quick else (options.rounds, 27, None)
    BACKENDS.update(gathered=Gathered, fixed=Fixed)
    os.environ["SHOAL_CACHE"] = tempfile.mkdtemp()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what the forked processes then have
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}; R = {most}, eta = 3, {SLOTS} slots, median of {rounds}")  # fmt: skip
    print(f"{'':24} {'way':10} {'seconds':>8} {'to target':>10} {'best':>7} {'surgery is':>11}")
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name in options.tasks:
        for kind in options.algorithms:
            cell = measured(name, kind, options.ways, rounds, most, rows)
            figures[f"{name}, {kind}"] = cell
            for way, row in cell.items():
                target = "never" if row["to_target"] is None else f"{row['to_target']:.2f}"
                gain = f"{row['seconds'] / cell['surgery']['seconds']:.2f}x" if "surgery" in cell else ""
                cells = f"{way:10} {row['seconds']:8.2f} {target:>10} {row['best']:7.4f} {gain:>11}"
                print(f"{name + ', ' + kind:24} {cells}", flush=True)
                least = ASKED[name].get(way)
                if least and "surgery" in cell and not options.quick:
                    gained = row["seconds"] / cell["surgery"]["seconds"]
                    missed += [f"{name}, {kind}: {gained:.2f}x over {way}, asked {least}x"] * (gained < least)
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def measured(name: str, kind: str, ways: list[str], rounds: int, most: int, rows: int | None) -> dict[str, Any]:
    """All ways in turn, each round with another seed."""
    target = TASKS[name][2]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    reached: dict[str, list[float]] = {way: [] for way in ways}
    best: dict[str, float] = {}
    for seed in range(rounds):
        for way in ways:
            if way == "processes" and seed:
                continue
            shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)  # every run profiles anew
            took, timeline = WAYS[way](name, ALGORITHMS[kind](most), seed, rows)
            seconds[way].append(took)
            reached[way] += [at for at, accuracy in timeline if accuracy >= target][:1]
            best[way] = max([best.get(way, 0.0), *(accuracy for _, accuracy in timeline)])
    return {
        way: {
            "seconds": round(statistics.median(seconds[way]), 3),
            "to_target": round(statistics.median(reached[way]), 3) if len(reached[way]) == len(seconds[way]) else None,
            "best": round(best[way], 4),
        }
        for way in ways
    }


if __name__ == "__main__":
    sys.exit(main())
