"""Samples that `LossTrend`, ASHA and the median rule save on real curves of fine-tuning, and the value they end with.

The curves are those of `fine_tuning_curves.py`: low-rank adapters, 20 reports of 96 samples each. A search trains the
64 configurations of a task in an order drawn by a seed, the same for all searches; the trials in training report
together, one report a round. Regret is the best loss that a search has seen less the least in the table, over the
median of all trials' best losses less the same. Saved is the share of the samples of 64 whole trials that was not
trained on.

Asked is that `LossTrend` saves 0.6 of the samples at a mean regret that is no greater than ASHA's.

    python benchmarks/loss_trend.py [--seeds 100] [--quick]
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random as Draws
from statistics import fmean, median

from shoal.algorithms import ASHA, Algorithm, Median, Random
from shoal.algorithms.loss_trend import LossTrend
from shoal.algorithms.stop_rules import StopRules
from shoal.core.space import Space, uniform
from shoal.core.trial import Report, TrialState

FILE = Path(__file__).with_name("fine_tuning_curves.json")
SPACE = Space({"nothing": uniform(0, 1)})
"""What a trial trains follows from its number; see `Table.shuffled`."""

SAVED = 0.6
"""Asked of `LossTrend`."""
SEEDS = 100
AT_ONCE = (1, 8, 64)

Curves = Sequence[Sequence[float]]
"""Losses of each configuration after each report, infinite where one diverged."""

SEARCHES: dict[str, Callable[[int, int, int], Algorithm]] = {
    "none": lambda trials, reports, at_once: Random(trials, reports),
    "Median": lambda trials, reports, at_once: Median(trials, reports, concurrency=at_once),
    "Median, grace 5": lambda trials, reports, at_once: Median(trials, reports, grace=5, concurrency=at_once),
    "ASHA": lambda trials, reports, at_once: ASHA(trials, reports, concurrency=at_once),
    "ASHA, eta 2": lambda trials, reports, at_once: ASHA(trials, reports, eta=2, concurrency=at_once),
    "ASHA, from 3": lambda trials, reports, at_once: ASHA(trials, reports, min_epochs=3, concurrency=at_once),
    "LossTrend": lambda trials, reports, at_once: StopRules(Random(trials, reports), [LossTrend()]),
}
"""Name -> search of so many trials and reports, of which so many trials train at once."""


@dataclass(frozen=True)
class Table:
    """Curves of a task, and the ends of regret: the least loss, and the median of the best losses."""

    curves: Curves
    least: float
    middle: float

    @classmethod
    def of(cls, trials: Sequence[dict[str, list[float | None]]]) -> "Table":
        reports = max(len(trial["losses"]) for trial in trials)
        curves = []
        for trial in trials:  # a trial that has failed has no later reports
            known = [math.inf if loss is None else loss for loss in trial["losses"]]
            curves.append(known + [math.inf] * (reports - len(known)))
        best = [min(curve) for curve in curves]
        return cls(curves, min(best), median(best))

    def regret(self, loss: float) -> float:
        return (loss - self.least) / (self.middle - self.least)

    def shuffled(self, seed: int) -> Curves:
        """The curves of trials 0, 1, ..., for all searches of a seed."""
        return Draws(seed).sample(self.curves, len(self.curves))


@dataclass(frozen=True)
class End:
    """Of a search.

    Args:
        trained: Reports of all trials.
        best: Best loss.
        kept: Of each trial that was ended by its trend, whether its whole curve stays above what it was said to reach.
    """

    trained: int
    best: float
    kept: list[bool]


_REACHES = re.compile(r"reaches at best (\S+) at")
_ROUNDING = 5e-4
"""Relative, of a number in a reason."""


def search(algorithm: Algorithm, curves: Curves, at_once: int) -> End:
    """Run a search of the curves of trials 0, 1, ..."""
    algorithm.bind(SPACE, metric="loss", mode="min", seed=0)
    waiting: list[tuple[int, int]] = []
    training: dict[int, int] = {}  # trial -> target
    reached = [0] * len(curves)
    best = math.inf
    kept: list[bool] = []
    while not algorithm.finished:
        for group in algorithm.next_groups(at_once):
            waiting += [(trial.number, group.budget.epochs) for trial in group.trials]
        while waiting and len(training) < at_once:
            number, target = waiting.pop(0)
            training[number] = target
        for number, target in sorted(training.items()):
            if number not in training:
                continue  # a decision on another trial's report ended it
            epoch = reached[number] = reached[number] + 1
            loss = curves[number][epoch - 1]
            best = min(best, loss)
            state = TrialState.PAUSED if epoch == target else TrialState.RUNNING
            decisions = algorithm.observe(Report(number, epoch, {"loss": loss}, state=state))
            for each in decisions:
                if said := _REACHES.search(each.reason):
                    kept.append(min(curves[each.trial]) >= float(said[1]) * (1 - _ROUNDING))
            for ended in [decision.trial for decision in decisions] + [number] * (epoch == target):
                training.pop(ended, None)
    return End(sum(reached), best, kept)


@dataclass(frozen=True)
class Row:
    saved: float
    regret: float
    worst: float
    found: float
    """Share of seeds with the least loss of the table."""
    kept: float | None
    """Share of the reasons of `LossTrend` that hold of the whole curve."""

    @classmethod
    def of(cls, make: Callable[[int, int, int], Algorithm], table: Table, at_once: int, seeds: range) -> "Row":
        trials, reports = len(table.curves), len(table.curves[0])
        ends = [search(make(trials, reports, at_once), table.shuffled(seed), at_once) for seed in seeds]
        regrets = [table.regret(end.best) for end in ends]
        saved = 1 - fmean(end.trained for end in ends) / (trials * reports)
        kept = [each for end in ends for each in end.kept]
        found = fmean(regret == 0 for regret in regrets)
        return cls(saved, fmean(regrets), max(regrets), found, fmean(kept) if kept else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="orders of the configurations")
    parser.add_argument("--quick", action="store_true", help="one order, eight trials at once")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    missed: list[str] = []
    figures: dict[str, dict[str, float]] = {}
    print(f"mean over {len(seeds)} orders of the configurations")
    columns = f"{'saved':>6} {'regret':>7} {'worst':>7} {'best found':>10} {'reasons hold':>12}"
    print(f"{'task':12} {'at once':>7}  {'search':16} {columns}")
    for task, known in json.loads(FILE.read_text()).items():
        table = Table.of(known["trials"])
        for at_once in AT_ONCE[1:2] if options.quick else AT_ONCE:
            rows = {name: Row.of(make, table, at_once, seeds) for name, make in SEARCHES.items()}
            for name, row in rows.items():
                figures[f"{task}, {at_once}, {name}"] = {"saved": round(row.saved, 3), "regret": round(row.regret, 4)}
                print(
                    f"{task:12} {at_once:7}  {name:16} {row.saved:6.3f} {row.regret:7.4f} {row.worst:7.4f} "
                    f"{row.found:10.0%}" + ("" if row.kept is None else f" {row.kept:12.0%}"),
                    flush=True,
                )
            ours, asha = rows["LossTrend"], rows["ASHA"]
            where = f"{task}, {at_once} at once"
            if ours.saved < SAVED:
                missed.append(f"{where}: saved {ours.saved:.3f}, asked {SAVED}")
            if ours.regret > asha.regret:
                missed.append(f"{where}: regret {ours.regret:.4f}, that of ASHA is {asha.regret:.4f}")
    judged = [] if options.quick else missed
    print(json.dumps({"figures": figures, "asked": SAVED, "seeds": len(seeds), "missed": judged}))
    return 1 if judged else 0


if __name__ == "__main__":
    sys.exit(main())
