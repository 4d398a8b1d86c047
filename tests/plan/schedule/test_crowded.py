"""Every policy with devices of which less is left than their jobs take: one is lost, others hold its memory, or jobs
were measured to demand more than what they have reserved.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import TurnStats
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule.base import JobState, JobView
from shoal.plan.schedule.check import check_plan
from shoal.plan.schedule.registry import POLICIES, make_policy

NOTE = "python (pid 4711) holds 70.0 GB"


def job(name: str, memory: int, **where: object) -> JobView:
    return JobView(name, {"gpu": Demand(0.5, memory, 1.0, 5.0)}, since=0.0, **where)  # type: ignore[arg-type]


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_a_shrunk_device_admits_no_job_and_names_the_foreign_program(name: str, healthy: bool) -> None:
    crowded = Device("cuda:0", "gpu", 10 * 10**9, 2, healthy=healthy, note=NOTE)
    cluster = Cluster((Node("here", 4, (crowded, Device("cuda:1", "gpu", 40 * 10**9, 2))),))
    running = job("old", 30 * 10**9, state=JobState.RUNNING, devices=("cuda:0",), preemptible=False, home="cuda:0")
    jobs = [running, job("small", 5 * 10**9), job("large", 60 * 10**9)]
    plan = make_policy(name).plan(jobs, cluster, 1.0)
    check_plan(plan, jobs, cluster, 1.0)
    assert [(action.job, action.devices) for action in plan.actions] == [("small", ("cuda:1",))]  # type: ignore[union-attr]
    (refusal,) = plan.refusals
    if healthy:
        assert refusal.reason == f"needs 60.0 GB, cuda:0 has 0 MB free: {NOTE}"
    else:
        assert refusal.reason == "can never run here: needs 60.0 GB, the largest device cuda:1 has 40.0 GB"


@st.composite
def overfull(draw: st.DrawFn) -> tuple[list[JobView], Cluster]:
    """Devices whose jobs demand up to 3 times the compute of one, and jobs that wait."""
    ratio = draw(st.sampled_from((1.0, 1.5, 2.0)))
    scalings = st.sampled_from((Scaling(), Scaling(1.2, max_jobs=4), Scaling(1.5, 1.1, 2, 3, 2.0), Scaling(devices=2)))
    demands = st.builds(
        Demand, st.sampled_from((0.0, 0.3, 0.5, 1.0)), st.integers(0, 20), st.just(1.0), st.sampled_from((0.0, 10.0))
    )
    devices = [Device(f"gpu{i}", "A100", 80, oversubscription=ratio) for i in range(draw(st.integers(1, 3)))]
    jobs: list[JobView] = []
    for device in devices:
        full = replace(device, oversubscription=3.0)
        for index in range(draw(st.integers(0, 5))):
            scaling = draw(scalings)
            running = JobView(
                f"{device.name}/{index}",
                {"A100": draw(demands)},
                JobState.RUNNING,
                (device.name,),
                draw(st.sampled_from((None, 0.25, 1.0))) if scaling.max_jobs > 1 else None,
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
@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_legal_on_devices_whose_jobs_demand_more_than_their_capacity(name: str) -> None:
    @settings(max_examples=10 if name == "exact" else 25, deadline=None, database=None)
    @given(overfull())
    def check(situation: tuple[list[JobView], Cluster]) -> None:
        jobs, where = situation
        check_plan(make_policy(name).plan(jobs, where, 100.0), jobs, where, 100.0)

    check()
