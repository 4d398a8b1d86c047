"""What is reserved for running jobs, as members leave and join."""

from dataclasses import replace

import pytest
from planner_samples import KnownCosts

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand, Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Job, Purpose
from shoal.core.trial import Trial
from shoal.plan.cache import PlanCache
from shoal.plan.plan_input import PlanInput
from shoal.plan.planning_context import PlanningContext, reservations
from shoal.plan.schedule import Fifo

DEVICE = Device("cuda:0", "H200", 1000, cores=4)
KEY, UNKNOWN = FusionKey("known", "", 32), FusionKey("unknown", "", 32)
PROFILE = Profile({1: 0.1}, 10, 0, base_memory=100, member_memory=10, compute=0.5, cores=1.0)
BEGUN = Demand(0.5, 140, 1.0, 60.0)
WHOLE = Demand(1.0, 0, 0.0, 0.0)


def array(*numbers, key=KEY):
    return Array(key, tuple(Member(Trial(number, {}, number, 0), 0, 3) for number in numbers))


def context(profile):
    return PlanningContext(PlanInput(Fifo(), KnownCosts(profile), Cluster((Node("one", 4, (DEVICE,)),))), PlanCache())


def reserved(job, join=(), profile=PROFILE):
    turn = context(lambda key, kind: profile if key == KEY else None)
    found = reservations([(job, DEVICE)], {job.id: join} if join else {}, turn)
    assert set(found) <= {job.id}
    return found.get(job.id)


def job(*arrays, demand=BEGUN, purpose=Purpose.TRAIN):
    return Job("job-1", arrays, purpose, demand)


@pytest.mark.parametrize(
    ("changes", "memory"),
    [
        pytest.param({"job": job(array(0, 1, 2, 3))}, None, id="nothing has changed"),
        pytest.param({"job": job(array(0, 1))}, 120, id="members left"),
        pytest.param({"job": job()}, None, id="all have left, and it is about to end"),
        pytest.param({"job": job(array(0, 1, 2, 3)), "join": [array(4, 5)]}, 160, id="others join"),
        pytest.param({"job": job(array(0)), "join": [array(4, 5)]}, 130, id="some left and others join"),
        pytest.param({"job": job(), "join": [array(4)]}, 110, id="others join as the last leaves"),
        pytest.param(
            {"job": job(array(0, 1, 2, 3)), "profile": replace(PROFILE, member_memory=50)},
            None,
            id="it takes more than was thought, and reserves no more for it",
        ),
        pytest.param(
            {"job": job(array(0, 1, 2, 3)), "profile": replace(PROFILE, member_memory=5)},
            120,
            id="it takes less than was thought",
        ),
        pytest.param({"job": job(array(0, 1), demand=WHOLE)}, 120, id="it has become known"),
        pytest.param({"job": job(array(0, key=UNKNOWN), demand=WHOLE)}, None, id="it is still unknown"),
        pytest.param({"job": job(array(0, 1), demand=None)}, 120, id="nothing was reserved"),
        pytest.param({"job": job(array(0), demand=None, purpose=Purpose.PROFILE)}, None, id="it measures"),
    ],
)
def test_memory(changes, memory):
    demand = reserved(**changes)
    assert (demand and demand.memory) == memory


def test_a_job_keeps_its_initial_share_of_compute():
    small = replace(BEGUN, compute=0.25)
    assert reserved(job(array(0, 1), demand=small)).compute == 0.25
    assert reserved(job(array(0), demand=small), join=[array(1)]).compute == 0.25
    assert reserved(job(array(0, 1), demand=replace(BEGUN, compute=1.0))).compute == 0.5


def test_a_job_without_members_holds_its_memory():
    turn = context(lambda key, kind: PROFILE)
    assert turn.running_demand(job(), DEVICE) == Demand(1.0, 140, 1.0, 0.0)
