"""The simulator, on cases worked out by hand."""

from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backend.simulated import ClusterEvent, SimulatedJob, Simulation, SlowDown, Source
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import PolicyError, ScenarioError
from shoal.cost.scaling import Scaling
from shoal.schedule import WFD, Fifo, JobState, Plan, Policy, Refusal, Resize, Resume, Start, Stop, Suspend

GB = 10**9


def node(name="n0", devices=1, kind="A100", cores=8, **changes):
    return Node(name, cores, tuple(Device(f"{name}/{i}", kind, 80 * GB, **changes) for i in range(devices)))


def job(name, seconds=10.0, *, compute=1.0, memory=1.0, cores=1.0, kind="A100", **changes: Any):
    return SimulatedJob(name, {kind: Demand(compute, int(memory * GB), cores, seconds)}, **changes)


class Scripted(Policy):
    """Does what a table says, at the times it says."""

    def __init__(self, script):
        self.script = dict(script)
        self.seen = []

    def plan(self, jobs, cluster, now):
        self.seen.append((now, {job.id: job for job in jobs}))
        actions = self.script.pop(now, ())
        idle = {job.id for job in jobs if not job.devices}
        for action in actions:
            (idle.add if isinstance(action, Suspend) else idle.discard)(action.job)
        later = [time for time in self.script if time > now]
        return Plan(tuple(actions), tuple(Refusal(name, "scripted") for name in idle), min(later, default=None))


class Halved(SlowDown):
    """Everybody on a device at 1/n of the speed."""

    def speeds(self, device: Device, tenants: Sequence[object]) -> Sequence[float]:
        return [1 / len(tenants)] * len(tenants)


TWO = Cluster((node(devices=2),))
ONE = Cluster((node(),))
ON, BOTH = ("n0/0",), ("n0/0", "n0/1")


def ends(jobs, cluster=ONE, policy=None, slowdown=None, **settings):
    return dict(Simulation(jobs, cluster, policy or Fifo(), slowdown, **settings).run().completion)


