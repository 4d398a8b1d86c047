from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from schedule_samples import cluster, gpu, job, needs

from shoal.core.errors import PolicyError
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule import (
    WFD,
    Auto,
    JobState,
    JobView,
    Plan,
    Policy,
    Refusal,
    Resize,
    Resume,
    Start,
    Stop,
    Suspend,
    check_plan,
    make_policy,
)
from shoal.testing.policies import check_policy

WHERE = cluster(gpu(0), gpu(1, healthy=False), gpu(2, kind="H200"), gpu(3), cores=4)
RUNS = replace(job("runs", compute=0.6, memory=50, on="cuda:0"), scaling=Scaling(max_jobs=2, devices=2))
SLEEPS = JobView("sleeps", {"A100": needs()}, JobState.SUSPENDED)
WAITS = replace(job("waits", compute=0.5, memory=40), scaling=Scaling(max_jobs=2))
JOBS = [RUNS, SLEEPS, WAITS]
LATER = Refusal("waits", "later")
WIDE = Scaling(max_jobs=1, devices=2)
NEW = job("new", memory=50)


def complete(plan):
    """The plan, with a refusal for each job that it suspends or leaves suspended."""
    asleep = {"sleeps"}
    for action in plan.actions:
        if isinstance(action, Suspend):
            asleep.add(action.job)
        else:
            asleep.discard(action.job)
    known = {refusal.job for refusal in plan.refusals}
    rest = tuple(Refusal(name, "its turn comes") for name in sorted(asleep - known) if name != "waits")
    return replace(plan, refusals=(*plan.refusals, *rest))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan((), (LATER,)), id="nothing"),
        pytest.param(Plan((Start("waits", ("cuda:3",)),)), id="start"),
        pytest.param(Plan((Suspend("runs"), Start("waits", ("cuda:0",)))), id="on what was freed"),
        pytest.param(Plan((Stop("runs", "why"), Start("waits", ("cuda:0",)))), id="on what was stopped"),
        pytest.param(Plan((Suspend("runs"), Resume("runs", ("cuda:3",))), (LATER,)), id="move"),
        pytest.param(Plan((Resume("sleeps", ("cuda:3",)), Start("waits", ("cuda:3",)))), id="share"),
        pytest.param(Plan((Resize("runs", ("cuda:0", "cuda:3")),), (LATER,)), id="resize"),
    ],
)
def test_legal_plans_pass(plan):
    check_plan(complete(plan), JOBS, WHERE, 0.0)


ILLEGAL = {
    "unknown job": (Plan((Start("nobody", ("cuda:3",)),), (LATER,)), "'nobody'.*does not exist"),
    "unknown device": (Plan((Start("waits", ("cuda:9",)),)), "'cuda:9'.*does not exist; there are cuda:0"),
    "unhealthy device": (Plan((Start("waits", ("cuda:1",)),)), "'cuda:1'.*not healthy"),
    "wrong kind": (Plan((Start("waits", ("cuda:2",)),)), "cannot run on H200, only on A100"),
    "started twice": (Plan((Start("waits", ("cuda:3",)),) * 2), "that is running; it must be waiting"),
    "start of a running job": (Plan((Start("runs", ("cuda:3",)),), (LATER,)), "that is running"),
    "suspend of a waiting job": (Plan((Suspend("waits"),), (LATER,)), "Suspend.*that is waiting; it must be running"),
    "resume of a running job": (Plan((Resume("runs", ("cuda:3",)),), (LATER,)), "it must be suspended"),
    "resume after stop": (Plan((Stop("runs", "why"), Resume("runs", ("cuda:0",))), (LATER,)), "does not exist"),
    "resize to nothing": (Plan((Resize("runs", ()),), (LATER,)), "at least one device"),
    "resize to one device twice": (Plan((Resize("runs", ("cuda:0", "cuda:0")),), (LATER,)), "none twice"),
    "resize to more than it may use": (
        Plan((Resize("runs", ("cuda:0", "cuda:1", "cuda:3")),), (LATER,)),
        "names 3 devices; the job may use 2",
    ),
    "several devices that are not free": (
        Plan((Start("waits", ("cuda:3",)), Resize("runs", ("cuda:0", "cuda:3")))),
        "cuda:3 would be shared with 'runs', which holds 2 devices",
    ),
    "two devices for one fraction": (Plan((Resize("runs", ("cuda:0", "cuda:3"), 0.5),), (LATER,)), "has all of each"),
    "a share that was not asked for": (Plan((Resume("sleeps", ("cuda:3",), 0.5),), (LATER,)), "job that cannot share"),
    "no share": (Plan((Start("waits", ("cuda:3",), 0.0),)), "not above 0 and finite"),
    "a share that is not a number": (Plan((Start("waits", ("cuda:3",), float("nan")),)), "not above 0 and finite"),
    "too large a share": (Plan((Start("waits", ("cuda:3",), 1.5),)), "take 1.5 of its 1 compute"),
    "a wake that is past": (Plan((), (LATER,), wake=0.0), "finite and after now, .* got 0.0 s"),
    "a wake that is not a time": (Plan((), (LATER,), wake=float("nan")), "finite and after now"),
    "a wake that never comes": (Plan((), (LATER,), wake=float("inf")), "finite and after now"),
    "too much compute": (Plan((Start("waits", ("cuda:0",)),)), r"Start\(job='waits'.*take 1.1 of its 1 compute"),
    "neither": (Plan(), "'waits' neither runs nor is refused"),
    "both": (Plan((Start("waits", ("cuda:3",)),), (LATER,)), "not waiting after the plan"),
    "refused twice": (Plan((), (LATER, LATER)), "second refusal"),
    "refused without a word": (Plan((), (Refusal("waits", " "),)), "no reason"),
    "refusal of a running job": (Plan((), (LATER, Refusal("runs", "no"))), "'runs'.*not waiting"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_plans_are_named(name):
    plan, message = ILLEGAL[name]
    with pytest.raises(PolicyError, match=message):
        check_plan(complete(plan), JOBS, WHERE, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"compute": 0.1, "memory": 31}, "take 81000000000 of its 80000000000 bytes", id="memory"),
        pytest.param({"compute": 0.1, "cores": 3.5}, "node n0 would take 4.5 of its 4 cores", id="cores"),
    ],
)
def test_hard_limits(changes, message):
    with pytest.raises(PolicyError, match=message):
        check_plan(Plan((Start("new", ("cuda:0",)),)), [RUNS, job("new", **changes)], WHERE, 0.0)


