"""Cost of tuning a PointNet and a MobileNet by random search and by Hyperband, as HFTA's tuner HFHT does (figure 8).

- serial      one configuration after another in one process, with the threads that torch takes by default
- concurrent  two processes, forked with torch and the data loaded, of one thread each, take configurations from a queue
- fused       Shoal with an empty job history, on two slots of one core

Eight hyper-parameters are searched, with the paper's ranges (table 12) but for smaller batches and for periods that are
a fifth of its own; batch size and structure differ between arrays. PointNet classifies unit balls of four norms by 64
of their points, MobileNet (V2 or V3-Large, a quarter as wide) pictures of CIFAR-10. The numbers of configurations are
the paper's for random search; all epochs are fewer. The cost is the time from the call to the result, during which the
search has the machine for itself. Each search runs in a process of its own, forked from one that has imported all.

    python benchmarks/hfht.py [--tasks pointnet mobilenet] [--data DIR] [--quick]
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import pointnet
from models.mobilenet import mobilenet_v2, mobilenet_v3_large
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, in_a_loop, in_processes
from search_tasks.pictures import CIFAR, pictures
from torch.utils.data import TensorDataset

import shoal
from shoal.algorithms.base import Algorithm

DATA = Path(__file__).parents[2] / "shared" / "data"
SLOTS = 2
SEED = 1
NOISE = 0.97
"""Asked: cost of the better plain way over that of fused training."""


class Tuned(shoal.Task):
    """A classifier, its optimizer and its schedule, with the hyper-parameters of table 12.

    Args:
        train: Number of samples to train on.
        valid: Number of samples to validate on.
    """

    def __init__(self, train: int, valid: int) -> None:
        self.train, self.valid = train, valid

    def optimizer(self, model, config):
        betas = (config["beta1"], config["beta2"])
        return torch.optim.Adam(model.parameters(), config["lr"], betas, weight_decay=config["weight_decay"])

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.StepLR(optimizer, config["period"], config["factor"])

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (self.scores(model, x).argmax(1) == y).float().mean()}

    def scores(self, model, x):
        return model(x)


class PointNet(Tuned):
    NORMS = (1.0, 2.0, 4.0, 16.0)

    def data(self, config):
        return tuple(TensorDataset(*self.clouds(count, seed)) for seed, count in enumerate((self.train, self.valid)))

    def clouds(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(count) % len(self.NORMS)
        norm = torch.tensor(self.NORMS)[y].view(-1, 1, 1)
        points = torch.randn(count, 3, 64, generator=generator)
        return points / points.abs().pow(norm).sum(1, keepdim=True).pow(1 / norm), y

    def model(self, config):
        return pointnet.Classifier(16, config["transform"])

    def loss(self, model, batch):
        return pointnet.loss(model, batch)

    def scores(self, model, x):
        return model(x)[0]


class MobileNet(Tuned):
    def __init__(self, train: int, valid: int, file: Path) -> None:
        super().__init__(train, valid)
        self.file = file

    def data(self, config):
        counts = {"train": self.train, "test": self.valid}
        return tuple(TensorDataset(*pictures(self.file, part, count)) for part, count in counts.items())

    def model(self, config):
        return (mobilenet_v2 if config["version"] == "V2" else mobilenet_v3_large)(0.25)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)


SPACE = {
    "lr": shoal.loguniform(1e-4, 1e-2),
    "beta1": shoal.uniform(0.001, 0.999),
    "beta2": shoal.uniform(0.001, 0.999),
    "weight_decay": shoal.uniform(0.0, 0.5),
    "factor": shoal.uniform(0.1, 0.9),
    "period": shoal.choice([1, 2, 4, 8]),
}
SPACES = {
    "pointnet": SPACE | {"batch_size": shoal.choice([8, 16, 32]), "transform": shoal.choice([False, True])},
    "mobilenet": SPACE | {"batch_size": shoal.choice([4, 8]), "version": shoal.choice(["V2", "V3-Large"])},
}
ALGORITHMS: dict[str, dict[str, Callable[[], Algorithm]]] = {
    "pointnet": {
        "random": lambda: shoal.Random(60, epochs=2),
        "hyperband": lambda: shoal.Hyperband(max_epochs=25, eta=5, skip_last=1),
    },
    "mobilenet": {
        "random": lambda: shoal.Random(50, epochs=1),
        "hyperband": lambda: shoal.Hyperband(max_epochs=9, eta=3, skip_last=1),
    },
}
WAYS = ("serial", "concurrent", "fused")


def cost(way: str, task: Tuned, space: dict[str, Any], algorithm: Algorithm, backend: str) -> tuple[float, float]:
    """Seconds of a search in one way, and the best accuracy that its configurations ended with."""
    asked = Asked(task, space, algorithm, "accuracy", "max", SEED)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        began = time.perf_counter()
        if way == "serial":
            best = in_a_loop(asked).best
        elif way == "concurrent":
            torch.set_num_threads(1)
            best = in_processes(asked, Path(folder), SLOTS).best
        else:
            best = shoal.tune(
                task, space, metric="accuracy", mode="max", algorithm=algorithm, devices=f"cpu:{SLOTS}",
                backend=backend, directory=f"{folder}/study", seed=SEED, show_progress=False,
            ).best_trial.objective  # fmt: skip
        return time.perf_counter() - began, best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="*", choices=list(SPACES), default=list(SPACES))
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument(
        "--quick", action="store_true", help="PointNet, two configurations, 16 samples, in this process; judges nothing"
    )
    options = parser.parse_args()
    if options.quick:
        options.tasks = ["pointnet"]
    file = options.data / CIFAR
    if "mobilenet" in options.tasks and not file.exists():
        parser.error(f"{file} is missing; name its folder with --data, or leave it out with --tasks pointnet")
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    torch.optim.Adam([torch.zeros(1)])  # imports what the forked processes then have
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}; {SLOTS} slots")  # fmt: skip
    print(f"{'':22} {'way':10} {'seconds':>8} {'of fused':>9} {'best':>7}")
    costs: dict[str, dict[str, dict[str, float]]] = {}
    missed = []
    tasks = {"pointnet": PointNet(384, 128), "mobilenet": MobileNet(128, 64, file)}
    for name in options.tasks:
        for kind, make in ALGORITHMS[name].items():
            if options.quick:
                small = PointNet(16, 16)
                found = {way: cost(way, small, SPACES[name], shoal.Random(2, epochs=1), "inline") for way in WAYS}
            else:
                found = {way: in_a_fork(cost, way, tasks[name], SPACES[name], make(), "local") for way in WAYS}
            fused = found["fused"][0]
            for way, (seconds, best) in found.items():
                print(
                    f"{name + ', ' + kind:22} {way:10} {seconds:8.2f} {seconds / fused:8.2f}x {best:7.4f}", flush=True
                )
            costs.setdefault(name, {})[kind] = {way: round(seconds, 3) for way, (seconds, _) in found.items()}
            for way in ("serial", "concurrent") if not options.quick else ():
                if (gain := found[way][0] / fused) < NOISE:
                    missed.append(f"{name}, {kind}: {gain:.2f}x less cost than {way}, asked {NOISE}")
    print(json.dumps({"cost": costs, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
