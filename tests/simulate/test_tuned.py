"""Oversubscription found while a simulation runs."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from simulate_samples import GB, REAL, ROOT, cluster, job, needs_data

from shoal.backend.simulated import ClusterEvent, Simulation, SlowDown
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import ScenarioError
from shoal.cost.scaling import Scaling
from shoal.schedule import POLICIES, WFD, JobState, JobView, OversubscriptionTuner, TurnStats, check_plan
from shoal.cli.simulate import outcome_json, outcomes_table
from shoal.simulate.scenario import load
from shoal.simulate.slowdown import Scalings


class Limited(SlowDown):
    """A device delivers so many times the compute that it is said to have."""

    def __init__(self, limit):
        self.limit = limit

    def speeds(self, device, tenants):
        asked = sum(tenant.job.demand[device.kind].compute for tenant in tenants)
        return [min(1.0, self.limit * device.compute / asked)] * len(tenants)


class Noted(OversubscriptionTuner):
    """Begins at one ratio, is at another after some observations, and notes what it is told."""

    def __init__(self, *ratios, after=1):
        super().__init__()
        self.script, self.after, self.seen = ratios, after, []

    @property
    def ratios(self):
        return {"A100": self.ratio("A100")}

    def ratio(self, kind):
        return self.script[min(len(self.seen) // self.after, len(self.script) - 1)]

    def observe(self, kind, jobs):
        self.seen.append(list(jobs))


def run(jobs, tuner, *, policy=None, where=None, slowdown=None, **more):
    return Simulation(jobs, where or cluster(1), policy or WFD(), slowdown or Limited(2.0), tuner=tuner, **more).run()


def test_observed_at_every_epoch_and_at_every_change_while_jobs_wait():
    """An epoch of a alone, one of b beside it, the rest of a alone; then c, for which nobody waits."""
    jobs = [
        job("a", compute=0.5, seconds=9, budget=3),
        job("b", compute=0.25, seconds=4, budget=1, arrival=3),
        job("c", compute=1.0, seconds=1),
    ]
    tuner = Noted(1.0)
    outcome = run(jobs, tuner)
    assert outcome.completion == {"a": 9.0, "b": 7.0, "c": 10.0}
    assert tuner.seen == [[(0.5, 1.0)], [(0.5, 1.0), (0.25, 1.0)], [(0.5, 1.0)]]


QUIET = {
    "nobody waits": ([job("a", compute=0.5, budget=5)], Noted(1.0)),
    "it is still being started": (
        [job("a", seconds=0, start_seconds=5.0), job("b", seconds=0)], Noted(1.0)
    ),
    "a share was given to it": (
        [job(f"j{i}", scaling=Scaling(sharing=2), compute=1.0) for i in range(3)], Noted(1.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("jobs", "tuner"), QUIET.values(), ids=QUIET)
def test_nothing_is_learnt_while(jobs, tuner):
    policy = POLICIES["water_filling"]() if jobs[0].scaling.sharing > 1 else WFD()
    outcome = run(jobs, tuner, policy=policy)
    assert len(outcome.completion) == len(jobs)
    assert tuner.seen == []


def test_where_the_ratio_falls_jobs_stay_and_the_device_is_not_observed_until_it_has_drained():
    jobs = [job(f"j{i}", compute=1.0, seconds=10 * (i + 1), budget=i + 1) for i in range(6)]
    tuner = Noted(3.0, 1.0)
    outcome = run(jobs, tuner, slowdown=Limited(3.0))
    assert outcome.switches == 0
    assert outcome.oversubscription == {"A100": 1.0}
    first, *later = tuner.seen
    assert len(first) == 3
    assert all(len(jobs) == 1 for jobs in later)
    begun = sorted((stay.begin, stay.end) for stay in outcome.intervals)
    assert [begin for begin, _ in begun] == [0, 0, 0, 60, 90, 110], "the next begins when all three have ended"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_all_jobs_under_ratios_that_rise_and_fall(policy):
    jobs = [
        job(f"j{i}", compute=(0.3, 0.5, 0.9)[i % 3], seconds=5 + i, budget=3, arrival=i // 4 * 3.0, **more)
        for i, more in enumerate(
            [{}, {"scaling": Scaling(1.2, sharing=3)}, {"scaling": Scaling(1.5, 1.1, 2, 2, 0.5)}, {}] * 3
        )
    ]
    added = (Node("more", 8, (Device("more/0", "A100", 80 * 10**9, oversubscription=9.0),)),)

    def outcome():
        events = [ClusterEvent(4.0, added=added), ClusterEvent(9.0, failed=("gpu0",))]
        tuner = Noted(1.0, 3.0, 2.0, 1.0, 2.5, 1.0)
        return run(jobs, tuner, policy=POLICIES[policy](), where=cluster(2), events=events)

    found = outcome()
    assert len(found.completion) == len(jobs)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_legal_on_devices_that_hold_more_than_may_be_promised_now(policy):
    @settings(max_examples=10 if policy == "exact" else 50, deadline=None, database=None)
    @given(crowded())
    def check(situation):
        jobs, where = situation
        check_plan(POLICIES[policy]().plan(jobs, where, 100.0), jobs, where, 100.0)

    check()


def test_a_long_search_finds_what_its_devices_deliver():
    jobs = [job(f"j{i}", compute=0.25, seconds=50 + i % 7, budget=5) for i in range(400)]
    tuner = OversubscriptionTuner()
    found = run(jobs, tuner, where=cluster(2, oversubscription=5.0))
    alone = run(jobs, None, where=cluster(2))
    fixed = run(jobs, None, where=cluster(2, oversubscription=2.0))
    assert found.oversubscription["A100"] == pytest.approx(2.0, abs=0.5)
    assert alone.oversubscription == {}
    assert found.makespan < 1.1 * fixed.makespan < 0.6 * alone.makespan


def test_jobs_that_stand_still_or_take_no_time_do_not_keep_a_simulation_from_ending():
    still = run([job("a", budget=2), job("b", budget=2)], OversubscriptionTuner(), slowdown=Limited(0.0))
    assert set(still.waiting) == {"a", "b"}
    assert len(run([job(f"j{i}", seconds=0, budget=2) for i in range(3)], OversubscriptionTuner()).completion) == 3


TEXT = """\
slowdown = "demands"

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

