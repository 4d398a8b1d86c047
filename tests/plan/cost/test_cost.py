import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.demand import Profile
from shoal.plan.cost.cost import STEP_OVERHEAD_SECONDS, Cost, packed_demand


def cost(step, **changes):
    fields = {
        "epoch_steps": 10,
        "validation_steps": 3,
        "base_memory": 100,
        "member_memory": 10,
        "compute": 0.5,
        "cores": 1.0,
    }
    return Cost(Profile(step, **fields | changes))


@pytest.mark.parametrize(
    ("measured", "members", "expected"),
    [
        pytest.param({1: 1.0, 4: 2.5, 16: 4.9}, 4, 2.5, id="measured"),
        pytest.param({1: 1.0, 4: 2.5, 16: 4.9}, 2, 1.5, id="between the first two"),
        pytest.param({1: 1.0, 4: 2.5, 16: 4.9}, 10, 3.7, id="between the last two"),
        pytest.param({1: 1.0, 4: 2.5, 16: 4.9}, 26, 6.9, id="above: the last slope"),
        pytest.param({16: 4.9, 1: 1.0, 4: 2.5}, 26, 6.9, id="sizes in any order"),
        pytest.param({4: 2.0, 8: 3.0}, 1, 2.0, id="below: the smallest size bounds it"),
        pytest.param({1: 1.0, 2: 0.9}, 10, 0.9, id="noise does not make a large array faster"),
        pytest.param({2: 3.0}, 6, 9.0, id="one measurement: proportional"),
    ],
)
def test_step_seconds(measured, members, expected):
    assert cost(measured).step_seconds(members) == pytest.approx(expected)
    assert cost(measured).step_seconds(members, batches=3) == pytest.approx(3 * expected), "gradients of three batches"


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        pytest.param([], 0.0, id="nobody"),
        pytest.param([5, 5], 5 * 3.0, id="all equally far"),
        pytest.param([1, 5, 2], 1 * 4.0 + 1 * 3.0 + 3 * 2.0, id="who is done leaves"),
        pytest.param([0, 2], 2 * 2.0, id="one has nothing to do"),
    ],
)
def test_seconds_of_members_that_leave(epochs, expected):
    assert cost({1: 2.0, 3: 4.0}).seconds(epochs) == pytest.approx(expected * (10 + 3 / 3))


@pytest.mark.parametrize(
    ("measured", "members", "expected"),
    [
        pytest.param({}, 4, None, id="never measured"),
        pytest.param({4: 2.0, 16: 5.0}, 4, 2.0, id="measured"),
        pytest.param({4: 2.0, 16: 5.0}, 8, 2.0, id="the nearest"),
        pytest.param({4: 2.0}, 8, 2.0, id="twice the size"),
        pytest.param({4: 2.0}, 9, None, id="too far above"),
        pytest.param({4: 2.0}, 1, None, id="too far below"),
    ],
)
def test_fused_gain(measured, members, expected):
    assert cost({1: 1.0}, fused_gain=measured).fused_gain(members) == expected


@pytest.mark.parametrize(
    ("measured", "members", "expected"),
    [({}, 4, 0.0), ({4: 0.1}, 8, 0.2), ({4: 0.1, 16: 0.4}, 10, 0.25)],
    ids=["never measured", "proportional", "between"],
)
def test_fuse_seconds(measured, members, expected):
    assert cost({1: 1.0}, fuse_seconds=measured).fuse_seconds(members) == pytest.approx(expected)


def test_a_validation_step_costs_a_third_of_a_training_step():
    assert cost({1: 2.0}).seconds([5]) == pytest.approx(5 * (10 + 3 / 3) * 2.0)


@pytest.mark.parametrize(
    ("measured", "at_most", "expected"),
    [
        pytest.param({1: 1.0, 4: 2.0, 16: 4.0}, 16, 16, id="the largest is best"),
        pytest.param({1: 1.0, 4: 2.0, 16: 4.0}, 100, 100, id="and then larger ones are allowed"),
        pytest.param({1: 1.0, 4: 2.0, 16: 4.0}, 9, 9, id="a limit between measured sizes"),
        pytest.param({1: 1.0, 4: 2.0, 16: 12.0}, 100, 4, id="the middle one is best"),
        pytest.param({1: 1.0, 4: 4.4, 16: 20.0}, 100, 1, id="fusing is slower: one by one"),
        pytest.param({1: 1.0, 4: 4.0}, 100, 100, id="equal: the larger"),
        pytest.param({1: 0.001, 4: 0.0043}, 4, 4, id="slower by less than the turns that are saved"),
        pytest.param({1: 0.001, 4: 0.0049}, 4, 1, id="slower by more"),
        pytest.param({1: 1.0}, 8, 8, id="nothing is known against fusing"),
        pytest.param({4: 1.0, 8: 1.5}, 1, 1, id="a limit below all measured sizes"),
    ],
)
def test_best_size(measured, at_most, expected):
    assert cost(measured).best_size(at_most) == expected


