"""Hermes's bins of sixteen trials on four devices, on real loss curves: the mean time until the good ones are good.

The curves are the training losses of 1000 configurations for each of eight tasks (TaskSet). Of a bin, four (type 1) or
twelve (type 2) are good: they reach 90 % of the best reduction of the loss, from the median first loss to the 1st
percentile of the curves' minima. All are there from the start, in random order. The state machine of live studies runs
them in virtual time (`scenarios/hermes_type1.toml`): an interval of a curve takes 10 s, Hermes's quantum; round robin
and SLAQ have three times that; a suspension with its resumption costs 1 s. The speed-up is the mean time until a good
trial reaches the target under first in, first out, divided by that under the policy. Of type 2 it is also that of the
four trials with the lowest losses.

    python benchmarks/time_sharing.py [--live] [--quick]

With `--live`, real trainings take turns on one slot instead; see `time_sharing_live.py`.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from papers.experiment import missed_of
from papers.hermes import CURVES, EXPERIMENTS
from report import report
from search_tasks.pictures import MNIST
from time_sharing_live import BEST, GOOD, TRIALS, measure_live, policies, speed_ups

from shoal.core.device import Cluster
from shoal.core.trial import Trial
from shoal.simulate.scenario import DATA, Scenario, load
from shoal.simulate.workload import CURVES_FILE, RecordedCurves, read_task

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / DATA
"""Of the measured curves and of MNIST."""
TASKS = range(8)
NODES, BINS = 4, 5
INTERVAL = 10.0
"""Seconds of an interval of a curve: Hermes's quantum."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--live", action="store_true", help="real trainings instead of curves")
    parser.add_argument("--quick", action="store_true", help="a bin of one task; one small CNN; judges nothing")
    options = parser.parse_args()
    file = FOLDER / (MNIST if options.live else CURVES_FILE)
    if not file.is_file():
        print(f"{file} is not there: nothing can be measured")
        return report({"skipped": f"no {file.name}"}, [])
    if options.live:
        return measure_live(file, options.quick)
    tasks, bins = (TASKS[:1], 1) if options.quick else (TASKS, BINS)
    kinds = list(product(tasks, GOOD))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = {kind: pool.submit(measure, *kind, bins) for kind in kinds}
        found = {kind: run.result() for kind, run in runs.items()}
    print(f"{bins} bins of each task and type; speed-up over fifo")
    figures = {
        "speed_up": {task: speed_ups(f"task {task}", {kind: found[task, kind] for kind in GOOD}) for task in tasks}
    }
    return report(figures, [] if options.quick else missed_of(EXPERIMENTS, CURVES, figures))


def measure(task: int, kind: str, bins: int) -> dict[str, tuple[float, float]]:
    """Mean seconds by policy, over some bins, until the good trials reach the target, and until the best four do."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for seed in range(bins):
        scenario = bin_of(task, kind, seed)
        (source,) = scenario.sources
        least = {f"{source.name}/{n}": min(source.curves.losses(Trial(n, {}, 0, 0), 0, 50)) for n in range(TRIALS)}
        for name, policy in policies(INTERVAL).items():
            reached = scenario.simulate(policy).reached
            best = sorted(reached, key=least.__getitem__)[:BEST]
            rows.setdefault(name, []).append((fmean(reached.values()), fmean(reached[trial] for trial in best)))
    return {name: (fmean(good for good, _ in each), fmean(best for _, best in each)) for name, each in rows.items()}


def bin_of(task: int, kind: str, seed: int) -> Scenario:
    """The scenario of a bin, with the curves of a task, on as many nodes as Hermes has."""
    scenario = load(ROOT / "scenarios" / f"hermes_{kind.replace(' ', '')}.toml", FOLDER, seed)
    (node,), (source,) = scenario.cluster.nodes, scenario.sources
    (device,) = node.devices
    nodes = (replace(node, name=f"n{n}", devices=(replace(device, name=f"n{n}/0"),)) for n in range(NODES))
    source = replace(source, curves=RecordedCurves(read_task(FOLDER, task), seed, TRIALS, GOOD[kind]))
    return replace(scenario, cluster=Cluster(tuple(nodes)), sources=(source,))


if __name__ == "__main__":
    sys.exit(main())
