"""Who comes into a job that runs."""

from dataclasses import replace

import pytest
from baselines import RandomPacking
from planner_samples import (
    BY_BATCH,
    FETCHES,
    GB,
    KEPT,
    LINEAR,
    A,
    B,
    C,
    Turns,
    array,
    cluster,
    known,
    member,
    numbers,
    room,
    slots,
)

from shoal.core.array import Array
from shoal.core.job import Job, Purpose
from shoal.core.resources import Share
from shoal.plan.admission import MAX_REFUSED, admit
from shoal.plan.array_packer import START_SECONDS, ArrayPacker
from shoal.plan.schedule import Fifo


def taken_in(arrays, running, packer, costs, free, alone):
    """Which arrays come into which job, where no member joins an array."""
    return admit(arrays, running, free, costs, packer, alone, fuse=False)


def test_an_array_without_a_device_joins_a_running_job_if_that_saves_time():
    costs = known(A=KEPT, B=KEPT, C=replace(LINEAR, step_seconds={1: 10.0}))
    (device,) = slots(1, memory=3)
    running = [(Job("runs", (array(A, 0, 1),)), device)]
    placement = Turns(Fifo(), costs).plan(
        [(member(7), B), (member(8), replace(B, batch_size=64)), (member(9), C)], running, cluster(device), 0.0
    )
    assert placement.starts == ()
    (joined,) = placement.joins["runs"]
    assert (joined.key, numbers(joined), joined.profile) == (B, [7], KEPT), "there is memory for one"
    assert placement.refusals.keys() == {8, 9}


def test_arrays_spread_over_the_running_jobs():
    costs = known(A=KEPT, B=KEPT)
    devices = slots(2)
    running = [
        (Job(name, (array(A, place),)), device) for place, (name, device) in enumerate(zip("xy", devices, strict=True))
    ]
    waiting_arrays = [array(replace(B, batch_size=size), 10 + size) for size in range(8)]
    costs = known(A=KEPT, B=KEPT)
    free = room({device.name: 50 * GB for device in devices})
    taken = taken_in(waiting_arrays, running, ArrayPacker(), costs, free, frozenset())
    assert {job: len(arrays) for job, arrays in taken.items()} == {"x": 4, "y": 4}


@pytest.mark.parametrize(
    ("mixing", "fuse", "separate"),
    [
        pytest.param(1.0, True, False, id="members at other epochs are faster as one"),
        pytest.param(4.0, True, True, id="they are faster apart"),
        pytest.param(None, True, True, id="they were never timed together"),
        pytest.param(1.0, False, True, id="nothing is fused"),
    ],
)
def test_an_array_of_the_same_key_stays_apart_where_its_members_do_not_join(mixing, fuse, separate):
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0),)), device)]
    costs = known(A=replace(KEPT, step_seconds={1: 0.001, 4: 0.002}, mixing=mixing))
    free = room({device.name: 50 * GB})
    taken = admit([array(A, 1, start=3)], running, free, costs, ArrayPacker(RandomPacking()), fuse=fuse)
    (joined,) = taken["runs"]
    assert (numbers(joined), joined.separate) == ([1], separate)


def test_members_join_the_first_array_of_their_key_only():
    """Each of two arrays has room for members, but a worker lets them join the first one."""
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0), array(A, 1))), device)]
    costs = known(A=replace(KEPT, step_seconds={1: 0.001, 2: 0.001, 4: 0.009}, mixing=1.0))
    free = room({device.name: 50 * GB})
    taken = admit([array(A, 2, start=3), array(A, 3, start=3)], running, free, costs, ArrayPacker(RandomPacking()))
    assert [(numbers(each), each.separate) for each in taken["runs"]] == [([2], False), ([3], True)]


@pytest.mark.parametrize(
    ("other", "comes"),
    [
        pytest.param(Job("other", (array(A, 9, target=100),)), True, id="no device is free earlier"),
        pytest.param(Job("other", (array(A, 9, target=98),)), True, id="one is, by less than a start takes"),
        pytest.param(Job("other", (array(A, 9, target=96),)), False, id="one is, by more"),
        pytest.param(Job("other", (array(A, 9, target=48), array(B, 8, target=48))), False, id="after two arrays"),
        pytest.param(Job("other", (array(A, 7, target=96),)), False, id="with a trial that is to be alone"),
        pytest.param(Job("other", (array(A, 9),), Purpose.PROFILE), False, id="when it has measured"),
        pytest.param(Job("other", ()), False, id="when it has ended, as all have left"),
        pytest.param(Job("other", (array(C, 9),)), True, id="nobody knows when"),
    ],
)
@pytest.mark.parametrize("fits", [True, False], ids=["", "but is too small"])
def test_an_array_joins_no_job_that_ends_after_the_next_device_is_free(other, comes, fits):
    """There is room in a job of a third of a second, and none in the other one."""
    short = replace(KEPT, step_seconds={1: START_SECONDS / 30})
    some = [*slots(1), *slots(1, "other", memory=100 if fits else 0)]
    running = list(zip([Job("long", (array(A, 0, target=100),)), other], some, strict=True))
    free = room({running[0][1].name: 50 * GB, running[1][1].name: 0})
    taken = taken_in(
        [array(B, 1)], running, ArrayPacker(RandomPacking()), known(A=short, B=short), free, frozenset({7})
    )
    assert taken.keys() == ({"long"} if comes or not fits else set())


def test_a_younger_array_does_not_join_before_a_refused_older_one():
    costs = known(A=KEPT, B=KEPT, C=replace(LINEAR, step_seconds={1: 10.0}))
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0),)), device)]
    free = room({device.name: 50 * GB})
    assert taken_in([array(C, 1), array(B, 2)], running, ArrayPacker(), costs, free, frozenset()) == {}


