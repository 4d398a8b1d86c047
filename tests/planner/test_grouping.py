"""Arrays to jobs: who may share a process, what such a job takes, and who comes into one that runs."""

from dataclasses import replace

import pytest
from planner_samples import GB, LINEAR, A, B, C, cluster, known, member, numbers, room, slots, waiting

from shoal.cost.demand import Demand
from shoal.planner import Array, Grouping, Job, Planner, Purpose, Random, Single
from shoal.planner.grouping import MOST_REFUSED, START_SECONDS
from shoal.planner.packing import Packing
from shoal.schedule import Fifo
from shoal.trial import Budget, TrialGroup

FETCHES = replace(LINEAR, step_seconds={1: 0.001}, fetch_seconds=0.01, sharing="window")
"""Samples take ten times as long to make as a step."""
KEPT = replace(FETCHES, sharing="kept")
BY_BATCH = replace(FETCHES, sharing="batch")


def array(key, *trials, start=0, target=10):
    return Array(key, tuple(member(number, start=start, target=target) for number in trials))


def grouped(arrays, profiles, grouping=None, devices=None, alone=frozenset()):
    found = (grouping or Grouping()).groups(arrays, profiles, devices or slots(1), {}, alone)
    return [[numbers(each) for each in group] for group in found]


@pytest.mark.parametrize(
    ("profile", "other", "together"),
    [
        pytest.param(FETCHES, B, True, id="samples are fetched once"),
        pytest.param(KEPT, B, True, id="and kept"),
        pytest.param(replace(LINEAR, step_seconds={1: 10.0}), B, False, id="nothing is saved"),
        pytest.param(FETCHES, replace(B, data="other"), False, id="other data"),
        pytest.param(FETCHES, replace(B, order=1), False, id="another order, and samples are not kept"),
        pytest.param(KEPT, replace(B, order=1), True, id="another order of samples that are kept"),
        pytest.param(BY_BATCH, B, True, id="whole batches of one size"),
        pytest.param(BY_BATCH, replace(B, batch_size=64), False, id="batches of other sizes"),
        pytest.param(replace(FETCHES, member_memory=60 * GB), B, False, id="more than there is memory for"),
    ],
)
def test_who_shares_a_process(profile, other, together):
    profiles = known(A=profile, B=profile)
    expected = [[[0], [1]]] if together else [[[0]], [[1]]]
    assert grouped([array(A, 0), array(other, 1)], profiles) == expected


def test_samples_are_not_shared_by_those_at_other_epochs():
    profiles = known(A=FETCHES, B=FETCHES)
    assert grouped([array(A, 0), array(B, 1, start=3)], profiles) == [[[0]], [[1]]]


@pytest.mark.parametrize(
    ("profile", "ahead", "together"),
    [
        pytest.param(FETCHES, 0, [[[0], [2]], [[1], [3]]], id="nothing follows"),
        pytest.param(FETCHES, 99, [[[0]], [[1], [2], [3]]], id="what follows comes back"),
        pytest.param(KEPT, 99, [[[0]], [[1], [2], [3]]], id="or is done anywhere"),
    ],
)
def test_what_others_wait_for_is_not_kept_by_company(profile, ahead, together):
    rung = TrialGroup((member(0).trial,), Budget(10), epochs_ahead=ahead, work_ahead=ahead)
    arrays = [array(A if number % 2 else B, number) for number in range(4)]
    found = Grouping().groups(
        arrays,
        known(A=profile, B=profile),
        slots(2),
        {},
        frozenset(),
        lambda one: None if one.trial.number else rung,
    )
    assert [[numbers(each) for each in group] for group in found] == together


class Noting(Packing):
    """Keeps what it was told."""

    def __init__(self):
        self.told = []

    def pack(self, candidates, scene):
        self.told[:] = candidates
        return [(candidate,) for candidate in candidates]