[[jobs]]
count = 60
compute = 0.3
seconds = 10

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
    "a number after tuned": ('kind = "H100"', 'kind = "A100"', 13, f"{MIXED}A100 or for none"),
    "tuned after a number": ('oversubscription = "tuned"', "oversubscription = 2", 22, f"{MIXED}A100 or for none"),
    "another word": ('"tuned"', '"tuned!"', 7, "`oversubscription` is 'tuned!' (did you mean 'tuned'?)"),
    "not above 0": ('"tuned"', "0", 7, "`oversubscription` must be finite and above 0, got 0.0"),
    "no number": ('"tuned"', "true", 7, "`oversubscription` must be a number or a string, got True"),
}


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_told_with_its_line(old, new, line, message, tmp_path):
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@needs_data
@pytest.mark.parametrize("name", ["sp1", "sp3"])
def test_on_measured_share_curves_a_search_gains_while_the_ratio_is_being_found(name, tmp_path):
    """What is tried costs something beside the ratio that the paper found, and far less than not to share."""
    text = (ROOT / f"scenarios/{name}.toml").read_text()

    def makespan(ratio):
        path = written(tmp_path, re.sub(r"oversubscription = \S+", f"oversubscription = {ratio}", text))
        return load(path, REAL).simulate("wfd").makespan

    tuned = makespan('"tuned"')
    assert tuned < 0.8 * makespan(1.0)
    assert tuned < 1.25 * makespan(3.0)


def test_a_device_without_compute_is_not_observed():
    device = Device("gpu0", "A100", 80 * GB, compute=0.0)
    tuner = Noted(1.0)
    jobs = [job("a", compute=0.0, budget=2), job("b", compute=0.0, budget=2), job("c", compute=0.5)]
    outcome = run(jobs, tuner, where=Cluster((Node("n0", 64, (device,)),)), slowdown=Scalings())
    assert outcome.completion == {"a": 10.0, "b": 10.0}
    assert tuner.seen == []
