"""The same 32-trial search by Shoal and by every rival that is installed, each from the call to the result.

An MLP 64-128-128-10 on handwritten digits, Adam, batch 32, 10 epochs, 32 learning rates from 1e-4 to 1e-1.

- The loop, the pools of two processes, Optuna, Ray Tune and Syne Tune train with the same function, `train` of
  rivals/digits.py: a DataLoader and a plain loop, as PyTorch's tutorials have it. "tensors indexed" is the same without
  a DataLoader, which few users write, but which is faster.
- "torch.func by hand" trains all models at once, by `stack_module_state` and an Adam that is written by hand for them.
- Shoal gets the model, data and metrics as a `Task`. "Shoal" has an empty job history and measures its model;
  "known model" has it in the history, and so does "over Ray".

Each run is in a process forked from one that has imported torch, its compiler and Shoal. The modules of its tool are
imported, and Ray's cluster is up, before its clock starts. Rivals take turns in rounds, those far behind in the first
round only; medians are shown. The rows of `papers/rivals.py` say what is asked.

    python benchmarks/search_vs_peers.py [--quick]
"""

import argparse
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
import torch._dynamo  # which torch's optimizers import at their first step
import torch.nn.functional as F
from papers.experiment import missed_of
from papers.rivals import EXPERIMENTS, OVER_RAY, PEERS, RAPIDFIRE
from report import machine, report
from rivals import digits
from rivals.forked import in_a_fork

import shoal

EPOCHS, ROUNDS, SLOTS = 10, 2, 2
RATES = [1e-4 * 1000 ** (number / 31) for number in range(32)]
SETS = digits.load()
"""In memory before any clock starts, for every rival."""


class Digits(shoal.Task):
    def data(self, config):
        return SETS

    def model(self, config):
        return digits.model()

    def optimizer(self, net, config):
        return torch.optim.Adam(net.parameters(), lr=config["lr"])

    def loss(self, net, batch):
        return F.cross_entropy(net(batch[0]), batch[1])

    def metrics(self, net, batch):
        return {"accuracy": (net(batch[0]).argmax(1) == batch[1]).float().mean()}


def with_shoal(epochs: int, known: bool = True, backend: str = "local") -> float:
    if not known:
        shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        study = shoal.tune(
            Digits(), {"lr": shoal.grid(RATES)}, metric="accuracy", mode="max", algorithm=shoal.Grid(epochs),
            devices=f"cpu:{SLOTS}", backend=backend, directory=f"{folder}/study", show_progress=False,
        )  # fmt: skip
        return study.best_trial.objective


def with_a_loop(epochs: int, loader: bool = True) -> float:
    return max(digits.train(SETS, rate, number, epochs, loader) for number, rate in enumerate(RATES))


def with_a_pool(epochs: int, method: str, loader: bool = True) -> float:
    with multiprocessing.get_context(method).Pool(SLOTS, torch.set_num_threads, (1,)) as pool:
        trials = [(SETS, rate, number, epochs, loader) for number, rate in enumerate(RATES)]
        return max(pool.starmap(digits.train, trials, chunksize=1))


def with_optuna(epochs: int) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"lr": RATES}))
    study.optimize(
        lambda trial: digits.train(SETS, trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.number, epochs),
        n_trials=len(RATES),
    )
    return study.best_value


def with_ray_tune(epochs: int, reuse: bool = False) -> float:
    """A trial a core; with `reuse` the process of a trial that has ended trains the next one."""
    from ray import tune

    def trainable(config: dict, sets: digits.Sets, rates: list[float]) -> None:
        torch.set_num_threads(1)
        tune.report({"accuracy": digits.train(sets, rates[config["number"]], config["number"], epochs)})

    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_parameters(trainable, sets=SETS, rates=RATES),
            param_space={"number": tune.grid_search(list(range(len(RATES))))},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=reuse),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        return results.get_best_result().metrics["accuracy"]