@pytest.mark.parametrize(
    ("profile", "incoming", "comes"),
    [
        pytest.param(FETCHES, array(B, 1, start=3), True, id="in the same epoch"),
        pytest.param(FETCHES, array(A, 1, start=3), True, id="of the same key"),
        pytest.param(FETCHES, Array(B, (member(1, 3), member(2, 0))), False, id="in several epochs"),
        pytest.param(FETCHES, array(B, 1), False, id="in another epoch"),
        pytest.param(FETCHES, array(replace(B, order=1), 1, start=3), False, id="in another order"),
        pytest.param(BY_BATCH, array(B, 1, start=3), True, id="whole batches of one size"),
        pytest.param(BY_BATCH, array(replace(B, batch_size=64), 1, start=3), False, id="batches of another size"),
    ],
)
def test_an_array_at_the_same_epoch_joins_at_once(profile, incoming, comes):
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0, start=3),)), device)]
    free = room({device.name: 50 * GB})
    found = taken_in([incoming], running, ArrayPacker(), known(A=profile, B=profile), free, frozenset())
    assert found.keys() == ({"runs"} if comes else set())
    assert all(each.separate for arrays in found.values() for each in arrays), "also from those of its key"


@pytest.mark.parametrize("start", [0, 3])
def test_an_array_at_several_epochs_shares_no_stream(start):
    (device,) = slots(1)
    running = [(Job("runs", (Array(A, (member(0, 3), member(2, 0))),)), device)]
    free = room({device.name: 50 * GB})
    costs = known(A=FETCHES, B=FETCHES)
    assert taken_in([array(B, 1, start=start)], running, ArrayPacker(), costs, free, frozenset()) == {}


def test_admission_ends_after_many_refused_arrays():
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0, start=3),)), device)]
    free = room({device.name: 50 * GB})
    for refused, comes in ((MAX_REFUSED - 1, True), (MAX_REFUSED, False)):
        arrays = [*(array(B, number) for number in range(1, refused + 1)), array(B, 99, start=3)]
        taken = taken_in(arrays, running, ArrayPacker(), known(A=FETCHES, B=FETCHES), free, frozenset())
        assert bool(taken) == comes


@pytest.mark.parametrize(("target", "comes"), [(10, True), (4, False)], ids=["after long", "soon"])
def test_an_array_joins_unless_it_ends_earlier_on_the_next_free_device(target, comes):
    """There is room in a job that trains 10 other arrays beside, and none in the other one."""
    devices = slots(2)
    crowd = tuple(array(replace(A, batch_size=size), size, start=3) for size in range(10))
    running = list(
        zip([Job("crowd", crowd), Job("other", (array(A, 99, start=3, target=target),))], devices, strict=True)
    )
    free = room({devices[0].name: 50 * GB, devices[1].name: 0})
    found = taken_in(
        [array(B, 100, start=3, target=10)], running, ArrayPacker(), known(A=FETCHES, B=FETCHES), free, frozenset()
    )
    assert found.keys() == ({"crowd"} if comes else set())


def test_an_array_that_shares_samples_joins_before_older_arrays():
    costs = known(A=FETCHES, B=FETCHES, C=KEPT)
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0, start=3),)), device)]
    waiting_arrays = [array(B, 1), array(C, 2), array(B, 3, start=3)]
    found = taken_in(waiting_arrays, running, ArrayPacker(), costs, room({device.name: 50 * GB}), frozenset())
    assert {job: [numbers(each) for each in arrays] for job, arrays in found.items()} == {"runs": [[3]]}


@pytest.mark.parametrize(
    ("free", "cores", "comes"),
    [
        pytest.param(3, 1.0, True, id="room for its member, the larger base, and the cores"),
        pytest.param(2, 1.0, False, id="none for the larger base"),
        pytest.param(3, 0.5, False, id="none for the cores"),
    ],
)
def test_a_joining_array_takes_the_additional_demand_of_the_job(free, cores, comes):
    (device,) = slots(1, uuid="GPU-0", cores=4)
    costs = known(A=KEPT, B=replace(KEPT, base_memory=2 * GB, cores=2.0))
    running = [(Job("runs", (array(A, 0),)), device)]
    left = room({device.name: free * GB}, cores)
    taken = taken_in([array(B, 1)], running, ArrayPacker(), costs, left, frozenset())
    assert taken.keys() == ({"runs"} if comes else set())
    assert left.memory(left[device.name]) == (0 if comes else free * GB)


def test_no_array_joins_if_the_cores_are_overdrawn():
    left = room({"cpu:0": 5 * GB}, cores=-0.5)
    assert (left.memory(left["cpu:0"]), left.has_room(left["cpu:0"], Share())) == (0, False)


@pytest.mark.parametrize(
    ("job", "alone"),
    [
        pytest.param(Job("job", (array(A, 0),), Purpose.PROFILE), frozenset(), id="one that measures"),
        pytest.param(Job("job", (array(A, 0),)), frozenset({0}), id="of a trial that is to be alone"),
        pytest.param(Job("job", (array(C, 0),)), frozenset(), id="of which nothing is known"),
        pytest.param(Job("job", (array(replace(A, data="other"), 0),)), frozenset(), id="of other data"),
    ],
)
def test_jobs_that_admit_no_arrays(job, alone):
    (device,) = slots(1)
    taken = taken_in(
        [array(B, 1)], [(job, device)], ArrayPacker(), known(A=FETCHES, B=FETCHES), room({device.name: 9 * GB}), alone
    )
    assert taken == {}
