"""Limits of the processes of jobs that share a device, and what a change of a share leads to."""

from dataclasses import replace

import pytest
from planner_samples import GB, A, B, KnownCosts, Turns, cluster, known, member, profile, slots, waiting

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.event import Reported, TurnStats
from shoal.core.job import Job, Purpose
from shoal.core.trial import Report
from shoal.plan.cost.scaling import Scaling
from shoal.plan.job_tracker import PreemptionRequest
from shoal.plan.planning_context import SHARES_WORTH_SECONDS
from shoal.plan.schedule import WFD, JobState, JobView, Plan, Policy, Refusal, Resize, Start
from shoal.plan.shares import UNMEASURED_BYTES, limit_placed, memory_limit, restarted_alone

GPU, OTHER = slots(2, "H200")


def train(name, compute=0.25):
    found = profile({1: 1.0}, compute=compute)
    return Job(name, (Array(A, (member(1),), found),), demand=Demand(compute, GB, 1.0, 10.0))


STARTS = {
    "alone on its device": ([("a", 0.25)], [], [None]),
    "two at once": ([("a", 0.25), ("b", 0.5)], [], [0.25, 0.5]),
    "one beside one that runs": ([("a", 0.25)], ["z"], [0.25]),
    "all of the device, twice": ([("a", 1.0), ("b", 2.0)], [], [None, None]),
}


@pytest.mark.parametrize("name", STARTS)
def test_jobs_that_share_a_device_are_limited_and_a_job_alone_is_not(name):
    placed, held, limits = STARTS[name]
    jobs = [(train(each, compute), GPU) for each, compute in placed]
    others = [(train(each), GPU) for each in held] + [(train("elsewhere"), OTHER)]
    assert [job.compute_limit for job, _ in limit_placed(jobs, others, lambda device: True)] == limits
    assert [job.compute_limit for job, _ in limit_placed(jobs, others, lambda device: False)] == [None] * len(jobs)


