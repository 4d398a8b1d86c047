"""Fluid's scheduling of TrialGroups, simulated: successive halving on eight devices against first in, first out.

Every rung is a TrialGroup that arrives when the one before has ended. Which trials are promoted is drawn beforehand, so
both policies run the same trials for the same budgets. An epoch of a trial takes log-normal seconds: median 10, sigma
0.5, which is twice as long or half as long for one trial in six (hyper-parameters such as width and batch size decide).

Fluid measures its overheads and prints none, only the bounds α < c/(c-1) and β < 1 + 1/d within which sharing and
spreading are of use (Lemmas 4 and 6). Taken here are the middle of them, with c = 4 and d = 8: four trials on a device
take 1.59 times as long each, eight devices are 5.2 times as fast as one. "dear" stands nine tenths of the way to the
bounds: 2.2 times as long, 3.8 times as fast. Starting a trial and resizing it cost 2 s.

    python benchmarks/groups.py [--seeds 20] [--quick]
    python benchmarks/groups.py --live [--slots 2] [--rounds 1] [--trainings ...] [--searches ...] [--quick]

With `--live`, real trainings are searched on CPU slots instead; see `groups_live.py`.

The last line is one JSON object; the exit status is 1 if a figure is missed.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from groups_live import SEARCHES as SEARCHES_LIVE
from groups_live import TRAININGS, compare

from shoal.algorithms.base import Algorithm, Problem
from shoal.core.device import Cluster, Device, Node
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState, derive_seed
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.scaling import Scaling
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule import make_policy
from shoal.simulate.run import Simulation
from shoal.simulate.scenario import DATA
from shoal.simulate.slowdown import SLOWDOWNS
from shoal.simulate.tables import profile_of_costs
from shoal.simulate.workload import PowerLawCurves, SimulatedModel, SimulatedWorkload, TrialSource

ROOT = Path(__file__).parents[1]
ASKED = 1.6
"""Least speed-up over first in, first out: the mean over seeds, of each search, with the middling overheads."""

SMALL = 27
"""Trials of a search that is tried with `--quick`."""
DEVICES = 8
MAX_JOBS = 4
SECONDS = 2.0
PARTS = 4
"""Of an epoch, at the ends of which a trial reports and can be moved: else much would be done twice."""


def scaling(part: float, max_jobs: int = MAX_JOBS, devices: int = DEVICES) -> Scaling:
    """Overheads that stand this part of the way to Fluid's bounds."""
    return Scaling(1 + part / (MAX_JOBS - 1), 1 + part / DEVICES, max_jobs, devices, SECONDS)


OVERHEADS = {
    "middling": scaling(0.5),
    "none": scaling(0.0),
    "dear": scaling(0.9),
    "sharing only": scaling(0.5, devices=1),
    "spreading only": scaling(0.5, max_jobs=1),
}


@dataclass(frozen=True)
class Halving:
    """Successive halving: the first rung's trials, epochs of its budget, and what trials and budgets change by."""

    trials: int
    epochs: int
    eta: int

    def rungs(self) -> list[tuple[int, int]]:
        """Trials of each rung, and epochs that they have behind them at its end."""
        found = []
        trials, epochs = self.trials, self.epochs
        while trials >= 1:
            found.append((trials, epochs))
            trials, epochs = trials // self.eta, epochs * self.eta
        return found


SEARCHES = {
    "halving, 81 trials, eta 3": Halving(81, 1, 3),
    "halving, 64 trials, eta 4": Halving(64, 1, 4),
    "halving, 27 trials, eta 3": Halving(27, 1, 3),
    "halving, 32 trials, eta 2": Halving(32, 1, 2),
}


class Rungs(TrialSource):
    """The trials of a search, and what they take."""

    name = "search"
    arrivals = (0.0,)
    curves = PowerLawCurves()

    def __init__(self, search: Halving, overheads: Scaling, seed: int) -> None:
        draw = random.Random(seed)
        seconds = [10 * math.exp(draw.gauss(0, 0.5)) for _ in range(search.trials)]
        self.structures = [_structure(number, each, overheads) for number, each in enumerate(seconds)]
        promoted = list(range(search.trials))
        self._rungs: list[tuple[list[int], int]] = []
        for trials, epochs in search.rungs():
            promoted = draw.sample(promoted, trials)
            self._rungs.append((promoted, epochs))

    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        return _Promotions(self._rungs)


def _structure(number: int, seconds: float, overheads: Scaling) -> SimulatedModel:
    """Of a trial, by the seconds of its epoch."""
    takes = replace(
        profile_of_costs(seconds / PARTS, 1.0, 10**9, 1.0, {}),
        crowding={jobs: overheads.factor(1 / jobs) for jobs in range(2, overheads.max_jobs + 1)},
        spreading={width: overheads.factor(width) for width in range(2, overheads.devices + 1)},
    )
    return SimulatedModel(f"trial {number}", {"A100": takes}, "", overheads.alpha, SECONDS, SECONDS)


