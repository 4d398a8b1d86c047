from dataclasses import replace

import pytest
from schedule_samples import cluster, gpu, job

from shoal.cost.scaling import Scaling
from shoal.schedule import JobState, Resize, Start, WaterFilling, check_plan

ELASTIC = Scaling(alpha=1.05, beta=1.05, sharing=2, devices=4)


def trial(name, seconds, scaling=ELASTIC, **changes):
    view = job(name, compute=1.0, memory=1, cores=1, seconds=seconds)
    return replace(view, group="rung", scaling=scaling, **changes)


def running(name, seconds, *devices, share=None, scaling=ELASTIC):
    view = trial(name, seconds, scaling)
    return replace(view, state=JobState.RUNNING, devices=devices, share=share)


def plan(jobs, where):
    """Actions by job, of a plan that was checked."""
    answer = WaterFilling().plan(jobs, where, now=0.0)
    check_plan(answer, jobs, where, 0.0)
    return {action.job: action for action in answer.actions}


def test_the_toy_case_of_the_paper():
    """Four trials of 4, 4, 12 and 30 s on five devices: the last on three, the short ones packed."""
    actions = plan([trial("a", 4), trial("b", 4), trial("c", 12), trial("d", 30)], cluster(*map(gpu, range(5))))
    assert all(isinstance(action, Start) for action in actions.values())
    assert len(actions["d"].devices) == 3
    assert len(actions["c"].devices) == 1
    assert actions["c"].share is None
    assert actions["a"].devices == actions["b"].devices
    assert (actions["a"].share, actions["b"].share) == (0.5, 0.5)
    used = [name for label in ("a", "c", "d") for name in actions[label].devices]
    assert len(set(used)) == 5


def test_trials_that_neither_share_nor_grow_get_a_device_each():
    rigid = Scaling()
    actions = plan([trial("a", 4, rigid), trial("b", 9, rigid), trial("c", 30, rigid)], cluster(gpu(0), gpu(1)))
    assert sorted(actions) == ["b", "c"]
    assert all(action.share is None and len(action.devices) == 1 for action in actions.values())


GROWS = {
    "onto a device that was freed": (0.0, ("cuda:0", "cuda:1")),
    "not if that costs more than it saves": (100.0, None),
}


@pytest.mark.parametrize("name", GROWS)
def test_a_running_trial_grows(name):
    cost, devices = GROWS[name]
    scaling = replace(ELASTIC, resize_seconds=cost)
    actions = plan([running("a", 30.0, "cuda:0", scaling=scaling)], cluster(gpu(0), gpu(1)))
    if devices is None:
        assert not actions
    else:
        assert isinstance(actions["a"], Resize)
        assert sorted(actions["a"].devices) == sorted(devices)


def test_a_trial_that_holds_two_devices_makes_room():
    actions = plan([running("a", 10.0, "cuda:0", "cuda:1"), trial("b", 10.0)], cluster(gpu(0), gpu(1)))
    assert isinstance(actions["a"], Resize)
    assert len(actions["a"].devices) == 1
    assert isinstance(actions["b"], Start)


def test_memory_is_hard_when_trials_share():
    big = [replace(trial(name, 10.0), demand=job(name, memory=50, seconds=10).demand) for name in "abc"]
    actions = plan(big, cluster(gpu(0), gpu(1)))
    places = [action.devices for action in actions.values()]
    assert len(places) == len(set(places)) == 2


def test_what_is_not_preemptible_stays():
    fixed = replace(running("a", 30.0, "cuda:0"), preemptible=False)
    assert not plan([fixed], cluster(gpu(0), gpu(1)))
