from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_samples import cluster, gpu, job, placed, refused

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Node
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule import JobState, Resize, Resume, Start, Suspend, WaterFilling, check_plan
from shoal.plan.schedule.growth import StripPlacement
from shoal.plan.schedule.water_filling import due_widths, fill_up

FREE = Scaling(alpha=1.0, beta=1.0, max_jobs=2, devices=4)
"""Fluid's toy case: neither sharing nor spreading costs anything."""

EASY = Scaling(alpha=1.2, beta=1.05, max_jobs=4, devices=8)


def trial(name, seconds=10.0, scaling=EASY, on=(), share=None, group="g", **amounts):
    """A trial that waits, or runs on devices."""
    demand = {"compute": 1.0, **amounts}
    view = replace(job(name, seconds=seconds, **demand), scaling=scaling, trial_group=group)
    return replace(view, state=JobState.RUNNING, devices=tuple(on), share=share) if on else view


def names(*indices):
    return tuple(f"cuda:{index}" for index in indices)


def gpus(count, **changes):
    return cluster(*(gpu(index, **changes) for index in range(count)))


def plan(jobs, where):
    """Job -> (devices, share) of the actions of a plan that was checked."""
    answer = WaterFilling().plan(jobs, where, 0.0)
    check_plan(answer, jobs, where, 0.0)
    return answer, {x.job: (x.devices, x.share) for x in answer.actions if isinstance(x, (Start, Resume, Resize))}


WIDTHS = {
    "the toy case": ([4, 4, 12, 30], FREE, 5, [1 / 2, 1 / 2, 1, 3]),
    "equal trials, one device each": ([5, 5, 5], EASY, 3, [1, 1, 1]),
    "rounded down": ([5, 5], EASY, 3, [1, 1]),
    "less than a device is 1/c": ([5] * 10, EASY, 8, [1 / 4] * 10),
    "c = 1: never less than a device": ([5] * 10, Scaling(devices=4), 8, [1] * 10),
    "at most d": ([5], Scaling(devices=4), 8, [4]),
    "a product that rounding makes a little less than whole": ([0.1] * 10, EASY, 30, [3] * 10),
    "no known times: equal parts": ([0, 0], EASY, 4, [2, 2]),
    "no device": ([5, 5], EASY, 0, [1 / 4, 1 / 4]),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_due_widths(name):
    seconds, scaling, devices, expected = WIDTHS[name]
    assert due_widths(seconds, [scaling] * len(seconds), devices) == pytest.approx(expected)


FILLED = {
    "nothing is left over": ([3, 2], [30, 20], 5, [3, 2]),
    "one device goes to the one that would end last": ([1, 1], [6, 5], 3, [2, 1]),
    "the first of equals": ([1, 1], [5, 5], 3, [2, 1]),
    "one at a time": ([1, 1], [20, 5], 5, [4, 1]),
    "part of a device becomes a whole one": ([0.25, 0.25], [5, 5], 2, [1, 1]),
    "no whole device is left for the second": ([0.25, 0.25], [5, 4], 1.5, [1, 0.25]),
    "at most d": ([7], [5], 10, [8]),
}


@pytest.mark.parametrize("name", FILLED)
def test_fill_up(name):
    widths, seconds, devices, expected = FILLED[name]
    assert fill_up(widths, seconds, [EASY] * len(widths), devices) == pytest.approx(expected)


def test_no_device_is_given_that_makes_a_trial_slower():
    assert fill_up([2.0], [10.0], [Scaling(beta=1.5, devices=8)], 8) == [2.0]


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12), st.integers(1, 16))
def test_widths_of_one_device_and_more_fit_on_the_devices(seconds, devices):
    scalings = [EASY] * len(seconds)
    whole = [width for width in due_widths(seconds, scalings, devices) if width >= 1]
    assert sum(whole) <= devices
    filled = fill_up(due_widths(seconds, scalings, devices), seconds, scalings, devices)
    assert sum(filled) <= max(devices, sum(due_widths(seconds, scalings, devices))) + 1e-6


def test_the_toy_case_exactly():
    toy = [trial(name, seconds, FREE) for name, seconds in {"a1": 4, "a2": 4, "a3": 12, "a4": 30}.items()]
    _, places = plan(toy, gpus(5))
    assert places == {
        "a4": (names(0, 1, 2), None),
        "a3": (names(3), None),
        "a1": (names(4), 0.5),
        "a2": (names(4), 0.5),
    }


