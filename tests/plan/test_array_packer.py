"""Arrays to jobs: who may share a process, and what such a job takes."""

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
    slots,
    waiting,
)

from shoal.core.array import Array
from shoal.core.trial import Budget, TrialGroup
from shoal.plan.array_packer import START_SECONDS, ArrayPacker
from shoal.plan.packing import NoPacking, Packing
from shoal.plan.schedule import Fifo

KEPT_AND_SHORT = replace(KEPT, step_seconds={1: START_SECONDS / 100})
"""A start of a job is a large part of its time."""


def packed(arrays, costs, packer=None, devices=None, alone=frozenset()):
    found = (packer or ArrayPacker()).packs(arrays, costs, devices or slots(1), {}, alone)
    return [[numbers(each) for each in pack] for pack in found]


@pytest.mark.parametrize(
    ("profile", "other", "together"),
    [
        pytest.param(FETCHES, B, True, id="samples are fetched once"),
        pytest.param(KEPT_AND_SHORT, B, True, id="and kept"),
        pytest.param(replace(LINEAR, step_seconds={1: 10.0}), B, False, id="nothing is saved"),
        pytest.param(FETCHES, replace(B, data="other"), False, id="other data"),
        pytest.param(FETCHES, replace(B, order=1), False, id="another order, and samples are not kept"),
        pytest.param(KEPT_AND_SHORT, replace(B, order=1), True, id="another order of samples that are kept"),
        pytest.param(BY_BATCH, B, True, id="whole batches of one size"),
        pytest.param(BY_BATCH, replace(B, batch_size=64), False, id="batches of other sizes"),
        pytest.param(replace(FETCHES, member_memory=60 * GB), B, False, id="more than there is memory for"),
    ],
)
def test_arrays_of_equal_data_and_kinds_share_a_process(profile, other, together):
    costs = known(A=profile, B=profile)
    expected = [[[0], [1]]] if together else [[[0]], [[1]]]
    assert packed([array(A, 0), array(other, 1)], costs) == expected


def test_arrays_at_different_epochs_do_not_share_samples():
    costs = known(A=FETCHES, B=FETCHES)
    assert packed([array(A, 0), array(B, 1, start=3)], costs) == [[[0]], [[1]]]


@pytest.mark.parametrize(
    ("profile", "ahead", "together"),
    [
        pytest.param(FETCHES, 0, [[[0], [2]], [[1], [3]]], id="nothing follows"),
        pytest.param(FETCHES, 99, [[[0]], [[1], [2], [3]]], id="what follows comes back"),
        pytest.param(KEPT_AND_SHORT, 99, [[[0]], [[1], [2], [3]]], id="or is done anywhere"),
    ],
)
def test_an_array_with_follow_up_training_is_not_delayed_by_a_pack(profile, ahead, together):
    rung = TrialGroup((member(0).trial,), Budget(10), epochs_ahead=ahead, work_ahead=ahead)
    arrays = [array(A if number % 2 else B, number) for number in range(4)]
    found = ArrayPacker().packs(
        arrays,
        known(A=profile, B=profile),
        slots(2),
        {},
        frozenset(),
        {0: rung},
    )
    assert [[numbers(each) for each in pack] for pack in found] == together


class Noting(Packing):
    """Keeps what it was told."""

    def __init__(self):
        self.told = []

    def pack(self, candidates, context):
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
def test_follow_up_training_counts_in_its_process_or_as_a_tail(profile, seconds, fetching, tail):
    """Two of one rung, of which nine trials are to be trained for 27 epochs in all; they have 4 and 6 epochs left."""
    both = Array(A, (member(0, target=4), member(1, target=6)))
    rung = TrialGroup(tuple(member(number).trial for number in range(18)), Budget(6), epochs_ahead=27, work_ahead=27)
    one_by_one = replace(profile, step_seconds={1: 0.001, 2: 0.002})
    packing = Noting()
    ArrayPacker(packing).packs([both], known(A=one_by_one), slots(1), {}, frozenset(), dict.fromkeys(range(18), rung))
    (found,) = packing.told
    assert (found.seconds, found.fetching, found.tail) == pytest.approx((seconds, fetching, tail))


def test_arrays_of_the_same_data_have_the_same_fetch_time():
    noisy = replace(FETCHES, fetch_seconds=0.03)
    packing = Noting()
    arrays = [array(A, 0), array(replace(B, batch_size=64), 1), array(replace(C, data="other"), 2)]
    packed(arrays, known(A=FETCHES, B=noisy, C=noisy), ArrayPacker(packing))
    per_sample = {one.key.structure: one.fetching / 100 / one.key.batch_size for one in packing.told}
    assert per_sample == pytest.approx({"A": 0.01 / 32, "B": 0.01 / 32, "C": 0.03 / 32})


def test_failed_and_unmeasured_arrays_get_their_own_process():
    costs = known(A=FETCHES, B=FETCHES)
    arrays = [array(A, 0), array(C, 1), array(B, 2), array(B, 3)]
    assert packed(arrays, costs, alone={3}) == [[[0], [2]], [[1]], [[3]]]


def test_arrays_with_profiles_on_different_kinds_are_not_packed():
    costs = known(A={"cpu/1": FETCHES}, B={"H200": FETCHES})
    devices = [*slots(1), *slots(1, "H200")]
    assert packed([array(A, 0), array(B, 1)], costs, devices=devices) == [[[0]], [[1]]]


def test_the_packing_decides():
    costs = known(A=FETCHES, B=FETCHES)
    arrays = [array(A, 0), array(B, 1)]
    assert packed(arrays, costs, ArrayPacker(NoPacking())) == [[[0]], [[1]]]
    slow = known(A=LINEAR, B=LINEAR)
    assert packed(arrays, slow, ArrayPacker(RandomPacking())) == [[[0], [1]]]


def test_a_measured_loss_splits_a_pack():
    costs = known(A=replace(FETCHES, fetch_seconds=0.0005), B=replace(FETCHES, fetch_seconds=0.0005))
    arrays = [array(A, 0), array(B, 1)]
    assert packed(arrays, costs) == [[[0], [1]]]
    loses = ArrayPacker(relative_times=lambda kind: {(A.steps, B.steps): 1.5})
    assert packed(arrays, costs, loses) == [[[0]], [[1]]]


def test_the_demand_of_a_job_is_the_sum_over_its_arrays():
    fuses = replace(FETCHES, step_seconds={1: 0.001, 2: 0.0015}, base_memory=2 * GB)
    costs = known(A=fuses, B=replace(FETCHES, base_memory=3 * GB, cores=2.0))
    asked = []

    class Look(Fifo):
        def plan(self, jobs, where, now):
            asked.extend(jobs)
            return super().plan(jobs, where, now)

    placement = Turns(Look(), costs).plan(waiting((A, 2), (B, 1)), [], cluster(*slots(1, cores=4)), 0.0)
    ((job, _),) = placement.starts
    assert [each.key for each in job.arrays] == [A, B]
    (demand,) = asked[0].demand.values()
    steps = 10 * 10 * (0.0015 + 0.001)  # epochs, and steps of each array
    assert demand.memory == 3 * GB + 3 * GB
    assert demand.cores == 2.0
    assert demand.seconds == pytest.approx(steps + 0.01 * 10 * 10)


def test_the_fixed_overhead_of_jobs_makes_packs_of_short_arrays_pay():
    short = replace(LINEAR, step_seconds={1: START_SECONDS / 1000})
    assert packed([array(A, 0), array(B, 1)], known(A=short, B=short)) == [[[0], [1]]]
