"""Jobs that wait for a faster device where they would end sooner, on clusters of several kinds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from schedule_samples import cluster, gpu, job, needs, placed, refused

import shoal.plan.schedule.auto as auto_module
from shoal.core.resources import Ledger
from shoal.plan.schedule import Auto, JobState, check_plan
from shoal.plan.schedule.auto import SpaceSharing
from shoal.plan.schedule.completion_times import MIN_WAITING_GAIN, CompletionTimes
from shoal.testing.policies import check_policy
from shoal.testing.strategies import scheduling_problems

FAST, SLOW = gpu(0, kind="V100"), gpu(1, kind="K80")
BOTH = cluster(FAST, SLOW)
CROWD = cluster(gpu(0, kind="V100", oversubscription=2.0), SLOW)
WORDS = "waits for cuda:0 (V100), where it is expected to end sooner than on cuda:1 (K80)"


def ask(seconds, times=9, compute=1.0, **amounts):
    """Demand of a job that takes `times` as long on a K80 as on a V100."""
    kinds = {"V100": seconds, "K80": times * seconds}
    return {kind: needs(compute=compute, seconds=each, **amounts) for kind, each in kinds.items()}


def on_fast(seconds, **amounts):
    """A running job with these seconds left on the V100."""
    return job("old", {"V100": needs(**{"compute": 1.0, "seconds": seconds} | amounts)}, on="cuda:0")


CASES = {
    "an idle V100 comes before an idle K80": (BOTH, [job("a", ask(10))], {"a": "cuda:0"}, {}),
    "a K80 nine times as slow is left idle while the V100 is soon free": (
        BOTH,
        [on_fast(20), job("a", ask(10))],
        {},
        {"a": WORDS},
    ),
    "not while the V100 is busy for longer": (BOTH, [on_fast(85), job("a", ask(10))], {"a": "cuda:1"}, {}),
    "not for a gain within the error of estimates": (BOTH, [on_fast(72), job("a", ask(10))], {"a": "cuda:1"}, {}),
    "a wait that gains just more": (BOTH, [on_fast(70), job("a", ask(10))], {}, {"a": WORDS}),
    "not for a device of the same speed": (BOTH, [on_fast(1), job("a", ask(10, times=1))], {"a": "cuda:1"}, {}),
    "later jobs count those that wait already": (
        BOTH,
        [on_fast(20), job("a", ask(10, times=4)), job("b", ask(9, times=4))],
        {"b": "cuda:1"},
        {"a": WORDS},
    ),
    "and those that this plan starts": (
        BOTH,
        [job("a", ask(10)), job("b", ask(9, times=3)), job("c", ask(8, times=2))],
        {"a": "cuda:0", "c": "cuda:1"},
        {"b": WORDS},
    ),
    "and those that fit only a V100, where they wait": (
        BOTH,
        [on_fast(20), job("large", {"V100": needs(compute=1.0, seconds=90)}), job("a", ask(10))],
        {"a": "cuda:1"},
        {"large": "waits for a free device: cuda:0 is busy"},
    ),
    "an overdue job, or one that was not measured, is not waited for": (
        BOTH,
        [on_fast(0), job("a", ask(10))],
        {"a": "cuda:1"},
        {},
    ),
    "room beside it is": (
        BOTH,
        [
            job("stuck", {"V100": needs(compute=0.3, seconds=0)}, on="cuda:0"),
            on_fast(10, compute=0.7),
            job("a", ask(10, compute=0.7)),
        ],
        {},
        {"a": WORDS},
    ),
    "a wait lasts no longer than the run on the free device": (
        BOTH,
        [on_fast(20), replace(job("a", ask(10)), since=-90.0)],
        {"a": "cuda:1"},
        {},
    ),
    "it continues until then": (BOTH, [on_fast(20), replace(job("a", ask(10)), since=-89.0)], {}, {"a": WORDS}),
    "a suspended job waits, too": (
        BOTH,
        [on_fast(20), replace(job("a", ask(10)), state=JobState.SUSPENDED, home="cuda:1")],
        {},
        {"a": WORDS},
    ),
    "a crowded V100 that is free is preferred to a slow K80": (
        CROWD,
        [on_fast(20), job("a", ask(10))],
        {"a": "cuda:0"},
        {},
    ),
    "jobs that slow each other down end later: 2 x 45 s and 10 s": (
        CROWD,
        [on_fast(45), replace(on_fast(45), id="older"), job("a", ask(10))],
        {"a": "cuda:1"},
        {},
    ),
    "two of 20 s end after 40 s": (
        CROWD,
        [on_fast(20), replace(on_fast(20), id="older"), job("a", ask(10))],
        {},
        {"a": WORDS},
    ),
    "a job that does not fit the faster device never waits for it": (
        BOTH,
        [on_fast(20), job("a", ask(10) | {"V100": needs(compute=1.0, memory=90, seconds=1)})],
        {"a": "cuda:1"},
        {},
    ),
    "cores of the node that others keep are not waited for": (
        cluster(FAST, SLOW, cores=4),
        [
            on_fast(20, cores=1),
            job("b", {"K80": needs(compute=0.1, cores=2, seconds=900)}, on="cuda:1"),
            job("a", {"V100": needs(compute=1.0, cores=3, seconds=10), "K80": needs(cores=1, seconds=90)}),
        ],
        {"a": "cuda:1"},
        {},
    ),
    "an unhealthy V100 is not waited for": (
        cluster(replace(FAST, healthy=False), SLOW),
        [on_fast(20), job("a", ask(10))],
        {"a": "cuda:1"},
        {},
    ),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_waits_for_a_faster_device(monkeypatch, name, large):
    """Beyond the limit of pairs, too."""
    where, jobs, begun, reasons = CASES[name]
    if large:
        monkeypatch.setattr(auto_module, "_LARGE", 0)
    plan = Auto().plan(jobs, where, 0.0)
    check_plan(plan, jobs, where, 0.0)
    assert placed(plan) == begun
    assert refused(plan) == reasons


def test_a_job_on_several_devices_ends_by_its_scaling():
    """With h(2) = 0.55, 20 s left are 11 s."""
    where = cluster(FAST, gpu(2, kind="V100"), SLOW)
    team = replace(on_fast(20), devices=("cuda:0", "cuda:2"), preemptible=False)
    team = replace(team, scaling=replace(team.scaling, beta=1.1, devices=2))
    times = CompletionTimes(Ledger(where, [team]), [team])
    view = job("a", ask(10, times=3, compute=0.0))
    found = times.first_faster(view, times.first_free(view))
    assert found.capacity.device.name == "cuda:0"
    assert found.end == pytest.approx(21)


def test_the_gain_of_a_wait_is_relative():
    times = CompletionTimes(Ledger(BOTH, [on_fast(20)]), [on_fast(20)])
    free = times.first_free(job("a", ask(10)))
    assert free.end == 90
    bound = 30 / (1 - MIN_WAITING_GAIN)
    assert times.first_faster(job("a", ask(10)), free._replace(end=bound - 1e-6)) is None
    assert times.first_faster(job("a", ask(10)), free._replace(end=bound + 1e-6)).end == 30


def _before(policy, jobs, where):
    """The starts of a plan that looks only at devices with room, one after another."""
    ledger = Ledger(where, jobs)
    kinds = {capacity.device.kind for capacity in ledger.capacities}

    def rank(view):
        here = [(each.seconds, each.compute) for kind, each in view.demand.items() if kind in kinds]
        seconds, compute = min(here, default=(0.0, 0.0))
        return -max(seconds * compute, view.critical_path) if policy.largest_first else seconds * compute

    def expected(view, capacity):
        device, each = capacity.device, view.demand[capacity.device.kind]
        committed = device.capacity - capacity.compute + each.compute
        crowding = max(1.0, committed / device.compute) if device.compute > 0 else 1.0
        return each.seconds * crowding, -capacity.compute, capacity.position

    starts = []
    for view in sorted((view for view in jobs if view.state is not JobState.RUNNING), key=rank):
        if room := [capacity for capacity in ledger.capacities if ledger.fits(view, capacity)]:
            capacity = min(room, key=lambda capacity: expected(view, capacity))
            ledger.take(view, capacity)
            starts.append((view.id, (capacity.device.name,)))
    return starts


@settings(deadline=None)
@given(scheduling_problems())
def test_on_devices_of_one_kind_no_job_waits_for_a_busy_one(problem):
    jobs, where, now = problem
    kind = next((device.kind for _, device in where), "small")
    alike = where.select(lambda device: device.kind == kind)
    names = {device.name for _, device in alike}
    jobs = [view for view in jobs if names.issuperset(view.devices)]
    for largest_first in (True, False):
        policy = SpaceSharing(largest_first)
        plan = policy.plan(jobs, alike, now)
        assert [(action.job, action.devices) for action in plan.actions] == _before(policy, jobs, alike)
        assert not any("expected to end sooner" in refusal.reason for refusal in plan.refusals)


@settings(deadline=None)
@given(scheduling_problems())
def test_a_job_waits_only_while_another_runs_and_not_for_ever(problem):
    jobs, where, now = problem
    plan = SpaceSharing().plan(jobs, where, now)
    check_plan(plan, jobs, where, now)
    waiting = {refusal.job for refusal in plan.refusals if "expected to end sooner" in refusal.reason}
    assert not waiting or plan.actions or any(view.state is JobState.RUNNING for view in jobs)
    much_later = SpaceSharing().plan(jobs, where, now + 1e9)
    assert not any("expected to end sooner" in refusal.reason for refusal in much_later.refusals)
    assert [(action.job, action.devices) for action in much_later.actions] == _before(SpaceSharing(), jobs, where)


def test_sharing_conforms():
    check_policy(SpaceSharing, examples=settings.default.max_examples // 2)
