"""Regret of Shoal's searches on real loss curves, beside that of the papers' pseudo-code and of Syne Tune.

The curves are those of `surrogates.py`. A search trains on a number of workers, an epoch taking as long for all trials;
the budget is counted in epochs of all trials together. Regret is the best validation loss seen so far less the least
there is in the table, over the median loss before training less the same.

The random configuration of a trial is the same for all searches of a seed, and a loss that is NaN is infinite for all.
So what draws nothing else (ASHA, Hyperband) should agree with the pseudo-code to the last digit, and is held to that.
BOHB stands beside its paper twice. "as here" is the paper's pseudo-code with what Shoal does otherwise, the same random
numbers and every density computed candidate by candidate: held to the last digit too. "the paper" is without that: a
trial is sampled when a worker is free for it, where Shoal samples a bracket as it begins so that it can be fused; and
kernels are not cut off at 0 and 1, where candidates are. Its difference is as noisy as its standard error says.

Syne Tune is compared where it is installed (`pip install syne-tune`, which Shoal does not depend on). Its density,
`KernelDensityEstimator`, is put into the paper's loop; it asks for 2 (d + 1) observations before it proposes. Two of
its searches are others than Shoal's, so they are printed and not judged. Its ASHA stops trials, and of m on a rung
lets go on who is among the best floor(m / 3) + 1, where Shoal's "stopping" says floor(m / 3), and everybody while m
is below 3. Its BOHB is not a Hyperband but that ASHA, with a model of last values, whatever their epoch. A quick run
judges only what should agree to the last digit.

With `--gains` it measures, in place of all this, what initial points, repeats and earlier studies gain (`gains.py`).

    python benchmarks/regret.py [--data ../shared/data] [--seeds 30] [--gains] [--quick]
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random

from gains import print_gains
from paper_searches import (
    Draw,
    PaperASHA,
    PaperBOHB,
    PaperHyperband,
    Place,
    Search,
    SyneTune,
    paper_model,
    syne_model,
)
from surrogates import BEYOND, EPOCHS, ETA, RANGES, SPACE, WORKERS, Difference, Ours, Table, place_of, regrets, tables

from shoal.algorithms import ASHA, BOHB, Algorithm, Hyperband
from shoal.core.trial import derive_seed
from shoal.simulate.scenario import DATA
from shoal.simulate.workload import CURVES_FILE

ROOT = Path(__file__).parents[1]
ASKED = 0.05
"""Greatest difference of mean regrets, at the end and on average over the budget, as a part of the other's."""

SEEDS, GAINS_SEEDS = 30, 10
ENOUGH = 8 + 3
"""Trials at a budget with which BOHB models it: N_min + 2 with N_min = d + 1."""


def random_place(seed: int, number: int) -> Place:
    """As Shoal draws it, for all searches."""
    return place_of(SPACE.sample(derive_seed(seed, "config", number)))


@dataclass(frozen=True)
class Comparison:
    """A search of Shoal's beside another; both are made of a seed.

    Args:
        exact: whether they are to agree to the last digit.
        judged: whether they are one search at all.
    """

    ours: Callable[[], Algorithm]
    other: Callable[[int, Draw], Search]
    workers: int
    budget: int
    exact: bool = False
    judged: bool = True


def stream(seed: int) -> Callable[[int], Random]:
    """Random numbers for the model's proposal of a trial, as Shoal has them."""
    return lambda number: Random(derive_seed(seed, "bohb", number))


def bohb() -> Algorithm:
    return BOHB(EPOCHS, ETA, brackets=BEYOND, concurrency=WORKERS)


COMPARISONS = {
    "ASHA, the paper": Comparison(
        lambda: ASHA(BEYOND, EPOCHS, ETA, concurrency=WORKERS),
        lambda seed, draw: PaperASHA(EPOCHS, ETA, draw),
        WORKERS,
        1000,
        exact=True,
    ),
    "Hyperband, the paper": Comparison(
        lambda: Hyperband(EPOCHS, ETA), lambda seed, draw: PaperHyperband(EPOCHS, ETA, draw), 1, 357, exact=True
    ),
    "BOHB, the paper, as here": Comparison(
        bohb,
        lambda seed, draw: PaperBOHB(EPOCHS, ETA, draw, paper_model(stream(seed), cut_off=True), ENOUGH, whole=True),
        WORKERS,
        1000,
        exact=True,
    ),
    "BOHB, the paper": Comparison(
        bohb,
        lambda seed, draw: PaperBOHB(EPOCHS, ETA, draw, paper_model(stream(seed), cut_off=False), ENOUGH),
        WORKERS,
        1000,
    ),
}
SYNE_TUNE = {
    "ASHA (stopping), Syne Tune": Comparison(
        lambda: ASHA(BEYOND, EPOCHS, ETA, concurrency=WORKERS, variant="stopping"),
        lambda seed, draw: SyneTune("ASHA", EPOCHS, draw, 1000, len(RANGES), seed),
        WORKERS,
        1000,
        judged=False,
    ),
    "BOHB, Syne Tune's density": Comparison(
        bohb,
        lambda seed, draw: PaperBOHB(EPOCHS, ETA, draw, syne_model(stream(seed)), ENOUGH),
        WORKERS,
        1000,
    ),
    "BOHB, Syne Tune's": Comparison(
        bohb,
        lambda seed, draw: SyneTune("BOHB", EPOCHS, draw, 0, len(RANGES), seed),
        WORKERS,
        1000,
        judged=False,
    ),
}


