"""Fluid's scheduling of TrialGroups, simulated: successive halving on eight devices against first in, first out.

Every rung is a TrialGroup that arrives when the one before has ended. Which trials are promoted is drawn beforehand, so
both policies run the same trials for the same budgets. An epoch of a trial takes log-normal seconds: median 10, sigma
0.5, which is twice as long or half as long for one trial in six (hyper-parameters such as width and batch size decide).

Fluid measures its overheads and prints none, only the bounds α < c/(c-1) and β < 1 + 1/d within which sharing and
spreading are of use (Lemmas 4 and 6). Taken here are the middle of them, with c = 4 and d = 8: four trials on a device
take 1.59 times as long each, eight devices are 5.2 times as fast as one. "dear" stands nine tenths of the way to the
bounds: 2.2 times as long, 3.8 times as fast. Starting a trial and resizing it cost 2 s.

    python benchmarks/groups.py [--seeds 20] [--quick]
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shoal.backend.simulated import SimulatedJob, Simulation, Source
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.cost.scaling import Scaling
from shoal.schedule import POLICIES
from shoal.simulate.slowdown import Scalings

ASKED = 1.6
"""Least speed-up over first in, first out: the mean over seeds, of each search, with the middling overheads."""

DEVICES = 8
SHARING = 4
SECONDS = 2.0


def scaling(part: float, sharing: int = SHARING, devices: int = DEVICES) -> Scaling:
    """Overheads that stand this part of the way to Fluid's bounds."""
    return Scaling(1 + part / (SHARING - 1), 1 + part / DEVICES, sharing, devices, SECONDS)


OVERHEADS = {
    "middling": scaling(0.5),
    "none": scaling(0.0),
    "dear": scaling(0.9),
    "sharing only": scaling(0.5, devices=1),
    "spreading only": scaling(0.5, sharing=1),
}


@dataclass(frozen=True)
class Halving:
    """Successive halving: the first rung's trials, epochs of its budget, and what trials and budgets change by."""

    trials: int
    epochs: int
    eta: int

    def rungs(self) -> list[tuple[int, int]]:
        """Trials of each rung, and epochs that they are trained for there, on top of those before."""
        found, trained = [], 0
        trials, epochs = self.trials, self.epochs
        while trials >= 1:
            found.append((trials, epochs - trained))
            trained, trials, epochs = epochs, trials // self.eta, epochs * self.eta
        return found


SEARCHES = {
    "halving, 81 trials, eta 3": Halving(81, 1, 3),
    "halving, 64 trials, eta 4": Halving(64, 1, 4),
    "halving, 27 trials, eta 3": Halving(27, 1, 3),
    "halving, 32 trials, eta 2": Halving(32, 1, 2),
}


class Rungs(Source):
    """The rungs of a search, one after the other."""

    def __init__(self, search: Halving, overheads: Scaling, seed: int) -> None:
        draw = random.Random(seed)
        self._rungs = search.rungs()
        self._trials = [10 * math.exp(draw.gauss(0, 0.5)) for _ in range(search.trials)]
        self._overheads = overheads
        self._draw = draw
        self._rung = -1
        self._left = 0

    def begin(self) -> Sequence[SimulatedJob]:
        return self._next(0.0)

    def ended(self, job: str, now: float) -> Sequence[SimulatedJob]:
        self._left -= 1
        return self._next(now) if self._left == 0 and self._rung + 1 < len(self._rungs) else ()

    def _next(self, now: float) -> Sequence[SimulatedJob]:
        self._rung += 1
        self._left, epochs = self._rungs[self._rung]
        self._trials = self._draw.sample(self._trials, self._left)
        return [
            SimulatedJob(
                f"rung-{self._rung}/{index}",
                {"A100": Demand(1.0, 10**9, 1.0, epochs * seconds)},
                arrival=now,
                scaling=self._overheads,
                group=f"rung-{self._rung}",
                start_seconds=SECONDS,
            )
            for index, seconds in enumerate(self._trials)
        ]


def cluster() -> Cluster:
    devices = tuple(Device(f"cuda:{index}", "A100", 80 * 10**9) for index in range(DEVICES))
    return Cluster((Node("node", 1000.0, devices),))


def makespan(policy: str, search: Halving, overheads: Scaling, seed: int) -> float:
    source = Rungs(search, overheads, seed)
    return Simulation((), cluster(), POLICIES[policy](), Scalings(), sources=(source,)).run().makespan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="draws of trials' times and of who is promoted")
    parser.add_argument("--quick", action="store_true", help="one seed")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    seeds = range(1 if options.quick else options.seeds)
    figures: dict[str, dict[str, float]] = {}
    print(f"{'search':28} {'overheads':15} {'fifo':>9} {'water_filling':>14} {'speed-up':>9} {'least':>6}")
    for search_name, search in SEARCHES.items():
        figures[search_name] = {}
        for name, overheads in OVERHEADS.items():
            before = [makespan("fifo", search, overheads, seed) for seed in seeds]
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


if __name__ == "__main__":
    sys.exit(main())
