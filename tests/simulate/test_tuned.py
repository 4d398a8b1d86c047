"""Oversubscription found while a simulation runs."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from simulate_samples import REAL, ROOT, cluster, needs_data, simulation, structure

from shoal.cli.simulate import outcome_json, outcomes_table
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import ScenarioError
from shoal.cost.scaling import Scaling
from shoal.planner.grouping import Grouping
from shoal.planner.packing.base import NoPacking
from shoal.schedule import POLICIES, WFD, JobState, JobView, OversubscriptionTuner, TurnStats, check_plan
from shoal.simulate.run import ClusterEvent, Simulation
from shoal.simulate.scenario import load
from shoal.simulate.workload import SimulatedStudy, SimulatedWorkload


def limited(limit):
    """A device delivers so many times the compute that it is said to have."""

    def speeds(device, jobs):
        return [min(1.0, limit * device.compute / sum(job.compute_demand for job in jobs))] * len(jobs)

    return speeds


class Scripted(OversubscriptionTuner):
    """Has one ratio after the other, whatever it observes."""

    def __init__(self, *script):
        super().__init__()
        self.script, self.seen = script, 0

    @property
    def ratios(self):
        return {"A100": self.ratio("A100")}

    def ratio(self, kind):
        return self.script[min(self.seen, len(self.script) - 1)]

    def observe(self, kind, jobs):
        self.seen += 1


def searched(trials, epochs, seconds, where, tuner, policy=None, **more):
    """A search on devices that deliver twice what they are said to have."""
    net = structure("net", compute=0.25, seconds=seconds)
    search = SimulatedStudy("s", [net], 1, ("random", {"n": trials, "epochs": epochs}))
    more = {"fuse": False, "grouping": Grouping(NoPacking()), **more}
    return Simulation(SimulatedWorkload([search]), where, policy or WFD(), limited(2.0), tuner=tuner, **more).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_all_jobs_under_ratios_that_rise_and_fall(policy):
    added = (Node("more", 8, (Device("more/0", "A100", 80 * 10**9, oversubscription=9.0),)),)

    def outcome():
        events = [ClusterEvent(4.0, added=added), ClusterEvent(9.0, failed=("gpu0",))]
        tuner = Scripted(1.0, 3.0, 2.0, 1.0, 2.5, 1.0)
        return searched(12, 4, 2.0, cluster(2), tuner, POLICIES[policy](), events=events)

    found = outcome()
    assert len(found.completion) == 12
    assert found == outcome()


@st.composite
def crowded(draw):
    """Devices that were filled at a ratio of 3, which has fallen since, and jobs that wait."""
    ratio = draw(st.sampled_from((1.0, 1.5, 2.0)))
    scalings = st.sampled_from((Scaling(), Scaling(1.2, sharing=4), Scaling(1.5, 1.1, 2, 3, 2.0), Scaling(devices=2)))
    demands = st.builds(
        Demand, st.sampled_from((0.0, 0.3, 0.5, 1.0)), st.integers(0, 20), st.just(1.0), st.sampled_from((0.0, 10.0))
    )
    devices = [Device(f"gpu{i}", "A100", 80, oversubscription=ratio) for i in range(draw(st.integers(1, 3)))]
    jobs = []
    for device in devices:
        full = replace(device, oversubscription=3.0)
        for index in range(draw(st.integers(0, 5))):
            scaling = draw(scalings)
            running = JobView(
                f"{device.name}/{index}",
                {"A100": draw(demands)},
                JobState.RUNNING,
                (device.name,),
                draw(st.sampled_from((None, 0.25, 1.0))) if scaling.sharing > 1 else None,
                ran=10.0,
                quanta=draw(st.sampled_from(((), (TurnStats(2.0, 1.0, 1.0, 3, 10.0),)))),
                scaling=scaling,
                preemptible=draw(st.booleans()),
                home=device.name,
            )
            if sum(each.compute(full) for each in (*jobs, running) if each.home == device.name) <= full.capacity:
                jobs.append(running)
    for index in range(draw(st.integers(0, 6))):
        jobs.append(JobView(f"waits/{index}", {"A100": draw(demands)}, scaling=draw(scalings), since=90.0))
    return jobs, Cluster((Node("n", 64.0, tuple(devices)),))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_legal_on_devices_that_hold_more_than_may_be_promised_now(policy):
    @settings(max_examples=10 if policy == "exact" else 25, deadline=None, database=None)
    @given(crowded())
    def check(situation):
        jobs, where = situation
        check_plan(POLICIES[policy]().plan(jobs, where, 100.0), jobs, where, 100.0)

    check()


def test_a_long_search_finds_what_its_devices_deliver():
    found = searched(100, 8, 10.0, cluster(2, oversubscription=5.0), OversubscriptionTuner())
    alone = searched(100, 8, 10.0, cluster(2), None)
    fixed = searched(100, 8, 10.0, cluster(2, oversubscription=2.0), None)
    assert found.oversubscription["A100"] == pytest.approx(2.0, abs=0.5)
    assert alone.oversubscription == {}
    assert found.makespan < 1.1 * fixed.makespan < 0.6 * alone.makespan


def test_jobs_that_stand_still_or_take_no_time_do_not_keep_a_simulation_from_ending():
    two = [structure("a"), structure("b")]
    still = simulation(two, cluster(1), WFD(), slowdown=lambda device, jobs: [0.0] * len(jobs)).run()
    assert set(still.waiting) == {"job/0", "job/1"}
    assert len(simulation([structure("a", seconds=0)], cluster(1), WFD()).run().completion) == 1


TEXT = """\
slowdown = "demands"
fuse = false
packing = "none"

