"""Who waits joins a running array where that is cheaper than to have a device later."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_samples import CONSTANT, FUSES, GB, LINEAR, A, B, known, member, numbers, profile, room, slots

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.job import Job, Purpose
from shoal.cost.estimate import seconds
from shoal.planner.joining import Host, hosts, joined

DEAR = replace(FUSES, fuse_seconds={1: 0.0, 16: 1e4})
COMPILED = replace(FUSES, compile_seconds=1e4, compiled_gain={4: 2.0})
UNMIXABLE = replace(FUSES, mixing=None)
SHARES_MUCH = replace(FUSES, mixing=3.0)
NEVER_COMPILED = replace(FUSES, compile_seconds=1e4, compiled_gain={4: 1.0})


def host(step, count, first=100, memory_gb=100, key=A):
    """On a device of its own with so much memory."""
    members = tuple(member(first + index) for index in range(count))
    return Host("job", Array(key, members, step), step, "cpu", room({"cpu": (memory_gb - count) * GB}))


def array(count, key=A, start=0):
    return Array(key, tuple(member(number, start=start) for number in range(count)))


def by_job(joins):
    return {job: tuple(member for each in arrays for member in each.members) for job, arrays in joins.items()}


@pytest.mark.parametrize(
    ("step", "waiting", "memory_gb", "expected"),
    [
        pytest.param(FUSES, array(3), 100, [0, 1, 2], id="fusing pays"),
        pytest.param(FUSES, array(3, start=4), 100, [0, 1, 2], id="from another epoch as well"),
        pytest.param(CONSTANT, array(3), 100, [0, 1, 2], id="members are free"),
        pytest.param(LINEAR, array(3), 100, None, id="nothing is saved"),
        pytest.param(FUSES, array(3, key=B), 100, None, id="another structure"),
        pytest.param(FUSES, array(3), 6, [0, 1], id="as many as memory holds"),
        pytest.param(FUSES, array(3), 4, None, id="no memory"),
        pytest.param(DEAR, array(3), 100, None, id="making the array anew takes longer than that saves"),
        pytest.param(COMPILED, array(3), 100, None, id="so does compiling it anew"),
        pytest.param(UNMIXABLE, array(3), 100, None, id="epochs do not mix"),
        pytest.param(SHARES_MUCH, array(3), 100, None, id="batches that are shared save more"),
        pytest.param(NEVER_COMPILED, array(3), 100, [0, 1, 2], id="what is not compiled need not be compiled anew"),
        pytest.param(profile({1: 1.0, 4: 1.2, 16: 16.0}), array(3), 100, None, id="the array is as large as is good"),
    ],
)
def test_who_joins(step, waiting, memory_gb, expected):
    joins = by_job(joined([waiting], [host(step, 4, memory_gb=memory_gb)]))
    assert {job: [m.trial.number for m in members] for job, members in joins.items()} == (
        {} if expected is None else {"job": expected}
    )


def test_the_array_that_saves_most_takes_them_and_the_others_what_is_left():
    small, large = host(FUSES, 2), replace(host(FUSES, 6, first=200, memory_gb=8), job="other")
    joins = by_job(joined([array(4)], [small, large]))
    assert {job: len(members) for job, members in joins.items()} == {"job": 4}
    small, large = host(FUSES, 2, memory_gb=4), replace(host(FUSES, 6, first=200, memory_gb=8), job="other")
    joins = by_job(joined([array(4)], [small, large]))
    assert {job: len(members) for job, members in joins.items()} == {"job": 2, "other": 2}


def test_hosts_of_one_device_share_its_memory():
    free = room({"cpu": 3 * GB})
    pair = [
        Host(name, Array(key, (member(first),), FUSES), FUSES, "cpu", free)
        for name, key, first in (("one", A, 100), ("two", B, 200))
    ]
    joins = by_job(joined([array(2), Array(B, tuple(member(10 + number) for number in range(5)))], pair))
    assert {job: len(members) for job, members in joins.items()} == {"one": 2, "two": 1}
    assert free.memory("cpu") == 0


@pytest.mark.parametrize(
    ("epochs", "expected"), [(3, [0, 1]), (10, [0, 1]), (11, [])], ids=["shorter", "as long", "longer"]
)
def test_nobody_keeps_a_device_from_those_that_cannot_join(epochs, expected):
    """The host has ten epochs left; an array of another structure waits."""
    waiting = Array(A, tuple(member(number, target=epochs) for number in range(2)))
    joins = by_job(joined([Array(B, (member(50),)), waiting], [host(FUSES, 4)]))
    assert [m.trial.number for members in joins.values() for m in members] == expected


def test_who_can_take_others_in():
    device, other = slots(2, memory=10)
    full = Job("full", (Array(A, (member(0), member(1))),))
    jobs = [
        (full, device),
        (Job("profile", (Array(A, (member(2),)),), Purpose.PROFILE), other),
        (Job("empty", (Array(A, ()),)), other),
        (Job("alone", (Array(A, (member(3),)),)), other),
        (Job("unknown", (Array(B, (member(4),)),)), other),
        (Job("beside", (Array(A, (member(5),)),)), device),
    ]
    found = hosts(jobs, room({device.name: 6 * GB}), known(A=FUSES), alone={3})
    assert [(each.job, numbers(each.array), each.free.memory(each.device)) for each in found] == [
        ("full", [0, 1], 6 * GB),
        ("beside", [5], 6 * GB),
    ]


@pytest.mark.parametrize(
    ("promised", "beside", "uuid", "joining"),
    [
        pytest.param(4, 0, "GPU-0", 1, id="a quarter more than promised"),
        pytest.param(8, 0, "GPU-0", 5, id="promised more than it needs"),
        pytest.param(8, 3, "GPU-0", 3, id="another array of the job needs some"),
        pytest.param(4, 0, "", 5, id="no GPU"),
        pytest.param(None, 0, "GPU-0", 5, id="promised nothing"),
    ],
)
def test_a_job_on_a_gpu_does_not_outgrow_the_limit_of_its_process(promised, beside, uuid, joining):
    (device,) = slots(1, memory=100, uuid=uuid)
    demand = None if promised is None else Demand(0.5, promised * GB, 1.0, 60.0)
    others = (Array(B, tuple(member(200 + index) for index in range(beside))),) if beside else ()
    job = Job("job", (Array(A, tuple(member(100 + index) for index in range(4))), *others), demand=demand)
    found = hosts([(job, device)], room({device.name: 90 * GB}), known(A=FUSES, B=FUSES), alone=set())
    joins = by_job(joined([array(5)], found))
    assert len(joins.get("job", ())) == joining


@settings(deadline=None)
@given(
    waiting=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.sampled_from([A, B])), max_size=4),
    present=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40), st.sampled_from([A, B])), max_size=3),
    step=st.sampled_from([LINEAR, FUSES, CONSTANT, DEAR, COMPILED]),
)
def test_joining_keeps_its_promises(waiting, present, step):
    """Nobody joins twice, no other structure, no more than memory holds, and never to lose time."""
    rest = {f"cpu:{index}": max(0, most - count) * GB for index, (count, most, _) in enumerate(present)}
    free = room(rest or {"cpu:0": 0})
    running = [
        Host(
            f"job-{index}",
            Array(key, tuple(member(1000 * (index + 1) + m) for m in range(count)), step),
            step,
            f"cpu:{index}",
            free,
        )
        for index, (count, _, key) in enumerate(present)
    ]
    before = {each.job: each.array for each in running}
    arrays, first = [], 0
    for count, start, key in waiting:
        arrays.append(Array(key, tuple(member(first + m, start=start) for m in range(count))))
        first += count
    joins = by_job(joined(arrays, running))
    keys = {m.trial.number: each.key for each in arrays for m in each.members}
    taken = [m.trial.number for members in joins.values() for m in members]
    assert len(taken) == len(set(taken))
    for each in running:
        members = joins.get(each.job, ())
        assert each.array.members == (*before[each.job].members, *members)
        assert all(keys[m.trial.number] == each.array.key for m in members)
        if members:
            assert step is not LINEAR
            assert free.memory(each.device) >= 0
            mine, theirs = ([m.epochs for m in some] for some in (before[each.job].members, members))
            assert seconds(step, [*mine, *theirs]) < seconds(step, mine) + seconds(step, theirs)