class _Promotions(Algorithm):
    """Rungs whose trials are known beforehand; each comes when the one before has ended."""

    def __init__(self, rungs: list[tuple[list[int], int]]) -> None:
        self._rungs = rungs
        self._rung = -1
        self._left: set[int] = set()

    def begin(self, problem: Problem) -> None: ...

    def next_groups(self, free: int) -> list[TrialGroup]:
        if self._left or self.finished:
            return []
        self._rung += 1
        numbers, epochs = self._rungs[self._rung]
        self._left = set(numbers)
        trials = tuple(
            Trial(number, {"structure": f"trial {number}"}, derive_seed("groups", number), 0) for number in numbers
        )
        return [TrialGroup(trials, Budget(epochs * PARTS), f"rung-{self._rung}")]

    def observe(self, report: Report) -> list[Decision]:
        if report.state is TrialState.RUNNING:
            return []
        self._left.discard(report.trial)
        if self._left:
            return []
        trained = self._rungs[self._rung][0]
        promoted = [] if self.finished else self._rungs[self._rung + 1][0]
        return [Decision(number, TrialState.COMPLETE) for number in trained if number not in promoted]

    @property
    def finished(self) -> bool:
        return not self._left and self._rung + 1 == len(self._rungs)


def cluster() -> Cluster:
    devices = tuple(Device(f"cuda:{index}", "A100", 80 * 10**9) for index in range(DEVICES))
    return Cluster((Node("node", 1000.0, devices),))


def makespan(policy: str, search: Halving, overheads: Scaling, seed: int) -> float:
    searches = SimulatedWorkload([Rungs(search, overheads, seed)])
    slowdown = SLOWDOWNS["none"]({each.name: each for each in searches.keys.values()}, Path())
    packer = ArrayPacker(make_packing("none"))
    run = Simulation(searches, cluster(), make_policy(policy), slowdown, packer=packer, fuse=False)
    outcome = run.run()
    assert not outcome.waiting, f"{policy} left trials waiting: {outcome.waiting}"
    return outcome.makespan


def main() -> int:
    options = arguments()
    if options.live:
        return compare(options)
    seeds = range(1 if options.quick else options.seeds)
    figures: dict[str, dict[str, float]] = {}
    print(f"{'search':28} {'overheads':15} {'fifo':>9} {'water_filling':>14} {'speed-up':>9} {'least':>6}")
    for search_name, search in SEARCHES.items():
        if options.quick and search.trials > SMALL:
            continue
        figures[search_name] = {}
        before = [makespan("fifo", search, OVERHEADS["none"], seed) for seed in seeds]  # shares and spreads nothing
        for name, overheads in OVERHEADS.items():
            after = [makespan("water_filling", search, overheads, seed) for seed in seeds]
            ratios = [old / new for old, new in zip(before, after, strict=True)]
            figures[search_name][name] = round(fmean(ratios), 3)
            print(
                f"{search_name:28} {name:15} {fmean(before):7.0f} s {fmean(after):12.0f} s "
                f"{fmean(ratios):8.2f}x {min(ratios):5.2f}x"
            )
    missed = [
        f"{search}: {found['middling']:.2f}x, asked {ASKED}x"
        for search, found in figures.items()
        if found["middling"] < ASKED
    ]
    print(json.dumps({"speed_up": figures, "asked": ASKED, "seeds": len(seeds), "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="draws of trials' times and of who is promoted")
    parser.add_argument(
        "--quick", action="store_true", help="one seed of the small searches; with --live judges nothing"
    )
    live = parser.add_argument_group("real trainings")
    live.add_argument("--live", action="store_true", help="real trainings on CPU slots instead of simulated ones")
    live.add_argument("--data", type=Path, default=ROOT / DATA, help="folder of MNIST; digits where it is missing")
    live.add_argument("--slots", type=int, default=2, help="CPU slots")
    live.add_argument("--rounds", type=int, default=1)
    live.add_argument("--trainings", nargs="+", choices=TRAININGS)
    live.add_argument("--searches", nargs="+", choices=SEARCHES_LIVE, default=list(SEARCHES_LIVE))
    options = parser.parse_args()
    for name in ("seeds", "slots", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    options.rounds = 1 if options.quick else options.rounds
    options.trainings = options.trainings or TRAININGS[: 2 if options.quick else 3]  # programs begin slowly
    return options


if __name__ == "__main__":
    sys.exit(main())
