"""Time-sharing of one device by sixteen trials, on real loss curves: the mean time until the good ones are good.

The curves are the training losses of 1000 configurations for each of eight tasks (TaskSet). Left out are those with a
value that is not finite, a first value of 10 or more, or any value of 5 or more. Between two recorded values ten steps
are interpolated. A trial is good if it reaches 90 % of the best reduction: from the median first value to the 1st
percentile of the curves' minima. As Hermes does, bins of sixteen trials are drawn, four of them good (type 1) or twelve
(type 2), in random order, all of which are there from the start.

A quantum is one recorded interval, three for round robin and SLAQ. Every change to another trial costs a tenth of a
quantum. A trial ends with its curve. `oracle` knows the order: the good trials first, each to its end. `ideal` also
knows the times: the good trial that reaches the target soonest first, and no longer than until it does.

The speed-up is the mean time until a good trial reaches the target, over all bins, under first in, first out, divided
by that under the policy.

    python benchmarks/time_sharing.py [--data ../shared/data] [--bins 1000] [--quick]
    python benchmarks/time_sharing.py --live [--rounds 1] [--quick]

With `--live`, real trainings take turns on one slot instead; see `time_sharing_live.py`.

The last line is one JSON object; the exit status is 1 if a figure is missed.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean

from baselines import RoundRobin, Slaq
from time_sharing_live import compare

from shoal.core.demand import Demand
from shoal.plan.schedule import Convergence, ExpectedFinish, JobState, JobView, TurnStats
from shoal.plan.schedule.time_sharing import TimeSharing
from shoal.simulate.scenario import DATA
from shoal.simulate.workload import CURVES_FILE, CurveSet, read_task
from shoal.simulate.workload import STEPS_PER_EPOCH as STEPS

ROOT = Path(__file__).parents[1]
TASKS = range(8)
TRIALS = 16
GOOD = {"type 1": 4, "type 2": 12}
INTERVAL = 10.0
"""Seconds of a recorded interval: Hermes's quantum."""
SWITCH = INTERVAL / STEPS
ASKED = {"type 1": 2.4, "type 2": 1.18}
"""Least mean over tasks of the speed-up of `expected_finish`, which has to be at least 1 on each task."""

POLICIES: dict[str, TimeSharing] = {
    "round_robin": RoundRobin(quantum=3 * INTERVAL),
    "slaq": Slaq(quantum=3 * INTERVAL),
    "convergence": Convergence(quantum=INTERVAL, jobs_per_device=TRIALS),
    "expected_finish": ExpectedFinish(quantum=INTERVAL),
}


@dataclass
class Trial:
    """A trial on its way.

    Args:
        losses: of all its steps, the first of which follows the first recorded value.
        goal: steps until the target is reached, or inf.
        view: as the policy sees it.
        steps: trained so far.
    """

    losses: Sequence[float]
    goal: float
    view: JobView
    steps: int = 0


def main() -> int:
    options = arguments()
    if options.live:
        return compare(options)
    kinds = list(product(TASKS, GOOD))
    began = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = {kind: pool.submit(measure, options.data, *kind, options.bins) for kind in kinds}
        found = {kind: run.result() for kind, run in runs.items()}
    names = [*POLICIES, "oracle", "ideal"]
    speed_up: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in GOOD}
    missed: list[str] = []
    for kind in GOOD:
        print(f"{kind}: {GOOD[kind]} good trials of {TRIALS}, speed-up over fifo, {options.bins} bins of each task")
        print(f"{'task':>4} {'fifo':>10} " + " ".join(f"{name:>15}" for name in names))
        for task in TASKS:
            mean = found[task, kind]
            ratios = [mean["fifo"] / mean[name] for name in names]
            for name, ratio in zip(names, ratios, strict=True):
                speed_up[kind][name].append(ratio)
            print(f"{task:>4} {mean['fifo']:>8.0f} s " + " ".join(f"{ratio:>15.2f}" for ratio in ratios))
        print(f"{'mean':>15} " + " ".join(f"{fmean(speed_up[kind][name]):>15.2f}" for name in names))
        ours = speed_up[kind]["expected_finish"]
        if fmean(ours) < ASKED[kind]:
            missed.append(f"{kind}: expected_finish {fmean(ours):.2f}, asked {ASKED[kind]}")
        missed += [f"{kind}, task {task}: expected_finish {each:.2f}" for task, each in enumerate(ours) if each < 1]
    print(f"{platform.machine()}, Python {platform.python_version()}; {time.perf_counter() - began:.0f} s to simulate")
    figures = {
        kind: {name: {"mean": round(fmean(each), 3), "least": round(min(each), 3)} for name, each in rows.items()}
        for kind, rows in speed_up.items()
    }
    print(json.dumps({"speed_up": figures, "bins": options.bins, "missed": missed}))
    return 1 if missed else 0


def measure(data: Path, number: int, kind: str, bins: int) -> dict[str, float]:
    """Mean seconds until a good trial reaches the target, by policy, on the same bins."""
    task = read_task(data, number)
    good = [curve for curve in task.curves if min(curve) <= task.target]
    others = [curve for curve in task.curves if min(curve) > task.target]
    random = Random(f"{kind}, task {number}")
    times: dict[str, list[float]] = {name: [] for name in ("fifo", *POLICIES, "oracle", "ideal")}
    for _ in range(bins):
        drawn = [*random.sample(good, GOOD[kind]), *random.sample(others, TRIALS - GOOD[kind])]
        random.shuffle(drawn)
        curves = [interpolated(curve) for curve in drawn]
        times["fifo"].append(by_order(curves, task))
        for name, policy in POLICIES.items():
            times[name].append(fmean(by_turns(policy, curves, task.target)))
        order = sorted(curves, key=lambda losses: min(losses) > task.target)
        times["oracle"].append(by_order(order, task))
        times["ideal"].append(at_best(curves, task))
    return {name: fmean(each) for name, each in times.items()}


