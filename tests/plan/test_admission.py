"""Who waits joins a running array where that is cheaper than to have a device later."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_samples import CONSTANT, FUSES, GB, LINEAR, A, B, known, member, profile, room, slots

from shoal.core.array import Array, add_members
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.plan.admission import admit
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.cost import Cost
from shoal.plan.packing import NoPacking

DEAR = replace(FUSES, fuse_seconds={1: 0.0, 16: 1e4})
COMPILED = replace(FUSES, compile_seconds=1e4, compiled_gain={4: 2.0})
UNMIXABLE = replace(FUSES, mixing=None)
SHARES_MUCH = replace(FUSES, mixing=3.0)
NEVER_COMPILED = replace(FUSES, compile_seconds=1e4, compiled_gain={4: 1.0})


def host(count, name="job", first=100, key=A):
    """A job on a device of its own, of the same name."""
    members = tuple(member(first + index) for index in range(count))
    return Job(name, (Array(key, members),)), Device(name, "cpu/1", 100 * GB)


def joined(arrays, running, free, costs, alone=frozenset()):
    """Who joins which job, where nobody comes in beside."""
    return by_job(admit(arrays, running, free, costs, ArrayPacker(NoPacking()), alone))


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
def test_members_join_the_array_that_saves_most_time(step, waiting, memory_gb, expected):
    free = room({"job": (memory_gb - 4) * GB})
    joins = joined([waiting], [host(4)], free, known(A=step, B=step))
    assert {job: [m.trial.number for m in members] for job, members in joins.items()} == (
        {} if expected is None else {"job": expected}
    )


def test_remaining_members_join_the_next_best_array():
    pair = [host(2), host(6, "other", first=200)]
    joins = joined([array(4)], pair, room({"job": 98 * GB, "other": 2 * GB}), known(A=FUSES))
    assert {job: len(members) for job, members in joins.items()} == {"job": 4}
    joins = joined([array(4)], pair, room({"job": 2 * GB, "other": 2 * GB}), known(A=FUSES))
    assert {job: len(members) for job, members in joins.items()} == {"job": 2, "other": 2}


TWICE_AS_SLOW = profile({1: 2.0, 16: 8.0})


@pytest.mark.parametrize(
    ("waiting", "on_fast", "expected"),
    [
        pytest.param([array(4)], 4, {"fast": 4}, id="the saving is larger on the slow device"),
        pytest.param([array(4)], 12, {}, id="an array would last longer than the mean load of a job"),
        pytest.param(
            [array(4), Array(A, tuple(member(50 + index) for index in range(7)))],
            4,
            {"fast": 11},
            id="more work allows longer arrays",
        ),
    ],
)
def test_members_join_the_array_that_ends_first_on_devices_of_several_kinds(waiting, on_fast, expected):
    costs = known(A={"fast": FUSES, "slow": TWICE_AS_SLOW})
    pair = [
        (host(on_fast, "fast")[0], Device("fast", "fast", 100 * GB)),
        (host(4, "slow", first=200)[0], Device("slow", "slow", 100 * GB)),
    ]
    joins = joined(waiting, pair, room({"fast": 80 * GB, "slow": 80 * GB}), costs)
    assert {job: len(members) for job, members in joins.items()} == expected


def test_hosts_of_one_device_share_its_memory():
    free = room({"cpu": 3 * GB})
    device = Device("cpu", "cpu/1", 100 * GB)
    pair = [(host(1, "one")[0], device), (host(1, "two", first=200, key=B)[0], device)]
    waiting = [array(2), Array(B, tuple(member(10 + number) for number in range(5)))]
    joins = joined(waiting, pair, free, known(A=FUSES, B=FUSES))
    assert {job: len(members) for job, members in joins.items()} == {"one": 2, "two": 1}
    assert free.memory(free["cpu"]) == 0


@pytest.mark.parametrize(
    ("epochs", "expected"), [(3, [0, 1]), (10, [0, 1]), (11, [])], ids=["shorter", "as long", "longer"]
)
def test_joins_do_not_delay_keys_that_cannot_join(epochs, expected):
    """The host has ten epochs left; an array of another structure waits."""
    waiting = Array(A, tuple(member(number, target=epochs) for number in range(2)))
    joins = joined([Array(B, (member(50),)), waiting], [host(4)], room({"job": 96 * GB}), known(A=FUSES, B=FUSES))
    assert [m.trial.number for members in joins.values() for m in members] == expected


def test_open_hosts():
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

    def hosts(alone):
        free = {each.name: 6 * GB for each in (device, other)}
        some = [Array(A, (member(10),))]
        return [job.id for job, where in jobs if joined(some, [(job, where)], room(free), known(A=FUSES), alone)]

    assert hosts(alone={3}) == ["full", "beside"]
    assert hosts(alone=set()) == ["full", "alone", "beside"]


@settings(deadline=None)
@given(
    waiting=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.sampled_from([A, B])), max_size=4),
    present=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40), st.sampled_from([A, B])), max_size=3),
    step=st.sampled_from([LINEAR, FUSES, CONSTANT, DEAR, COMPILED]),
)
def test_joining_invariants(waiting, present, step):
    """Nobody joins twice, no other structure, no more than memory holds, and never to lose time."""
    rest = {f"cpu:{index}": max(0, most - count) * GB for index, (count, most, _) in enumerate(present)}
    free = room(rest or {"cpu:0": 0})
    running = [host(count, f"cpu:{index}", 1000 * (index + 1), key) for index, (count, _, key) in enumerate(present)]
    arrays, first = [], 0
    for count, start, key in waiting:
        arrays.append(Array(key, tuple(member(first + m, start=start) for m in range(count))))
        first += count
    found = admit(arrays, running, free, known(A=step, B=step), ArrayPacker(NoPacking()))
    joins = by_job(found)
    keys = {m.trial.number: each.key for each in arrays for m in each.members}
    taken = [m.trial.number for members in joins.values() for m in members]
    assert len(taken) == len(set(taken))
    for job, device in running:
        (before,) = job.arrays
        members = joins.get(job.id, ())
        (after,) = add_members(job.arrays, found.get(job.id, ()))
        assert after.members == (*before.members, *members)
        assert all(keys[m.trial.number] == before.key for m in members)
        if members:
            assert step is not LINEAR
            assert free.memory(free[device.name]) >= 0
            mine, theirs = ([m.epochs for m in some] for some in (before.members, members))
            cost = Cost(step)
            assert cost.seconds([*mine, *theirs]) < cost.seconds(mine) + cost.seconds(theirs)
