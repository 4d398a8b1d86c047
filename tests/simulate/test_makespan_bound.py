"""The bound on cases whose best schedule is plain, and below every simulated makespan."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_samples import cluster, simulation, structure, tables

from shoal.plan.schedule import WFD, Fifo
from shoal.simulate.slowdown import read_curves
from shoal.simulate.workload import ListedJobs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from makespan_bound import best_makespan, jobs_of


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tables(tmp_path_factory.mktemp("tables"))


def some(count, workload, **changes):
    return [structure(f"{workload} {i}", workload, **changes) for i in range(count)]


def bound(jobs, where, data):
    return best_makespan(jobs_of([ListedJobs("job", jobs, [0.0] * len(jobs))]), where, read_curves(data))


CASES = {
    "linear speed: sharing gains nothing": (some(6, "heavy/1"), cluster(2), 30.0),
    "never shorter than one job alone": (some(1, "heavy/1"), cluster(8), 10.0),
    "full speed on 2/7: 3.5 jobs a device": (some(7, "light/1"), cluster(1), 20.0),
    "memory allows two a device": (some(8, "light/1", memory=40), cluster(1), 40.0),
    "cores allow one a device": (some(8, "light/1", cores=64), cluster(1), 80.0),
    "lengths differ": ([*some(2, "heavy/1"), *some(1, "light/1", seconds=40)], cluster(1), 40.0),
}


@pytest.mark.parametrize(("jobs", "where", "expected"), CASES.values(), ids=CASES)
def test_bound(jobs, where, expected, data):
    assert bound(jobs, where, data) == pytest.approx(expected)


@settings(database=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("light/1", "heavy/1")), st.integers(1, 30), st.sampled_from((0.2, 0.5, 1.0))),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 3),
    st.sampled_from((1.0, 3.0)),
    st.sampled_from((Fifo(), WFD())),
)
def test_no_schedule_is_better(data, amounts, devices, ratio, policy):
    jobs = [structure(f"j{i}", work, seconds=s, compute=c) for i, (work, s, c) in enumerate(amounts)]
    where = cluster(devices, oversubscription=ratio)
    found = simulation(jobs, where, policy, slowdown="shares", data=data).run().makespan
    assert bound(jobs, where, data) <= found * (1 + 1e-9)
