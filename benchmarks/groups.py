"""Fluid's scheduling of TrialGroups, simulated: `water_filling` against first in, first out, a trial a device.

Searches of Shoal's own algorithms train models whose losses follow power laws. An epoch of a trial takes log-normal
seconds: median 10, sigma 0.5 unless stated. Starting a trial and resizing it cost 2 s.

Fluid measures its overheads and prints none, only the bounds α < c/(c-1) and β < 1 + 1/d within which sharing and
growing are of use (Lemmas 4 and 6). The middle of them is taken, with c = 4 and d = 8: four trials on a device take
1.59 times as long each, eight devices are 5.2 times as fast as one. "high" overheads stand nine tenths of the way.

    python benchmarks/groups.py [--quick]
"""

import argparse
import math
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.experiment import missed_of
from papers.fluid import EIGHT, EXPERIMENTS, SIMULATED
from report import report

from shoal.core.device import Cluster, Device, Node
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.scaling import Scaling
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule import make_policy
from shoal.simulate.run import Simulation
from shoal.simulate.scenario import load
from shoal.simulate.slowdown import SLOWDOWNS
from shoal.simulate.tables import profile_of_costs
from shoal.simulate.workload import SimulatedModel, SimulatedStudy, SimulatedWorkload

TOY = Path(__file__).parents[1] / "scenarios" / "fluid_toy.toml"
POLICIES = ("fifo", "water_filling")
SEEDS = 3
"""Draws of configurations, curves and times."""
SECONDS = 2.0
PARTS = 4
"""Of an epoch, at the ends of which a trial reports and can be moved: else much would be done twice."""
ALPHA, BETA = 1 + 0.5 / 3, 1 + 0.5 / 8
MIDDLE = Scaling(ALPHA, BETA, max_jobs=4, devices=8)
HIGH = replace(MIDDLE, alpha=1 + 0.9 / 3, beta=1 + 0.9 / 8)


@dataclass(frozen=True)
class Case:
    """A search, and where it runs.

    Args:
        algorithm: Name of the algorithm.
        settings: Settings of the algorithm; an epoch of it is one of `PARTS`.
        scaling: Overheads, c and d.
        devices: Number of devices.
        sigma: Standard deviation of the logarithm of an epoch's seconds.
    """

    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    scaling: Scaling = MIDDLE
    devices: int = 8
    sigma: float = 0.5

    def models(self, seed: int) -> list[SimulatedModel]:
        """Draw models, of which it is known that a device has no use for more than c, nor one for more than d."""
        draw, c, alpha = random.Random(seed), self.scaling.max_jobs, self.scaling.alpha
        crowding = {jobs: alpha ** (jobs - 1) for jobs in range(2, c + 1)} | {c + 1: alpha ** (c - 1) * (c + 1) / c}
        spreading = {width: self.scaling.factor(width) for width in range(2, self.scaling.devices + 1)}
        models = []
        for number in range(100):
            takes = profile_of_costs(10 * math.exp(draw.gauss(0, self.sigma)) / PARTS, 1.0, 10**9, 1.0, {})
            takes = replace(takes, crowding=crowding, spreading=spreading)
            models.append(SimulatedModel(f"model {number}", {"A100": takes}, "", alpha, SECONDS, SECONDS))
        return models

    def makespan(self, policy: str, seed: int) -> float:
        """Simulate the search; return its seconds."""
        study = SimulatedStudy("search", self.models(seed), 1000, (self.algorithm, self.settings), seed=seed)
        searches = SimulatedWorkload([study])
        slowdown = SLOWDOWNS["none"]({each.name: each for each in searches.keys.values()}, Path())
        devices = tuple(Device(f"cuda:{index}", "A100", 80 * 10**9) for index in range(self.devices))
        cluster = Cluster((Node("node", 1000.0, devices),))
        packer = ArrayPacker(make_packing("none"))
        outcome = Simulation(searches, cluster, make_policy(policy), slowdown, packer=packer, fuse=False).run()
        assert not outcome.waiting, f"{policy} left trials waiting: {outcome.waiting}"
        return outcome.makespan


