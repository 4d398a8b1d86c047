"""Which arrays share a process, by name, by likeness and at random; the cost model has a file of its own."""

import pytest
from baselines import BASELINE_PACKINGS, KNN, BatchSize, RandomPacking
from baselines.packings import distance, positions
from packing_samples import candidate, context, numbers, relative_times

from shoal.core.errors import PackError
from shoal.plan.packing import (
    PACKINGS,
    Candidate,
    CostPacking,
    NoPacking,
    PackingContext,
    check_packs,
    make_packing,
    predicted,
)
from shoal.testing import check_packing


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("made", [*PACKINGS.values(), *BASELINE_PACKINGS.values()], ids=lambda made: made.__name__)
def test_every_packing_conforms(made):
    check_packing(made, examples=30)


@pytest.mark.parametrize(
    "packing",
    [KNN(2.0), RandomPacking(2), CostPacking(0.0)],
    ids=lambda packing: repr(packing),
)
def test_other_settings_conform(packing):
    check_packing(lambda: packing, examples=20)


class Forgetful(NoPacking):
    def pack(self, candidates, context):
        return super().pack(candidates, context)[1:]


class Fickle(NoPacking):
    """Answers every other call."""

    def __init__(self):
        object.__setattr__(self, "calls", [])

    def pack(self, candidates, context):
        self.calls.append(context)
        return super().pack(candidates, context) if len(self.calls) % 2 else []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Forgetful, r"the packs are illegal: the array of trial 0.* is in no pack"),
        (Fickle, "a second call returns other packs"),
    ],
)
def test_the_suite_rejects_broken_packings(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_packing(broken, examples=50)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (lambda: CostPacking(1.0), r"`worth` must be at least 0 and below 1, got 1.0; 0.05 is 5 % of the time"),
        (lambda: CostPacking(5), r"got 5"),
        (lambda: make_packing("cst"), r"there is no packing 'cst' \(did you mean 'cost'\?\); .*one of cost, none"),
        (lambda: make_packing("knn"), r"'knn' is a baseline of the papers.* benchmarks/baselines .*one of cost, none"),
        (lambda: make_packing(3), r"there is no packing 3;"),
    ],
)
def test_a_bad_setting_is_shown(setting, message):
    with pytest.raises(PackError, match=message):
        setting()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: candidate(0, seconds=-1.0), "`seconds` must be finite and not negative, got -1.0"),
        (lambda: candidate(0, seconds=float("nan")), "got nan"),
        (lambda: candidate(0, tail=-1.0), "`tail` must be finite and not negative, got -1.0"),
        (lambda: candidate(0, seconds=1.0, fetching=2.0), "at least 0 and at most its seconds, 1.0, got 2.0"),
        (lambda: candidate(0, memory=-1), "`memory` must not be negative, got -1000000000"),
        (lambda: context(devices=0), r"names no device; give the seconds until each is free"),
        (lambda: context(loads=(-1.0,)), r"`loads` must be finite seconds and not negative, got \(-1.0,\)"),
        (lambda: context(start=float("inf")), r"`start` must be finite seconds"),
        (lambda: context(memory=-1), "`memory` must not be negative"),
        (
            lambda: context(relative_times=relative_times([candidate(0)], _0=0.0)),
            "a relative time must be finite and above 0, got 0.0 of .*'S0'",
        ),
    ],
)
def test_an_impossible_amount_is_shown(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_packing_by_name_and_itself():
    assert isinstance(make_packing("none"), NoPacking)
    packing = KNN(3)
    assert make_packing(packing) is packing


A, B, C = candidate(0), candidate(1), candidate(2, data="other")
ILLEGAL = {
    "somebody is left out": ([[A]], "trial 1 is in no pack"),
    "somebody comes twice": ([[A], [A, B]], "trial 0 is in two packs"),
    "somebody was not given": ([[A], [B], [candidate(7)]], "trial 7 is in two packs, or was never given"),
    "nobody": ([[A], [], [B]], "a pack is empty"),
    "another order of packs": ([[B], [A]], "not in the order of their first candidates"),
    "another order within": ([[B, A]], "the pack of the array of trial 1 is not in the order"),
}


@pytest.mark.parametrize(("packs", "message"), ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_packs(packs, message):
    with pytest.raises(PackError, match=message):
        check_packs(packs, [A, B], context())


@pytest.mark.parametrize("packs", [None, [None], [("a",)], 3], ids=str)
def test_an_answer_that_is_not_a_list_of_packs_is_refused(packs):
    with pytest.raises(PackError, match="was given, got"):
        check_packs(packs, [A, B], context())


def test_packs_with_two_streams_or_too_much_memory_are_refused():
    with pytest.raises(PackError, match="needs 2 streams of data; a process has one"):
        check_packs([[A, C]], [A, C], context())
    with pytest.raises(PackError, match="needs 2000000000 bytes, the smallest device has 1000000000"):
        check_packs([[A, B]], [A, B], context(memory=1))
    check_packs([[A], [B]], [A, B], context(memory=0))
    check_packs([[A, A]], [A, A], context())


BATCH_SIZES = {
    "equal ones together": ([20, 40, 20, 40, 20], {}, [[0, 2, 4], [1, 3]]),
    "as many as fit": ([20] * 5, {"memory": 2}, [[0, 1], [2, 3], [4]]),
    "none fits": ([20, 20], {"memory": 0}, [[0], [1]]),
    "nothing": ([], {}, []),
}


@pytest.mark.parametrize(("sizes", "where", "expected"), BATCH_SIZES.values(), ids=BATCH_SIZES)
def test_batch_sizes(sizes, where, expected):
    candidates = [candidate(number, batch_size=size) for number, size in enumerate(sizes)]
    assert numbers(BatchSize().pack(candidates, context(**where))) == expected


def test_base_memory_counts_and_an_array_that_does_not_fit_is_skipped():
    large = [candidate(0, memory=3, base=1), candidate(1, memory=3, base=2), candidate(2, memory=1, base=2)]
    assert numbers(BatchSize().pack(large, context(memory=7))) == [[0, 2], [1]]
    assert numbers(BatchSize().pack(large, context(memory=9))) == [[0, 1, 2]]


def test_random_packs_fill_memory_or_reach_the_size_limit():
    candidates = [candidate(number) for number in range(7)]
    assert sorted(map(len, RandomPacking().pack(candidates, context(memory=3)))) == [1, 3, 3]
    assert sorted(map(len, RandomPacking(2).pack(candidates, context()))) == [1, 2, 2, 2]
    assert len({repr(numbers(RandomPacking(2).pack(candidates, context(seed=seed)))) for seed in range(5)}) > 1


PAPER = {
    "batch_size": range(20, 75, 5),
    "learning_rate": [10.0**exponent for exponent in range(-6, 0)],
}
ONE = {"batch_size": 20, "optimizer": "SGD", "learning_rate": 0.01, "activation": "ReLU"}
OTHER = ONE | {"batch_size": 40, "optimizer": "Adagrad"}


def test_the_sum_of_differences_gives_the_example_of_the_paper():
    one, other = positions([ONE, OTHER], PAPER)
    assert distance(one, other) == 5  # 4 steps of batch size, and another optimizer


DISTANCES = {
    "equal": ({"a": 1, "b": "x"}, {"b": "x", "a": 1.0}, {}, 0),
    "names": ({"a": "x"}, {"a": "y"}, {}, 1),
    "names in order": ({"a": "small"}, {"a": "large"}, {"a": ["small", "medium", "large"]}, 2),
    "a value that is not among those in order": ({"a": "small"}, {"a": "tiny"}, {"a": ["small", "large"]}, 1),
    "numbers without an axis: their ranks": ({"a": 1e-6}, {"a": 0.7}, {}, 1),
    "yes and no are not numbers": ({"a": True, "b": 1}, {"a": False, "b": 7}, {}, 2),
    "lists": ({"a": [0.9, 0.99]}, {"a": [0.9, 0.999]}, {}, 1),
    "one has not got it": ({"o": {"name": "sgd", "momentum": 0.5}}, {"o": {"name": "adam"}}, {}, 2),
    "a numeric axis": ({"a": 1}, {"a": 100}, {"a": [1, 10, 100]}, 2),
}


@pytest.mark.parametrize(("one", "other", "axes", "expected"), DISTANCES.values(), ids=DISTANCES)
def test_distances(one, other, axes, expected):
    assert distance(*positions([one, other], axes)) == expected


def test_numbers_without_an_axis_are_ranked_among_all_candidates():
    found = positions([{"lr": value} for value in (0.5, 0.001, 0.5, 0.1)], {})
    assert [distance(found[0], place) for place in found] == [0, 2, 0, 1]


def configured(*configs):
    return [candidate(number, config=config) for number, config in enumerate(configs)]


def test_the_nearest_arrays_are_packed_first():
    """Clusters of three batch sizes each, and memory for three: whoever is the centroid, they come together."""
    candidates = configured(*({"batch_size": size} for size in (20, 65, 25, 70, 20, 65)))
    for seed in range(6):
        assert numbers(KNN().pack(candidates, context(memory=3, axes=PAPER, seed=seed))) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (KNN(4.9), [[0], [1]]),
        (KNN(5), [[0, 1]]),
        (KNN(), [[0, 1]]),
    ],
    ids=repr,
)
def test_arrays_beyond_the_threshold_are_not_packed(packing, expected):
    assert numbers(packing.pack(configured(ONE, OTHER), context(axes=PAPER))) == expected


