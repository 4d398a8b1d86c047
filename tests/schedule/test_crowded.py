"""Every policy with a job on a device of which less is left than it takes: it is lost, or others hold its memory."""

import pytest

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.schedule.base import JobState, JobView
from shoal.schedule.check import check_plan
from shoal.schedule.registry import POLICIES, make_policy

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