WHOLE = replace(GPU, name="cuda:0", uuid="GPU-0")
MEMORY = {
    "alone on its device": (WHOLE, 1, 4 * GB, 0),
    "beside another": (WHOLE, 2, 4 * GB, 5 * GB + UNMEASURED_BYTES),
    "on an instance of a GPU": (replace(WHOLE, name="mig:0", uuid="MIG-0"), 2, 4 * GB, 5 * GB + UNMEASURED_BYTES),
    "of unknown demand": (WHOLE, 2, 0, 0),
    "on a CPU": (replace(GPU, name="cpu:0"), 2, 4 * GB, 0),
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_job_beside_others_on_a_gpu_has_a_limit_of_memory(name):
    device, jobs, demand, limit = MEMORY[name]
    job = replace(train("a"), demand=Demand(0.25, demand, 1.0, 10.0))
    assert memory_limit(job, device, jobs) == limit
    (placed,) = limit_placed([(job, device)], [(train("z"), device)] * (jobs - 1), lambda device: False)
    assert placed == (replace(job, memory_limit=limit), device)


def test_a_job_of_unknown_demand_is_not_limited():
    jobs = [(replace(train(name), demand=None), GPU) for name in "ab"]
    assert limit_placed(jobs, [], lambda device: True) == jobs


LEFT_ALONE = {
    "a restart pays": ({}, {}, True),
    "it ends too soon": ({"seconds": 1.0}, {}, False),
    "a part of the device slows it down little": ({"alpha": 1.01}, {}, False),
    "it was not told to start yet": ({"preemptible": False}, {}, False),
    "it is not limited": ({}, {"limit": None}, False),
    "it is not alone": ({}, {"beside": True}, False),
    "the part suffices, as was measured": ({}, {"speeds": {1: {0.25: 1.0, 0.5: 1.0}}}, False),
    "the part does not suffice, as was measured": ({}, {"speeds": {1: {0.25: 0.5, 0.5: 1.0}}}, True),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_limited_job_that_is_left_alone_is_restarted_where_that_pays(name):
    """It has 100 s to continue the whole device, four times as many on a quarter of it, and a restart takes 5 s."""
    seen, changes, restarts = LEFT_ALONE[name]
    found = profile({1: 1.0}, share_speeds=changes.get("speeds", {}))
    job = Job("a", (Array(A, (member(1),), found),), compute_limit=changes.get("limit", 0.25))
    demand = {"H200": Demand(1.0, GB, 1.0, seen.get("seconds", 100.0))}
    scaling = Scaling(seen.get("alpha", 4 ** (1 / 3)))
    view = JobView("a", demand, JobState.RUNNING, ("H200:0",), scaling=scaling, switch_seconds=5.0)
    view = replace(view, preemptible=seen.get("preemptible", True))
    others = [(train("z"), GPU if changes.get("beside") else OTHER)]
    requests = restarted_alone([(job, GPU)], others, [view])
    text = "restarted, as it has H200:0 to itself and its process is limited to 25%"
    assert requests == ({"a": PreemptionRequest(True, text)} if restarts else {})


class Scripted(Policy):
    """Answers with one list of actions after another; all else stays off the devices."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def plan(self, jobs, cluster, now):
        actions = self.answers.pop(0)
        placed = {action.job for action in actions}
        off = [job.id for job in jobs if job.state is not JobState.RUNNING and job.id not in placed]
        return Plan(tuple(actions), tuple(Refusal(name, "not now") for name in off))


def planner(costs, policy, limits=lambda device: True):
    return Turns(policy, costs, can_limit_compute=limits)


@pytest.mark.parametrize("limited", [True, False])
def test_another_share_of_a_running_job_is_another_reservation(limited):
    """Its process keeps the limit that it started with."""
    small = profile({1: 10.0}, compute=0.9, share_speeds={1: {0.25: 0.9, 0.5: 1.0}})
    policy = Scripted(
        [Start("waiting-0", ("H200:0",), 0.25), Start("waiting-1", ("H200:0",), 0.25)],
        [Resize("job-00001", ("H200:0",), 0.75)],
        [Resize("job-00001", ("H200:0",))],
    )
    turns, where = planner(known(A=small, B=small), policy, lambda device: limited), cluster(GPU)
    first, second = turns.plan(waiting((A, 1), (B, 1)), [], where, 0.0).starts
    found = [(job.demand.compute, job.compute_limit) for job, _ in (first, second)]
    assert found == [(0.25, 0.25 if limited else None)] * 2
    turns.tracker.on_report(Reported("job-00001", (Report(0, 1),), TurnStats(2.0, 1.0, 1.0, 3, 0.5)), 1.0)
    wider = turns.plan([], [first, second], where, 2.0)
    assert {name: demand.compute for name, demand in wider.reservations.items()} == {"job-00001": 0.75}
    assert not wider.preemptions
    job = replace(first[0], demand=wider.reservations["job-00001"])
    assert turns.plan([], [(job, GPU)], where, 3.0).reservations["job-00001"].compute == 0.5, "as in its demand"


def test_shares_are_measured_before_much_is_trained_one_after_another():
    """A half of the device first, then, as that suffices, a quarter; other devices train meanwhile."""
    measured = {"A": profile({1: SHARES_WORTH_SECONDS / 100})}

    def look_up(key, kind):
        return measured.get(key.structure)

    turns, where = planner(KnownCosts(look_up), WFD()), cluster(GPU, OTHER)
    members = waiting((A, 20))
    begun = turns.plan(members, [], where, 0.0).starts
    assert [(job.purpose, job.compute_limit, device.name) for job, device in begun] == [
        (Purpose.PROFILE, 0.5, "H200:0"), (Purpose.TRAIN, None, "H200:1")
    ]  # fmt: skip
    measured["A"] = replace(measured["A"], share_speeds={1: {0.5: 1.0}})
    wait = [(each, A) for each, _ in members if each not in begun[1][0].members]
    profiled = [(job.compute_limit, device.name) for job, device in turns.plan(wait, begun[1:], where, 1.0).starts[:1]]
    assert profiled == [(0.25, "H200:0")]
    measured["A"] = replace(measured["A"], share_speeds={1: {0.5: 1.0, 0.25: 0.5}})
    after = turns.plan(wait, begun[1:], where, 2.0).starts
    assert {(job.purpose, job.demand.compute) for job, _ in after} == {(Purpose.TRAIN, 0.5)}
    assert {(device.name, job.compute_limit) for job, device in after} >= {("H200:1", 0.5)}, "in company it is limited"


@pytest.mark.parametrize(
    ("seconds", "limits", "unmeasurable"),
    [
        (SHARES_WORTH_SECONDS / 3000, True, set()),
        (SHARES_WORTH_SECONDS, False, set()),
        (SHARES_WORTH_SECONDS, True, {(A, "H200")}),
    ],
    ids=["little work", "no limits", "it has failed"],
)
def test_shares_that_are_not_measured(seconds, limits, unmeasurable):
    turns = planner(known(A=profile({1: seconds}), B=profile({1: 0.001})), WFD(), lambda device: limits)
    placement = turns.plan(waiting((A, 20)), [], cluster(GPU), 0.0, unmeasurable=unmeasurable)
    assert [job.purpose for job, _ in placement.starts] == [Purpose.TRAIN]
    assert turns.plan(waiting((B, 1)), [], cluster(OTHER), 1.0).starts[0][0].purpose is Purpose.TRAIN
