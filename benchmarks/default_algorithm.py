"""Regret of what `tune` chooses from without an algorithm, by the epochs of a trial and the trials at a time.

The tables are those of `surrogates.py`. Each search has as many trials; "spent" are the epochs that it trains in all.
In brackets stands the regret of the searches that train each trial to the end, once they have spent as many epochs.

    python benchmarks/default_algorithm.py [--data ../shared/data] [--seeds 3] [--epochs 3 9 27] [--workers 8 32]
"""

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from surrogates import Ours, Table, regrets, tables

from shoal.algorithms import ASHA, Algorithm, OptunaSearch, Random
from shoal.simulate.scenario import DATA

ROOT = Path(__file__).parents[1]
TRIALS = 64
TO_THE_END = ("Random", "OptunaSearch")
SHORT = 9
"""Epochs below which a sampler that models rungs has nothing to model."""

Curves = list[tuple[int, list[float]]]
"""For each task and seed the epochs spent, and the regret after each epoch."""


class Counted(Ours):
    """Counts the epochs of its trials."""

    def __init__(self, algorithm: Algorithm, seed: int) -> None:
        super().__init__(algorithm, seed)
        self.reached: dict[int, int] = {}

    def tell(self, number: int, epoch: int, loss: float) -> None:
        self.reached[number] = epoch
        super().tell(number, epoch, loss)


def searches(epochs: int, workers: int) -> dict[str, Callable[[], Algorithm]]:
    found: dict[str, Callable[[], Algorithm]] = {
        "Random": lambda: Random(TRIALS, epochs),
        "OptunaSearch": lambda: OptunaSearch(TRIALS, epochs, concurrency=workers),
        "ASHA": lambda: ASHA(TRIALS, epochs, concurrency=workers),
    }
    if epochs >= SHORT:
        found['ASHA, "tpe"'] = lambda: ASHA(TRIALS, epochs, concurrency=workers, sampler="tpe")
    return found


def curves(make: Callable[[], Algorithm], tasks: list[Table], seeds: range, workers: int, epochs: int) -> Curves:
    found = []
    for task in tasks:
        for seed in seeds:
            search = Counted(make(), seed)
            curve = [float(value) for value in regrets(search, task, workers, TRIALS * epochs)]
            found.append((sum(search.reached.values()), curve))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / DATA)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 9, 27])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tasks, figures = tables(options.data), {}
    for epochs in options.epochs:
        for workers in options.workers:
            makers = searches(epochs, workers)
            found = {name: curves(make, tasks, range(options.seeds), workers, epochs) for name, make in makers.items()}
            for name, own in found.items():
                spent, regret = fmean(spent for spent, _ in own), fmean(curve[-1] for _, curve in own)
                beside = [
                    fmean(curve[spent - 1] for (spent, _), (_, curve) in zip(own, found[other], strict=True))
                    for other in TO_THE_END
                ]
                shown = f"({beside[0]:.3f}, {beside[1]:.3f})" if name not in TO_THE_END else ""
                print(
                    f"{epochs:3} epochs, {workers:2} at a time  {name:12} {spent:6.0f} {regret:7.3f} {shown}",
                    flush=True,
                )
                figures[f"{epochs}, {workers}, {name}"] = [round(spent), round(regret, 4)]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
