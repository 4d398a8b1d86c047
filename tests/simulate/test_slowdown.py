"""Slow-down models against tables small enough to work out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_samples import DEVICE, REAL, needs_data, tables, tenant

from shoal.core.device import Device
from shoal.core.errors import ScenarioError
from shoal.cost.scaling import Scaling
from shoal.simulate.curves import read_task
from shoal.simulate.slowdown import Demands, Pairs, Scalings, Shares, allocate, read_curves

HALVABLE = Scaling(alpha=1.5, sharing=2)

ALLOCATIONS = {
    "in proportion": ([1, 3], [1, 1], 1.0, [0.25, 0.75]),
    "one is bounded, the other gets the rest": ([1, 1], [0.2, 1], 1.0, [0.2, 0.8]),
    "all bounded: some is left": ([1, 1], [0.2, 0.3], 1.0, [0.2, 0.3]),
    "bounds are met one after the other": ([1, 1, 1], [0.1, 0.4, 1.0], 1.0, [0.1, 0.4, 0.5]),
    "no weight at all": ([0, 0], [1, 1], 1.0, [0.5, 0.5]),
    "one weighs nothing": ([0, 1], [1, 0.5], 1.0, [0, 0.5]),
    "nobody": ([], [], 1.0, []),
}


@pytest.mark.parametrize(("weights", "bounds", "total", "expected"), ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_allocate(weights, bounds, total, expected):
    assert allocate(weights, bounds, total) == pytest.approx(expected)


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), max_size=8))
def test_an_allocation_keeps_its_limits(pairs):
    weights, bounds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    shares = allocate(weights, bounds, 1.0)
    assert sum(shares) <= 1 + 1e-9
    assert all(-1e-9 <= share <= bound + 1e-9 for share, bound in zip(shares, bounds, strict=True))
    if all(weights):
        assert sum(shares) == pytest.approx(min(1.0, sum(bounds)))


SHARES = {
    "alone": ([tenant("heavy/1")], [1.0]),
    "two that are alike: half of the device, between 3/7 and 4/7": ([tenant("heavy/1")] * 2, [0.5, 0.5]),
    "light ones use two sevenths at most": ([tenant("light/1")] * 2, [1.0, 1.0]),
    "what a light one cannot use is the other's": ([tenant("light/1"), tenant("heavy/1")], [1.0, 5 / 7]),
    "below a seventh in proportion": ([tenant("light/1")] * 14, [0.25] * 14),
    "by demand": ([tenant("heavy/1", compute=0.25), tenant("heavy/1", compute=0.75)], [0.25, 0.75]),
    "a share is an upper bound": ([tenant("heavy/1", share=1 / 7)], [1 / 7]),
    "a share above what is there": ([tenant("heavy/1", share=0.9), tenant("heavy/1", share=0.9)], [0.5, 0.5]),
    "unmeasured slices: linear from 0": ([tenant("large/1", share=2 / 7)], [0.25]),
}


@pytest.mark.parametrize(("tenants", "expected"), SHARES.values(), ids=SHARES)
def test_shares(tenants, expected, tmp_path):
    assert Shares(tables(tmp_path)).speeds(DEVICE, tenants) == pytest.approx(expected)


V100 = Device("gpu", "V100", 16 * 10**9)
PAIRED = {
    "alone": (["a"], [1.0]),
    "two of a kind": (["a", "a"], [0.6, 0.6]),
    "two kinds": (["a", "b"], [0.5, 0.5]),
    "the other way round": (["b", "a"], [0.5, 0.5]),
    "out of memory together": (["b", "b"], [0.0, 0.0]),
    "three were never measured": (["a", "a", "a"], [0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize(("names", "expected"), PAIRED.values(), ids=PAIRED)
def test_pairs(names, expected, tmp_path):
    tenants = [tenant(name, kind="V100") for name in names]
    assert Pairs(tables(tmp_path)).speeds(V100, tenants) == pytest.approx(expected)


DEMANDS = {
    "within the device": ([tenant(compute=0.5), tenant(compute=0.5)], [1.0, 1.0], [1.0, 1.0]),
    "twice the device": ([tenant(compute=1.0)] * 2, [0.5, 0.5], [1.0, 1.0]),
    "nothing asked": ([tenant(compute=0.0)], [1.0], [1.0]),
    "half a device costs alpha": ([tenant(share=0.5, scaling=HALVABLE)] * 2, [1 / 1.5] * 2, [1 / 1.5] * 2),
}


@pytest.mark.parametrize(("tenants", "demands", "scalings"), DEMANDS.values(), ids=DEMANDS)
def test_demands_and_scalings(tenants, demands, scalings):
    assert Demands().speeds(DEVICE, tenants) == pytest.approx(demands)
    assert Scalings().speeds(DEVICE, tenants) == pytest.approx(scalings)


UNKNOWN = {
    "workload of shares": (Shares, DEVICE, "huge/1", r"job 'x': a100_mig_slices.csv has no 'huge/1'; it has heavy/1"),
    "workload of pairs": (Pairs, V100, "c", "job 'x': gavel_oracle_throughputs.json has no 'c'; it has a, b"),
    "no workload": (Shares, DEVICE, "", "job 'x': it names no `workload`, by which a100_mig_slices.csv is read"),
    "kind of pairs": (Pairs, DEVICE, "a", "has no 'a100'; it has v100"),
}


@pytest.mark.parametrize(("model", "device", "workload", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown(model, device, workload, message, tmp_path):
    with pytest.raises(ScenarioError, match=message):
        model(tables(tmp_path)).speeds(device, [tenant(workload)])


@pytest.mark.parametrize("model", [Shares, Pairs])
def test_a_missing_table_names_the_option(model, tmp_path):
    with pytest.raises(ScenarioError, match=r"is not there, and this scenario needs it; name the folder .* --data"):
        model(tmp_path)


DAMAGED = {
    "shares": (Shares, "a100_mig_slices.csv", "foo,bar\n1,2\n"),
    "pairs": (Pairs, "gavel_oracle_throughputs.json", "[1]"),
    "curves": (lambda data: read_task(data, 0), "taskset_curves_8.npz", "x"),
}


@pytest.mark.parametrize(("model", "name", "text"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_told_as_that(model, name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ScenarioError, match=f"{name} is not the table that it should be"):
        model(tmp_path)


@needs_data
def test_the_real_tables():
    curves = read_curves(REAL)
    assert len(curves) == 32
    for curve in curves.values():
        speeds = [speed for _, speed in curve.speeds]
        assert speeds == sorted(speeds)
        assert speeds[-1] == 1.0
        assert 0 < curve.useful <= 1
    assert curves["resnet/64"].speed(1 / 7) == pytest.approx(0.0283 / 0.0489)
    alone = Pairs(REAL).speeds(V100, [tenant("ResNet-18 (batch size 64)", kind="V100")])
    assert alone == [1.0]