def grid(trials: int, scaling: Scaling, devices: int = 8, sigma: float = 0.5) -> Case:
    """Return a search that trains all trials for four epochs."""
    return Case("random", {"n": trials, "epochs": 4 * PARTS}, scaling, devices, sigma)


HALVING = {"max_epochs": 27 * PARTS, "eta": 3, "min_epochs": PARTS}
SHA = Case("successive_halving", {"n": 27, **HALVING})
ASHA = Case("asha", {"n": 81, **HALVING, "concurrency": 8})

CASES: dict[str, dict[str, Case]] = {
    "algorithms": {
        "SHA": SHA,
        "Hyperband": Case("hyperband", {"max_epochs": 27 * PARTS, "eta": 3}),
        "SyncBOHB": Case("sync_bohb", HALVING),
        "BOHB": Case("bohb", HALVING),
        "ASHA": ASHA,
        "PBT": Case("pbt", {"n": 8, "epochs": 27 * PARTS, "interval": 3 * PARTS}),
    },
    "overheads of SHA": {"high": replace(SHA, scaling=HIGH)},
    "workers of SyncBOHB": {n: Case("sync_bohb", HALVING, devices=int(n)) for n in ("4", "16")},
    "sharing only": {n: grid(int(n), replace(MIDDLE, devices=1), sigma=0) for n in ("9", "27", "81")},
    "growing only": {n: grid(int(n), replace(MIDDLE, max_jobs=1)) for n in ("2", "3", "6")},
    "c": {n: grid(27, Scaling(ALPHA, 1.0, int(n)), sigma=0) for n in ("2", "4")},
    "d": {n: grid(3, Scaling(2.0, BETA, 1, int(n))) for n in ("2", "4", "8")},
    "alpha": {"10": grid(27, Scaling(10.0, 1.0, 4), sigma=0)},
    "beta, devices": {f"{beta:.2f}, 16": grid(3, Scaling(2.0, beta, 1, 16), 16) for beta in (BETA, 2)},
    "sigma": {n: grid(9, MIDDLE, sigma=float(n)) for n in ("0", "1")},
}
"""Part -> case by name. "c" and "d" are Fluid's limits of jobs on a device and of devices of a job."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed of grid searches and successive halving")
    quick = parser.parse_args().quick
    seeds = range(1 if quick else SEEDS)
    toy = load(TOY)
    figures = {"toy": {policy: toy.simulate(make_policy(policy)).makespan for policy in POLICIES}}
    print(f"Fluid's toy case, s: {figures['toy']}")
    print(f"{'part':20} {'case':10} {'fifo':>9} {'water_filling':>14} {'speed-up':>9}")
    for part, cases in CASES.items():
        figures[part] = {}
        for name, case in cases.items():
            if quick and case.algorithm not in ("random", "successive_halving"):
                continue
            before, after = ([case.makespan(policy, seed) for seed in seeds] for policy in POLICIES)
            figures[part][name] = ratio = fmean(old / new for old, new in zip(before, after, strict=True))
            print(f"{part:20} {name:10} {fmean(before):7.0f} s {fmean(after):12.0f} s {ratio:8.2f}x", flush=True)
    if not quick:
        four = replace(ASHA, devices=4)
        ratio = fmean(ASHA.makespan("fifo", seed) / four.makespan("water_filling", seed) for seed in seeds)
        print(f"ASHA, 8 trials on 4 devices {EIGHT}: {ratio:.2f}x")
        figures["concurrency"] = {EIGHT: ratio}
    figures = {part: {name: round(value, 3) for name, value in found.items()} for part, found in figures.items()}
    return report(figures, [] if quick else missed_of(EXPERIMENTS, SIMULATED, figures))


if __name__ == "__main__":
    sys.exit(main())