[[nodes]]
kind = "A100"
devices = 2
memory_gb = 80
oversubscription = "tuned"

[[nodes]]
kind = "H100"
devices = 1
memory_gb = 80
oversubscription = 2.5

[[models]]
name = "net"
epoch_seconds = 10
compute = 0.3
memory_gb = 1

[[studies]]
learning_rates = 60
epochs = 4

[[events]]
at = 30
add = [{ name = "new", kind = "A100", devices = 1, memory_gb = 80, oversubscription = "tuned" }]
"""


def written(folder, text):
    path = folder / "small.toml"
    path.write_text(text)
    return path


def test_a_scenario_says_which_kinds_are_tuned(tmp_path):
    scenario = load(written(tmp_path, TEXT))
    assert scenario.tuned == ("A100",)
    assert [device.capacity for _, device in scenario.cluster] == [1.0, 1.0, 2.5]
    outcomes = {"wfd": scenario.simulate("wfd"), "ff": scenario.simulate("ff")}
    assert outcomes["wfd"] == scenario.simulate("wfd")
    assert outcomes["wfd"].oversubscription.keys() == {"A100"}
    at_once = [stay.compute for stay in outcomes["wfd"].intervals if stay.device == "node1/0" and stay.begin == 0]
    assert sum(at_once) == pytest.approx(2.4), "the number given for the other kind counts"
    console = Console(width=200)
    with console.capture() as captured:
        console.print(outcomes_table(scenario, outcomes))
    assert re.search(r"oversubscription found: wfd A100 [\d.]+; ff A100 [\d.]+ *\n", captured.get())
    found = json.loads(json.dumps(outcome_json(scenario, "wfd", outcomes["wfd"])))
    assert found["oversubscription"] == outcomes["wfd"].oversubscription


MIXED = '`oversubscription` must be "tuned" for all nodes with '
WRONG = {
    "a number after tuned": ('kind = "H100"', 'kind = "A100"', 15, f"{MIXED}A100 or for none"),
    "tuned after a number": ('oversubscription = "tuned"', "oversubscription = 2", 9, f"{MIXED}A100 or for none"),
    "another word": ('"tuned"', '"tuned!"', 9, "or 'tuned', got 'tuned!' (did you mean 'tuned'?)"),
    "not above 0": ('"tuned"', "0", 9, "`oversubscription` must be a number from 1e-06 to"),
    "no number": ('"tuned"', "true", 9, "or 'tuned', got True"),
}


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_told_with_its_line(old, new, line, message, tmp_path):
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@needs_data
@pytest.mark.parametrize("name", [pytest.param("sp1", marks=pytest.mark.thorough), "sp3"])
def test_on_measured_share_curves_a_search_gains_while_the_ratio_is_being_found(name, tmp_path):
    """What is tried costs something beside the ratio that the paper found, and far less than not to share."""
    text = (ROOT / f"scenarios/{name}.toml").read_text()

    def makespan(ratio):
        longer = text.replace("epochs = 5", "epochs = 15")
        path = written(tmp_path, re.sub(r"oversubscription = \S+", f"oversubscription = {ratio}", longer))
        return load(path, REAL).simulate("wfd").makespan

    tuned = makespan('"tuned"')
    assert tuned < 0.8 * makespan(1.0)
    assert tuned < 1.4 * makespan(3.0)