@pytest.mark.parametrize(
    ("profile", "seconds", "fetching", "tail"),
    [
        (FETCHES, 10 * 0.01 + 3 * 0.01 + (6 + 27) * 0.1, (6 + 27) * 0.1, 0.0),
        (KEPT, 10 * 0.01, 0.0, 27 * 0.01),
    ],
    ids=["samples shared at one place", "samples that are kept"],
)
def test_what_follows_is_a_part_of_what_it_comes_back_to_or_a_tail(profile, seconds, fetching, tail):
    """Two of one rung, of which nine trials are to be trained for 27 epochs in all; they have 4 and 6 epochs left."""
    both = Array(A, (member(0, target=4), member(1, target=6)))
    rung = TrialGroup(tuple(member(number).trial for number in range(18)), Budget(6), epochs_ahead=27, work_ahead=27)
    one_by_one = replace(profile, step_seconds={1: 0.001, 2: 0.002})
    packing = Noting()
    Grouping(packing).groups([both], known(A=one_by_one), slots(1), {}, frozenset(), lambda one: rung)
    (found,) = packing.told
    assert (found.seconds, found.fetching, found.tail) == pytest.approx((seconds, fetching, tail))


def test_samples_of_the_same_data_take_as_long_whoever_measured_them():
    noisy = replace(FETCHES, fetch_seconds=0.03)
    packing = Noting()
    arrays = [array(A, 0), array(replace(B, batch_size=64), 1), array(replace(C, data="other"), 2)]
    grouped(arrays, known(A=FETCHES, B=noisy, C=noisy), Grouping(packing))
    per_sample = {one.key.structure: one.fetching / 100 / one.key.batch_size for one in packing.told}
    assert per_sample == pytest.approx({"A": 0.01 / 32, "B": 0.01 / 32, "C": 0.03 / 32})


def test_who_failed_in_company_and_who_is_unknown_has_a_process_of_its_own():
    profiles = known(A=FETCHES, B=FETCHES)
    arrays = [array(A, 0), array(C, 1), array(B, 2), array(B, 3)]
    assert grouped(arrays, profiles, alone={3}) == [[[0], [2]], [[1]], [[3]]]


def test_arrays_that_are_known_on_other_kinds_of_devices_are_not_put_together():
    profiles = known(A={"cpu/1": FETCHES}, B={"H200": FETCHES})
    devices = [*slots(1), *slots(1, "H200")]
    assert grouped([array(A, 0), array(B, 1)], profiles, devices=devices) == [[[0]], [[1]]]


def test_the_packing_decides():
    profiles = known(A=FETCHES, B=FETCHES)
    arrays = [array(A, 0), array(B, 1)]
    assert grouped(arrays, profiles, Grouping(Single())) == [[[0]], [[1]]]
    slow = known(A=LINEAR, B=LINEAR)
    assert grouped(arrays, slow, Grouping(Random())) == [[[0], [1]]]


def test_a_pace_that_was_measured_to_lose_undoes_a_group():
    profiles = known(A=replace(FETCHES, fetch_seconds=0.0005), B=replace(FETCHES, fetch_seconds=0.0005))
    arrays = [array(A, 0), array(B, 1)]
    assert grouped(arrays, profiles) == [[[0], [1]]]
    loses = Grouping(paces=lambda kind: {(A.steps, B.steps): 1.5})
    assert grouped(arrays, profiles, loses) == [[[0]], [[1]]]


def test_a_job_of_several_arrays_takes_what_they_need_together():
    fuses = replace(FETCHES, step_seconds={1: 0.001, 2: 0.0015}, base_memory=2 * GB)
    profiles = known(A=fuses, B=replace(FETCHES, base_memory=3 * GB, cores=2.0))
    asked = []

    class Look(Fifo):
        def plan(self, jobs, where, now):
            asked.extend(jobs)
            return super().plan(jobs, where, now)

    planner = Planner(Look(), profiles, lambda: "job")
    placement = planner.plan(waiting((A, 2), (B, 1)), [], cluster(*slots(1, cores=4)), 0.0)
    ((job, _),) = placement.starts
    assert [each.key for each in job.arrays] == [A, B]
    (demand,) = asked[0].demand.values()
    steps = 10 * 10 * (0.0015 + 0.001)  # epochs, and steps of each array
    assert demand.memory == 3 * GB + 3 * GB
    assert demand.cores == 2.0
    assert demand.seconds == pytest.approx(steps + 0.01 * 10 * 10)


