"""Slow-down models against tables small enough to work out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_samples import DEVICE, REAL, cluster, needs_data, simulation, structure, tables

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.errors import ScenarioError
from shoal.core.job import Job
from shoal.core.trial import Trial
from shoal.plan.schedule.knapsack import WFD
from shoal.run.virtual_job import VirtualJob
from shoal.simulate.slowdown import SLOWDOWNS, divide_in_proportion, read_curves
from shoal.simulate.workload import read_task


def tenant(workload="", share=None, compute=1.0, alpha=None):
    return structure("x", workload, compute=compute, alpha=alpha), share


def speeds(model, tenants, data=None):
    """Of jobs that a policy gave shares, on one device."""
    structures, jobs = {}, []
    for number, (each, share) in enumerate(tenants):
        name = f"job {number}"
        structures[name] = each
        takes = each.profiles["A100"]
        array = Array(FusionKey(name, "", 1), (Member(Trial(number, {}, 0, 0), 0, 1),), takes)
        reserved = Demand(takes.compute if share is None else share, 0, 1.0, 10.0)
        jobs.append(VirtualJob(Job(name, (array,), demand=reserved), DEVICE))
    return SLOWDOWNS[model](structures, data)(DEVICE, jobs)


ALLOCATIONS = {
    "in proportion": ([1, 3], [1, 1], [0.25, 0.75]),
    "one is bounded, the other gets the rest": ([1, 1], [0.2, 1], [0.2, 0.8]),
    "all bounded: some is left": ([1, 1], [0.2, 0.3], [0.2, 0.3]),
    "bounds are met one after the other": ([1, 1, 1], [0.1, 0.4, 1.0], [0.1, 0.4, 0.5]),
    "no weight at all": ([0, 0], [1, 1], [0.5, 0.5]),
    "one weighs nothing": ([0, 1], [1, 0.5], [0, 0.5]),
    "nobody": ([], [], []),
}


@pytest.mark.parametrize(("weights", "bounds", "expected"), ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_allocate(weights, bounds, expected):
    assert divide_in_proportion(weights, bounds) == pytest.approx(expected)


@settings(database=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), max_size=8))
def test_an_allocation_keeps_its_limits(pairs):
    weights, bounds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    shares = divide_in_proportion(weights, bounds)
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
    assert speeds("shares", tenants, tables(tmp_path)) == pytest.approx(expected)


DEMANDS = {
    "within the device": ([tenant(compute=0.5), tenant(compute=0.5)], [1.0, 1.0], [1.0, 1.0]),
    "twice the device": ([tenant(compute=1.0)] * 2, [0.5, 0.5], [1.0, 1.0]),
    "nothing asked": ([tenant(compute=0.0)], [1.0], [1.0]),
    "half a device costs alpha": ([tenant(share=0.5, alpha=1.5)] * 2, [1 / 1.5] * 2, [1 / 1.5] * 2),
    "a share below what it asks for": ([tenant(share=0.25, compute=0.5)] * 4, [0.5] * 4, [0.5] * 4),
    "what nobody was given is divided": ([tenant(share=0.25, compute=0.5)] * 2, [1.0, 1.0], [1.0, 1.0]),
    "a share above what it asks for": ([tenant(share=0.5, compute=0.25)] * 2, [1.0, 1.0], [1.0, 1.0]),
    "a share of one that is left alone": ([tenant(share=0.25, alpha=1.5)], [1.0], [1.0]),
}


@pytest.mark.parametrize(("tenants", "demands", "none"), DEMANDS.values(), ids=DEMANDS)
def test_demands_and_none(tenants, demands, none):
    assert speeds("demands", tenants) == pytest.approx(demands)
    assert speeds("none", tenants) == pytest.approx(none)


UNKNOWN = {
    "huge/1": "x: there is no workload 'huge/1' .* there are light/1, heavy/1, large/1",
    "": "x names no `workload` in a100_mig_slices.csv",
}


@pytest.mark.parametrize(("workload", "message"), UNKNOWN.items())
def test_unknown(workload, message, tmp_path):
    with pytest.raises(ScenarioError, match=message):
        speeds("shares", [tenant(workload)], tables(tmp_path))


def test_a_missing_table_names_the_option(tmp_path):
    with pytest.raises(ScenarioError, match=r"is not there, and this scenario needs it; name the folder .* --data"):
        read_curves(tmp_path)


DAMAGED = {
    "shares": (read_curves, "a100_mig_slices.csv", "foo,bar\n1,2\n"),
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
        assert 0 < curve.saturation <= 1
    assert curves["resnet/64"].speed(1 / 7) == pytest.approx(0.0283 / 0.0489)


def test_jobs_that_stand_still_or_take_no_time_do_not_keep_a_simulation_from_ending():
    two = [structure("a"), structure("b")]
    still = simulation(two, cluster(1), WFD(), slowdown=lambda device, jobs: [0.0] * len(jobs)).run()
    assert set(still.waiting) == {"job/0", "job/1"}
    assert len(simulation([structure("a", seconds=0)], cluster(1), WFD()).run().completion) == 1
