"""Twenty-four real trainings on one slot, under each policy: the mean time until the best four are good.

Perceptrons on handwritten digits and on MNIST, trained by stochastic gradient descent with rates of which few are good,
none of them fused or packed, one at a time. The best four are those with the highest last accuracy; what counts is the
mean time from the call until each of them has 90 % of its last accuracy, relative to `fifo` of the same round. All
policies train the same trials to the same values; policies take turns, and the table shows medians over the rounds.

"switch" is what suspending and resuming a trial cost: the time of the slot outside of training and validation, beyond
that under `fifo`, divided by the suspensions; the median over the policies that suspend.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from baselines import RoundRobin, Slaq
from search_tasks.pictures import MNIST, pictures
from search_tasks.search import Supervised
from search_tasks.tabular import Linear
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.activity import Activity
from shoal.journal.view import JournalView
from shoal.look.accounting import accounting
from shoal.plan.schedule import Auto, Convergence, ExpectedFinish, Fifo, Policy

__all__ = ["compare"]

QUANTUM = 0.5
BEST = 4
PART = 0.9
"""Of the last accuracy."""
RATES = (0.03, 1e-4, 3.0, 3e-4, 1e-5, 10.0, 0.1, 1e-3, 30.0, 3e-5, 1e-6, 5.0)
POLICIES: dict[str, Policy] = {
    "fifo": Fifo(),
    "round_robin": RoundRobin(quantum=QUANTUM),
    "slaq": Slaq(quantum=QUANTUM),
    "convergence": Convergence(quantum=QUANTUM),
    "expected_finish": ExpectedFinish(quantum=QUANTUM),
    "auto": Auto("time_to_good", ExpectedFinish(quantum=QUANTUM)),
}
LEAST_OF_EXPECTED_FINISH, LEAST_OF_BEST, MOST_SWITCH_SECONDS = 1.6, 0.95, 0.030
"""Asked: the speed-up of `expected_finish`, the speed-up of `auto` relative to the best of the others, and seconds of a
suspension and the resumption that follows."""


TRAINING = (Activity.STEPS, Activity.TIMED_STEPS, Activity.VALIDATION)


class Perceptron(Supervised):
    """A perceptron on digits or on MNIST, as the config says.

    Args:
        mnist: File of MNIST.
        rows: Pictures of MNIST to train on.
    """

    def __init__(self, mnist: Path, rows: int) -> None:
        self.mnist, self.rows = mnist, rows

    def data(self, config):
        if config["data"] == "mnist":
            counts = {"train": self.rows, "test": 500}
            return tuple(TensorDataset(*pictures(self.mnist, part, count)) for part, count in counts.items())
        return Linear().data(config)

    def model(self, config):
        inputs = 784 if config["data"] == "mnist" else 64
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def eval_batch_size(self, config):
        return 250


@dataclass(frozen=True)
class Run:
    """A study under one policy.

    Args:
        good: Mean seconds until the best trials have a part of their last accuracy.
        seconds: Seconds of the whole study.
        others: Seconds of the slot outside of training and validation.
        suspensions: Number of times that a trial was suspended.
        last: Last accuracy of each trial.
    """

    good: float
    seconds: float
    others: float
    suspensions: int
    last: dict[int, float]


def run(task: shoal.Task, space: dict[str, Any], epochs: int, policy: Policy, directory: Path) -> Run:
    began = time.time()
    shoal.tune(
        task, space, metric="accuracy", mode="max", algorithm=shoal.Grid(epochs), policy=policy, fuse=False,
        packing="none", devices="cpu:1", directory=directory, show_progress=False,
    )  # fmt: skip
    seconds = time.time() - began
    curves: dict[int, list[tuple[float, float]]] = {}
    with JournalView.read(directory) as journal:
        for _, at, report in journal.reports_after(0, 1_000_000):
            if "accuracy" in report.metrics:
                curves.setdefault(report.trial, []).append((at - began, report.metrics["accuracy"]))
        suspensions = sum(job.outcome == "suspended" for job in journal.jobs())
        spent = accounting(journal, time.time()).seconds
    others = sum(value for activity, value in spent.items() if activity not in TRAINING)
    last = {number: curve[-1][1] for number, curve in curves.items()}
    best = sorted(last, key=lambda number: (-last[number], number))[:BEST]
    good = fmean(next(at for at, value in curves[number] if value >= PART * last[number]) for number in best)
    return Run(good, seconds, others, suspensions, last)


def compare(options: argparse.Namespace) -> int:
    """Print the table and the line of JSON; return the exit status."""
    mnist = options.data / MNIST
    sets = ["digits", "mnist"] if mnist.is_file() else ["digits"]
    rates = RATES[:2] if options.quick else RATES
    epochs, rounds = (2, 1) if options.quick else (12, options.rounds)
    space = {"lr": shoal.grid(rates), "data": shoal.grid(sets), "batch_size": 4 if sets == ["digits"] else 16}
    task = Perceptron(mnist, 200 if options.quick else 5000)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}; {len(rates) * len(sets)} trials of {epochs} epochs on one slot, "
        f"quantum {QUANTUM} s, median of {rounds}"
    )
    runs: dict[str, list[Run]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        run(task, space, 1, POLICIES["fifo"], Path(folder) / "first")  # fills the job history
        for number in range(rounds):
            names = list(POLICIES)
            for name in (*names[number:], *names[:number]):
                runs[name].append(run(task, space, epochs, POLICIES[name], Path(folder) / f"{name}-{number}"))
    return report(runs, judged=not options.quick)


def report(runs: dict[str, list[Run]], *, judged: bool) -> int:
    """Print the table and the line of JSON; return the exit status."""
    fifo = runs["fifo"]
    speed = {
        name: median(first.good / each.good for first, each in zip(fifo, found, strict=True))
        for name, found in runs.items()
    }
    switches = [
        (each.others - first.others) / each.suspensions
        for found in runs.values()
        for first, each in zip(fifo, found, strict=True)
        if each.suspensions
    ]
    switch = median(switches) if switches else 0.0
    print(f"{'policy':15} {'to good, s':>10} {'speed-up':>8} {'study, s':>8} {'suspensions':>11}")
    for name, found in runs.items():
        print(f"{name:15} {median(x.good for x in found):10.2f} {speed[name]:8.2f} "
              f"{median(x.seconds for x in found):8.2f} {median(x.suspensions for x in found):11.0f}")  # fmt: skip
    print(f"switch {1000 * switch:.0f} ms")
    missed = []
    if speed["expected_finish"] < LEAST_OF_EXPECTED_FINISH:
        missed.append(f"expected_finish {speed['expected_finish']:.2f} times fifo, asked {LEAST_OF_EXPECTED_FINISH}")
    best = max(value for name, value in speed.items() if name != "auto")
    if speed["auto"] < LEAST_OF_BEST * best:
        missed.append(f"auto {speed['auto']:.2f}, the best of the others {best:.2f}")
    if switch > MOST_SWITCH_SECONDS:
        missed.append(f"a switch takes {1000 * switch:.0f} ms, asked {1000 * MOST_SWITCH_SECONDS:.0f}")
    if any(each.last != fifo[0].last for found in runs.values() for each in found):
        missed.append("the policies trained to other values")
    missed = missed if judged else []
    figures = {"speed_up": {name: round(value, 3) for name, value in speed.items()}, "switch_seconds": round(switch, 4)}
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0
