"""Conformance suite for policies: checks the plans for invented clusters and jobs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.schedule.base import Changes, JobState, JobView, Plan, Policy, Resume, Session, Start
from shoal.schedule.check import check_plan
from shoal.schedule.ledger import fits_empty_device

__all__ = ["check_policy"]


def check_policy(make: Callable[[], Policy], *, examples: int = 200) -> None:
    """Run the whole suite on a policy.

    Args:
        make: Factory of new instances with the same settings.
        examples: Number of clusters, with jobs, to invent.

    Raises:
        AssertionError: the contract of `shoal.schedule.Policy` is broken; hypothesis shows the smallest cluster and
            jobs that break it.
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
    _check_session(policy, jobs, cluster, now)


def _check_session(policy: Policy, jobs: Sequence[JobView], cluster: Cluster, now: float) -> None:
    """A session plans as the policy does after a node with its jobs, after the rest, and after the start of the plan's
    jobs.
    """
    first = Cluster(cluster.nodes[:1])
    inside = {device.name for _, device in first}
    early = next((i for i, job in enumerate(jobs) if not inside.issuperset(job.devices)), len(jobs) // 2)
    session = policy.session(first)
    _assert_same(session, Changes(tuple(jobs[:early])), policy, jobs[:early], first, now)
    plan = _assert_same(session, Changes(tuple(jobs[early:]), cluster=cluster), policy, jobs, cluster, now)
    begun = {action.job: action for action in plan.actions if isinstance(action, (Start, Resume))}
    if len(begun) < len(plan.actions):
        return
    running = {
        job.id: replace(
            job, state=JobState.RUNNING, devices=begun[job.id].devices, share=begun[job.id].share, since=now
        )
        for job in jobs
        if job.id in begun
    }
    after = [running.get(job.id, job) for job in jobs]
    _assert_same(session, Changes(tuple(running.values())), policy, after, cluster, now + 1.0)
    left = [job for job in after if job.id not in running]
    _assert_same(session, Changes(ended=tuple(running)), policy, left, cluster, now + 2.0)


def _assert_same(
    session: Session, changes: Changes, policy: Policy, jobs: Sequence[JobView], cluster: Cluster, now: float
) -> Plan:
    found = _plain(session.plan(changes, now))
    expected = _plain(policy.plan(jobs, cluster, now))
    assert found == expected, f"given only {changes}, a session plans {found}, the policy plans {expected}"
    return expected


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