def interpolated(curve: Sequence[float]) -> list[float]:
    """Ten steps for each recorded interval."""
    return [
        before + (after - before) * step / STEPS for before, after in pairwise(curve) for step in range(1, STEPS + 1)
    ]


def steps_to(losses: Sequence[float], target: float) -> float:
    """Steps until a trial has reached the target, or inf."""
    return next((step for step, loss in enumerate(losses, start=1) if loss <= target), inf)


def by_order(curves: Sequence[Sequence[float]], task: CurveSet) -> float:
    """One after the other, each to its end: mean seconds until the good trials reach the target."""
    clock, reached = 0.0, []
    for losses in curves:
        clock += SWITCH
        goal = steps_to(losses, task.target)
        if goal < inf:
            reached.append(clock + goal * INTERVAL / STEPS)
        clock += len(losses) * INTERVAL / STEPS
    return fmean(reached)


def at_best(curves: Sequence[Sequence[float]], task: CurveSet) -> float:
    """The good trials alone, the first to reach the target first: mean seconds until they do."""
    clock, reached = 0.0, []
    for goal in sorted(steps_to(losses, task.target) for losses in curves):
        if goal < inf:
            clock += SWITCH + goal * INTERVAL / STEPS
            reached.append(clock)
    return fmean(reached)


def by_turns(
    policy: TimeSharing, curves: Sequence[Sequence[float]], target: float, switch: float = SWITCH
) -> list[float]:
    """Seconds until each good trial reaches the target, in the order in which they do.

    `TimeSharing.plan` on one device, step by step, without what only matters on several.
    """
    trials = [start(number, losses, target, switch) for number, losses in enumerate(curves)]
    good = sum(trial.goal < inf for trial in trials)
    clock, best, reached = 0.0, inf, []
    running: Trial | None = None
    while len(reached) < good:
        before, running = running, choose(policy, trials, clock)
        if running is not before:
            clock += switch
            if before is not None:
                preemptions = before.view.preemptions + 1
                before.view = replace(
                    before.view, state=JobState.SUSPENDED, devices=(), since=clock, preemptions=preemptions
                )
            running.view = replace(running.view, state=JobState.RUNNING, devices=("cuda:0",), since=clock)
        first = running.steps
        last = running.steps = min(first + round(policy.turn(running.view) / INTERVAL * STEPS), len(running.losses))
        if first < running.goal <= last:
            reached.append(clock + (running.goal - first) * INTERVAL / STEPS)
        clock += (last - first) * INTERVAL / STEPS
        seen = running.losses[first:last]
        running.view = told(running.view, seen, len(running.losses) - last)
        if min(seen) < best:
            best = min(seen)
            for trial in trials:
                trial.view = replace(trial.view, best=best)
        if last == len(running.losses):
            trials.remove(running)
            running = None
    return reached


def start(number: int, losses: Sequence[float], target: float, switch: float) -> Trial:
    view = JobView(str(number), demand(len(losses)), switch_seconds=switch)
    return Trial(losses, steps_to(losses, target), view)


def demand(steps: int) -> dict[str, Demand]:
    return {"A100": Demand(1.0, 10**9, 1.0, steps * INTERVAL / STEPS)}


def told(view: JobView, seen: Sequence[float], left: int) -> JobView:
    """A trial after a turn."""
    turn = TurnStats(max(seen), min(seen), seen[-1], len(seen), len(seen) * INTERVAL / STEPS)
    return replace(view, demand=demand(left), ran=view.ran + turn.seconds, quanta=(*view.quanta, turn))


def choose(policy: TimeSharing, trials: Sequence[Trial], now: float) -> Trial:
    """The one that has the next turn."""
    for trial in trials:
        if not policy.is_measured(trial.view):
            return trial
    priorities = policy.priorities([trial.view for trial in trials], now)
    best = max(priorities)
    equals = [trial for trial, priority in zip(trials, priorities, strict=True) if priority == best]
    return next((trial for trial in equals if trial.view.devices), equals[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / DATA, help="folder of the measured curves")
    parser.add_argument("--bins", type=int, default=1000, help="of each task and type")
    parser.add_argument("--live", action="store_true", help="real trainings instead of curves")
    parser.add_argument("--rounds", type=int, default=1, help="of the real trainings")
    parser.add_argument(
        "--quick", action="store_true", help="2 bins; with --live two trials a data set, judges nothing"
    )
    options = parser.parse_args()
    if options.bins < 1:
        parser.error(f"--bins must be at least 1, got {options.bins}")
    if options.quick:
        options.bins = 2
    if not options.live and not (options.data / CURVES_FILE).is_file():
        print(f"{options.data / CURVES_FILE} is not there: nothing can be measured. Name its folder with --data")
        print(json.dumps({"missed": [], "skipped": f"no {CURVES_FILE}"}))
        parser.exit(0)
    return options


if __name__ == "__main__":
    sys.exit(main())
