"""The benchmark of time-sharing takes turns as the policies do in a simulation."""

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from time_sharing import INTERVAL, POLICIES, STEPS, at_best, by_order, by_turns, interpolated, steps_to

from shoal.backend.simulated import SimulatedJob, Simulation
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.simulate.curves import Task

ONE = Cluster((Node("node", 100.0, (Device("cuda:0", "A100", 10**9),)),))


def bin_of_curves(seed: int, trials: int = 8, intervals: int = 12) -> list[list[float]]:
    """Some fall to a floor of their own, with noise."""
    random = Random(seed)
    curves = []
    for _ in range(trials):
        start, floor, rate = random.uniform(2, 4), random.uniform(0, 2), random.uniform(0.1, 1)
        points = [
            floor + (start - floor) / (1 + rate * point) + random.gauss(0, 0.02) for point in range(intervals + 1)
        ]
        curves.append(interpolated(points))
    return curves


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_turns_are_those_of_a_simulation(name: str, seed: int) -> None:
    curves = bin_of_curves(seed)
    target = sorted(map(min, curves))[3]
    jobs = [
        SimulatedJob(
            str(number), {"A100": Demand(1.0, 1, 1.0, len(losses) * INTERVAL / STEPS)}, curve=losses, target=target
        )
        for number, losses in enumerate(curves)
    ]
    policy = POLICIES[name]
    outcome = Simulation(jobs, ONE, policy, quantum=policy.quantum).run()
    assert by_turns(policy, curves, target, switch=0.0) == pytest.approx(sorted(outcome.reached.values()))


def test_interpolation() -> None:
    assert interpolated([2.0, 1.0, 0.0])[:11] == pytest.approx([1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.9])


def test_steps_to_a_target() -> None:
    assert steps_to([3.0, 2.0, 1.0], 2.0) == 2
    assert steps_to([3.0, 2.0, 1.0], 0.5) == float("inf")


def test_orders_of_which_the_times_are_known() -> None:
    """Twenty steps of a second each, and a second for every change of trials."""
    slow, bad, quick = [2.0] * 9 + [0.0] * 11, [2.0] * 20, [2.0] * 3 + [0.0] * 17
    task = Task([slow, bad, quick], 0.5)
    assert by_order([slow, bad, quick], task) == pytest.approx(((1 + 10) + (21 + 21 + 1 + 4)) / 2)
    assert at_best([slow, bad, quick], task) == pytest.approx(((1 + 4) + (5 + 1 + 10)) / 2)
