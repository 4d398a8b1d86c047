"""What trackers cost a study: the time of one with all trackers that are installed over that of one without.

The study trains small classifiers on handwritten digits with Hyperband, on all cores, with the local back end. Studies
with and without trackers take turns; what counts is the median of the ratios of the rounds, and the time includes the
wait for the trackers at the end. TensorBoard keeps all trials, MLflow has an SQLite store that exists already (a first
study, not timed, makes it, and fills the job history), W&B writes offline.

    python benchmarks/trackers.py [--rounds 3] [--epochs 81] [--quick]
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import shoal
from shoal.integrations.mlflow import MLflowCallback
from shoal.integrations.tensorboard import TensorBoardCallback
from shoal.integrations.wandb import WandbCallback

MOST = 1.03
"""Asked: the time with trackers over that without."""


class Digits(shoal.Task):
    def data(self, config: Any) -> Any:
        x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
        x = x.float() / 16
        return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])

    def model(self, config: Any) -> Any:
        width = config["width"]
        return torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def trackers(folder: Path) -> list[shoal.Callback]:
    """Those that are installed."""
    found = {
        "tensorboardX": lambda: TensorBoardCallback(),
        "mlflow": lambda: MLflowCallback(f"sqlite:///{folder / 'mlflow.db'}", "benchmark"),
        "wandb": lambda: WandbCallback("benchmark", mode="offline"),
    }
    return [make() for package, make in found.items() if importlib.util.find_spec(package) is not None]


def seconds(directory: Path, callbacks: list[shoal.Callback], epochs: int, backend: str) -> float:
    """The time of a study, and a check that it was tracked."""
    began = time.perf_counter()
    study = shoal.tune(
        Digits(),
        {"lr": shoal.loguniform(1e-4, 1e-1), "width": shoal.choice([256, 512])},
        metric="accuracy",
        mode="max",
        algorithm=shoal.Hyperband(max_epochs=epochs, eta=3),
        directory=directory,
        callbacks=callbacks,
        backend=backend,
        show_progress=False,
    )
    took = time.perf_counter() - began
    if callbacks:
        positions = json.loads((directory / "callbacks.json").read_text())
        assert all(len(each["ended"]) == len(study.trials) for each in positions), "a tracker was left out"
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=81, help="most epochs of a trial")
    parser.add_argument(
        "--quick", action="store_true", help="one round of at most 3 epochs, in one process; judges nothing"
    )
    options = parser.parse_args()
    rounds, epochs, backend = (1, 3, "inline") if options.quick else (options.rounds, options.epochs, "local")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["SHOAL_CACHE"] = str(folder / "cache")
        used = [type(each).__name__ for each in trackers(folder)]
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
              f"{torch.__version__}; {', '.join(used)}")  # fmt: skip
        if not options.quick:
            seconds(folder / "first", trackers(folder), 3, backend)
            seconds(folder / "history", [], epochs, backend)
        ratios = []
        for number in range(rounds):
            without = seconds(folder / f"without-{number}", [], epochs, backend)
            tracked = seconds(folder / f"with-{number}", trackers(folder), epochs, backend)
            ratios.append(tracked / without)
            print(f"round {number}: {without:.2f} s without, {tracked:.2f} s with: {ratios[-1]:.3f}", flush=True)
    ratio = median(ratios)
    missed = [] if options.quick or ratio <= MOST else [f"{ratio:.3f} times the time without, asked at most {MOST}"]
    print(json.dumps({"ratio": round(ratio, 4), "rounds": [round(x, 4) for x in ratios], "trackers": used,
                      "missed": missed}))  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
