"""The conformance suite of policies: whatever the cluster and the jobs, every plan keeps the rules."""

import copy
from collections.abc import Callable, Sequence

from shoal.cluster.device import Cluster
from shoal.errors import PolicyError
from shoal.schedule.base import JobState, JobView, Plan, Policy, Start
from shoal.schedule.check import check_plan

__all__ = ["check_policy"]


def check_policy(make: Callable[[], Policy], *, examples: int = 200) -> None:
    """Run the whole suite on a policy.

    Args:
        make: a new instance with the same settings at every call.
        examples: how many clusters, with jobs, to invent.

    Raises:
        AssertionError: the contract of `shoal.schedule.Policy` is broken; hypothesis shows the smallest cluster and
            jobs with which it is.
        ImportError: hypothesis is not installed.
    """
    try:
        from hypothesis import given, settings
    except ImportError as error:
        raise ImportError("check_policy needs hypothesis. Install it with: pip install hypothesis") from error
    from shoal.testing.situations import situations

    @settings(max_examples=examples, deadline=None, database=None, report_multiple_bugs=False)
    @given(situations())
    def check(situation: tuple[tuple[JobView, ...], Cluster, float]) -> None:
        _check(make, *situation)

    check()


def _check(make: Callable[[], Policy], jobs: tuple[JobView, ...], cluster: Cluster, now: float) -> None:
    policy = make()
    before = copy.deepcopy((jobs, cluster))
    plan = policy.plan(jobs, cluster, now)
    assert (jobs, cluster) == before, "the policy changed what it was given"
    _assert_legal(plan, jobs, cluster)
    assert policy.plan(jobs, cluster, now) == plan, "asked twice, it answers differently"
    assert make().plan(jobs, cluster, now) == plan, "another instance answers differently"
    if all(job.state is JobState.WAITING for job in jobs) and not any(isinstance(act, Start) for act in plan.actions):
        able = [job.id for job in jobs if _could_start(job, cluster)]
        assert not able, f"nothing runs and nothing is started, though {able} could be"


def _assert_legal(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> None:
    try:
        check_plan(plan, jobs, cluster)
    except PolicyError as error:
        raise AssertionError(f"the plan is illegal: {error}") from error


def _could_start(job: JobView, cluster: Cluster) -> bool:
    """Whether there is a device that the job fits when it has it to itself."""
    for node, device in cluster:
        demand = job.demand.get(device.kind)
        if (
            demand is not None
            and device.healthy
            and demand.compute <= device.capacity
            and demand.memory <= device.memory
            and demand.cores <= node.cores
        ):
            return True
    return False
