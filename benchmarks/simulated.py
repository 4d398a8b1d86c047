"""Policies beside each other without a device: HyperSack's search spaces in simulation, and single decisions.

- makespan    simulated makespan of SP1 to SP4 against one job per device (`fifo`), beside the best that measured share
              curves allow (`makespan_bound.py`, a linear program); and of SP1 by oversubscription, under `wfd`
- decisions   SP3 on 4 devices and SP4 on 16, all jobs waiting, the cluster empty, one decision: compute in use, as a
              part of what may be reserved, and the median CPU time; and 100,000 jobs on 10,000 devices
- cluster     Gavel's models on 1,000 devices of three kinds (`scenarios/gavel_1k.toml`), nothing fused, nothing fails

All but decision times are virtual seconds, equal on every machine. The last line is one JSON object; the exit status is
1 if a row of `papers/hypersack.py` is missed.

    python benchmarks/simulated.py [makespan decisions cluster] [--quick]
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from makespan_bound import best_makespan, jobs_of
from papers.experiment import missed_of
from papers.hypersack import EXPERIMENTS
from report import report

from shoal.core.device import Cluster, Node
from shoal.plan.schedule import Exact, JobView, Plan, Policy, check_plan, make_policy
from shoal.simulate.scenario import DATA, Scenario, load
from shoal.simulate.slowdown import SHARES_FILE, read_curves

ROOT = Path(__file__).parents[1]
TABLES = ROOT / DATA
KNAPSACKS = ("ff", "ffd", "wf", "wfd")
SPACES = ("sp1", "sp2", "sp3", "sp4_4", "sp4_8", "sp4", "sp4_h100", "sp4_mixed")
RATIOS = (1.0, 2.0, 2.5, 3.0, 3.5, 4.0)
"""Ratios of oversubscription that are compared."""
Figures = dict[str, dict[str, float]]


def main() -> int:
    options = arguments()
    figures: dict[str, object] = {}
    for name in options.parts:
        print(f"{name}:")
        figures[name] = PARTS[name](options)
    return report(figures, [] if options.quick else missed_of(EXPERIMENTS, None, figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="SP3, and small parts of the others; judges nothing")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(PARTS)}")
    options.parts = options.parts or [name for name in PARTS if name != "cluster" or not options.quick]
    if not (TABLES / SHARES_FILE).is_file():
        print(f"{TABLES / SHARES_FILE} is not there: nothing can be measured")
        parser.exit(report({"skipped": f"no {SHARES_FILE}"}, []))
    return options


def scenario_of(name: str) -> Scenario:
    return load(ROOT / "scenarios" / f"{name}.toml", TABLES)


def makespan(options: argparse.Namespace) -> Figures:
    """Return the speed-ups over one job per device by search space; and seconds of SP1 by oversubscription."""
    curves = read_curves(TABLES)
    found: Figures = {}
    for name in ("sp3",) if options.quick else SPACES:
        scenario = scenario_of(name)
        alone = scenario.simulate("fifo").makespan
        ratios = {policy: alone / scenario.simulate(policy).makespan for policy in (*KNAPSACKS, "auto")}
        bound = alone / best_makespan(jobs_of(scenario.sources), scenario.cluster, curves)
        found[name] = {"fifo": 1.0, **ratios, "bound": bound}
        print(f"  {name:10} fifo {alone:.1f} s; times as fast: {words(found[name])}", flush=True)
    if not options.quick:
        scenario = scenario_of("sp1")
        seconds = {
            str(ratio): replace(scenario, cluster=oversubscribed(scenario.cluster, ratio)).simulate("wfd").makespan
            for ratio in RATIOS
        }
        found["oversubscription"] = seconds
        print(f"  sp1, wfd, seconds by oversubscription: {words(seconds)}")
    return found


def oversubscribed(cluster: Cluster, ratio: float) -> Cluster:
    def changed(node: Node) -> Node:
        return replace(node, devices=tuple(replace(device, oversubscription=ratio) for device in node.devices))

    return Cluster(tuple(map(changed, cluster.nodes)))


def decisions(options: argparse.Namespace) -> Figures:
    """Return the part of the compute that each policy uses, and its milliseconds, by search space."""
    found: Figures = {}
    for name in ("sp3", "sp4"):
        jobs, cluster = instance(scenario_of(name))
        for policy in ("exact", *KNAPSACKS, "fifo"):
            exact = policy == "exact"
            solver = Exact(0.5 if options.quick else 10.0) if exact else make_policy(policy)
            plan, seconds = decided(solver, jobs, cluster, 1 if exact or options.quick else 101)
            check_plan(plan, jobs, cluster, 0.0)
            row = found[f"{name}, {policy}"] = {"occupancy": occupancy(plan, jobs, cluster), "ms": 1e3 * seconds}
            print(f"  {name} {policy:6} {row['occupancy']:.2%} in {row['ms']:.3f} ms", flush=True)
    jobs, cluster = instance(scenario_of("large"))
    if options.quick:
        jobs, cluster = jobs[: len(jobs) // 50], Cluster(cluster.nodes[: len(cluster.nodes) // 50])
    plan, seconds = decided(make_policy("wfd"), jobs, cluster, 1)
    found["large, wfd"] = {"placed": len(plan.actions), "seconds": seconds}
    print(f"  {len(jobs)} jobs on {sum(1 for _ in cluster)} devices: wfd decides in {seconds:.2f} s")
    return found


def instance(scenario: Scenario) -> tuple[list[JobView], Cluster]:
    """Return the jobs of a scenario, all waiting, and its cluster."""
    demands = [demand for _, demand in jobs_of(scenario.sources)]
    return [JobView(str(number), demand) for number, demand in enumerate(demands)], scenario.cluster


def decided(policy: Policy, jobs: Sequence[JobView], cluster: Cluster, rounds: int) -> tuple[Plan, float]:
    """Return a plan, and the median of the CPU seconds that it took."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        plan = policy.plan(jobs, cluster, 0.0)
        taken.append(time.process_time() - start)
    return plan, median(taken)


def occupancy(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> float:
    """Return the compute in use, as a part of what may be reserved."""
    demands = {job.id: job.demand for job in jobs}
    devices = {device.name: device for _, device in cluster}
    used = sum(demands[action.job][devices[action.devices[0]].kind].compute for action in plan.actions)
    return used / sum(device.capacity for device in devices.values())


def cluster(options: argparse.Namespace) -> Figures:
    """Return the hours until the last job ends, device hours and the mean hours to the end of a job, by policy."""
    scenario = replace(scenario_of("gavel_1k"), fuse=False, packing="none", events=())
    scenario = replace(scenario, sources=scenario.sources[:3]) if options.quick else scenario
    found: Figures = {}
    for policy in ("wfd", "auto"):
        began = time.process_time()
        result = scenario.simulate(policy)
        hours = {
            "makespan": result.makespan,
            "device hours": result.device_seconds,
            "completion": result.mean_completion,
        }
        found[policy] = {name: seconds / 3600 for name, seconds in hours.items()}
        print(f"  {policy}: hours: {words(found[policy])}; {time.process_time() - began:.0f} s of CPU time", flush=True)
    return found


def words(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


PARTS = {"makespan": makespan, "decisions": decisions, "cluster": cluster}

if __name__ == "__main__":
    sys.exit(main())
