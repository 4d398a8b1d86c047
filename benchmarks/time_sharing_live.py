"""The four CNNs of Hermes on one slot: bins of sixteen trainings under each policy, and what a process of Shoal costs.

The trainings (`time_sharing_cnns.py`) have an optimizer, batch size, learning rate and weight decay of Hermes's grid
each. Of a bin, four (type 1) or twelve (type 2) have settings that converge, in random order; none are fused or
packed. The good trials are the four or twelve with the lowest last validation loss. What counts is the mean time from
the call until each of them has 90 % of the reduction of its loss from chance; of type 2 also that of its best four.
(Hermes takes 90 % of the best reduction; of trainings of a second few come so near to the best.) All policies train
the same trials to the same values.

A switch is a suspension with the resumption that follows: the time of the slot outside of training and validation,
beyond that under `fifo`, divided by the suspensions.

The overhead of a process is that of `tune` over the plain loop of `rivals/plain_search.py` in this process: a thousand
steps of SGD with batches of 16, as in Hermes's Table 2.
"""

import math
import os
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from baselines import RoundRobin, Slaq
from papers.experiment import missed_of
from papers.hermes import EXPERIMENTS, TRAININGS
from report import machine, report
from rivals.plain_search import Asked, in_a_loop
from time_sharing_cnns import CNNS, OPTIMIZERS, Digits

import shoal
from shoal.core.activity import Activity
from shoal.journal.view import JournalView
from shoal.look.accounting import accounting
from shoal.plan.schedule import Auto, Convergence, ExpectedFinish, Fifo, Policy

__all__ = ["BEST", "GOOD", "TRIALS", "measure_live", "policies", "speed_ups"]

TRIALS = 16
GOOD = {"type 1": 4, "type 2": 12}
BEST = 4
QUANTUM = 0.2
"""Seconds. A training takes four to ten."""
TRAIN, EPOCHS = 256, 8
CHANCE = math.log(10)
PART = 0.9
GRID = {
    "optimizer": tuple(OPTIMIZERS),
    "batch_size": (16, 24, 32, 50),
    "lr": (1e-3, 5e-4, 1e-4, 1e-5),
    "weight_decay": (0.1, 0.01, 0.001),
}
"""Hermes's Table 1."""
TRAINING = (Activity.STEPS, Activity.TIMED_STEPS, Activity.VALIDATION)
STEPS = 1000


class Run(NamedTuple):
    """A bin under one policy."""

    means: tuple[float, float]
    """Seconds until the good trials are done, and until the best four are."""
    others: float
    """Seconds of the slot outside of training and validation."""
    suspensions: int
    last: dict[int, float]
    """Last loss of each trial."""


def policies(quantum: float) -> dict[str, Policy]:
    """The policies with the quanta of Hermes: those of round robin and SLAQ are three times as long."""
    return {
        "fifo": Fifo(),
        "round_robin": RoundRobin(quantum=3 * quantum),
        "slaq": Slaq(quantum=3 * quantum),
        "convergence": Convergence(quantum=quantum, jobs_per_device=TRIALS),
        "auto": Auto("time_to_good", ExpectedFinish(quantum=quantum)),
    }


