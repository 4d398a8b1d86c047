"""Quality of the search algorithms on recorded loss curves, beside those of Syne Tune and Optuna at equal epochs.

Regret is the best validation loss so far less the least in the table, over the possible gain: 0 for the best
configuration. All searches of a part run on the same curves with as many workers, and their random configurations are
the same for a seed. The parts:

- searches: ASHA, Hyperband and BOHB on the tasks of `surrogates.py`. Syne Tune's ASHA and Optuna's
  `SuccessiveHalvingPruner` stop trials at rungs. Syne Tune has no synchronous brackets: its Hyperband is ASHA with four
  brackets, and its BOHB is ASHA with a density. Optuna's BOHB is TPE with `HyperbandPruner`. There is no PBT, as
  recorded curves have no weights to copy.
- default: `tune` without an algorithm, beside Optuna's default (TPE with `MedianPruner`) and random whole trials, on
  the same tasks, at the epochs that Shoal's search spends.
- fine_tuning: `LossTrend`, ASHA and the median rule on the curves of `fine_tuning_curves.py`, in orders drawn by seeds.
  Saved is the share of the samples of 64 whole trials that was not trained on.

    python benchmarks/regret.py [searches] [default] [fine_tuning] [--seeds 10] [--data ../shared/data] [--quick]
"""

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random as Draws
from statistics import fmean, median
from typing import Any

import numpy as np
from optuna.pruners import HyperbandPruner, MedianPruner, SuccessiveHalvingPruner
from papers.experiment import missed_of
from papers.quality import EXPERIMENTS
from report import report
from rival_searches import Optuna, SyneTune
from surrogates import BEYOND, EPOCHS, ETA, SPACE, Search, ShoalSearch, losses_of, tables

from shoal.algorithms import ASHA, BOHB, Algorithm, Hyperband, Median, Random
from shoal.algorithms.default import WIDTH, SearchBudget, choose
from shoal.algorithms.loss_trend import LossTrend
from shoal.algorithms.stop_rules import StopRules
from shoal.core.space import Space, uniform
from shoal.simulate.scenario import DATA
from shoal.simulate.workload import CURVES_FILE

ROOT = Path(__file__).parents[1]
FINE_TUNING = Path(__file__).with_name("fine_tuning_curves.json")

WORKERS = 8
BUDGET = 20 * EPOCHS
TRIALS = 64

SEARCHES: Mapping[str, Callable[[int], Search]] = {
    "ASHA": partial(ShoalSearch, ASHA(BEYOND, EPOCHS, ETA, concurrency=WORKERS)),
    "ASHA with TPE": partial(ShoalSearch, ASHA(BEYOND, EPOCHS, ETA, concurrency=WORKERS, sampler="tpe")),
    "Hyperband": partial(ShoalSearch, Hyperband(EPOCHS, ETA)),
    "BOHB": partial(ShoalSearch, BOHB(EPOCHS, ETA, brackets=BEYOND, concurrency=WORKERS)),
    "Syne Tune's ASHA": partial(SyneTune, "ASHA", is_random=True),
    "Syne Tune's ASHA (4 brackets)": partial(SyneTune, "ASHA", is_random=True, brackets=4),
    "Syne Tune's BOHB": partial(SyneTune, "BOHB", is_random=False),
    "Optuna's halving (random)": partial(Optuna, SuccessiveHalvingPruner(1, ETA), is_random=True),
    "Optuna's halving (TPE)": partial(Optuna, SuccessiveHalvingPruner(1, ETA), is_random=False),
    "Optuna's Hyperband (random)": partial(Optuna, HyperbandPruner(1, EPOCHS, ETA), is_random=True),
    "Optuna's Hyperband (TPE)": partial(Optuna, HyperbandPruner(1, EPOCHS, ETA), is_random=False),
}
BESIDE = {
    "ASHA": ("Syne Tune's ASHA", "Optuna's halving (random)"),
    "ASHA with TPE": ("Syne Tune's BOHB", "Optuna's halving (TPE)"),
    "Hyperband": ("Syne Tune's ASHA (4 brackets)", "Optuna's Hyperband (random)"),
    "BOHB": ("Syne Tune's BOHB", "Optuna's Hyperband (TPE)"),
}
"""Search of Shoal's -> those of others that are held against it; Hyperband ends after one round, the others never."""