@pytest.mark.parametrize("action", [Suspend("runs"), Stop("runs", "why"), Resize("runs", ("cuda:3",))], ids=str)
def test_a_job_that_is_not_preemptible_stays_as_it_is(action):
    with pytest.raises(PolicyError, match=r"'runs'.*not preemptible"):
        check_plan(Plan((action,), (LATER,)), [replace(RUNS, preemptible=False), WAITS], WHERE, 0.0)


def test_cores_of_jobs_on_other_devices_of_the_node_count():
    with pytest.raises(PolicyError, match="node n0"):
        check_plan(Plan((Start("new", ("cuda:3",)),)), [RUNS, job("new", cores=3.5)], WHERE, 0.0)


def test_an_overfull_device_is_legal_if_the_plan_does_not_use_it():
    full = [job("a", compute=0.9, on="cuda:0"), job("b", compute=0.9, on="cuda:0")]
    check_plan(Plan((Start("new", ("cuda:3",)),)), [*full, job("new")], WHERE, 0.0)


def test_a_job_that_gives_back_a_device_may_keep_one_on_which_other_programs_have_taken_memory():
    wide = replace(job("wide", memory=50), state=JobState.RUNNING, devices=("cuda:0", "cuda:3"), scaling=WIDE)
    crowded = cluster(gpu(0, memory=20), gpu(3))
    check_plan(Plan((Resize("wide", ("cuda:0",)), Start("new", ("cuda:3",)))), [wide, job("new")], crowded, 0.0)
    with pytest.raises(PolicyError, match="the jobs on cuda:0 would take"):
        check_plan(Plan((Resize("wide", ("cuda:3",)), Start("new", ("cuda:0",)))), [wide, NEW], crowded, 0.0)
    narrow = replace(job("narrow", memory=50, on="cuda:0"), share=0.5, scaling=Scaling(max_jobs=2, devices=2))
    check_plan(Plan((Resize("narrow", ("cuda:0",), 0.25),)), [narrow], crowded, 0.0)
    for more in (Resize("narrow", ("cuda:0",), 0.75), Resize("narrow", ("cuda:0", "cuda:3"))):
        with pytest.raises(PolicyError, match="the jobs on cuda:0 would take"):
            check_plan(Plan((more,)), [narrow], crowded, 0.0)


class Broken(Policy):
    """Nothing is wrong with it yet."""

    def plan(self, jobs, cluster, now):
        return WFD().plan(jobs, cluster, now)


class Forgetful(Broken):
    """Remembers its last plan."""

    last = 0

    def plan(self, jobs, cluster, now):
        Forgetful.last += 1
        plan = super().plan(jobs, cluster, now)
        return Plan(plan.actions, tuple(Refusal(r.job, f"{r.reason} {Forgetful.last}") for r in plan.refusals))


class Lazy(Broken):
    """Starts nothing."""

    def plan(self, jobs, cluster, now):
        return Plan((), tuple(Refusal(job.id, "no") for job in jobs if not job.devices))


class Greedy(Broken):
    """Starts everything on the first device."""

    def plan(self, jobs, cluster, now):
        first = next((device.name for _, device in cluster), "")
        return Plan(tuple(Start(job.id, (first,)) for job in jobs if not job.devices))


class Meddling(Broken):
    """Changes the demands it was shown."""

    def plan(self, jobs, cluster, now):
        plan = super().plan(jobs, cluster, now)
        for view in jobs:
            view.demand.update(
                {kind: replace(each, seconds=each.seconds / 2 + 1) for kind, each in view.demand.items()}
            )
        return plan


@pytest.fixture
def unshrunk():
    """The first example that fails is good enough."""
    chosen = settings.get_current_profile_name()
    settings.register_profile("unshrunk", phases=[Phase.generate])
    settings.load_profile("unshrunk")
    yield
    settings.load_profile(chosen)


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Forgetful, "a second call returns another plan"),
        (Lazy, "nothing is started"),
        (Greedy, "illegal"),
        (Meddling, "changed what it was given"),
    ],
)
def test_the_conformance_suite_finds_broken_policies(policy, message):
    with pytest.raises(AssertionError, match=message):
        check_policy(policy, examples=60)


def test_policies_are_made_by_name():
    assert isinstance(make_policy("wfd"), WFD)
    assert make_policy("auto", "mean_completion") == Auto("mean_completion")
    own: Policy = Lazy()
    assert make_policy(own) is own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fifoo", r"'fifoo' \(did you mean 'fifo'\?\).*auto, convergence"),
        ("huge", r"no policy 'huge'; .*fifo"),
        ("round_robin", r"'round_robin' is a baseline of the papers.* benchmarks/baselines .*one of auto, convergence"),
    ],
)
def test_an_unknown_policy_is_named_with_the_known_ones(name, message):
    with pytest.raises(PolicyError, match=message):
        make_policy(name)