def speed_ups(title: str, means: Mapping[str, Mapping[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Print and return the speed-ups over `fifo`.

    Args:
        title: Of the table.
        means: Type of a bin -> policy -> mean seconds until the good trials are done, and until the best four are.
    """
    found = {}
    print(f"{title:12}" + "".join(f"{name:>13}" for name in policies(QUANTUM)))
    for name, kind, place in (("type 1", "type 1", 0), ("type 2", "type 2", 0), ("top 4", "type 2", 1)):
        fifo = means[kind]["fifo"][place]
        found[name] = {policy: round(fifo / each[place], 3) for policy, each in means[kind].items()}
        print(f"{name:12}" + "".join(f"{value:13.2f}" for value in found[name].values()))
    return found


def settings_of(kind: str, cnn: str, trials: int) -> list[dict[str, Any]]:
    """Settings of a bin, in random order; those that converge have steps of the gradients' signs and a high rate."""
    random = Random(f"{kind}, {cnn}")
    good, others = [], []
    for optimizer, *rest, rate, decay in product(*GRID.values()):
        converges = optimizer in ("rmsprop", "adam") and rate >= 5e-4 and decay < 0.1
        (good if converges else others).append(dict(zip(GRID, (optimizer, *rest, rate, decay), strict=True)))
    count = GOOD[kind] * trials // TRIALS
    drawn = [*random.sample(good, count), *random.sample(others, trials - count)]
    random.shuffle(drawn)
    return drawn


def run(task: Digits, policy: Policy, good: int, epochs: int, directory: Path) -> Run:
    """Train a bin under a policy; `good` is the number of its good trials."""
    began = time.time()
    shoal.tune(
        task, {"place": shoal.grid(range(len(task.settings)))}, metric="valid_loss", mode="min",
        algorithm=shoal.Grid(epochs), policy=policy, fuse=False, packing="none", devices="cpu:1", directory=directory,
        show_progress=False,
    )  # fmt: skip
    curves: dict[int, list[tuple[float, float]]] = {}
    with JournalView.read(directory) as journal:
        for _, at, report in journal.reports_after(0, 1_000_000):
            curves.setdefault(report.trial, []).append((at - began, report.metrics["valid_loss"]))
        suspensions = sum(job.outcome == "suspended" for job in journal.jobs())
        spent = accounting(journal, time.time()).seconds
    others = sum(seconds for activity, seconds in spent.items() if activity not in TRAINING)
    last = {number: curve[-1][1] for number, curve in curves.items()}
    done = [seconds_to_done(curves[number]) for number in sorted(last, key=lambda number: (last[number], number))]
    return Run((fmean(done[:good]), fmean(done[:BEST])), others, suspensions, last)


def seconds_to_done(curve: list[tuple[float, float]]) -> float:
    """Seconds until a loss has 90 % of its reduction from chance; one that has risen has it at its end."""
    target = CHANCE - PART * (CHANCE - curve[-1][1])
    return next((at for at, loss in curve if loss <= target), curve[-1][0])


def overhead(file: Path, cnn: str, steps: int, folder: Path) -> tuple[float, float]:
    """Seconds of a plain loop, and of `tune`."""
    settings = {"optimizer": "sgd", "batch_size": 16, "lr": 1e-3, "weight_decay": 1e-3}
    task, config = Digits(file, cnn, 16 * steps // 10, [settings]), {"place": 0}
    began = time.perf_counter()
    in_a_loop(Asked(task, config, shoal.Grid(10), "valid_loss", "min", 0))
    middle = time.perf_counter()
    shoal.tune(task, config, metric="valid_loss", mode="min", algorithm=shoal.Grid(10), devices="cpu:1",
               directory=folder, show_progress=False)  # fmt: skip
    return middle - began, time.perf_counter() - middle


def measure_live(file: Path, quick: bool) -> int:
    """Print the tables and the line of JSON; return the exit status."""
    torch.set_num_threads(1)  # in this process and in those of Shoal
    trials, epochs, steps = (4, 2, 20) if quick else (TRIALS, EPOCHS, STEPS)
    print(machine("torch"))
    print(f"Bins of {trials} trainings of {epochs} epochs on one slot, quantum {QUANTUM} s; speed-up over fifo")
    figures: dict[str, dict[str, Any]] = {"speed_up": {}, "switch_seconds": {}, "overhead": {}}
    other_values: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        for cnn in list(CNNS)[:1] if quick else CNNS:
            means, switches = {}, []
            for kind, count in GOOD.items():
                task = Digits(file, cnn, TRAIN, settings_of(kind, cnn, trials))
                first, good = Path(folder) / f"{cnn} {kind}", count * trials // TRIALS
                run(task, Fifo(), good, 1, first)  # fills the job history
                runs = {name: run(task, each, good, epochs, first / name) for name, each in policies(QUANTUM).items()}
                means[kind] = {name: each.means for name, each in runs.items()}
                fifo = runs["fifo"]
                switches += [(x.others - fifo.others) / x.suspensions for x in runs.values() if x.suspensions]
                if any(each.last != fifo.last for each in runs.values()):
                    other_values.append(f"{cnn}, {kind}: the policies trained to other values")
            figures["speed_up"][cnn] = speed_ups(cnn, means)
            figures["switch_seconds"][cnn] = round(median(switches or [0.0]), 4)
            print(f"switch {1000 * figures['switch_seconds'][cnn]:.0f} ms")
        overhead(file, "GoogLeNet", 10, Path(folder) / "first")  # imports what a first step imports
        for cnn in ("GoogLeNet",) if quick else ("GoogLeNet", "VGG19"):
            plain, ours = overhead(file, cnn, steps, Path(folder) / f"{cnn} overhead")
            figures["overhead"][cnn] = round(ours / plain - 1, 4)
            print(f"{cnn}, {steps} steps: plain loop {plain:.2f} s, tune {ours:.2f} s ({ours / plain - 1:+.1%})")
    return report(figures, [] if quick else [*other_values, *missed_of(EXPERIMENTS, TRAININGS, figures)])
