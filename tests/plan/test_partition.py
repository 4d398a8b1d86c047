import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_samples import (
    CONSTANT,
    FUSES,
    GB,
    LINEAR,
    LITTLE,
    SLOWER,
    A,
    B,
    C,
    KnownCosts,
    classes_of,
    known,
    member,
    numbers,
    profile,
    slots,
    waiting,
)

from shoal.plan.partition import ARRAYS_PER_DEVICE, MAX_ARRAYS, MAX_ARRAYS_IN_ALL, MIN_ARRAYS, partition
from shoal.plan.waiting import OutOfMemoryLimit

TRIED = replace(LINEAR, step_seconds={1: 1.0}, expected_epochs=600, first_size=8)
SHORT = replace(TRIED, expected_epochs=200)
TRIED_WHOLE = replace(TRIED, first_size=None)
"""The time alone is all that is known."""


def cut(members, costs, devices, busy, alone=frozenset(), **settings):
    return partition(classes_of(members, alone), costs, devices, busy, **settings).arrays


def sizes(arrays):
    return [len(array.members) for array in arrays]


SIZES = {
    "one cohort on one device": (waiting((A, 8)), known(A=FUSES), slots(1), {}, [8]),
    "one cohort on two devices": (waiting((A, 8)), known(A=FUSES), slots(2), {}, [4, 4]),
    "one cohort on three devices, as even as can be": (waiting((A, 16)), known(A=FUSES), slots(3), {}, [5, 5, 6]),
    "fusing gains nothing: one by one": (waiting((A, 3)), known(A=LINEAR), slots(1), {}, [1, 1, 1]),
    "it gains less than it takes to make an array": (
        waiting((A, 3)),
        known(A=replace(FUSES, fuse_seconds={1: 0.0, 3: 1e3})),
        slots(1),
        {},
        [1, 1, 1],
    ),
    "one cohort on seven devices": (waiting((A, 16)), known(A=LITTLE), slots(7), {}, [2, 2, 2, 3, 2, 2, 3]),
    "too dear to measure together: tried": (waiting((A, 20)), known(A=TRIED), slots(2), {}, [5, 5, 5, 5]),
    "tried in smaller arrays, for little work": (waiting((A, 20)), known(A=SHORT), slots(1), {}, [2, 3, 3, 3, 3, 3, 3]),
    "tried in none, as each device would begin one": (waiting((A, 4)), known(A=SHORT), slots(2), {}, [1, 1, 1, 1]),
    "tried with all that wait": (waiting((A, 20)), known(A=TRIED_WHOLE), slots(1), {}, [20]),
    "tried on many devices": (waiting((A, 6)), known(A=TRIED), slots(4), {}, [1, 2, 1, 2]),
    "more devices than members": (waiting((A, 3)), known(A=LINEAR), slots(8), {}, [1, 1, 1]),
    "members are free: cutting gains nothing": (waiting((A, 8)), known(A=CONSTANT), slots(2), {}, [8]),
    "fusing is slower: one by one": (waiting((A, 5)), known(A=SLOWER), slots(1), {}, [1, 1, 1, 1, 1]),
    "two cohorts on two devices": (waiting((A, 8), (B, 8)), known(A=FUSES, B=FUSES), slots(2), {}, [8, 8]),
    "two cohorts on four devices": (waiting((A, 8), (B, 8)), known(A=FUSES, B=FUSES), slots(4), {}, [4, 4, 4, 4]),
    "three cohorts on four devices: one is cut": (
        waiting((A, 8), (B, 8), (C, 8)),
        known(A=FUSES, B=FUSES, C=FUSES),
        slots(4),
        {},
        [4, 4, 8, 8],
    ),
    "a long cohort beside a short one is cut": (
        waiting((A, 12), (B, 2)),
        known(A=FUSES, B=FUSES),
        slots(2),
        {},
        [6, 6, 2],
    ),
    "many cohorts are left whole": (
        waiting((A, 8), (B, 6), (C, 4)),
        known(A=LITTLE, B=LITTLE, C=LITTLE),
        slots(1),
        {},
        [8, 6, 4],
    ),
    "the other device is busy for long": (waiting((A, 8)), known(A=FUSES), slots(2), {"cpu/1:0": 1e4}, [8]),
    "the other device is soon free": (waiting((A, 8)), known(A=FUSES), slots(2), {"cpu/1:0": 1.0}, [4, 4]),
    "the other device is soon free, but much slower": (
        waiting((A, 8)),
        known(
            A={"fast": FUSES, "slow": replace(FUSES, step_seconds={n: 10 * t for n, t in FUSES.step_seconds.items()})}
        ),
        [*slots(1, "fast"), *slots(1, "slow")],
        {"fast:0": 1.0, "slow:0": 1.0},
        [8],
    ),
    "all devices are busy for long": (waiting((A, 8)), known(A=FUSES), slots(2), {"cpu/1:0": 1e4, "cpu/1:1": 1e4}, [8]),
    "a running job that ends last is no reason for a long array": (
        waiting((A, 16)),
        known(A=FUSES),
        slots(4),
        {f"cpu/1:{index}": 1.0 for index in range(3)} | {"cpu/1:3": 1e3},
        [8, 8],
    ),
    "memory limits the size": (waiting((A, 10)), known(A=FUSES), slots(1, memory=4), {}, [3, 3, 4]),
    "not even one fits": (waiting((A, 2)), known(A=FUSES), slots(1, memory=0), {}, [1, 1]),
    "the smaller device that can hold one limits the size": (
        waiting((A, 8)),
        known(A={"small": profile({1: 1.0, 8: 1.0}), "large": profile({1: 1.0, 8: 1.0})}),
        [*slots(1, "small", memory=4), *slots(1, "large", memory=80)],
        {},
        [4, 4],
    ),
    "a device that cannot hold one limits nothing": (
        waiting((A, 8)),
        known(A={"small": CONSTANT, "large": CONSTANT}),
        [*slots(1, "small", memory=0), *slots(1, "large", memory=80)],
        {},
        [8],
    ),
    "nothing is known: one by one": (waiting((A, 3)), known(), slots(1), {}, [1, 1, 1]),
    "known on one of two kinds": (
        waiting((A, 4)),
        known(A={"large": CONSTANT}),
        [*slots(1, "small"), *slots(1, "large")],
        {},
        [4],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    members, profiles, devices, busy, expected = SIZES[name]
    assert sizes(cut(members, profiles, devices, busy)) == expected


@pytest.mark.parametrize(
    ("step", "elastic", "expected"),
    [
        pytest.param(CONSTANT, True, [(A, [1, 4, 0, 3]), (B, [2])], id="where that pays, whatever they start from"),
        pytest.param(
            LITTLE, True, [(A, [0, 3]), (A, [1, 4]), (B, [2])], id="not where batches are all there is to gain"
        ),
        pytest.param(CONSTANT, False, [(A, [0, 3]), (A, [1, 4]), (B, [2])], id="not where arrays cannot hold them"),
    ],
)
def test_only_members_of_one_key_are_fused(step, elastic, expected):
    members = [(member(0), A), (member(1, start=3), A), (member(2), B), (member(3), A), (member(4, start=3), A)]
    arrays = cut(members, known(A=step, B=CONSTANT), slots(1), {}, elastic=elastic)
    assert [(array.key, numbers(array)) for array in arrays] == expected


def test_trials_with_different_data_seeds_are_fused():
    members = [(member(number, data_seed=number), A) for number in range(4)]
    assert sizes(cut(members, known(A=CONSTANT), slots(1), {})) == [4]


def test_equal_targets_are_kept_together():
    targets = [9, 3, 9, 3, 3, 9]
    members = [(member(number, target=target), A) for number, target in enumerate(targets)]
    arrays = cut(members, known(A=LITTLE), slots(1, memory=3), {})
    assert [numbers(array) for array in arrays] == [[0, 2, 5], [1, 3, 4]]


def test_arrays_come_in_the_order_of_their_oldest_members():
    members = [(member(7), B), (member(3), A), (member(1), B), (member(9), C)]
    arrays = cut(members, known(A=CONSTANT, B=CONSTANT, C=CONSTANT), slots(1), {})
    assert [numbers(array) for array in arrays] == [[1, 7], [3], [9]]


def test_trials_that_failed_before_are_alone():
    arrays = cut(waiting((A, 6)), known(A=CONSTANT), slots(1), {}, alone={1, 4})
    assert [numbers(array) for array in arrays] == [[0, 2, 3, 5], [1], [4]]


@settings(deadline=None)
@given(
    cohorts=st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(1, 20), st.integers(0, 2)), max_size=5),
    profiles=st.dictionaries(st.sampled_from("ABC"), st.sampled_from([LINEAR, FUSES, CONSTANT, SLOWER])),
    devices=st.integers(1, 5),
    memory_gb=st.integers(0, 30),
    busy=st.dictionaries(st.sampled_from(["cpu/1:0", "cpu/1:1"]), st.floats(0, 1e4)),
    alone=st.sets(st.integers(0, 20)),
    seed=st.integers(0, 9),
    elastic=st.booleans(),
)
def test_partition_invariants(cohorts, profiles, devices, memory_gb, busy, alone, seed, elastic):
    members = waiting(*((key, count, {"start": start}) for key, count, start in cohorts))
    random.Random(seed).shuffle(members)
    costs, machines = known(**profiles), slots(devices, memory=memory_gb)
    classes = classes_of(members, alone)
    arrays, behind = partition(classes, costs, machines, busy, elastic)
    assert (arrays, behind) == partition(classes, costs, machines, busy, elastic)
    keys = {held.trial.number: key for held, key in members}
    placed = [number for array in arrays for number in numbers(array)]
    assert len(placed) == len(set(placed))
    assert len(placed) + sum(len(array.members) * times for array, times in behind) == pytest.approx(len(keys))
    by_cohort = {}
    for array in arrays:
        assert {keys[number] for number in numbers(array)} == {array.key}
        starts = {held.start for held in array.members}
        assert len(starts) == 1 or (elastic and costs.profile(array.key, "cpu/1") in (FUSES, CONSTANT))
        if len(array.members) > 1:
            assert not alone & set(numbers(array))
            assert costs.of(array.key, "cpu/1").memory(len(array.members)) <= memory_gb * GB
            assert costs.profile(array.key, "cpu/1") is not SLOWER
        if not alone & set(numbers(array)) and not elastic:
            by_cohort.setdefault((array.key, array.members[0].start), []).append(len(array.members))
    for counts in by_cohort.values():
        assert max(counts) - min(counts) <= 1


