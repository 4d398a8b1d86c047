"""Searches as sources of jobs, and the losses of their trials."""

import pytest
from simulate_samples import REAL, cluster, needs_data, structure

from shoal.core.errors import ScenarioError
from shoal.core.trial import Report, Trial, TrialState
from shoal.plan.schedule import Fifo
from shoal.simulate.run import Simulation
from shoal.simulate.workload import (
    CurveSet,
    ListedJobs,
    PowerLawCurves,
    RecordedCurves,
    SimulatedStudy,
    SimulatedWorkload,
    read_task,
)

HALVING = ("hyperband", {"max_epochs": 9, "eta": 3, "brackets": 1})


def search(name="s", settings=("grid", {"epochs": 3}), **changes):
    nets = [structure(f"{name}: net x {size}", compute=0.5, seconds=2.0, start_seconds=1.0) for size in (32, 64)]
    return SimulatedStudy(name, nets, 2, settings, **{"arrivals": (5.0,), **changes})


def run(*sources):
    return Simulation(SimulatedWorkload(sources), cluster(4), Fifo(), lambda device, jobs: [1.0] * len(jobs)).run()


def test_nothing_is_asked_for_before_it_comes():
    searches = SimulatedWorkload([search()])
    searches.now = 4.9
    assert searches.next_groups(free=8) == []
    searches.now = 5.0
    (group,) = searches.next_groups(free=8)
    assert (group.name, group.budget.epochs, [trial.number for trial in group.trials]) == ("s: grid", 3, [0, 1, 2, 3])
    assert not searches.finished


def test_the_trials_of_several_sources_have_numbers_of_their_own():
    listed = ListedJobs("jobs", [structure("long"), structure("short")], [7.0, 6.0], group="both")
    searches = SimulatedWorkload([search("a"), search("b", seed=3), listed])
    searches.now = 6.0
    groups = searches.next_groups(free=8)
    assert [[trial.number for trial in group.trials] for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [searches.label(number) for number in (1, 7, 8)] == ["a/1", "b/3", "jobs/1"]
    assert searches.key(groups[2].trials[0]).structure == "short"
    assert searches.observe(Report(8, 1, {"loss": 1.0}, state=TrialState.PAUSED))[0].trial == 8
    searches.now = 7.0
    assert [[trial.number for trial in group.trials] for group in searches.next_groups(free=8)] == [[9]]


def test_hyperband_promotes_what_has_the_least_loss():
    outcome = run(search(settings=HALVING))
    rungs = [[name for name in outcome.completion if name.endswith(end)] for end in ("@3", "@9")]
    assert [len(outcome.completion) - sum(map(len, rungs)), *map(len, rungs)] == [9, 3, 1]
    searches = SimulatedWorkload([search(settings=HALVING)])
    searches.now = 5.0
    first = {f"s/{x.number}": searches.losses(x, 1)[-1] for group in searches.next_groups(8) for x in group.trials}
    best = sorted(first, key=first.__getitem__)[:3]
    assert {name.removesuffix("@3") for name in rungs[0]} == set(best)
    assert outcome == run(search(settings=HALVING))


def test_a_trial_reports_along_its_own_curve():
    searches = SimulatedWorkload([search("a"), search("b")])
    searches.now = 5.0
    trials = [trial for group in searches.next_groups(8) for trial in group.trials]
    for trial in trials:
        losses = [searches.report(trial, epoch).metrics["loss"] for epoch in (1, 2, 3)]
        assert losses == sorted(losses, reverse=True)
    assert len({searches.report(trial, 1).metrics["loss"] for trial in trials[:4]}) == 4


def test_two_searches_run_side_by_side():
    outcome = run(search("a"), search("b", seed=3))
    assert len(outcome.completion) == 8
    assert outcome.makespan == pytest.approx(14)


def trial(number):
    return Trial(number, {}, number, 0)


def test_decay_falls_from_its_start():
    losses = PowerLawCurves(2.0).losses(trial(1), 0, 5)
    assert list(losses) == sorted(losses, reverse=True)
    assert 0 < losses[-1] < losses[0] < 2.0
    assert list(losses[20:]) == list(PowerLawCurves(2.0).losses(trial(1), 2, 5))
    assert losses != PowerLawCurves(2.0).losses(trial(2), 0, 5)


CURVES = [[4.0, 2.0, 1.0], [4.0, 3.0, 3.0], [4.0, 3.5, 0.5], [4.0, 4.0, 4.0]]


def test_real_curves_are_interpolated():
    task = CurveSet(CURVES[:1], 1.0)
    losses = RecordedCurves(task, 0).losses(trial(0), 0, 3)
    assert losses[:2] == pytest.approx([3.8, 3.6])
    assert losses[9] == 2.0
    assert losses[19:] == [1.0] * 11


def test_a_bin_has_its_good_trials():
    task = CurveSet(CURVES, 1.0)
    curves = RecordedCurves(task, 5, trials=3, good=2)
    reached = [min(curves.losses(trial(number), 0, 2)) <= 1.0 for number in range(3)]
    assert sorted(reached) == [False, True, True]


def test_the_target_of_a_task():
    assert CurveSet.of(CURVES).target == pytest.approx(4.0 - 0.9 * 3.5)


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
