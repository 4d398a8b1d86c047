"""The policy `auto` beside every other policy on the scenarios, by each scenario's own objective.

Less is better; the best value of a scenario is marked. `auto` is asked to be at most 2 % above the best of the others.
`exact` has a second for each decision; of 100,000 jobs only the knapsack policies are asked, for the others need hours.

Of the scenarios that draw their trials from real curves, the mean over several seeds counts.

    python benchmarks/auto.py [--data ../shared/data] [--policies wfd ...] [--scenarios sp1 ...] [--quick]

A scenario in which all policies do alike, since none of them makes use of what it is about, is called undecided.

Last comes the end of searches that stop trials early, under `auto` by each objective: the default objective of a study
is asked to end them at most 2 % after the one that ends them soonest.
The last line is one JSON object; the exit status is 1 if a figure is missed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean

import baselines

from shoal.plan.schedule import OBJECTIVES, POLICIES, Auto, Exact, Knapsack
from shoal.simulate.scenario import DATA, load
from shoal.simulate.slowdown import SHARES_FILE

ROOT = Path(__file__).parents[1]
SLACK = 0.02
"""Part by which `auto` may be above the best single policy."""

LARGE = "large"
"""Of whose jobs only the knapsack policies are asked."""
SCENARIOS = (
    *("sp1", "sp2", "sp2_bert", "sp3", "sp4_4", "sp4_8", "sp4", "sp4_h100", "sp4_mixed"),
    *("fluid_toy", "fluid_halving", "hermes_type1", "hermes_type2", "mixed_day", LARGE),
)
SEEDS = {"hermes_type1": 5, "hermes_type2": 5}
"""How many of scenarios whose seed decides much: of these, the mean counts."""
STOPPING = ("fluid_halving", "mixed_day")
"""Whose algorithms stop trials early."""
DEFAULT = "makespan"
QUICK, QUICK_POLICIES = ("sp1", "fluid_halving"), ["wfd"]


def main() -> int:
    baselines.register()
    options = arguments()
    values: dict[str, dict[str, float]] = {}
    decisions: dict[str, float] = {}
    missed: list[str] = []
    undecided: list[str] = []
    for name in options.scenarios:
        seeds = range(1 if options.quick else SEEDS[name]) if name in SEEDS else (None,)
        drawn = [load(ROOT / "scenarios" / f"{name}.toml", options.data, seed) for seed in seeds]
        scenario = drawn[0]
        found = values[name] = {}
        began = time.perf_counter()
        able = [policy for policy in options.policies if name != LARGE or issubclass(POLICIES[policy], Knapsack)]
        for policy in ("auto", *able):
            outcomes = [each.simulate(Exact(seconds=1.0) if policy == "exact" else policy) for each in drawn]
            waiting = sum(len(outcome.waiting) for outcome in outcomes)
            if waiting:
                missed.append(f"{name}: {policy} left {waiting} jobs waiting")
                if policy != "auto":
                    continue  # a policy that did not end does not match
            found[policy] = fmean(getattr(outcome, scenario.objective) for outcome in outcomes)
            if policy == "auto":
                asked = sum(outcome.decisions for outcome in outcomes)
                decisions[name] = 1000 * sum(outcome.decision_seconds for outcome in outcomes) / max(1, asked)
        best = min(found.values())
        over = f", {len(drawn)} seeds" if len(drawn) > 1 else ""
        print(f"{name}: {OBJECTIVES[scenario.objective]}{over} ({time.perf_counter() - began:.0f} s to simulate)")
        for policy, value in sorted(found.items(), key=lambda each: each[1]):
            print(f"  {policy:15} {value:10.1f} s {value / best:8.3f} {'*' if value == best else ''}")
        if len(set(found.values())) == 1:
            undecided.append(name)
            print("  All policies do alike: this scenario shows nothing of auto.")
        rival = min((policy for policy in found if policy != "auto"), key=found.__getitem__)
        if found["auto"] > (1 + SLACK) * found[rival]:
            missed.append(f"{name}: auto {found['auto']:.1f} s, {rival} {found[rival]:.1f} s")
    ends = ends_by_objective([name for name in STOPPING if name in options.scenarios], options.data)
    for name, seconds in ends.items():
        if seconds[DEFAULT] > (1 + SLACK) * min(seconds.values()):
            missed.append(f"{name}: the default objective ends it after {seconds[DEFAULT]:.1f} s, {seconds}")
    print("ms a decision of auto: " + ", ".join(f"{name} {each:.2f}" for name, each in decisions.items()))
    rounded = {name: {policy: round(value, 2) for policy, value in found.items()} for name, found in values.items()}
    print(json.dumps({"seconds": rounded, "ends": ends, "undecided": undecided, "missed": missed}))
    return 1 if missed else 0


def ends_by_objective(names: list[str], data: Path) -> dict[str, dict[str, float]]:
    """Scenario -> objective of `auto` -> seconds until the last job ends."""
    ends = {}
    for name in names:
        scenario = load(ROOT / "scenarios" / f"{name}.toml", data)
        objectives = [each for each in OBJECTIVES if each != "time_to_target"]  # these scenarios have no target
        ends[name] = {each: round(scenario.simulate(Auto(each)).makespan, 1) for each in objectives}
        print(f"{name}, end by objective: " + ", ".join(f"{key} {value:.1f} s" for key, value in ends[name].items()))
    return ends


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / DATA, help="folder of the measured tables")
    others = [name for name in POLICIES if name != "auto"]
    parser.add_argument("--policies", nargs="+", choices=others, help="to compare auto with; by default all")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, help="of the folder scenarios/")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, one seed each, and wfd")
    options = parser.parse_args()
    options.scenarios = options.scenarios or (QUICK if options.quick else SCENARIOS)
    options.policies = options.policies or (QUICK_POLICIES if options.quick else others)
    if not (options.data / SHARES_FILE).is_file():
        if options.data != ROOT / DATA:
            parser.error(f"{options.data / SHARES_FILE} is not there")
        print(f"{options.data / SHARES_FILE} is not there: nothing can be measured. Name its folder with --data")
        print(json.dumps({"missed": [], "skipped": f"no {SHARES_FILE}"}))
        parser.exit(0)
    return options


if __name__ == "__main__":
    sys.exit(main())
