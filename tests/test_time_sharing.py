"""The benchmark of time-sharing takes turns as the policies do in a simulation."""

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from time_sharing import INTERVAL, POLICIES, STEPS, at_best, by_order, by_turns, interpolated, steps_to

from shoal.core.device import Cluster, Device, Node
from shoal.core.trial import Trial
from shoal.plan import job_tracker
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.packing.registry import make_packing
from shoal.run import virtual
from shoal.simulate.run import Simulation
from shoal.simulate.slowdown import SLOWDOWNS
from shoal.simulate.tables import profile_of_costs
from shoal.simulate.workload import Curves, CurveSet, ListedJobs, SimulatedModel, SimulatedWorkload

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


class Recorded(Curves):
    """An epoch is a step."""

    def __init__(self, curves: list[list[float]], target: float) -> None:
        self._curves, self.target = curves, target

    def losses(self, trial: Trial, begin: int, end: int) -> list[float]:
        return self._curves[trial.number][begin:end]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_turns_are_those_of_a_simulation(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STOP_SECONDS", 0.0)
    monkeypatch.setattr(job_tracker, "SWITCH_SECONDS", 0.0)
    curves = bin_of_curves(seed)
    target = sorted(map(min, curves))[3]
    takes = profile_of_costs(INTERVAL / STEPS, 1.0, 1, 1.0, {})
    structures = [SimulatedModel(str(number), {"A100": takes}, "", None, 0.0, 0.0) for number in range(len(curves))]
    listed = ListedJobs("job", structures, [0.0] * len(curves), curves=Recorded(curves, target), epochs=len(curves[0]))
    slowdown = SLOWDOWNS["none"]({each.name: each for each in structures}, Path())
    policy = POLICIES[name]
    packer = ArrayPacker(make_packing("none"))
    outcome = Simulation(SimulatedWorkload([listed]), ONE, policy, slowdown, packer=packer, fuse=False).run()
    assert by_turns(policy, curves, target, switch=0.0) == pytest.approx(sorted(outcome.reached.values()))


def test_interpolation() -> None:
    assert interpolated([2.0, 1.0, 0.0])[:11] == pytest.approx([1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.9])


def test_steps_to_a_target() -> None:
    assert steps_to([3.0, 2.0, 1.0], 2.0) == 2
    assert steps_to([3.0, 2.0, 1.0], 0.5) == float("inf")


def test_orders_of_which_the_times_are_known() -> None:
    """Twenty steps of a second each, and a second for every change of trials."""
    slow, bad, quick = [2.0] * 9 + [0.0] * 11, [2.0] * 20, [2.0] * 3 + [0.0] * 17
    task = CurveSet([slow, bad, quick], 0.5)
    assert by_order([slow, bad, quick], task) == pytest.approx(((1 + 10) + (21 + 21 + 1 + 4)) / 2)
    assert at_best([slow, bad, quick], task) == pytest.approx(((1 + 4) + (5 + 1 + 10)) / 2)