def test_who_finds_no_device_comes_into_a_job_that_runs_where_that_saves_time():
    profiles = known(A=KEPT, B=KEPT, C=replace(LINEAR, step_seconds={1: 10.0}))
    (device,) = slots(1, memory=3)
    running = [(Job("runs", (array(A, 0, 1),)), device)]
    placement = Planner(Fifo(), profiles, lambda: "new").plan(
        [(member(7), B), (member(8), replace(B, batch_size=64)), (member(9), C)], running, cluster(device), 0.0
    )
    assert placement.starts == ()
    (joined,) = placement.joins["runs"]
    assert (joined.key, numbers(joined), joined.profile) == (B, [7], KEPT), "there is memory for one"
    assert placement.refusals.keys() == {8, 9}


def test_newcomers_spread_over_the_jobs_that_run():
    profiles = known(A=KEPT, B=KEPT)
    devices = slots(2)
    running = [
        (Job(name, (array(A, place),)), device) for place, (name, device) in enumerate(zip("xy", devices, strict=True))
    ]
    waiting_arrays = [array(replace(B, batch_size=size), 10 + size) for size in range(8)]
    profiles = known(A=KEPT, B=KEPT)
    free = room({device.name: 50 * GB for device in devices})
    taken = Grouping().taken_in(waiting_arrays, running, profiles, free, frozenset())
    assert {job: len(arrays) for job, arrays in taken.items()} == {"x": 4, "y": 4}


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
def test_who_could_have_the_device_that_is_free_next_comes_into_no_job_that_ends_later(other, comes, fits):
    """There is room in a job of 1 s, and none in the other one."""
    some = [*slots(1), *slots(1, "other", memory=100 if fits else 0)]
    running = list(zip([Job("long", (array(A, 0, target=100),)), other], some, strict=True))
    free = room({running[0][1].name: 50 * GB, running[1][1].name: 0})
    taken = Grouping(Random()).taken_in([array(B, 1)], running, known(A=KEPT, B=KEPT), free, frozenset({7}))
    assert taken.keys() == ({"long"} if comes or not fits else set())


def test_nobody_overtakes_who_waits_for_a_device():
    profiles = known(A=KEPT, B=KEPT, C=replace(LINEAR, step_seconds={1: 10.0}))
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0),)), device)]
    free = room({device.name: 50 * GB})
    assert Grouping().taken_in([array(C, 1), array(B, 2)], running, profiles, free, frozenset()) == {}


@pytest.mark.parametrize(
    ("profile", "newcomer", "comes"),
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
def test_who_shares_samples_with_those_under_way_comes_at_once(profile, newcomer, comes):
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0, start=3),)), device)]
    free = room({device.name: 50 * GB})
    found = Grouping().taken_in([newcomer], running, known(A=profile, B=profile), free, frozenset())
    assert found.keys() == ({"runs"} if comes else set())
    assert all(each.apart for arrays in found.values() for each in arrays), "also from those of its key"


@pytest.mark.parametrize("start", [0, 3])
def test_who_trains_at_several_epochs_is_at_no_place_in_the_data(start):
    (device,) = slots(1)
    running = [(Job("runs", (Array(A, (member(0, 3), member(2, 0))),)), device)]
    free = room({device.name: 50 * GB})
    profiles = known(A=FETCHES, B=FETCHES)
    assert Grouping().taken_in([array(B, 1, start=start)], running, profiles, free, frozenset()) == {}


def test_after_many_that_come_nowhere_nobody_else_is_looked_at():
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0, start=3),)), device)]
    free = room({device.name: 50 * GB})
    for refused, comes in ((MOST_REFUSED - 1, True), (MOST_REFUSED, False)):
        arrays = [*(array(B, number) for number in range(1, refused + 1)), array(B, 99, start=3)]
        taken = Grouping().taken_in(arrays, running, known(A=FETCHES, B=FETCHES), free, frozenset())
        assert bool(taken) == comes


