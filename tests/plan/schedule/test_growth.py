"""How running jobs grow into devices that no job needs, and give them back to jobs that do."""

from dataclasses import replace

import pytest
from schedule_samples import cluster, gpu, job, placed, refused

from shoal.core.device import Cluster, Device, Node
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule import Auto, JobState, Resize, Start, WaterFilling, check_plan

UNKNOWN = Scaling(grows=True, resize_seconds=1.0)
"""Nothing is known of two devices."""
TWO = Scaling(beta=1.2, devices=2, resize_seconds=1.0)
THREE = replace(TWO, devices=3)
"""Two, or three devices have paid, and one more has not."""
CPU = Cluster(
    tuple(
        Node(name, 2, tuple(Device(f"{name}/cpu:{slot}", "cpu/1 model", 10**11) for slot in range(2)))
        for name in ("ash", "oak")
    )
)
ASH, OAK = (tuple(f"{name}/cpu:{slot}" for slot in range(2)) for name in ("ash", "oak"))


def names(*indices):
    return tuple(f"cuda:{index}" for index in indices)


def runs(name, scaling, on, seconds=100.0, **changes):
    demand = {"demand": job("any", compute=1.0, seconds=seconds).demand}
    if on[0].count("cpu"):
        demand = {"demand": {"cpu/1 model": demand["demand"]["A100"]}}
    view = replace(job(name), **demand, scaling=scaling, state=JobState.RUNNING, devices=on)
    return replace(view, **changes)


def waits(name, **amounts):
    return job(name, **{"compute": 1.0, "seconds": 10.0, **amounts})


GPUS = cluster(gpu(0), gpu(1), gpu(2))
CASES = {
    "an idle device is tried": ([runs("a", UNKNOWN, names(1))], GPUS, {"a": names(1, 0)}),
    "not again while it is": ([runs("a", UNKNOWN, names(1, 0))], GPUS, {}),
    "one job at a time": (
        [runs("a", UNKNOWN, names(0)), runs("b", UNKNOWN, names(1), seconds=200)],
        cluster(gpu(0), gpu(1), gpu(2), gpu(3)),
        {"b": names(1, 2)},
    ),
    "not if it was measured to gain nothing": ([runs("a", Scaling(), names(0))], GPUS, {}),
    "not if the job ends before that pays": ([runs("a", UNKNOWN, names(0), seconds=1.5)], GPUS, {}),
    "not before the job has reported": ([runs("a", UNKNOWN, names(0), preemptible=False)], GPUS, {}),
    "as far as was measured to pay": ([runs("a", TWO, names(2))], GPUS, {"a": names(2, 0)}),
    "and one more, if nothing speaks against it": (
        [runs("a", replace(TWO, grows=True), names(2))],
        GPUS,
        {"a": names(2, 0, 1)},
    ),
    "the job that ends last first": (
        [runs("a", TWO, names(0)), runs("b", TWO, names(1), seconds=300)],
        GPUS,
        {"b": names(1, 2)},
    ),
    "only devices of its kind": ([runs("a", UNKNOWN, names(0))], cluster(gpu(0), gpu(1, kind="V100")), {}),
    "only healthy ones": ([runs("a", UNKNOWN, names(0))], cluster(gpu(0), gpu(1, healthy=False)), {}),
    "not beside another job": (
        [runs("a", UNKNOWN, names(0), demand=job("x", compute=0.5).demand), runs("b", Scaling(), names(0))],
        cluster(gpu(0, oversubscription=2.0), gpu(1)),
        {},
    ),
    "only as far as the cores of the node reach": (
        [runs("a", UNKNOWN, names(0))],
        cluster(gpu(0), gpu(1), cores=1),
        {},
    ),
}


@pytest.mark.parametrize("policy", [Auto(), WaterFilling()], ids=["auto", "water_filling"])
@pytest.mark.parametrize(("jobs", "where", "expected"), CASES.values(), ids=CASES)
def test_jobs_grow_into_idle_devices(policy, jobs, where, expected):
    plan = policy.plan(jobs, where, 0.0)
    check_plan(plan, jobs, where, 0.0)
    assert {x.job: x.devices for x in plan.actions if isinstance(x, Resize)} == expected


ON_CPUS = {
    "not into those of its own node": ([runs("a", UNKNOWN, ASH[:1])], {"a": (ASH[0], OAK[0])}),
    "into those of another node": (
        [runs("a", UNKNOWN, ASH[:1]), runs("b", Scaling(), ASH[1:])],
        {"a": (ASH[0], OAK[0])},
    ),
    "not where a job has its first device": (
        [runs("a", UNKNOWN, ASH[:1]), runs("b", Scaling(), ASH[1:]), runs("c", Scaling(), OAK[:1])],
        {},
    ),
    "it keeps them": ([runs("a", TWO, (ASH[0], OAK[0])), runs("b", Scaling(), ASH[1:])], {}),
}


@pytest.mark.parametrize(("jobs", "expected"), ON_CPUS.values(), ids=ON_CPUS)
def test_auto_grows_into_slots_of_nodes_without_jobs(jobs, expected):
    plan = Auto().plan(jobs, CPU, 0.0)
    check_plan(plan, jobs, CPU, 0.0)
    assert {x.job: x.devices for x in plan.actions if isinstance(x, Resize)} == expected


def test_water_filling_grows_into_any_slot():
    jobs = [runs("a", UNKNOWN, ASH[:1])]
    (action,) = WaterFilling().plan(jobs, CPU, 0.0).actions
    assert action == Resize("a", ASH)


GIVEN_BACK = {
    "to a waiting job": (Auto(), [runs("a", TWO, names(0, 1)), waits("b")], 2, [Resize("a", names(0)), "cuda:1"]),
    "a device on trial": (
        WaterFilling(),
        [runs("a", UNKNOWN, names(0, 1)), waits("b")],
        2,
        [Resize("a", names(0)), "cuda:1"],
    ),
    "water-filling takes none that pays from a running job (section 3.3)": (
        WaterFilling(),
        [runs("a", TWO, names(0, 1)), waits("b")],
        2,
        [],
    ),
    "all, if a job is to share the first one": (
        Auto(),
        [runs("a", THREE, names(0, 1), demand=job("x", compute=0.4, seconds=100).demand), waits("b", compute=0.6),
         runs("c", Scaling(), names(2)), waits("d", compute=1.0)],
        3,
        [Resize("a", names(0)), "cuda:0", "cuda:1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "jobs", "devices", "expected"), GIVEN_BACK.values(), ids=GIVEN_BACK)
def test_devices_are_given_back(policy, jobs, devices, expected):
    where = cluster(*map(gpu, range(devices)))
    plan = policy.plan(jobs, where, 0.0)
    check_plan(plan, jobs, where, 0.0)
    resized = [x for x in plan.actions if isinstance(x, Resize)]
    started = sorted(x.devices[0] for x in plan.actions if isinstance(x, Start))
    assert [*resized, *started] == expected


def test_a_job_that_waits_for_another_kind_takes_no_device_back():
    other = replace(job("b"), demand={"V100": job("b").demand["A100"]})
    plan = Auto().plan([runs("a", TWO, names(0, 1)), other], cluster(gpu(0), gpu(1)), 0.0)
    assert not plan.actions
    assert "b" in refused(plan)
    assert not placed(plan)
