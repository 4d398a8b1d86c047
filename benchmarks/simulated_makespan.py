"""Simulated makespan on HyperSack's search spaces against one job per device, beside the best that shares allow.

Each policy's ratio is the makespan of `fifo`, one job a device, divided by its own. The bound is that ratio for the
least makespan that the measured share curves allow (`makespan_bound.py`, a linear program). Demands and sources
stand in scenarios/sp1.toml to sp4_mixed.toml; the paper's ratios are those that it prints, for its own models and
devices. Oversubscription is the paper's for an A100, 3.

    python benchmarks/simulated_makespan.py [--data ../shared/data] [--policies wfd auto] [--quick]
"""

import argparse
import json
import sys
from pathlib import Path

import baselines
from makespan_bound import best_makespan, jobs_of

from shoal.plan.schedule import POLICIES
from shoal.simulate.scenario import DATA, load
from shoal.simulate.slowdown import SHARES_FILE, read_curves

ROOT = Path(__file__).parents[1]
ASKED = {"wfd": 0.85, "auto": 0.95}
"""Least part of the bound's ratio."""

PAPER = {
    "sp1": {"ff": 2.5, "wfd": 2.8},
    "sp2": {"ff": 3.0, "wfd": 3.2},
    "sp2_bert": {},
    "sp3": {"ff": 2.3, "wfd": 2.5},
    "sp4_4": {"wfd": 2.7},
    "sp4_8": {"wfd": 2.7},
    "sp4": {"wfd": 2.7},
    "sp4_h100": {"wfd": 4.0},
    "sp4_mixed": {"wfd": 3.9},
}
"""HyperSack's speed-ups over one job per GPU, by scenario."""


def main() -> int:
    baselines.register()
    options = arguments()
    curves = read_curves(options.data)
    figures: dict[str, dict[str, float]] = {}
    print(f"{'':9} {'policy':14} {'makespan':>10} {'ratio':>7} {'bound':>7} {'of bound':>9} {'paper':>6}")
    for space in ("sp3",) if options.quick else PAPER:
        scenario = load(ROOT / "scenarios" / f"{space}.toml", options.data)
        least = best_makespan(jobs_of(scenario.sources), scenario.cluster, curves)
        alone = scenario.simulate("fifo").makespan
        figures[space] = {"fifo": 1.0, "bound": alone / least}
        print(f"{space:9} {'fifo':14} {alone:8.1f} s {1:7.2f} {alone / least:7.2f}")
        for policy in options.policies:
            makespan = scenario.simulate(policy).makespan
            figures[space][policy] = alone / makespan
            paper = PAPER[space].get(policy, "")
            print(
                f"{space:9} {policy:14} {makespan:8.1f} s {alone / makespan:7.2f} {alone / least:7.2f} "
                f"{least / makespan:9.1%} {paper:>6}"
            )
    missed = [
        f"{space}: {policy} {found[policy] / found['bound']:.1%} of the bound, asked {part:.0%}"
        for space, found in figures.items()
        for policy, part in ASKED.items()
        if policy in found and found[policy] < part * found["bound"]
    ]
    rounded = {space: {name: round(ratio, 3) for name, ratio in found.items()} for space, found in figures.items()}
    print(json.dumps({"ratios": rounded, "paper": PAPER, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / DATA, help="folder of the measured tables")
    chosen = ["ff", "ffd", "wf", "wfd", "best_fit", "auto"]
    parser.add_argument("--policies", nargs="*", choices=list(POLICIES), default=chosen)
    parser.add_argument("--quick", action="store_true", help="SP3 only")
    options = parser.parse_args()
    if not (options.data / SHARES_FILE).is_file():
        if options.data != ROOT / DATA:
            parser.error(f"{options.data / SHARES_FILE} is not there")
        print(f"{options.data / SHARES_FILE} is not there: nothing can be measured. Name its folder with --data")
        print(json.dumps({"missed": [], "skipped": f"no {SHARES_FILE}"}))
        parser.exit(0)
    return options


if __name__ == "__main__":
    sys.exit(main())
