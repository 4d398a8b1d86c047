"""Of a plan that is done at once, and what waits for jobs that still hold their devices."""

from dataclasses import replace

import pytest
from planner_samples import GB, slots

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Node
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule import (
    JobState,
    JobView,
    Plan,
    Refusal,
    Resize,
    Resume,
    Start,
    Stop,
    Suspend,
    check_plan,
)
from shoal.plan.schedule.check import feasible


def view(name, on=None, state=None, compute=0.4, memory=1, cores=1.0, share=None, preemptible=True):
    state = state or (JobState.WAITING if on is None else JobState.RUNNING)
    demand = {"cpu/1": Demand(compute, memory * GB, cores, 5.0)}
    where = () if on is None else (f"cpu/1:{on}",)
    return JobView(name, demand, state, where, share, scaling=Scaling(max_jobs=4), preemptible=preemptible)


def off(name, **changes):
    return view(name, state=JobState.SUSPENDED, **changes)


FIRST, SECOND = ("cpu/1:0",), ("cpu/1:1",)
CASES = {
    "nothing is in the way": (
        [view("a", on=0), view("b"), off("c")],
        [Start("b", FIRST), Resume("c", SECOND)],
        [Start("b", FIRST), Resume("c", SECOND)],
        {},
    ),
    "a device is given back while other programs fill the one that is kept": (
        [replace(view("a", on=0, memory=99), devices=FIRST + SECOND, scaling=Scaling(devices=2)), view("b")],
        [Resize("a", FIRST), Start("b", SECOND)],
        [Resize("a", FIRST)],
        {"b": "waits until a has left cpu/1:1"},
    ),
    "its place is left first": (
        [view("a", on=0), view("b"), view("c")],
        [Suspend("a"), Start("b", FIRST), Start("c", SECOND)],
        [Suspend("a"), Start("c", SECOND)],
        {"b": "waits until a has left cpu/1:0"},
    ),
    "it was asked to leave before": (
        [view("leaving", on=0, preemptible=False), off("b")],
        [Resume("b", FIRST)],
        [],
        {"b": "waits until leaving has left cpu/1:0"},
    ),
    "who is stopped leaves too": (
        [view("a", on=0), view("b")],
        [Stop("a", "over"), Start("b", FIRST)],
        [Stop("a", "over")],
        {"b": "waits until a has left cpu/1:0"},
    ),
    "who moves leaves first": (
        [view("a", on=0), view("b")],
        [Resize("a", SECOND), Start("b", FIRST)],
        [Resize("a", SECOND)],
        {"b": "waits until a has left cpu/1:0"},
    ),
    "a share is given up at once": (
        [view("a", on=0, share=1.0), view("b")],
        [Resize("a", FIRST, 0.5), Start("b", FIRST, 0.5)],
        [Resize("a", FIRST, 0.5), Start("b", FIRST, 0.5)],
        {},
    ),
    "the cores of the node are still in use": (
        [view("a", on=0, cores=3.0), view("b", cores=2.0), view("c")],
        [Suspend("a"), Start("b", SECOND), Start("c", SECOND)],
        [Suspend("a"), Start("c", SECOND)],
        {
            "b": "waits until others have left their devices: the jobs on node n0 would take 5 of its 4 cores",
        },
    ),
}


@pytest.mark.parametrize(("jobs", "actions", "done", "later"), CASES.values(), ids=CASES)
def test_the_feasible_part_of_a_plan(jobs, actions, done, later):
    where = Cluster((Node("n0", 4, tuple(slots(2))),))
    touched = {action.job for action in actions if not isinstance(action, (Suspend, Stop))}
    off_devices = [job.id for job in jobs if job.id not in touched and job.state is not JobState.RUNNING]
    off_devices += [action.job for action in actions if isinstance(action, Suspend)]
    plan = Plan(tuple(actions), tuple(Refusal(name, "waits") for name in off_devices))
    if "leaving" not in {job.id for job in jobs}:
        check_plan(plan, jobs, where, 0.0)
    found = feasible(plan, jobs, where, {"leaving"})
    assert found.actions == tuple(done)
    assert found.deferred == later