STOPPING: Mapping[str, Callable[[int], Algorithm]] = {
    "Median": lambda reports: Median(TRIALS, reports, concurrency=WORKERS),
    "Median, grace 5": lambda reports: Median(TRIALS, reports, grace=5, concurrency=WORKERS),
    "ASHA": lambda reports: ASHA(TRIALS, reports, concurrency=WORKERS),
    "ASHA, from 3": lambda reports: ASHA(TRIALS, reports, min_epochs=3, concurrency=WORKERS),
    "LossTrend": lambda reports: StopRules(Random(TRIALS, reports), [LossTrend()]),
}
"""Name -> search of so many reports."""

Curves = list[list[float]]
"""Regret after each epoch, for each task and seed."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Runner:
    """Runs searches on several processes."""

    pool: ProcessPoolExecutor
    data: Path
    seeds: int
    is_quick: bool

    def curves(self, make: Callable[[int], Search], workers: int, budget: int) -> Curves:
        """Regrets of a search on all tasks."""
        runs = product(range(2 if self.is_quick else len(tables(self.data))), range(self.seeds))
        return list(self.pool.map(partial(regrets, self.data, make, workers, budget), *zip(*runs, strict=True)))


def regrets(data: Path, make: Callable[[int], Search], workers: int, budget: int, task: int, seed: int) -> list[float]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return tables(data)[task].regrets(make(seed), workers, budget)


def rounded(**figures: float) -> dict[str, float]:
    return {name: round(float(figure), 4) for name, figure in figures.items()}


def searches(runner: Runner) -> Figures:
    """Each search of Shoal's beside the others, at the end of the budget and on average over it."""
    figures: Figures = {}
    known = {
        name: runner.curves(make, WORKERS, 4 * EPOCHS if runner.is_quick else BUDGET)
        for name, make in SEARCHES.items()
        if "Syne Tune" not in name or find_spec("syne_tune")
    }
    print(
        f"{'search':13} {'beside':30} {'epochs':>6} {'end':>7} {'its end':>8} {'mean':>7} {'its mean':>8} {'ratio':>13}"
    )
    for name, rivals in BESIDE.items():
        budget = min(map(len, known[name]))
        figures[name] = {}
        for rival in (each for each in rivals if each in known):
            ours, others = (np.array([curve[:budget] for curve in known[each]]) for each in (name, rival))
            end, its_end, mean, its_mean = ours[:, -1].mean(), others[:, -1].mean(), ours.mean(), others.mean()
            gaps = (others.mean(axis=1) - ours.mean(axis=1)) / mean
            ratio, error = its_mean / mean, gaps.std(ddof=1) / math.sqrt(len(gaps))
            print(
                f"{name:13} {rival:30} {budget:6} {end:7.4f} {its_end:8.4f} {mean:7.4f} {its_mean:8.4f} "
                f"{ratio:6.3f} ± {error:.3f}"
            )
            figures[name][rival] = rounded(regret=mean, ratio=ratio, error=error, ratio_at_the_end=its_end / end)
    return figures


