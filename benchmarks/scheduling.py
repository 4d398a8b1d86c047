"""How full each policy packs a cluster, and how long it takes to decide (HyperSack's table of policies).

1. The search spaces SP3 on 4 and SP4 on 16 devices: the jobs of `scenarios/sp3.toml` and `sp4.toml`, all waiting, the
   cluster empty, one decision. Occupancy is compute in use as a part of what may be reserved. HyperSack's own figures
   stand beside ours; its demands are not published but for their range, 22 % to 50 % of an A100. Those of the scenarios
   are measured, and reach from 38 % to 72 %.
2. 100,000 jobs on 10,000 devices (`scenarios/large.toml`), hardly two of the same demand: the first decision, and some
   of those that follow when one job ends. Each is a whole plan.

Decision times are medians of `--rounds` decisions. "as made" is of the jobs as the scenario makes them; "shared" is of
the same jobs where those of equal demand hold one object, by which they are decided on together. `wfd` is judged, by
"as made". The last line is one JSON object; the exit status is 1 if a figure is missed, but with `--quick`, which shows
only that all of it runs and that every plan is legal.

    python benchmarks/scheduling.py [--data ../shared/data] [--rounds 101] [--seconds 60] [--quick]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from random import Random

import baselines

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.errors import ScenarioError
from shoal.plan.cost.cost import Cost, packed_demand
from shoal.plan.schedule import Exact, JobState, JobView, Plan, Policy, check_plan, make_policy
from shoal.simulate.scenario import load
from shoal.simulate.tables import MAX_COUNT

ROOT = Path(__file__).parent.parent
POLICIES = ("ff", "ffd", "wf", "wfd", "best_fit", "fifo")
PAPER: Mapping[str, Mapping[str, str]] = {
    "sp3": {
        "exact": "99 %, 181.6 s",
        "ff": "88 %, 0.129 ms",
        "ffd": "97 %, 0.163 ms",
        "wf": "91 %, 0.135 ms",
        "wfd": "98 %, 0.171 ms",
    },
    "sp4": {
        "exact": "100 %, 212.8 s",
        "ff": "97 %, 0.264 ms",
        "ffd": "98 %, 0.298 ms",
        "wf": "97 %, 0.319 ms",
        "wfd": "100 %, 0.332 ms",
    },
}
ASKED = {"of_exact": 0.98, "decision_ms": 0.35, "first_s": 2.0, "later_s": 2.0}


@dataclass(frozen=True)
class Row:
    """What one policy made of one search space."""

    occupancy: float
    decision_ms: float
    shared_ms: float


@dataclass(frozen=True)
class Walk:
    """The first decision on many jobs, and those after the end of one of them."""

    jobs: int
    devices: int
    placed: int
    first_s: float
    later_s: Sequence[float]


def main() -> int:
    baselines.register()
    options = arguments()
    try:
        spaces = {name: instance(ROOT / "scenarios" / f"{name}.toml", options.data) for name in PAPER}
    except ScenarioError as error:
        print(error)
        print(json.dumps({"missed": [], "skipped": "no measured tables"}))
        return 0
    missed: list[str] = []
    found: dict[str, object] = {}
    for name, (jobs, cluster) in spaces.items():
        rows = table(jobs, cluster, options)
        print_table(name, rows, len(jobs), cluster)
        found[name] = {policy: vars(row) for policy, row in rows.items()}
        missed += judged(name, rows)
    for policy in ("wfd",) if options.quick else ("wfd", "wf", "ffd", "ff", "best_fit", "fifo"):
        walk = large(make_policy(policy), options)
        print_walk(policy, walk)
        found[f"large, {policy}"] = figures(walk)
        if policy == "wfd":
            missed += late(walk)
    print(json.dumps({"figures": found, "asked": ASKED, "missed": missed}))
    return 1 if missed and not options.quick else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data", help="folder of a100_mig_slices.csv")
    parser.add_argument("--rounds", type=int, default=101, help="decisions whose median is taken")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the exact solver")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 2,000 jobs; judges nothing")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.quick:
        options.rounds, options.seconds = 1, 0.5
    return options


def instance(path: Path, data: Path) -> tuple[list[JobView], Cluster]:
    """The jobs of a scenario, all waiting, and its cluster; those of one structure hold one demand."""
    scenario = load(path, data)
    jobs: list[JobView] = []
    for source in scenario.sources:
        demands: dict[str, Mapping[str, Demand]] = {}
        for group in source.algorithm(lambda: inf).next_groups(MAX_COUNT):
            for trial in group.trials:
                structure = source.structure(trial)
                if structure.name not in demands:
                    profiles = structure.profiles.items()
                    demands[structure.name] = {
                        kind: packed_demand([(Cost(each), [group.budget.epochs])]) for kind, each in profiles
                    }
                jobs.append(JobView(f"{source.name}/{trial.number}", demands[structure.name]))
    return jobs, scenario.cluster


def sharing(jobs: Sequence[JobView]) -> list[JobView]:
    """The jobs, those of equal demand with the very same one."""
    alike = {tuple(job.demand.items()): job.demand for job in jobs}
    return [replace(job, demand=alike[tuple(job.demand.items())]) for job in jobs]


def table(jobs: Sequence[JobView], cluster: Cluster, options: argparse.Namespace) -> dict[str, Row]:
    shared = sharing(jobs)
    rows = {}
    for name in ("exact", *POLICIES):
        policy = Exact(options.seconds) if name == "exact" else make_policy(name)
        plan, seconds = decided(policy, jobs, cluster, 1 if name == "exact" else options.rounds)
        # The solver merges equal demands itself.
        alike = seconds if name == "exact" else decided(policy, shared, cluster, options.rounds)[1]
        check_plan(plan, jobs, cluster, 0.0)
        rows[name] = Row(occupancy(plan, jobs, cluster), seconds * 1e3, alike * 1e3)
    return rows


def decided(policy: Policy, jobs: Sequence[JobView], cluster: Cluster, rounds: int) -> tuple[Plan, float]:
    """A plan, and the median of the seconds that it took."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        plan = policy.plan(jobs, cluster, 0.0)
        taken.append(time.perf_counter() - start)
    return plan, statistics.median(taken)


