from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf

import pytest
from baselines import RoundRobin
from hypothesis import settings
from schedule_samples import cluster, gpu, job, needs, placed, refused

import shoal.plan.schedule.auto as auto_module
from shoal.core.errors import PolicyError
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule import (
    OBJECTIVES,
    WFD,
    Auto,
    Convergence,
    JobState,
    Plan,
    Policy,
    Refusal,
    Resize,
    Start,
    Suspend,
    WaterFilling,
    check_plan,
    make_policy,
)
from shoal.plan.schedule.auto import PlanEstimate, SpaceSharing, plan_estimate
from shoal.plan.schedule.registry import check_losses
from shoal.simulate.run import SimulationResult
from shoal.simulate.scenario import load
from shoal.testing.policies import check_policy

TWO = cluster(gpu(0), gpu(1))
CROWD = cluster(gpu(0, oversubscription=3.0), gpu(1, oversubscription=3.0))
TWICE_AS_FAST = {"A100": needs(compute=1.0, seconds=10), "H100": needs(compute=1.0, seconds=5)}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_conforms_by_every_objective(objective):
    check_policy(lambda: Auto(objective, _OneByOne()), examples=settings.default.max_examples // 2)


def test_conforms_for_many_jobs(monkeypatch):
    monkeypatch.setattr(auto_module, "_LARGE", 15)
    check_policy(lambda: Auto("mean_completion"), examples=settings.default.max_examples // 2)


SHARING = {
    "largest work first": (
        SpaceSharing(),
        TWO,
        [job("long", compute=0.2, seconds=9), job("wide", compute=0.9, seconds=3), job("small", compute=0.1)],
        {"wide": "cuda:0", "long": "cuda:1", "small": "cuda:1"},
    ),
    "work for which others wait comes earlier": (
        SpaceSharing(),
        cluster(gpu(0)),
        [job("long", seconds=27, compute=1.0), replace(job("rung", seconds=3, compute=1.0), critical_path=28.0)],
        {"rung": "cuda:0"},
    ),
    "also where it takes little of a device": (
        SpaceSharing(),
        cluster(gpu(0)),
        [job("long", seconds=27, compute=1.0), replace(job("rung", seconds=3, compute=0.2), critical_path=28.0)],
        {"rung": "cuda:0"},
    ),
    "not where the mean end counts": (
        SpaceSharing(largest_first=False),
        cluster(gpu(0)),
        [
            job("long", seconds=27, compute=1.0),
            job("short", seconds=3, compute=1.0),
            replace(job("rung", seconds=4, compute=1.0), critical_path=28.0),
        ],
        {"short": "cuda:0"},
    ),
    "smallest work first": (
        SpaceSharing(largest_first=False),
        cluster(gpu(0)),
        [job("long", compute=0.2, seconds=9), job("wide", compute=0.9, seconds=3)],
        {"long": "cuda:0"},
    ),
    "equal work: oldest first, devices in order": (
        SpaceSharing(),
        TWO,
        [job("a"), job("b")],
        {"a": "cuda:0", "b": "cuda:1"},
    ),
    "of devices that nobody would crowd, the emptiest": (
        SpaceSharing(),
        CROWD,
        [job("old", compute=0.3, on="cuda:0"), job("a", compute=0.3)],
        {"a": "cuda:1"},
    ),
    "the faster kind is shared as long as that is no slower": (
        SpaceSharing(),
        cluster(gpu(0), gpu(1, kind="H100", oversubscription=3.0)),
        [job(name, TWICE_AS_FAST) for name in "abcd"],
        {"a": "cuda:1", "b": "cuda:1", "c": "cuda:0", "d": "cuda:1"},
    ),
    "capacity, memory and cores are hard": (
        SpaceSharing(),
        cluster(gpu(0), cores=3),
        [job("a", compute=1.2), job("b", memory=90), job("c", cores=4), job("d", compute=1.0)],
        {"d": "cuda:0"},
    ),
    "no devices": (SpaceSharing(), cluster(), [job("a")], {}),
}


@pytest.mark.parametrize("name", SHARING)
def test_sharing(name):
    policy, where, jobs, expected = SHARING[name]
    plan = policy.plan(jobs, where, 0.0)
    check_plan(plan, jobs, where, 0.0)
    assert list(placed(plan).items()) == list(expected.items())
    assert set(placed(plan)) | set(refused(plan)) == {view.id for view in jobs if not view.devices}


ELASTIC = Scaling(alpha=1.5, beta=1.25, max_jobs=2, devices=2, resize_seconds=3.0)


def elastic(name, **options):
    return replace(job(name, **options), scaling=ELASTIC)


OUTLOOKS = {
    "alone": (TWO, [job("a", seconds=8)], (Start("a", ("cuda:0",)),), PlanEstimate(8, 8, 0, 1)),
    "a crowded device: b's last 4 s are as fast as alone": (
        CROWD,
        [job("a", compute=0.8, seconds=4), job("b", compute=0.8, seconds=8)],
        (Start("a", ("cuda:0",)), Start("b", ("cuda:0",))),
        PlanEstimate(10.4, 8.4, 0, 1.25),
    ),
    "who follows on a crowded device brings what it asks for": (
        cluster(gpu(0, oversubscription=3.0)),
        [job("a", compute=0.8, seconds=4), job("b", compute=0.8, seconds=8), job("c", compute=0.2, seconds=6)],
        (Start("a", ("cuda:0",)), Start("b", ("cuda:0",))),
        PlanEstimate(12.4, (6.4 + 10.4 + 12.4) / 3, 6.4, 1.25),
    ),
    "half a device: h(1/2) = α": (
        TWO,
        [elastic("a", seconds=8)],
        (Start("a", ("cuda:0",), 0.5),),
        PlanEstimate(12, 12, 0, 1 / 1.5),
    ),
    "two devices: h(2) = β/2": (
        TWO,
        [elastic("a", seconds=8)],
        (Start("a", ("cuda:0", "cuda:1")),),
        PlanEstimate(5, 5, 0, 1.6),
    ),
    "moving costs": (
        TWO,
        [elastic("a", seconds=8, on="cuda:0")],
        (Resize("a", ("cuda:0", "cuda:1")),),
        PlanEstimate(8, 8, 0, 1.6),
    ),
    "who waits follows the first to end, the longest first": (
        cluster(gpu(0)),
        [job("a", seconds=4, on="cuda:0"), job("b", seconds=1), job("c", seconds=2)],
        (),
        PlanEstimate(7, 17 / 3, 5, 1),
    ),
    "what can run nowhere does not count": (
        TWO,
        [job("a", seconds=4, on="cuda:0"), job("b", {"H200": needs()})],
        (),
        PlanEstimate(4, 4, 0, 1),
    ),
    "who is suspended waits": (
        cluster(gpu(0)),
        [job("a", seconds=4, on="cuda:0"), job("b", seconds=6)],
        (Suspend("a"), Start("b", ("cuda:0",))),
        PlanEstimate(10, 8, 6, 1),
    ),
    "nothing runs": (TWO, [job("a")], (), PlanEstimate(inf, inf, inf, 0)),
    "no jobs": (TWO, [], (), PlanEstimate(0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", OUTLOOKS)
def test_plan_estimate(name):
    where, jobs, actions, expected = OUTLOOKS[name]
    found = plan_estimate(Plan(actions), jobs, where)
    for value in ("makespan", "mean_completion", "wait", "rate"):
        assert getattr(found, value) == pytest.approx(getattr(expected, value)), value


def test_grows_over_idle_devices():
    """Fluid's toy case (section 4.4): on five devices 30 s are due three, 12 s one, and 4 s half of one each."""
    where = cluster(*(gpu(index) for index in range(5)))
    scaling = Scaling(alpha=1.0, max_jobs=2, devices=4)
    jobs = [
        replace(job(str(index), compute=1.0, seconds=seconds), scaling=scaling)
        for index, seconds in enumerate((4, 4, 12, 30))
    ]
    assert Auto().plan(jobs, where, 0.0) == WaterFilling().plan(jobs, where, 0.0)


def test_a_scaling_implied_by_the_demand_does_not_reduce_sharing():
    """As of live jobs whose sharing was not seen yet: two of 0.4 at no cost. Three times a device may be reserved."""
    views = [
        *(job(name, compute=0.4, seconds=10, on="cuda:0") for name in "abc"),
        *(job(name, compute=0.8, seconds=10) for name in "defg"),
    ]
    jobs = [replace(view, scaling=Scaling(1.0, max_jobs=int(1 / view.demand["A100"].compute))) for view in views]
    where = cluster(gpu(0, oversubscription=3.0))
    assert placed(Auto().plan(jobs, where, 0.0)) == {"d": "cuda:0", "e": "cuda:0"}


def test_does_not_grow_where_that_costs_more_than_it_gains():
    """1 s is left; on two devices that would take 0.6 s and 3 s for the change."""
    jobs = [elastic("a", compute=1.0, seconds=1, on="cuda:0")]
    assert Auto().plan(jobs, TWO, 0.0).actions == ()


def test_shares_what_does_not_slow_down():
    """Four jobs of a quarter fit on one device at full speed; half a device each would cost them α."""
    jobs = [elastic(name, compute=0.25, seconds=10) for name in "abcd"]
    plan = Auto().plan(jobs, cluster(gpu(0)), 0.0)
    assert plan.actions == tuple(Start(name, ("cuda:0",)) for name in "abcd")


def test_leaves_running_jobs_alone_where_it_must():
    jobs = [replace(elastic("old", compute=1.0, on="cuda:0"), preemptible=False), job("a", compute=0.5)]
    for objective in OBJECTIVES:
        plan = Auto(objective, _OneByOne()).plan(jobs, cluster(gpu(0)), 0.0)
        assert plan.actions == ()
        assert refused(plan) == {"a": "waits for a free device: cuda:0 is busy"}


@dataclass(frozen=True)
class _OneByOne(Policy):
    """Gives a device to the job that has run least, and asks to be woken; leaves devices idle that others could use."""

    quantum: float = 10.0

    def plan(self, jobs, cluster, now):
        plan = WFD().plan(jobs, cluster, now)
        waiting = [view for view in jobs if view.state is JobState.WAITING]
        healthy = {device.name for _, device in cluster if device.healthy}
        held = [view for view in jobs if view.devices and healthy.issuperset(view.devices) and view.preemptible]
        if plan.actions or not waiting or not held or waiting[0].demand != held[0].demand:
            return replace(plan, wake=now + self.quantum)
        old, new = held[0], waiting[0]
        actions = (Suspend(old.id), Start(new.id, old.devices)) if len(old.devices) == 1 else ()
        begun = {new.id} if actions else set()
        off = [view.id for view in jobs if not view.devices and view.id not in begun]
        off += [old.id] if actions else []
        return Plan(actions, tuple(Refusal(name, "waits for its turn") for name in off), now + self.quantum)


TURNS = {
    "turns are taken": ("time_to_target", _OneByOne(), 1.0, True),
    "a switch costs more than the wait": ("time_to_target", _OneByOne(), 50.0, False),
    "the makespan gains nothing by them": ("makespan", _OneByOne(), 1.0, False),
    "no time-sharing policy": ("time_to_target", None, 1.0, False),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns(name):
    """One device, three jobs of 30 s: the second is expected to wait 30 s and the third 60 s, 45 s on average."""
    objective, turns, cost, expected = TURNS[name]
    demand = {"A100": needs(compute=1.0, seconds=30)}
    views = [job("a", demand, on="cuda:0"), job("b", demand), job("c", demand)]
    jobs = [replace(view, switch_seconds=cost) for view in views]
    plan = Auto(objective, turns).plan(jobs, cluster(gpu(0)), 0.0)
    assert (plan.actions == (Suspend("a"), Start("b", ("cuda:0",)))) == expected
    assert (plan.wake is not None) == expected


def test_no_turns_if_they_leave_compute_unused():
    """Two jobs fit beside each other; one by one they would do half as much in a second."""

    class Alone(Policy):
        def plan(self, jobs, cluster, now):
            others = tuple(Refusal(view.id, "waits for its turn") for view in jobs[1:])
            return Plan((Start(jobs[0].id, ("cuda:0",)),), others, now + 1)

    jobs = [job(name, compute=0.5) for name in "abc"]
    plan = Auto("time_to_target", Alone()).plan(jobs, cluster(gpu(0)), 0.0)
    assert set(placed(plan)) == {"a", "b"}


def test_many_jobs_are_packed_by_a_knapsack_policy(monkeypatch):
    monkeypatch.setattr(auto_module, "_LARGE", 4)
    jobs = [job("small", seconds=1), job("long", seconds=9), job("wide", compute=0.9, seconds=8)]
    assert list(placed(Auto().plan(jobs, TWO, 0.0)).items()) == list(placed(WFD().plan(jobs, TWO, 0.0)).items())
    assert list(placed(Auto("mean_completion").plan(jobs, TWO, 0.0))) == ["small", "wide", "long"]


@pytest.mark.parametrize(
    ("left", "first"),
    [
        pytest.param(5.0, "long", id="all can end in time"),
        pytest.param(4.9, "short", id="they cannot"),
        pytest.param(0.0, "short", id="none can"),
    ],
)
def test_the_makespan_counts_if_the_deadline_leaves_time_for_it(left: float, first: str):
    jobs = [job("short", compute=1.0, seconds=2), job("long", compute=1.0, seconds=3)]
    policy = Auto().with_deadline(100.0 + left)
    assert list(placed(policy.plan(jobs, cluster(gpu(0)), 100.0))) == [first]
    assert list(placed(Auto("mean_completion").plan(jobs, cluster(gpu(0)), 100.0))) == ["short"]


def test_objectives_are_properties_of_outcomes():
    assert all(isinstance(getattr(SimulationResult, name), property) for name in OBJECTIVES)
    assert make_policy("auto", "time_to_target").objective == "time_to_target"


@pytest.mark.parametrize(("objective", "first"), [("makespan", "long/0"), ("mean_completion", "short/0")])
def test_a_scenario_tells_its_objective(tmp_path, objective, first):
    file = tmp_path / "two.toml"
    file.write_text(
        f"""
        objective = "{objective}"
        packing = "none"
        [[nodes]]
        kind = "A100"
        devices = 1
        memory_gb = 80
        [[jobs]]
        name = "short"
        seconds = 1
        [[jobs]]
        name = "long"
        seconds = 9
        """
    )
    outcome = load(file).simulate("auto")
    assert min(outcome.completion, key=outcome.completion.__getitem__) == first


@pytest.mark.parametrize(
    ("policy", "begun", "words"),
    [
        pytest.param(Auto(), False, None, id="no turns"),
        pytest.param(Auto("time_to_good", turns=None), False, None, id="no time-sharing policy"),
        pytest.param(Auto("time_to_good", turns=RoundRobin()), False, None, id="turns in order"),
        pytest.param(
            Auto("time_to_good"),
            False,
            r"'auto' with the objective 'time_to_good' compares losses.*--loss\), or choose another objective",
            id="turns by loss",
        ),
        pytest.param(
            Convergence(), False, r"'convergence' compares losses.*--loss\), or choose a policy", id="another policy"
        ),
        pytest.param(
            Convergence(),
            True,
            r"maximised; choose a policy that needs none, .*\(--policy fifo\)$",
            id="study has begun",
        ),
    ],
)
def test_what_needs_losses_is_refused_without_them(policy, begun, words):
    assert policy.needs_losses == (words is not None)
    check_losses(policy, "loss", begun=begun)
    with nullcontext() if words is None else pytest.raises(PolicyError, match=words):
        check_losses(policy, None, begun=begun)


def test_an_unknown_objective_is_named():
    with pytest.raises(
        PolicyError, match="one of makespan, mean_completion, time_to_target, time_to_good, got 'speed'"
    ):
        Auto("speed")