def with_syne_tune(epochs: int) -> float:
    """The local back end, a process for each trial; it looks for ended trials every 0.1 s, by default every 5 s."""
    from syne_tune import StoppingCriterion, Tuner
    from syne_tune.backend import LocalBackend
    from syne_tune.config_space import loguniform, randint
    from syne_tune.optimizer.baselines import RandomSearch

    logging.getLogger("syne_tune").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # it writes files where it runs, too
        os.environ["SYNETUNE_FOLDER"] = folder
        torch.save([dataset.tensors for dataset in SETS], f"{folder}/data.pt")
        space = {"lr": loguniform(1e-4, 1e-1), "number": randint(0, 31), "epochs": epochs, "data": f"{folder}/data.pt"}
        points = [{"lr": rate, "number": number} for number, rate in enumerate(RATES)]
        tuner = Tuner(
            LocalBackend(digits.__file__),
            RandomSearch(space, metrics=["accuracy"], do_minimize=False, points_to_evaluate=points),
            StoppingCriterion(max_num_trials_started=len(RATES) - 1),
            n_workers=SLOTS, sleep_time=0.1, wait_trial_completion_when_stopping=True, save_tuner=False,
        )  # fmt: skip
        tuner.run()
        return tuner.tuning_status.overall_metric_statistics.max_metrics["accuracy"]


@dataclass(frozen=True)
class Rival:
    """A way to search.

    Args:
        search: Searches with so many epochs a trial, and returns the best accuracy.
        module: Module of its tool, which is imported before its clock starts.
        slow: Whether it runs in the first round only.
    """

    search: Callable[[int], float]
    module: str = "torch"
    slow: bool = False

    def run(self, epochs: int) -> tuple[float, float]:
        """Seconds, and the best accuracy."""
        warnings.simplefilter("ignore")
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            tool = import_module(self.module)
            if tool.__package__.startswith("ray"):
                os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
                ray = import_module("ray")
                ray.init(
                    "local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
                )
            began = time.perf_counter()
            best = self.search(epochs)
            seconds = time.perf_counter() - began
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()
        return seconds, best


RIVALS = {
    "plain loop": Rival(with_a_loop, slow=True),
    "plain loop, tensors indexed": Rival(partial(with_a_loop, loader=False)),
    "forked pool": Rival(partial(with_a_pool, method="fork")),
    "forked pool, tensors indexed": Rival(partial(with_a_pool, method="fork", loader=False)),
    "spawned pool": Rival(partial(with_a_pool, method="spawn")),
    "torch.func by hand": Rival(partial(digits.ensemble, SETS, RATES)),
    "Optuna": Rival(with_optuna, "optuna", slow=True),
    "Ray Tune": Rival(with_ray_tune, "ray.tune", slow=True),
    "Ray Tune, reuse_actors": Rival(partial(with_ray_tune, reuse=True), "ray.tune", slow=True),
    "Syne Tune": Rival(with_syne_tune, "syne_tune.optimizer.baselines", slow=True),
    "Shoal": Rival(partial(with_shoal, known=False)),
    "Shoal, known model": Rival(with_shoal),
    OVER_RAY: Rival(partial(with_shoal, backend="ray"), "ray"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="4 trials of 1 epoch, no Ray nor Syne Tune; checks no figure"
    )
    quick = parser.parse_args().quick
    rounds, epochs = (1, 1) if quick else (ROUNDS, EPOCHS)
    if quick:
        del RATES[4:]
    runs: dict[str, list[tuple[float, float]]] = {}
    packages, not_run = set(), {"RapidFire AI": RAPIDFIRE}
    for name, rival in RIVALS.items():
        package = rival.module.split(".")[0]
        if find_spec(package) is None:
            not_run[name] = f"{package.replace('_', '-')} is not installed"
        elif not (quick and package in ("ray", "syne_tune")):
            runs[name] = []
            packages.add(package)
    print(f"{machine(*sorted(packages))}; {len(RATES)} trials, {epochs} epochs")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = f"{cache}/shoal"
        for number in range(rounds):
            for name, found in runs.items():
                if not (number and RIVALS[name].slow):
                    found.append(in_a_fork(RIVALS[name].run, epochs))
    seconds = {name: statistics.median(took for took, _ in found) for name, found in runs.items()}
    times = {name: round(took / seconds["Shoal"], 3) for name, took in seconds.items()}
    best = {name: round(found[-1][1], 4) for name, found in runs.items()}
    print(f"{'':28} {'runs':>4} {'seconds':>8} {'times Shoal':>12} {'best accuracy':>14}")
    for name, found in runs.items():
        print(f"{name:28} {len(found):4} {seconds[name]:8.2f} {times[name]:12.2f} {best[name]:14.4f}")
    for name, reason in not_run.items():
        print(f"{name:28} not run: {reason}")
    figures = {"seconds": seconds, "times": times, "best": best, "not_run": not_run}
    return report(figures, [] if quick else missed_of(EXPERIMENTS, PEERS, figures))


if __name__ == "__main__":
    sys.exit(main())