def compared(comparison: Comparison, tasks: list[Table], seeds: range) -> tuple[Difference, Difference, bool]:
    """At the end of the budget, on average over it, and whether all curves agree to the last digit."""
    pairs = []
    for table in tasks:
        for seed in seeds:
            ours, other = Ours(comparison.ours(), seed), comparison.other(seed, partial(random_place, seed))
            pairs.append([regrets(each, table, comparison.workers, comparison.budget) for each in (ours, other)])
    ends = Difference.of([float(ours[-1]) for ours, _ in pairs], [float(other[-1]) for _, other in pairs])
    means = Difference.of([float(ours.mean()) for ours, _ in pairs], [float(other.mean()) for _, other in pairs])
    return ends, means, all((ours == other).all() for ours, other in pairs)


def main() -> int:
    options = arguments()
    warnings.filterwarnings("ignore", module="syne_tune|statsmodels|pandas")
    tasks, seeds = tables(options.data), range(options.seeds)
    if options.gains:
        return print_gains(tasks[:2], range(1), judged=False) if options.quick else print_gains(tasks, seeds)
    comparisons = dict(COMPARISONS)
    if options.quick:
        tasks, seeds = tasks[:2], range(1)
    elif find_spec("syne_tune") is not None:
        comparisons |= SYNE_TUNE
    if options.only:
        comparisons = {options.only: (COMPARISONS | SYNE_TUNE)[options.only]}
    print(f"mean over {len(tasks)} tasks and {len(seeds)} seeds; difference as a part of the other's, ± standard error")
    print(f"{'search, beside':28} {'regret':18} {'shoal':>8} {'other':>8} {'difference':>18}")
    figures: dict[str, dict[str, float | bool]] = {}
    missed: list[str] = []
    for name, comparison in comparisons.items():
        ends, means, equal = compared(comparison, tasks, seeds)
        figures[name] = {"end": round(ends.relative, 4), "mean": round(means.relative, 4), "equal": equal}
        if comparison.exact and not equal:
            missed.append(f"{name}: the curves differ")
        for when, found in (("at the end", ends), ("over the budget", means)):
            print(
                f"{name:28} {when:18} {found.ours:8.4f} {found.other:8.4f} "
                f"{found.relative:+10.1%} ± {found.error:.1%}" + ("" if comparison.judged else "  (another search)"),
                flush=True,
            )
            is_judged = comparison.judged and not options.quick
            if is_judged and abs(found.relative) > ASKED:
                missed.append(f"{name}, {when}: {found.relative:+.1%}, asked within {ASKED:.0%}")
    print(json.dumps({"difference": figures, "asked": ASKED, "seeds": len(seeds), "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / DATA, help=f"folder of {CURVES_FILE}")
    parser.add_argument("--seeds", type=int, help=f"of each task; {SEEDS} unless given, with --gains {GAINS_SEEDS}")
    parser.add_argument("--only", choices=[*COMPARISONS, *SYNE_TUNE], metavar="NAME", help="one row of the table")
    parser.add_argument("--gains", action="store_true", help="of initial points, repeats and earlier studies")
    parser.add_argument("--quick", action="store_true", help="two tasks, one seed; no Syne Tune")
    options = parser.parse_args()
    if options.gains and options.only:
        parser.error("--only names a row of the table without --gains; leave one of them out")
    if options.seeds is None:
        options.seeds = GAINS_SEEDS if options.gains else SEEDS
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    if not (options.data / CURVES_FILE).is_file():
        if options.data != ROOT / DATA:
            parser.error(f"{options.data / CURVES_FILE} is not there")
        print(f"{options.data / CURVES_FILE} is not there: nothing can be measured. Name its folder with --data")
        print(json.dumps({"missed": [], "skipped": f"no {CURVES_FILE}"}))
        parser.exit(0)
    return options


if __name__ == "__main__":
    sys.exit(main())