def test_a_thousand_trials_are_cut():
    members = waiting(*((A, 1, {"start": index % 7}) for index in range(1000)))
    calls = 0

    def look_up(key, kind):
        nonlocal calls
        calls += 1
        return FUSES

    cut(members, KnownCosts(look_up), slots(16, memory=16), {})
    assert calls < 100_000


@pytest.mark.parametrize(
    ("known_profile", "size"), [(LINEAR, 1), (replace(CONSTANT, member_memory=25 * GB), 4)], ids=["single", "of four"]
)
def test_of_many_equal_arrays_the_first_are_cut_and_the_others_counted(known_profile, size):
    devices = slots(2)
    most = MAX_ARRAYS
    found = partition(classes_of(waiting((A, 1000))), known(A=known_profile), devices, {})
    assert sizes(found.arrays) == [size] * most
    assert sorted(number for array in found.arrays for number in numbers(array)) == list(range(size * most))
    ((behind, times),) = found.behind
    assert (len(behind.members), times) == (size, 1000 / size - most)


def test_of_classes_of_different_lengths_each_has_its_first_arrays_cut():
    """A long trial behind hundreds of short ones is shown to the policy, and those behind count by their lengths."""
    short, long = MAX_ARRAYS + 100, MAX_ARRAYS + 7
    members = waiting((A, short, {"target": 1}), (A, long, {"target": 81}))
    found = partition(classes_of(members), known(A=LINEAR), slots(1), {})
    lengths = Counter(array.epochs for array in found.arrays)
    assert lengths == {(1,): MAX_ARRAYS, (81,): MAX_ARRAYS}
    assert {array.epochs: times for array, times in found.behind} == {(1,): 100, (81,): 7}