def default(runner: Runner) -> Figures:
    """The algorithm that `tune` chooses for 64 trials beside what others do by default."""
    figures: Figures = {}
    print(f"{'epochs':>6} {'at once':>7}  {'chosen':12} {'spent':>5} {'Shoal':>7} {'Optuna':>7} {'random':>7}")
    for epochs, devices in product((3, 9, EPOCHS), (1, 4)):
        workers = devices * WIDTH
        chosen = choose(SPACE, SearchBudget(TRIALS, epochs, devices, fuses=True)).algorithm
        found = {"Shoal": runner.curves(partial(ShoalSearch, chosen), workers, TRIALS * epochs)}
        spent = list(map(len, found["Shoal"]))
        optuna = partial(Optuna, MedianPruner(), is_random=False, epochs=epochs)
        for name, make in {"Optuna": optuna, "random": partial(ShoalSearch, Random(TRIALS, epochs))}.items():
            found[name] = runner.curves(make, workers, max(spent))
        regret = {name: fmean(curve[n - 1] for curve, n in zip(found[name], spent, strict=True)) for name in found}
        columns = " ".join(f"{each:7.4f}" for each in regret.values())
        print(f"{epochs:6} {workers:7}  {type(chosen).__name__:12} {fmean(spent):5.0f} {columns}", flush=True)
        figures[f"{epochs} epochs, {workers} at once"] = rounded(epochs=fmean(spent), **regret)
    return figures


def fine_tuning(runner: Runner) -> Figures:
    """Early stopping of fine-tuning: the samples that it saves, and the regret that it costs."""
    figures: Figures = {}
    orders = range(1 if runner.is_quick else 10 * runner.seeds)
    print(f"{'task':12} {'search':16} {'saved':>6} {'regret':>7} {'worst':>7} {'best found':>10}")
    for task, known in json.loads(FINE_TUNING.read_text()).items():
        curves = [[math.inf if loss is None else loss for loss in trial["losses"]] for trial in known["trials"]]
        figures[task] = {}
        for name in STOPPING:
            ends = list(runner.pool.map(partial(stopped, name, curves), orders))
            saved, regret = fmean(saved for saved, _ in ends), fmean(end for _, end in ends)
            worst, best = max(end for _, end in ends), fmean(end == 0 for _, end in ends)
            print(f"{task:12} {name:16} {saved:6.3f} {regret:7.4f} {worst:7.4f} {best:10.0%}", flush=True)
            figures[task][name] = rounded(saved=saved, regret=regret)
    return figures


def stopped(name: str, curves: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """Share of the samples that a search saves in an order of the trials, and its regret: 1 is the median trial's."""
    reports = max(map(len, curves))
    rows = [[math.inf, *curve, *[math.inf] * (reports - len(curve))] for curve in curves]  # failed ones report no more
    order = [np.array(row) for row in Draws(seed).sample(rows, len(rows))]
    search = ShoalSearch(STOPPING[name](reports), 0, Space({"nothing": uniform(0, 1)}))
    losses = losses_of(search, lambda number, _: order[number], WORKERS)
    best = sorted(map(min, rows))
    return 1 - len(losses) / (len(rows) * reports), (min(losses) - best[0]) / (median(best) - best[0])


PARTS = {"searches": searches, "default": default, "fine_tuning": fine_tuning}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--data", type=Path, default=ROOT / DATA, help=f"folder of {CURVES_FILE}")
    parser.add_argument("--seeds", type=int, default=10, help="of each task; ten times as many orders for fine-tuning")
    parser.add_argument("--quick", action="store_true", help="two tasks, one seed, one order; nothing is judged")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    if not (options.data / CURVES_FILE).is_file():
        print(f"{options.data / CURVES_FILE} is not there: only fine-tuning is measured. Name its folder with --data")
        parts = [part for part in parts if part == "fine_tuning"]
    if not parts:
        return report({"skipped": f"no {CURVES_FILE}"}, [])
    seeds = 1 if options.quick else options.seeds
    figures: Figures = {"seeds": seeds}
    with ProcessPoolExecutor() as pool:
        for part in parts:
            figures[part] = PARTS[part](Runner(pool, options.data, seeds, options.quick))
    return report(figures, [] if options.quick else missed_of(EXPERIMENTS, None, figures))


if __name__ == "__main__":
    sys.exit(main())
