"""Mixed demands on CPU slots: jobs bound by arithmetic, by memory or by input, with sharing found by trial and without.

- arithmetic  a small ResNet, whose convolutions keep a core busy
- memory      a wide perceptron with batches of four: every step streams weights, gradients and momenta through memory
- input       a small perceptron whose samples come from slow storage, for which its core waits; a `time.sleep` in the
              data set stands for a network file system (`search_tasks/stored.py`)
- program     the same as "input", as a plain PyTorch program that reports: its demand is measured from outside

"by trial" is the policy `water_filling`: how many jobs share a slot (Fluid's c) follows from their measured demand,
and where only one fits by demand, from a trial of two (Fluid, section 4.2.2). Nothing is fused or packed, and each
study has a job history of its own, empty at first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from models.resnet import resnet
from packs.pictures import made
from search_tasks.search import Supervised
from search_tasks.stored import Stored, program
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from placed.ours import ONE_JOB, Row, study
from placed.sharing import demand_text, profiles, side_by_side, why_alone
from shoal.core.demand import Profile
from shoal.core.device import Cluster
from shoal.journal.view import JournalView
from shoal.plan.cost.history import history_path

__all__ = ["BY_TRIAL", "MIXES", "QUICK", "Mix", "Mixed", "Run", "judged", "makespans", "measured", "run", "table"]

PIXELS = 16
"""On a side of a picture, but for "memory"."""
WIDTH = 2048
"""Of the wide perceptron: its first layer has 6.3 million weights, 25 MB, which no cache of a core holds."""
BATCHES = {"arithmetic": 32, "memory": 4, "input": 16}
SAMPLES = {"arithmetic": 320, "memory": 32, "input": 200}
VALID = {"arithmetic": 64, "memory": 32, "input": 50}
SECONDS = 1e-3
"""Wait for a sample from storage."""
JOBS, EPOCHS = 12, 10
"""Of a mix, and of each job: long enough for a trial, which needs five epochs."""

BY_TRIAL = "by trial"
POLICIES = {ONE_JOB: Row("fifo"), BY_TRIAL: Row("water_filling")}
LEAST, LEAST_OF_INPUT = 0.97, 1.3
"""Asked of sharing found by trial, relative to one job per slot: in each mix, and where all jobs wait for input."""


@dataclass(frozen=True)
class Mix:
    """Jobs of several demands, equally many of each.

    Args:
        bounds: What jobs are bound by: keys of `BATCHES`.
        is_program: Whether they are programs that report, and not a task.
    """

    bounds: tuple[str, ...]
    is_program: bool = False

    @property
    def waits(self) -> bool:
        """Whether all jobs wait for input."""
        return self.bounds == ("input",)

    def space(self, jobs: int) -> dict[str, Any]:
        """So many jobs, which differ in their learning rates, as a search space; neighbours differ in their demands."""
        rates = [1e-3 * 1.2**number for number in range(max(1, jobs // len(self.bounds)))]
        return {"lr": shoal.grid(rates), "bound": shoal.choice(self.bounds), "batch_size": BATCHES["input"]}


MIXES: Mapping[str, Mix] = {
    "arithmetic": Mix(("arithmetic",)),
    "memory": Mix(("memory",)),
    "input": Mix(("input",)),
    "input, programs": Mix(("input",), is_program=True),
    "arithmetic + memory": Mix(("arithmetic", "memory")),
    "arithmetic + input": Mix(("arithmetic", "input")),
    "memory + input": Mix(("memory", "input")),
    "all three": Mix(("arithmetic", "memory", "input")),
}
QUICK = ["arithmetic + input"]
"""Mixes of a quick run."""


class Mixed(Supervised):
    """Classes of pictures of CIFAR-10, by a model and from a data set whose demand the configuration names.

    Args:
        part: Part of the samples that is used, for a quick run.
    """

    def __init__(self, part: float = 1.0) -> None:
        self.part = part

    def data(self, config):
        bound = config["bound"]
        counts = {"train": SAMPLES[bound], "test": VALID[bound]}
        return tuple(self._part(bound, name, max(8, int(self.part * count))) for name, count in counts.items())

    def _part(self, bound, name, count):
        x, y = made("tensors", name, range(count)).tensors
        if bound != "memory":
            x = F.avg_pool2d(x, x.shape[-1] // PIXELS)
        samples = TensorDataset(x, y)
        return Stored(samples, count, SECONDS) if bound == "input" else samples

    def model(self, config):
        match config["bound"]:
            case "arithmetic":
                return resnet(8, (1, 1, 1))
            case "memory":
                return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
            case _:
                return nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS**2, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def batch_size(self, config):
        return BATCHES[config["bound"]]


@dataclass(frozen=True)
class Run:
    """A study of a mix under one policy.

    Args:
        seconds: Seconds from the call to the last result.
        side_by_side: Largest number of jobs that a slot held at a time.
        failed: Number of trials that were not trained to their end.
        profiles: What the study measured: what a job is bound by -> its profile.
    """

    seconds: float
    side_by_side: int
    failed: float
    profiles: Mapping[str, Profile]


Found = Mapping[str, Mapping[str, Sequence[Run]]]
"""Mix -> policy -> its runs, one for each round."""


def run(mix: Mix, policy: str, devices: str, folder: Path, *, quick: bool) -> Run:
    """Run a mix under a policy, in a folder that does not exist yet."""
    task, jobs, epochs = (Mixed(0.02), 2, 1) if quick else (Mixed(), JOBS, EPOCHS)
    training: shoal.Task | Callable[[Any], None] = partial(program, task) if mix.is_program else task
    figures = study(POLICIES[policy], training, mix.space(jobs), epochs, devices, folder / "study", folder / "cache")
    with JournalView.read(folder / "study") as journal:
        most = side_by_side(journal.jobs())
    return Run(figures.makespan, most, figures.failed, profiles(history_path(), "bound"))


def measured(names: Sequence[str], devices: str, rounds: int, folder: Path, *, quick: bool) -> Found:
    """Run mixes under each policy; policies take turns, in another order each round.

    Args:
        names: Mixes.
        devices: Slots, as of `shoal.tune`.
        rounds: Number of rounds.
        folder: Folder of the studies.
        quick: Whether to train next to nothing.
    """
    policies = list(POLICIES)
    found: dict[str, dict[str, list[Run]]] = {}
    for name in names:
        runs = found[name] = {policy: [] for policy in policies}
        print(f"{name}:", end="", flush=True)
        for turn in range(rounds):
            first = turn % len(policies)
            for policy in (*policies[first:], *policies[:first]):
                place = folder / name / f"{policy}-{turn}"
                runs[policy].append(run(MIXES[name], policy, devices, place, quick=quick))
                print(f" {policy} {runs[policy][-1].seconds:.1f} s,", end="", flush=True)
        print()
    return found


def makespans(found: Found) -> dict[str, dict[str, float]]:
    """Mix -> policy -> median seconds."""
    return {
        name: {policy: median(run.seconds for run in some) for policy, some in runs.items()}
        for name, runs in found.items()
    }


def table(found: Found, cluster: Cluster) -> None:
    """Print seconds and speed-ups by mix, then what was measured by trial."""
    print(f"{'mix':20} {'policy':20} {'makespan':>9} {'speed-up':>8} {'on a slot':>9} {'failed':>6}")
    for name, runs in makespans(found).items():
        for policy, seconds in runs.items():
            some = found[name][policy]
            print(f"{name:20} {policy:20} {seconds:9.1f} {runs[ONE_JOB] / seconds:7.2f}x "
                  f"{max(each.side_by_side for each in some):9} {max(each.failed for each in some):6.0f}")  # fmt: skip
    print(f"measured {BY_TRIAL}:")
    for name, by_policy in found.items():
        for bound, profile in by_policy[BY_TRIAL][-1].profiles.items():
            print(f"  {name}: {bound}: {demand_text(profile)}")
        if MIXES[name].waits and max(each.side_by_side for each in by_policy[BY_TRIAL]) < 2:
            (profile,) = by_policy[BY_TRIAL][-1].profiles.values()
            print(
                f"  {name}: NO JOB SHARED A SLOT, though all wait: {why_alone(profile, cluster) or 'nothing was tried'}"
            )


def judged(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return what sharing found by trial lacks, by median seconds of each mix and policy."""
    missed = []
    for name, runs in seconds.items():
        gain, asked = runs[ONE_JOB] / runs[BY_TRIAL], LEAST_OF_INPUT if MIXES[name].waits else LEAST
        if gain < asked:
            missed.append(f"{name}: sharing found by trial {gain:.2f}x of {ONE_JOB}, asked {asked}x")
    return missed
