"""Conformance suite for policies: checks the plans for invented clusters and jobs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.plan.schedule.base import JobView, Plan, Policy
from shoal.plan.schedule.check import check_plan
from shoal.plan.schedule.refusals import fits_empty_device

__all__ = ["check_policy"]


def check_policy(make: Callable[[], Policy], *, examples: int = 200) -> None:
    """Run the whole suite on a policy.

    Args:
        make: Factory of new instances with the same settings.
        examples: Number of clusters, with jobs, to invent.

    Raises:
        AssertionError: the contract of `shoal.plan.schedule.Policy` is broken; hypothesis shows the smallest cluster
            and jobs that break it.
        ImportError: hypothesis is not installed.
    """
    try:
        from hypothesis import given, settings
    except ImportError as error:
        raise ImportError("check_policy needs hypothesis. Install it with: pip install hypothesis") from error
    from shoal.testing.strategies import scheduling_problems

    @settings(max_examples=examples, deadline=None, database=None, report_multiple_bugs=False)
    @given(scheduling_problems())
    def check(situation: tuple[tuple[JobView, ...], Cluster, float]) -> None:
        _check(make, *situation)

    check()


def _check(make: Callable[[], Policy], jobs: tuple[JobView, ...], cluster: Cluster, now: float) -> None:
    policy = make()
    before = copy.deepcopy((jobs, cluster))
    plan = _plain(policy.plan(jobs, cluster, now))
    assert (jobs, cluster) == before, "the policy changed what it was given"
    _assert_legal(plan, jobs, cluster, now)
    assert _plain(policy.plan(jobs, cluster, now)) == plan, "a second call returns another plan"
    assert _plain(make().plan(jobs, cluster, now)) == plan, "another instance returns another plan"
    if not plan.actions and not any(job.devices for job in jobs):
        startable = [job.id for job in jobs if _could_start(job, cluster)]
        assert not startable, f"nothing runs and nothing is started, though {startable} could be"


def _plain(plan: Plan) -> Plan:
    """Return the plan with its refusals evaluated and sorted."""
    return replace(plan, refusals=tuple(sorted(plan.refusals, key=lambda refusal: refusal.job)))


def _assert_legal(plan: Plan, jobs: Sequence[JobView], cluster: Cluster, now: float) -> None:
    try:
        check_plan(plan, jobs, cluster, now)
    except PolicyError as error:
        raise AssertionError(f"the plan is illegal: {error}") from error


def _could_start(job: JobView, cluster: Cluster) -> bool:
    """Return whether a device is large enough for the job alone."""
    return any(device.healthy and fits_empty_device(node, device, job) for node, device in cluster)