def occupancy(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> float:
    """Compute in use, as a part of what may be reserved."""
    demands = {job.id: job.demand for job in jobs}
    devices = {device.name: device for _, device in cluster}
    used = sum(demands[action.job][devices[action.devices[0]].kind].compute for action in plan.actions)
    return used / sum(device.capacity for device in devices.values())


def large(policy: Policy, options: argparse.Namespace) -> Walk:
    """The decisions of `scenarios/large.toml`, or of a fiftieth of it."""
    jobs, cluster = instance(ROOT / "scenarios" / "large.toml", options.data)
    if options.quick:
        jobs, cluster = jobs[: len(jobs) // 50], Cluster(cluster.nodes[: len(cluster.nodes) // 50])
    return walk(policy, jobs, cluster, decisions=5 if options.quick else 10)


def walk(policy: Policy, jobs: Sequence[JobView], cluster: Cluster, decisions: int) -> Walk:
    """Let a policy decide of all jobs, and then whenever one of those that run has ended."""
    views = {job.id: job for job in jobs}
    plan, first = decided(policy, jobs, cluster, 1)
    begin(plan, views)
    ends = [action.job for action in plan.actions]
    later = []
    for name in islice(Random(0).sample(ends, len(ends)), decisions):
        del views[name]
        plan, seconds = decided(policy, list(views.values()), cluster, 1)
        begin(plan, views)
        later.append(seconds)
    return Walk(len(jobs), sum(1 for _ in cluster), len(ends), first, later)


def begin(plan: Plan, views: dict[str, JobView]) -> None:
    """Let the jobs run that a plan starts."""
    for action in plan.actions:
        views[action.job] = replace(views[action.job], state=JobState.RUNNING, devices=action.devices)


def judged(name: str, rows: Mapping[str, Row]) -> list[str]:
    """What `wfd` missed."""
    wfd, exact = rows["wfd"], rows["exact"]
    missed = []
    if wfd.occupancy < ASKED["of_exact"] * exact.occupancy:
        missed.append(f"{name}: wfd has {wfd.occupancy / exact.occupancy:.1%} of exact's occupancy, not 98 %")
    if wfd.decision_ms > ASKED["decision_ms"]:
        missed.append(f"{name}: wfd decides in {wfd.decision_ms:.3f} ms, not 0.35 ms")
    return missed


def late(walk: Walk) -> list[str]:
    """Which decisions of the large cluster took too long."""
    missed = []
    if walk.first_s > ASKED["first_s"]:
        missed.append(f"large: the first decision takes {walk.first_s:.2f} s, not 2 s")
    if max(walk.later_s) > ASKED["later_s"]:
        missed.append(f"large: a later decision takes {max(walk.later_s):.2f} s, not 2 s")
    return missed


def figures(walk: Walk) -> dict[str, float]:
    return {
        "placed": walk.placed,
        "first_s": walk.first_s,
        "later_median_s": statistics.median(walk.later_s),
        "later_max_s": max(walk.later_s),
    }


def print_table(name: str, rows: Mapping[str, Row], jobs: int, cluster: Cluster) -> None:
    print(f"\n{name}: {jobs} jobs on {sum(1 for _ in cluster)} devices")
    print(f"  {'policy':<10} {'occupancy':>9} {'of exact':>9} {'as made':>12} {'shared':>12}   HyperSack")
    for policy, row in rows.items():
        of_exact = row.occupancy / rows["exact"].occupancy
        times = f"{row.decision_ms:>9.3f} ms {row.shared_ms:>9.3f} ms"
        print(f"  {policy:<10} {row.occupancy:>9.2%} {of_exact:>9.2%} {times}   {PAPER[name].get(policy, '-')}")


def print_walk(policy: str, walk: Walk) -> None:
    found = figures(walk)
    print(
        f"\n{policy}, {walk.jobs} jobs on {walk.devices} devices: {walk.placed} begun at first, in {walk.first_s:.2f} s"
    )
    print(
        f"  {len(walk.later_s)} later decisions: median {found['later_median_s']:.2f} s, "
        f"longest {found['later_max_s']:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
