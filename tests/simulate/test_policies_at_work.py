"""What policies come to in a simulated study."""

from collections import Counter

import pytest
from baselines import RoundRobin, Slaq
from simulate_samples import ROOT, cluster, simulation, structure

from shoal.plan.array_packer import ArrayPacker
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule import Auto, Convergence, ExpectedFinish, WaterFilling
from shoal.run.virtual import STOP_SECONDS
from shoal.simulate.scenario import load
from shoal.simulate.workload import Curves, ListedJobs

TURNS = {
    "convergence": Convergence(),
    "expected_finish": ExpectedFinish(),
    "round_robin": RoundRobin(10.0),
    "slaq": Slaq(10.0),
}
APART = {"packer": ArrayPacker(make_packing("none")), "fuse": False}


class Recorded(Curves):
    """An epoch is a step."""

    def __init__(self, *curves):
        self._curves = curves

    def losses(self, trial, begin, end):
        return self._curves[trial.number][begin:end]


def by_turns(policy, curves, **costs):
    """What comes of trials on one device, a step of a second each."""
    structures = [structure(str(number), seconds=1.0, **costs) for number in range(len(curves))]
    arrivals, epochs = [0.0] * len(curves), len(curves[0])
    listed = ListedJobs("job", structures, arrivals, curves=Recorded(*curves), epochs=epochs)
    return simulation(listed, cluster(), policy, **APART).run()


@pytest.mark.parametrize("name", TURNS)
def test_all_have_a_turn_before_anybody_has_two(name):
    curves = [[1.0] * 100, [5.0 - step / 25 for step in range(100)], [9.0] * 100]
    found = by_turns(TURNS[name], curves, switch_seconds=0.5)
    first = found.intervals[:3]
    assert [stay.trial for stay in first] == ["job/0", "job/1", "job/2"]
    assert [stay.begin for stay in first] == pytest.approx([turn * (10.0 + STOP_SECONDS) for turn in range(3)])
    assert found.makespan == pytest.approx(300.0 + (STOP_SECONDS + 0.5) * found.switches, abs=1.0 * found.switches)
    assert set(found.completion) == {"job/0", "job/1", "job/2"}


def test_all_jobs_know_the_lowest_loss():
    told = []

    class Spy(Slaq):
        def priorities(self, jobs, now):
            told.append([job.best for job in jobs])
            return super().priorities(jobs, now)

    by_turns(Spy(10.0), [[3.0] * 20, [1.0] * 20, [2.0] * 20])
    assert {best for each in told for best in each} == {3.0, 1.0}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("costs", [{"switch_seconds": 31.0}, {"start_seconds": 45.0}], ids=str)
def test_turns_come_to_an_end_however_dear_a_switch_or_a_start(name, costs):
    """A turn is a quantum beside the switch."""
    found = by_turns(TURNS[name], [[2.0 - step / 100 for step in range(100)]] * 3, **costs)
    assert len(found.completion) == 3
    assert found.makespan >= 300.0 + 3 * costs.get("start_seconds", 0.0)


@pytest.mark.parametrize("policy", [WaterFilling(), Auto()], ids=lambda policy: type(policy).__name__)
def test_widths_end_the_toy_case_as_the_paper_does(policy):
    """Fluid: the trial of 30 s gets three devices, that of 12 s one, and the two of 4 s share one: 10 s and a start."""
    found = load(ROOT / "scenarios/fluid_toy.toml").simulate(policy)
    first = Counter(each.trial.split("/")[0] for each in found.intervals if each.begin == 0.0)
    assert first == {"long": 3, "middle": 1, "short": 2}
    assert len({each.device for each in found.intervals if each.begin == 0.0}) == 5
    assert 10.0 <= found.makespan <= 10.2