@pytest.mark.parametrize(("target", "comes"), [(10, True), (4, False)], ids=["after long", "soon"])
def test_who_shares_samples_comes_unless_done_earlier_on_the_device_that_is_free_next(target, comes):
    """There is room in a job that trains 10 other arrays beside, and none in the other one."""
    devices = slots(2)
    crowd = tuple(array(replace(A, batch_size=size), size, start=3) for size in range(10))
    running = list(
        zip([Job("crowd", crowd), Job("other", (array(A, 99, start=3, target=target),))], devices, strict=True)
    )
    free = room({devices[0].name: 50 * GB, devices[1].name: 0})
    found = Grouping().taken_in(
        [array(B, 100, start=3, target=10)], running, known(A=FETCHES, B=FETCHES), free, frozenset()
    )
    assert found.keys() == ({"crowd"} if comes else set())


def test_who_shares_samples_overtakes_who_waits_for_a_device():
    profiles = known(A=FETCHES, B=FETCHES, C=KEPT)
    (device,) = slots(1)
    running = [(Job("runs", (array(A, 0, start=3),)), device)]
    waiting_arrays = [array(B, 1), array(C, 2), array(B, 3, start=3)]
    found = Grouping().taken_in(waiting_arrays, running, profiles, room({device.name: 50 * GB}), frozenset())
    assert {job: [numbers(each) for each in arrays] for job, arrays in found.items()} == {"runs": [[3]]}


@pytest.mark.parametrize(
    ("free", "cores", "promised", "comes"),
    [
        pytest.param(3, 1.0, None, True, id="room for its member, the larger base, and the cores"),
        pytest.param(2, 1.0, None, False, id="none for the larger base"),
        pytest.param(3, 0.5, None, False, id="none for the cores"),
        pytest.param(3, 1.0, 4, True, id="a process that may grow"),
        pytest.param(3, 1.0, 2, False, id="a process that may not"),
    ],
)
def test_a_newcomer_takes_what_the_job_needs_more_with_it(free, cores, promised, comes):
    (device,) = slots(1, uuid="GPU-0", cores=4)
    profiles = known(A=KEPT, B=replace(KEPT, base_memory=2 * GB, cores=2.0))
    demand = None if promised is None else Demand(0.5, promised * GB, 1.0, 60.0)
    running = [(Job("runs", (array(A, 0),), demand=demand), device)]
    left = room({device.name: free * GB}, cores)
    taken = Grouping().taken_in([array(B, 1)], running, profiles, left, frozenset())
    assert taken.keys() == ({"runs"} if comes else set())
    assert left.memory(device.name) == (0 if comes else free * GB)


def test_nobody_joins_where_cores_are_overdrawn():
    left = room({"cpu:0": 5 * GB}, cores=-0.5)
    assert (left.memory("cpu:0"), left.holds("cpu:0", 0, 0.0)) == (0, False)


@pytest.mark.parametrize(
    ("job", "alone"),
    [
        pytest.param(Job("job", (array(A, 0),), Purpose.PROFILE), frozenset(), id="one that measures"),
        pytest.param(Job("job", (array(A, 0),)), frozenset({0}), id="of a trial that is to be alone"),
        pytest.param(Job("job", (array(C, 0),)), frozenset(), id="of which nothing is known"),
        pytest.param(Job("job", (array(replace(A, data="other"), 0),)), frozenset(), id="of other data"),
    ],
)
def test_jobs_that_nobody_comes_into(job, alone):
    (device,) = slots(1)
    taken = Grouping().taken_in(
        [array(B, 1)], [(job, device)], known(A=FETCHES, B=FETCHES), room({device.name: 9 * GB}), alone
    )
    assert taken == {}


def test_what_a_job_costs_beside_its_steps_is_worth_a_pack_of_short_ones():
    short = replace(LINEAR, step_seconds={1: START_SECONDS / 1000})
    assert grouped([array(A, 0), array(B, 1)], known(A=short, B=short)) == [[[0], [1]]]