@pytest.mark.parametrize(
    ("measured", "expected_epochs", "at_most", "expected"),
    [
        pytest.param({1: 1.0}, 1000, 16, 8, id="too dear to measure before"),
        pytest.param({1: 1.0}, 1000, 5, 5, id="fewer trials"),
        pytest.param({1: 1.0}, 200, 16, 3, id="no more than a twentieth of 2,000 steps pays for"),
        pytest.param({1: 1.0}, 119, 16, 1, id="too little work to try two"),
        pytest.param({1: 1.0}, 120, 16, 2, id="enough work to try two"),
        pytest.param({1: 1.0}, None, 16, 16, id="the only trial"),
        pytest.param({1: 1.0, 8: 9.0}, 20, 16, 1, id="tried, and slower"),
        pytest.param({1: 1.0, 8: 4.0}, 20, 16, 16, id="tried, and faster"),
    ],
)
def test_members_that_were_only_timed_alone_are_tried_together(measured, expected_epochs, at_most, expected):
    assert cost(measured, expected_epochs=expected_epochs, first_size=8).best_size(at_most) == expected
    if len(measured) == 1:
        assert cost(measured, expected_epochs=expected_epochs).best_size(at_most) == at_most, "without a limit"


@given(
    st.dictionaries(st.integers(1, 64), st.floats(0.01, 10), min_size=1, max_size=5),
    st.integers(1, 100),
)
def test_the_best_size_is_never_slower_per_member_than_any_other(measured, at_most):
    costs = cost(measured)
    best = costs.best_size(at_most)
    assert 1 <= best <= at_most
    smallest = min(measured)
    for size in range(1, at_most + 1):
        if size >= smallest or len(measured) == 1:
            taken = [(costs.step_seconds(members) + STEP_OVERHEAD_SECONDS) / members for members in (best, size)]
            assert taken[0] <= taken[1] * (1 + 1e-6)


@pytest.mark.parametrize(
    ("base", "member", "available", "at_most", "expected"),
    [
        pytest.param(100, 10, 155, 99, 5, id="whole members"),
        pytest.param(100, 10, 160, 99, 6, id="exactly full"),
        pytest.param(100, 10, 1000, 7, 7, id="room for more than there are"),
        pytest.param(100, 10, 109, 99, 0, id="not even one"),
        pytest.param(100, 10, 50, 99, 0, id="not even the process"),
        pytest.param(100, 0, 100, 99, 99, id="members too small to measure"),
        pytest.param(100, 0, 99, 99, 0, id="members too small to measure, and no room for the process"),
    ],
)
def test_largest_fitting(base, member, available, at_most, expected):
    costs = cost({1: 1.0}, base_memory=base, member_memory=member)
    assert costs.largest_fitting(available, at_most) == expected
    assert expected == 0 or costs.memory(expected) <= available


def test_a_demand_is_made_of_the_estimates():
    demand = packed_demand([(cost({1: 2.0, 3: 3.0}), [4, 4])])
    assert (demand.compute, demand.memory, demand.cores) == (0.5, 120, 1.0)
    assert demand.seconds == pytest.approx(4 * 11 * 2.5)


def test_measured_shares_beyond_the_whole_are_cut_to_it():
    demand = packed_demand([(cost({1: 2.0}, compute=1.02, cores=1.07), [1])], cores=1)
    assert (demand.compute, demand.cores) == (1.0, 1)


SPEEDS = {1: {0.5: 1.0, 0.25: 0.8}, 16: {0.5: 0.7, 0.75: 0.96}}


@pytest.mark.parametrize(
    ("speeds", "members", "demand"),
    [
        ({}, 1, 0.9),
        (SPEEDS, 1, 0.5),
        (SPEEDS, 16, 0.75),
        (SPEEDS, 40, 0.75),
        ({1: {0.5: 0.6}}, 1, 1.0),
        ({1: {0.5: 0.96, 0.25: 0.95}}, 1, 0.25),
    ],
    ids=["not measured: time in use", "one member", "many", "more than measured", "all of it", "a quarter"],
)
def test_the_demand_of_compute_follows_from_throughput(speeds, members, demand):
    found = Cost(Profile({1: 1.0}, 1, 0, 0, 1, compute=0.9, cores=1.0, share_speeds=speeds))
    assert found.compute(members) == demand
    assert packed_demand([(found, [1] * members)]).compute == demand


@pytest.mark.parametrize(
    ("speeds", "share"),
    [
        pytest.param({}, 0.5, id="first a half"),
        pytest.param({16: {0.5: 0.95}}, 0.25, id="it suffices"),
        pytest.param({16: {0.5: 0.9}}, 0.75, id="it does not"),
        pytest.param(SPEEDS, None, id="known"),
        pytest.param({16: {0.5: 0.95}, 2: {0.25: 0.6}}, None, id="known with two sizes"),
        pytest.param({16: {0.5: 0.9}, 2: {0.5: 0.95}}, 0.75, id="one share with two sizes"),
    ],
)
def test_the_next_share_to_measure(speeds, share):
    found = Cost(Profile({1: 1.0, 16: 2.0}, 1, 0, 0, 1, compute=0.9, cores=1.0, share_speeds=speeds))
    assert found.share_to_measure() == share