PREDICTIONS = {
    "alone nothing is saved": ([candidate(0, 10, 4)], {}, 12, 12),
    "the start is saved": ([candidate(0, 10), candidate(1, 20)], {}, 34, 32),
    "the longest fetching stays": ([candidate(0, 10, 4), candidate(1, 20, 5)], {}, 34, 28),
    "a gain": ([candidate(0, 10, 5), candidate(1, 10, 5)], {"_01": 0.5}, 24, 12),
    "a loss": ([candidate(0, 10), candidate(1, 10)], {"_01": 2.0}, 24, 42),
    "one pair of three": ([candidate(0), candidate(1), candidate(2)], {"_01": 0.7}, 36, 29),
    "all pairs of three": ([candidate(0), candidate(1), candidate(2)], {"_01": 0.7, "_02": 0.8, "_12": 0.6}, 36, 23),
}


@pytest.mark.parametrize(("pack", "measured", "apart", "expected"), PREDICTIONS.values(), ids=PREDICTIONS)
def test_predictions(pack, measured, apart, expected):
    found = predicted(pack, context(start=2.0, relative_times=relative_times(pack, **measured)))
    assert (found.apart, found.together) == pytest.approx((apart, expected))
    assert found.impv == pytest.approx((apart - expected) / apart)


def test_arrays_of_one_key_have_a_relative_time():
    pack = [candidate(number, structure="A") for number in range(4)]
    assert predicted(pack, context(relative_times=relative_times(pack, _01=0.5))).together == pytest.approx(20)


def test_a_prediction_ignores_measurements_of_other_pairs():
    pack = [candidate(0), candidate(1)]
    others = [candidate(number) for number in range(2, 9)]
    measured = {frozenset((one.key, other.key)): 3.0 for one in (*pack, *others) for other in others}
    where = context(relative_times=measured | relative_times(pack, _01=0.5))
    assert predicted(pack, where).together == pytest.approx(10)


def test_a_candidate_of_zero_seconds_saves_nothing():
    assert predicted([candidate(0, seconds=0)], context()).impv == 0


def test_a_candidate_without_members_is_refused():
    empty = candidate(0).array.__class__(candidate(0).key, ())
    with pytest.raises(ValueError, match="must have a member, it has none; leave out arrays that are done"):
        Candidate(empty, 1.0, 0.0, 0, 0)


def test_the_relative_time_of_a_pair_is_symmetric():
    where = PackingContext((0.0,), 0, relative_times=relative_times([A, B], _01=0.8))
    assert where.relative_time(A.key, B.key) == where.relative_time(B.key, A.key) == 0.8
    assert where.relative_time(A.key, A.key) is None