STATIC = {
    "the longest have devices of their own, the shortest share": (
        [trial(name, seconds) for name, seconds in {"a": 5, "b": 4, "c": 3}.items()],
        gpus(2),
        {"a": (names(0), None), "b": (names(1), 0.5), "c": (names(1), 0.5)},
    ),
    "a queue: c on every device": (
        [trial(f"{index}") for index in range(9)],
        gpus(2),
        {f"{index}": (names(index % 2), 0.25) for index in range(8)},
    ),
    "rounded down, then filled up": (
        [trial("a", 6), trial("b", 5)],
        gpus(3),
        {"a": (names(0, 2), None), "b": (names(1), None)},
    ),
    "a job that neither shares nor grows has a device of its own": (
        [trial("a", scaling=Scaling(), compute=0.2), trial("b", scaling=Scaling(), compute=0.2)],
        gpus(1, oversubscription=3.0),
        {"a": (names(0), None)},
    ),
    "memory is hard: two, though four may share": (
        [trial(f"{index}", memory=30) for index in range(4)],
        gpus(1),
        {"0": (names(0), 0.5), "1": (names(0), 0.5)},
    ),
    "cores of the node are hard": (
        [trial("a", cores=2)],
        Cluster((Node("n0", 5, (gpu(0), gpu(1), gpu(2))),)),
        {"a": (names(0, 1), None)},
    ),
    "a whole device even if its compute is less than the demand": (
        [trial("a", compute=1.5, scaling=Scaling(max_jobs=2))],
        gpus(1),
        {"a": (names(0), 1.0)},
    ),
    "several devices are of one kind, that on which it ends first": (
        [replace(trial("a"), demand={"A100": Demand(1.0, 10**9, 1.0, 10.0), "H100": Demand(1.0, 10**9, 1.0, 3.0)})],
        cluster(gpu(0), gpu(1), gpu(2, kind="H100")),
        {"a": (names(2), None)},
    ),
    "several devices are on few nodes": (
        [trial("a", scaling=Scaling(devices=2))],
        Cluster((Node("n0", 8, (gpu(0),)), Node("n1", 8, (gpu(1), gpu(2))))),
        {"a": (names(1, 2), None)},
    ),
    "an unhealthy device counts for nothing": (
        [trial("a")],
        cluster(gpu(0, healthy=False), gpu(1)),
        {"a": (names(1), None)},
    ),
    "jobs of no group are one": (
        [trial("a", 30, group=None), trial("b", 10, group=None)],
        gpus(4),
        {"a": (names(0, 1, 2), None), "b": (names(3), None)},
    ),
    "a job that is too large takes nothing from the others": (
        [trial("a", 1000, memory=90), trial("b", 10)],
        gpus(2),
        {"b": (names(0, 1), None)},
    ),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_fluid(name):
    jobs, where, expected = STATIC[name]
    _, places = plan(jobs, where)
    assert places == expected


SLOW = replace(EASY, resize_seconds=5.0)

DYNAMIC = {
    "devices are freed: a trial grows over them": (
        [trial("a", on=names(0))],
        gpus(4),
        [Resize("a", names(0, 1, 2, 3))],
    ),
    "not if that costs more than it gains": ([trial("a", 6, SLOW, on=names(0))], gpus(4), []),
    "nor if it is not preemptible": ([replace(trial("a", on=names(0)), preemptible=False)], gpus(4), []),
    "a share is widened when its neighbour has ended": (
        [trial("a", scaling=replace(EASY, devices=1), on=names(0), share=0.5)],
        gpus(1),
        [Resize("a", names(0))],
    ),
    "not if that costs more than it gains: 12 s against 5 + 10 s": (
        [trial("a", scaling=replace(SLOW, devices=1), on=names(0), share=0.5)],
        gpus(1),
        [],
    ),
    "stragglers that share a device part": (
        [trial("a", 9, on=names(0), share=0.5), trial("b", 8, on=names(0), share=0.5)],
        gpus(2),
        [Resize("a", names(1)), Resize("b", names(0))],
    ),
    "a new trial waits: who has several devices keeps them": (
        [trial("a", on=names(0, 1)), trial("b")],
        gpus(2),
        [],
    ),
    "nobody waits: who has too many gives some to who has too few": (
        [trial("a", 5, on=names(0, 1, 2)), trial("b", 40, on=names(3))],
        gpus(4),
        [Resize("a", names(0)), Resize("b", names(3, 1, 2))],
    ),
    "not if that costs more device time than it saves": (
        [trial("a", 5, SLOW, on=names(0, 1, 2)), trial("b", 40, SLOW, on=names(3))],
        gpus(4),
        [],
    ),
    "a whole device is shared with one that waits": (
        [trial("a", on=names(0)), trial("b")],
        gpus(1),
        [Resize("a", names(0), 0.5), Start("b", names(0), 0.5)],
    ),
    "nobody makes room for a job that would not fit there": (
        [trial("a", on=names(0), memory=50), trial("b", memory=50)],
        gpus(1),
        [],
    ),
    "a suspended trial is resumed": (
        [replace(trial("a", scaling=Scaling()), state=JobState.SUSPENDED)],
        gpus(1),
        [Resume("a", names(0))],
    ),
    "what runs on a device that is gone stays as it is": ([trial("a", on=names(9))], gpus(1), []),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_fluid(name):
    jobs, where, expected = DYNAMIC[name]
    answer, _ = plan(jobs, where)
    assert list(answer.actions) == expected


NEW = Scaling(alpha=1.0, trial=True)
"""A kind whose demand leaves no room for another one, and of which no two were measured together."""
HARM = Scaling(alpha=2.5)
"""Two were measured together: it takes both two and a half times as long."""


def half(name, scaling, since, seconds=10.0, **changes):
    return replace(trial(name, seconds, scaling, on=names(0), share=0.5), since=since, **changes)


TRIALS = {
    "one more is let in, beside one of the running": (
        [trial("a", scaling=NEW, on=names(0)), trial("b", scaling=NEW, on=names(1)),
         *(trial(x, scaling=NEW) for x in "cd")],
        2,
        [Resize("a", names(0), 0.5), Start("c", names(0), 0.5)],
    ),
    "nobody waits": ([trial("a", scaling=NEW, on=names(0))], 1, []),
    "who waits has a device": ([trial("a", scaling=NEW, on=names(0)), trial("b", scaling=NEW)], 2,
                               [Start("b", names(1))]),
    "not while another trial runs": (
        [half("a", NEW, 0.0), half("b", NEW, 1.0), trial("c", scaling=NEW, on=names(1)), trial("d", scaling=NEW)], 2, []
    ),
    "the next one, when one of two has ended": ([half("a", NEW, 0.0), trial("b", scaling=NEW)], 1,
                                                [Start("b", names(0), 0.5)]),
    "of both kinds nothing is known": ([trial("a", scaling=Scaling(), on=names(0)), trial("b", scaling=NEW)], 1, []),
    "nor is it of the one that waits": ([trial("a", scaling=NEW, on=names(0)), trial("b", scaling=Scaling())], 1, []),
    "memory is hard": (
        [trial("a", scaling=NEW, on=names(0), memory=50), trial("b", scaling=NEW, memory=50),
         trial("c", scaling=NEW, memory=20)], 1, [Resize("a", names(0), 0.5), Start("c", names(0), 0.5)],
    ),
    "who cannot be asked stays alone": (
        [replace(trial("a", scaling=NEW, on=names(0)), preemptible=False), trial("b", scaling=NEW)], 1, []
    ),
    "one more is taken back": (
        [half("a", HARM, 0.0), half("b", HARM, 1.0), trial("c", scaling=HARM)], 1,
        [Suspend("b"), Resize("a", names(0))],
    ),
    "not if waiting costs more": ([half("a", HARM, 0.0, 1.0), half("b", replace(HARM, resize_seconds=1.0), 1.0, 1.0)],
                                  1, []),
    "not if it makes no difference": ([half("a", Scaling(alpha=2.0), 0.0), half("b", Scaling(alpha=2.0), 1.0)], 1, []),
    "not who cannot be asked": (
        [half("a", HARM, 0.0, preemptible=False), half("b", HARM, 1.0, preemptible=False)], 1, []
    ),
    "not where another policy has placed them": (
        [trial("a", scaling=HARM, on=names(0), compute=0.5), trial("b", scaling=HARM, on=names(0), compute=0.5)], 1, []
    ),
    "not while the measurement is under way": ([half("a", NEW, 0.0), half("b", NEW, 1.0)], 1, []),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIALS)
def test_how_many_share_a_device_is_found_by_trial(name):
    jobs, devices, expected = TRIALS[name]
    answer, _ = plan(jobs, gpus(devices))
    assert list(answer.actions) == expected


def test_a_new_group_gets_idle_devices_before_others_are_scaled_down():
    old = trial("old", 100, SLOW, on=names(0, 1, 2, 3, 4, 5))
    new = [trial(f"new-{index}", 10, SLOW, group="new") for index in range(2)]
    answer, places = plan([old, *new], gpus(8))
    assert places == {"new-0": (names(6), None), "new-1": (names(7), None)}
    assert not answer.refusals


REASONS = {
    "too large": (trial("a", memory=90), "can never run here: needs 90.0 GB"),
    "no room": (trial("a", scaling=Scaling()), "waits for a free device: cuda:0 is busy"),
    "no compute of its own": (trial("a", compute=1.5, memory=60), "waits for a free device"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    waits, reason = REASONS[name]
    runs = replace(trial("runs", on=names(0), memory=50), preemptible=False)
    answer, places = plan([runs, waits], gpus(1))
    assert not places
    assert refused(answer)["a"].startswith(reason)


def test_without_preemption_sharing_or_growing_it_starts_jobs():
    jobs = [replace(trial(name, scaling=Scaling(), compute=0.3), preemptible=False) for name in "abc"]
    answer, _ = plan(jobs, gpus(2))
    assert placed(answer) == {"a": "cuda:0", "b": "cuda:1"}


@given(st.lists(st.floats(1, 100), min_size=1, max_size=20), st.integers(1, 6))
def test_a_repeated_plan_changes_nothing(seconds, devices):
    scaling = replace(EASY, resize_seconds=1.0)
    jobs = [trial(f"{index}", each, scaling) for index, each in enumerate(seconds)]
    _, places = plan(jobs, gpus(devices))
    after = [
        replace(job, state=JobState.RUNNING, devices=places[job.id][0], share=places[job.id][1])
        if job.id in places
        else job
        for job in jobs
    ]
    assert plan(after, gpus(devices))[1] == {}


def test_places_differ_by_more_than_rounding():
    assert StripPlacement(names(0), 1 / 3).is_close(StripPlacement(names(0), 1 - 2 / 3))
    assert not StripPlacement(names(0), 0.5).is_close(StripPlacement(names(1), 0.5))