@pytest.mark.parametrize(
    ("classes", "idle", "arrays"),
    [
        (1, 0, MAX_ARRAYS),
        (16, 1, MAX_ARRAYS_IN_ALL // 16),
        (100, 1, MIN_ARRAYS),
        (1, 10, 10 * ARRAYS_PER_DEVICE),
        (100, 10, 10 * ARRAYS_PER_DEVICE),
    ],
    ids=["one class", "some classes", "many classes", "idle devices", "many classes, idle devices"],
)
def test_of_each_class_as_many_arrays_are_cut_as_a_plan_may_need(classes, idle, arrays):
    devices = slots(10)
    busy = {device.name: 9.0 for device in devices[idle:]}
    members = waiting(*((A, 60, {"target": target + 1}) for target in range(classes)))
    found = partition(classes_of(members), known(A=LINEAR), devices, busy)
    assert Counter(array.epochs for array in found.arrays) == {(epochs + 1,): arrays for epochs in range(classes)}


def test_arrays_of_a_lower_rank_come_first():
    first, last = classes_of(waiting((A, 3)))[0], classes_of([(member(200 + i), A) for i in range(3)])[0]
    found = partition([last, replace(first, rank=2)], known(A=LINEAR), slots(1), {})
    assert [number for array in found.arrays for number in numbers(array)] == [200, 201, 202, 0, 1, 2]


def test_trials_that_wait_for_a_larger_device_do_not_hide_the_others():
    """They are of one cohort, since each trains alone."""
    members = waiting((A, 60))
    limits = {number: OutOfMemoryLimit(1, 200 * GB) for number in range(59)}
    found = partition(classes_of(members, {59}, limits), known(A=LINEAR), slots(1), {})
    assert [59] in [numbers(array) for array in found.arrays]
