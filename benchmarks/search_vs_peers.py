"""The same 32-trial search by a plain loop, two processes, Optuna, Ray Tune and Shoal, each from call to result.

An MLP 64-128-128-10 on handwritten digits, Adam, batch 32, 10 epochs, 32 learning rates from 1e-4 to 1e-1. Every rival
trains with the same function, `train`: a DataLoader and a plain loop, as PyTorch's tutorials have it; the row "tensors
indexed" is the same without a DataLoader. Shoal gets the same model, data and metrics as a `Task`. Rivals run
interleaved, `--rounds` times; the table shows medians. Shoal's job history is emptied before each of its runs, so it
profiles anew each time; the row "known" shows a study whose model is in the history.

    python benchmarks/search_vs_peers.py [--rounds 3] [--quick]
"""

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings

import torch
import torch.nn.functional as F
from rivals.first import first_search
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

TRIALS = 32
EPOCHS = 10
RATES = [1e-4 * 1000 ** (number / (TRIALS - 1)) for number in range(TRIALS)]
ASKED = {"of_plain_loop": 0.20, "of_ray_tune": 1 / 20}


def data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, valid = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[valid], y[valid])


TRAIN, VALID = data()
"""In memory before any clock starts, for every rival."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(rate: float, number: int, epochs: int, loader: bool = True) -> float:
    """One trial, as a plain PyTorch script trains it; returns the validation accuracy."""
    torch.manual_seed(number)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    batches = DataLoader(TRAIN, batch_size=32, shuffle=True)
    accuracy = 0.0
    for _ in range(epochs):
        net.train()
        for x, y in batches if loader else indexed(TRAIN):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            correct = [(net(x).argmax(1) == y).sum() for x, y in DataLoader(VALID, batch_size=32)]
        accuracy = float(sum(correct)) / len(VALID)
    return accuracy


def indexed(dataset: TensorDataset):
    for part in torch.randperm(len(dataset)).split(32):
        yield dataset.tensors[0][part], dataset.tensors[1][part]


class Digits(shoal.Task):
    def data(self, config):
        return TRAIN, VALID

    def model(self, config):
        return model()

    def optimizer(self, net, config):
        return torch.optim.Adam(net.parameters(), lr=config["lr"])

    def loss(self, net, batch):
        x, y = batch
        return F.cross_entropy(net(x), y)

    def metrics(self, net, batch):
        x, y = batch
        return {"accuracy": (net(x).argmax(1) == y).float().mean()}


def plain_loop(epochs: int) -> float:
    return max(train(rate, number, epochs) for number, rate in enumerate(RATES))


def plain_loop_indexed(epochs: int) -> float:
    return max(train(rate, number, epochs, loader=False) for number, rate in enumerate(RATES))


def _pooled(job: tuple[float, int, int]) -> float:
    torch.set_num_threads(1)
    return train(*job)


def two_processes(epochs: int) -> float:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return max(pool.map(_pooled, [(rate, number, epochs) for number, rate in enumerate(RATES)], chunksize=1))


def with_optuna(epochs: int) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"lr": RATES}))
    study.optimize(
        lambda trial: train(trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.number, epochs), n_trials=len(RATES)
    )
    return study.best_value


def with_ray_tune(epochs: int) -> float:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return ray_tune_search(epochs)
    finally:
        ray.shutdown()


def ray_tune_search(epochs: int, *, reuse: bool = False) -> float:
    """The search by Ray Tune on the cluster that this process is connected to, a trial a core.

    Args:
        epochs: of each trial.
        reuse: whether the process of a trial that has ended trains the next one, which Ray Tune does not by itself.
    """
    from ray import tune

    def trainable(config: dict) -> None:
        tune.report({"accuracy": _pooled((config["lr"], config["number"], epochs))})

    folder = tempfile.mkdtemp()
    try:
        results = tune.Tuner(
            trainable,
            param_space={"number": tune.grid_search(list(range(len(RATES)))), "lr": tune.sample_from(_rate)},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=reuse),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        return results.get_best_result().metrics["accuracy"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rate(config: dict) -> float:
    return RATES[config["number"]]


def with_shoal(epochs: int, known: bool = False) -> float:
    if not known:
        shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)
    folder = tempfile.mkdtemp()
    first_search()
    study = shoal.tune(
        Digits(),
        {"lr": shoal.grid(RATES)},
        metric="accuracy",
        mode="max",
        algorithm=shoal.Grid(epochs=epochs),
        directory=f"{folder}/study",
        show_progress=False,
    )
    best = study.best_trial.objective
    shutil.rmtree(folder)
    return best


RIVALS = {
    "plain loop": plain_loop,
    "plain loop, tensors indexed": plain_loop_indexed,
    "two processes": two_processes,
    "Optuna": with_optuna,
    "Ray Tune": with_ray_tune,
    "Shoal": with_shoal,
    "Shoal, known model": lambda epochs: with_shoal(epochs, known=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round, 4 trials of 1 epoch, without Ray and processes; checks no figure",
    )
    parser.add_argument("--only", nargs="*", help="some rivals, by name")
    options = parser.parse_args()
    rounds, epochs = (1, 1) if options.quick else (options.rounds, EPOCHS)
    if options.quick:
        del RATES[4:]
    slow_to_start = {"Ray Tune", "two processes"}
    names = options.only or [name for name in RIVALS if not (options.quick and name in slow_to_start)]
    os.environ["SHOAL_CACHE"] = tempfile.mkdtemp()
    warnings.simplefilter("ignore")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name in names:
            with contextlib.redirect_stdout(io.StringIO()):
                began = time.perf_counter()
                best[name] = RIVALS[name](epochs)
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}; {len(RATES)} trials, {epochs} epochs, median of {rounds}")  # fmt: skip
    print(f"{'':28} {'seconds':>8} {'of plain loop':>14} {'best accuracy':>14}")
    for name in names:
        share = median[name] / median.get("plain loop", median[name])
        print(f"{name:28} {median[name]:8.2f} {share:14.3f} {best[name]:14.4f}")
    figures = {"seconds": {name: round(value, 3) for name, value in median.items()}, "best": best}
    missed = []
    if not options.quick and not options.only:
        figures["of_plain_loop"] = median["Shoal"] / median["plain loop"]
        figures["of_ray_tune"] = median["Shoal"] / median["Ray Tune"]
        missed = [name for name, limit in ASKED.items() if figures[name] > limit]
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