CASES = {
    "one after the other": ({"jobs": [job("a", 10), job("b", 5)]}, {"a": 10, "b": 15}),
    "side by side": ({"jobs": [job("a", 10), job("b", 5)], "cluster": TWO}, {"a": 10, "b": 5}),
    "a later arrival": ({"jobs": [job("a", 10, arrival=3), job("b", 5, arrival=20)]}, {"a": 13, "b": 25}),
    "a job of no seconds": ({"jobs": [job("a", 0), job("b", 5)]}, {"a": 0, "b": 5}),
    "shared without harm": (
        {"jobs": [job("a", 10, compute=0.5), job("b", 5, compute=0.5)], "policy": WFD()},
        {"a": 10, "b": 5},
    ),
    "shared at half speed: b's 5 s take 10, then a has 5 s left": (
        {"jobs": [job("a", 10, compute=0.5), job("b", 5, compute=0.5)], "policy": WFD(), "slowdown": Halved()},
        {"b": 10, "a": 15},
    ),
    "start costs": ({"jobs": [job("a", 10, start_seconds=2.0)]}, {"a": 12}),
    "checkpoints cost a tenth": (
        {"jobs": [job("a", 10, checkpoint_every=5.0, checkpoint_seconds=0.5)]},
        {"a": 11},
    ),
    "suspended for 3 s, resumed for 1 s": (
        {
            "jobs": [job("a", 10, switch_seconds=1.0)],
            "policy": Scripted({0: [Start("a", ON)], 4: [Suspend("a")], 7: [Resume("a", ON)]}),
        },
        {"a": 14},
    ),
    "stopped, its progress kept, started anew": (
        {
            "jobs": [job("a", 10, start_seconds=2.0)],
            "policy": Scripted({0: [Start("a", ON)], 4: [Stop("a", "room for b")], 5: [Start("a", ON)]}),
        },
        {"a": 15},
    ),
    "two devices: h(2) = 1.2 / 2": (
        {
            "jobs": [job("a", 10, scaling=Scaling(beta=1.2, devices=2))],
            "cluster": TWO,
            "policy": Scripted({0: [Start("a", BOTH)]}),
        },
        {"a": 6},
    ),
    "grown after 4 s, 1 s to resize": (
        {
            "jobs": [job("a", 10, scaling=Scaling(devices=2, resize_seconds=1.0))],
            "cluster": TWO,
            "policy": Scripted({0: [Start("a", ON)], 4: [Resize("a", BOTH)]}),
        },
        {"a": 8},
    ),
    "its device fails: from the last checkpoint on another": (
        {"jobs": [job("a", 10, checkpoint_every=3.0)], "cluster": TWO, "events": [ClusterEvent(8.0, failed=("n0/0",))]},
        {"a": 12},
    ),
    "its device fails without a checkpoint": (
        {"jobs": [job("a", 10)], "cluster": TWO, "events": [ClusterEvent(8.0, failed=("n0/0",))]},
        {"a": 18},
    ),
    "its node is removed": (
        {
            "jobs": [job("a", 10)],
            "cluster": Cluster((node(), node("n1"))),
            "events": [ClusterEvent(8.0, removed=("n0",))],
        },
        {"a": 18},
    ),
    "all devices are lost and one comes back": (
        {
            "jobs": [job("a", 10), job("b", 1)],
            "events": [ClusterEvent(5.0, failed=("n0",)), ClusterEvent(20.0, restored=("n0/0",))],
        },
        {"a": 30, "b": 31},
    ),
    "a node joins": (
        {"jobs": [job("a", 10), job("b", 10)], "events": [ClusterEvent(4.0, added=(node("n1"),))]},
        {"a": 10, "b": 14},
    ),
    "only a later node is large enough": (
        {"jobs": [job("a", 10, kind="H100")], "events": [ClusterEvent(4.0, added=(node("n1", kind="H100"),))]},
        {"a": 14},
    ),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_ends(given, expected):
    assert ends(**given) == pytest.approx(expected)


def test_sums():
    jobs = [job("a", 10, compute=0.5), job("b", 5, compute=0.5), job("c", 5, arrival=2.0)]
    outcome = Simulation(jobs, TWO, Fifo()).run()
    assert outcome.completion == {"a": 10, "b": 5, "c": 10}
    assert (outcome.makespan, outcome.mean_completion, outcome.p95_completion) == (10, pytest.approx(23 / 3), 10)
    assert outcome.device_seconds == 20
    assert outcome.occupancy == ((0, 0.5), (5, 0.75), (10, 0.0))
    assert outcome.mean_occupancy == pytest.approx(0.625)
    assert [(stay.job, stay.begin, stay.end) for stay in outcome.intervals] == [("b", 0, 5), ("a", 0, 10), ("c", 5, 10)]


def test_what_a_policy_is_told():
    script = {0: [Start("a", ON)], 4: [Suspend("a")], 7: [Resume("a", ON)], 9: ()}
    policy = Scripted(script)
    losses = [10 - i for i in range(10)]
    Simulation([job("a", 10, curve=losses, switch_seconds=1.0, epoch=2, budget=12)], ONE, policy, quantum=1.0).run()
    seen = {now: views["a"] for now, views in policy.seen if views}
    assert [seen[now].state for now in script] == [
        JobState.WAITING, JobState.RUNNING, JobState.SUSPENDED, JobState.RUNNING,
    ]  # fmt: skip
    assert [seen[now].demand["A100"].seconds for now in script] == pytest.approx([10, 6, 6, 5])
    assert [seen[now].epoch for now in script] == [2, 6, 6, 7]
    assert [seen[now].ran for now in script] == [0, 4, 4, 6]
    assert [seen[now].since for now in script] == [0, 0, 4, 7]
    turns = [(q.highest, q.lowest, q.last, q.steps, q.seconds) for q in seen[9].quanta]
    assert turns == [(10, 7, 7, 4, 4), (6, 6, 6, 1, 2)]


def test_a_turn_lasts_a_quantum_at_least():
    policy = Scripted({0: [Start("a", ON)], 2: (), 4: (), 6: (), 8: ()})
    Simulation([job("a", 10, curve=range(10))], ONE, policy, quantum=3.0).run()
    turns = [len(views["a"].quanta) for _, views in policy.seen if views]
    assert turns == [0, 0, 1, 1, 2]


REFUSED = {
    "memory": (job("x", memory=90), "needs 90 GB, the largest device n0/0 has 80 GB"),
    "compute": (job("x", compute=1.5), "needs 1.5 of a device's compute, the largest device n0/0 offers 1"),
    "compute of a job that may grow, but not share": (
        job("x", compute=1.5, scaling=Scaling(devices=4)),
        "needs 1.5 of a device's compute, the largest device n0/0 offers 1",
    ),
    "cores": (job("x", cores=9), "needs 9 CPU cores, node n0 of the largest device n0/0 has 8"),
    "kind": (job("x", kind="TPU"), "it runs on TPU, the devices are A100"),
}


@pytest.mark.parametrize(("large", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_job_that_never_fits_is_refused_at_once(large, reason):
    outcome = Simulation([large, job("b", 5)], ONE, Fifo()).run()
    assert outcome.refused == {"x": f"can never run here: {reason}"}
    assert outcome.completion == {"b": 5}


@pytest.mark.parametrize("devices", [0, 1], ids=["no devices", "all devices lost"])
def test_jobs_wait_where_there_is_no_device(devices):
    lost = [ClusterEvent(4.0, failed=("n0",))]
    outcome = Simulation([job("a"), job("b")], Cluster((node(devices=devices),)), Fifo(), events=lost[:devices]).run()
    assert outcome.completion == {}
    assert outcome.makespan == outcome.mean_completion == outcome.p95_completion == outcome.time_to_target == inf
    assert outcome.mean_occupancy == 0
    assert sorted({**outcome.waiting, **outcome.refused}) == ["a", "b"]


def test_only_the_last_plan_s_wake_counts():
    class Once(Policy):
        asked: ClassVar[list[float]] = []

        def plan(self, jobs, cluster, now):
            self.asked.append(now)
            starts = [Start(job.id, ON) for job in jobs[:1] if not job.devices]
            waiting = jobs[len(starts) :] if starts else [job for job in jobs if not job.devices]
            return Plan(tuple(starts), tuple(Refusal(job.id, "later") for job in waiting), None if now else 6.0)

    assert ends([job("a", 10), job("b", 1, arrival=4.0)], policy=Once()) == {"a": 10, "b": 11}
    assert Once.asked == [0, 4, 10, 11]


def test_what_is_stopped_is_planned_for_at_once():
    class Restless(Policy):
        """Stops a job that has run for 4 s, once."""

        def plan(self, jobs, cluster, now):
            stop = [Stop(job.id, "once") for job in jobs if job.devices and now == 4]
            start = [Start(job.id, ON) for job in jobs if not job.devices]
            return Plan((*stop, *start), (), 4.0 if now < 4 else None)

    assert ends([job("a", 10, start_seconds=1.0)], policy=Restless()) == {"a": 12}


def test_a_policy_that_only_wakes_comes_to_an_end():
    class Sleepy(Policy):
        def plan(self, jobs, cluster, now):
            return Plan((), tuple(Refusal(job.id, "not now") for job in jobs), now + 1.0)

    outcome = Simulation([job("a")], ONE, Sleepy()).run()
    assert outcome.waiting == {"a": "not now"}


def test_a_job_that_stands_still_is_named():
    class Never(SlowDown):
        def speeds(self, device, tenants):
            return [0.0] * len(tenants)

    outcome = Simulation([job("a")], ONE, Fifo(), Never()).run()
    assert outcome.waiting == {"a": "makes no progress on n0/0"}


def test_an_illegal_plan_is_an_error():
    with pytest.raises(PolicyError, match="does not exist"):
        Simulation([job("a")], ONE, Scripted({0: [Start("a", ("n7/0",))]})).run()


WRONG = {
    "id twice": ({"jobs": [job("a"), job("a")]}, "two jobs are called 'a'"),
    "unknown device": ({"jobs": [job("a")], "events": [ClusterEvent(1.0, failed=("gpu",))]}, "no node or device 'gpu'"),
    "node added twice": ({"jobs": [job("a")], "events": [ClusterEvent(1.0, added=(node(),))]}, "'n0' already"),
    "no time": ({"jobs": [job("a")], "events": [ClusterEvent(float("nan"))]}, "has no time"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input(given, message):
    with pytest.raises(ScenarioError, match=message):
        ends(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"arrival": -1.0}, "`arrival`", id="negative arrival"),
        pytest.param({"start_seconds": float("nan")}, "`start_seconds`", id="nan"),
        pytest.param({"checkpoint_every": 0.0}, "`checkpoint_every`", id="no time between checkpoints"),
    ],
)
def test_wrong_job(changes, message):
    with pytest.raises(ScenarioError, match=message):
        job("a", **changes)
    with pytest.raises(ScenarioError, match="no demand"):
        SimulatedJob("a", {})


def test_a_source_makes_jobs_of_what_has_ended():
    class Chain(Source):
        def begin(self):
            return [job("a0", 3, arrival=1.0)]

        def ended(self, name, now):
            return [job("a1", 3, arrival=now + 1)] if name == "a0" else []

    assert ends([], sources=[Chain()]) == {"a0": 4, "a1": 8}


@settings(max_examples=50, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.sampled_from((0.2, 0.5, 1.0))), max_size=12),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=4),
    st.sampled_from((Fifo(), WFD())),
)
def test_every_job_ends_and_lean_changes_nothing(amounts, devices, changes, policy):
    jobs = [job(f"j{i}", s, compute=c, arrival=float(a)) for i, (a, s, c) in enumerate(amounts)]
    events = [ClusterEvent(float(at), **{"failed" if bad else "restored": ("n0/0",)}) for at, bad in changes]
    events.append(ClusterEvent(40.0, restored=("n0",)))
    cluster = Cluster((node(devices=devices),))
    whole, lean = (
        Simulation(jobs, cluster, policy, Halved(), events=events, lean=lean).run() for lean in (False, True)
    )
    assert whole.completion.keys() == {job.id for job in jobs}
    assert whole.completion == pytest.approx(lean.completion)
    stays = sum(stay.end - stay.begin for stay in whole.intervals)
    assert whole.device_seconds <= stays + 1e-6
    again = Simulation(jobs, cluster, policy, Halved(), events=events).run()
    assert again == whole


def test_when_a_target_is_reached():
    jobs = [job("a", 10, curve=[5, 3, 4, 1, 1], target=3.5), job("b", 10, curve=[5, 4, 4, 4, 4], target=3.5)]
    outcome = Simulation(jobs, ONE, Scripted({0: [Start("a", ON)], 2: [Suspend("a")], 5: [Resume("a", ON)]})).run()
    assert outcome.reached == pytest.approx({"a": 7})
    assert outcome.time_to_target == pytest.approx(7)


def test_a_policy_that_stops_what_it_starts_is_told_so():
    class Restless(Policy):
        def plan(self, jobs, cluster, now):
            return Plan((Start("a", ON), Stop("a", "on second thoughts")))

    with pytest.raises(PolicyError, match="asked 1001 times at 0 s, and time does not go on"):
        Simulation([job("a")], ONE, Restless()).run()
