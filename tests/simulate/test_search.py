"""Searches as sources of jobs, and the losses of their trials."""

import pytest
from simulate_samples import REAL, cluster, job, needs_data

from shoal.backend.simulated import Simulation
from shoal.core.demand import Demand
from shoal.core.errors import ScenarioError
from shoal.core.trial import Trial
from shoal.schedule import Fifo
from shoal.simulate.curves import Decay, RealCurves, Task, read_task
from shoal.simulate.search import Search, Structure

STRUCTURES = tuple(Structure("net", size, {"A100": Demand(0.5, 10**9, 1.0, 2.0)}) for size in (32, 64))


def search(name="s", algorithm=("grid", {"epochs": 3}), **changes):
    return Search(name, STRUCTURES, 2, algorithm, job("template", arrival=5.0, start_seconds=1.0), **changes)


def run(*searches):
    return Simulation((), cluster(4), Fifo(), sources=[each.source() for each in searches]).run()


def test_a_grid_is_one_group_of_jobs():
    jobs = search().source().begin()
    assert [job.id for job in jobs] == ["s/0", "s/1", "s/2", "s/3"]
    assert {(job.group, job.arrival, job.start_seconds, job.budget, job.epoch) for job in jobs} == {
        ("s: grid", 5.0, 1.0, 3, 0)
    }
    assert {job.demand["A100"].seconds for job in jobs} == {6.0}
    assert {len(job.curve) for job in jobs} == {30}


def test_hyperband_promotes_what_has_the_least_loss():
    halving = search(algorithm=("hyperband", {"max_epochs": 9, "eta": 3, "brackets": 1}))
    outcome = run(halving)
    rungs = [[name for name in outcome.completion if name.endswith(end)] for end in ("@3", "@9")]
    assert [len(outcome.completion) - sum(map(len, rungs)), *map(len, rungs)] == [9, 3, 1]
    first = {job.id: job.curve[-1] for job in halving.source().begin()}
    best = sorted(first, key=first.__getitem__)[:3]
    assert {name.removesuffix("@3") for name in rungs[0]} == set(best)
    assert outcome == run(halving)


def test_a_promoted_trial_goes_on_with_its_own_curve():
    source = search(algorithm=("hyperband", {"max_epochs": 3, "eta": 3, "brackets": 1})).source()
    first = {job.id: job for job in source.begin()}
    later = [job for name in first for job in source.ended(name, 9.0)]
    (promoted,) = later
    origin = first[promoted.id.removesuffix("@3")]
    assert (promoted.arrival, promoted.epoch, promoted.budget, promoted.demand["A100"].seconds) == (9.0, 1, 3, 4.0)
    assert promoted.curve[0] < origin.curve[-1]


def test_two_searches_run_side_by_side():
    outcome = run(search("a"), search("b", seed=3))
    assert len(outcome.completion) == 8
    assert outcome.makespan == pytest.approx(14)


def trial(number):
    return Trial(number, {}, number, 0)


def test_decay_falls_from_its_start():
    losses = Decay(2.0).losses(trial(1), 0, 5)
    assert list(losses) == sorted(losses, reverse=True)
    assert 0 < losses[-1] < losses[0] < 2.0
    assert list(losses[20:]) == list(Decay(2.0).losses(trial(1), 2, 5))
    assert losses != Decay(2.0).losses(trial(2), 0, 5)


CURVES = [[4.0, 2.0, 1.0], [4.0, 3.0, 3.0], [4.0, 3.5, 0.5], [4.0, 4.0, 4.0]]


def test_real_curves_are_interpolated():
    task = Task(CURVES[:1], 1.0)
    losses = RealCurves(task, 0).losses(trial(0), 0, 3)
    assert losses[:2] == pytest.approx([3.8, 3.6])
    assert losses[9] == 2.0
    assert losses[19:] == [1.0] * 11


def test_a_bin_has_its_good_trials():
    task = Task(CURVES, 1.0)
    curves = RealCurves(task, 5, trials=3, good=2)
    reached = [min(curves.losses(trial(number), 0, 2)) <= 1.0 for number in range(3)]
    assert sorted(reached) == [False, True, True]


def test_the_target_of_a_task():
    assert Task.of(CURVES).target == pytest.approx(4.0 - 0.9 * 3.5)


@needs_data
def test_a_real_task():
    task = read_task(REAL, 0)
    assert max(max(curve) for curve in task.curves) < 5
    assert sum(min(curve) <= task.target for curve in task.curves) >= 12
    with pytest.raises(ScenarioError, match="has the tasks 0 to 7, not 8"):
        read_task(REAL, 8)


def test_a_task_that_is_not_there(tmp_path):
    with pytest.raises(ScenarioError, match="--data DIR"):
        read_task(tmp_path, 0)
