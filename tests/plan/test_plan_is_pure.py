"""A plan changes nothing that it is given, and what it caches changes no plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_samples import (
    CONSTANT,
    FUSES,
    GB,
    KEPT,
    LINEAR,
    LITTLE,
    A,
    B,
    C,
    array,
    classes_of,
    cluster,
    known,
    place,
    room,
    slots,
    waiting,
)

from shoal.core.array import FusionKey
from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.job import Job
from shoal.core.resources import Ledger, Share
from shoal.plan import admission
from shoal.plan.admission import admit
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cache import PlanCache
from shoal.plan.plan_input import Placement, PlanInput
from shoal.plan.planner import plan
from shoal.plan.schedule import JobView, refusals
from shoal.plan.schedule.registry import make_policy

KEYS = [A, B, C, FusionKey("program", "", 1, opaque=True)]
PROFILES = st.dictionaries(st.sampled_from(["A", "B", "C", "program"]), st.sampled_from([LINEAR, LITTLE, FUSES, KEPT]))
GROUPS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 40), st.integers(0, 1)), max_size=4)
MACHINES = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1))
"""Number of slots, of fast ones, and of those that are lost."""


NOTES = ["", "python holds 3 GB"]
DEVICES = st.tuples(st.sampled_from([8, 16]), st.sampled_from(NOTES), st.integers(0, 16), st.booleans())
"""Gigabytes, note, gigabytes that are held, and whether by a job of several devices."""


def machine(numbers: tuple[int, int, int]) -> Cluster:
    few, fast, lost = numbers
    devices = [*slots(few, memory=30), *slots(fast, "fast", memory=60)]
    return cluster(*(replace(x, healthy=place >= lost) for place, x in enumerate(devices)))


def outcome(found: Placement) -> Mapping[str, Any]:
    history = vars(found.history)
    return {**{name: value for name, value in vars(found).items() if name != "history"}, "history": history}


@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(st.tuples(GROUPS, PROFILES, MACHINES), min_size=1, max_size=4),
    policy=st.sampled_from(["fifo", "auto", "wfd", "water_filling"]),
)
def test_equal_arguments_have_equal_results_and_stay_as_they_are(turns: list[Any], policy: str) -> None:
    """Through turns with other trials, profiles and devices, of which those that start run on in the next ones."""
    cache, inputs = PlanCache(), PlanInput(make_policy(policy), known(), cluster())
    running: list[Any] = []
    for version, (groups, profiles, numbers) in enumerate(turns):
        where = machine(numbers)
        there = {device.name for _, device in where}
        members = waiting(*((key, count, {"start": start}) for key, count, start in groups))
        busy = {each.trial.number for job, _ in running for each in job.members}
        classes = classes_of([each for each in members if each[0].trial.number not in busy])
        inputs = replace(
            inputs,
            costs=known(**profiles),
            cluster=where,
            now=float(version),
            waiting=sorted(classes, key=place),
            running=[(job, where.device(device.name)) for job, device in running if device.name in there],
        )
        before = vars(inputs.history.copy())
        found = plan(inputs, cache)
        assert vars(inputs.history) == before
        assert outcome(plan(inputs)) == outcome(found) == outcome(plan(inputs, cache))
        running += found.starts
        inputs = replace(inputs, history=found.history, next_job=found.next_job)


def test_a_plan_for_other_profiles_takes_none_of_those_before() -> None:
    cache, members = PlanCache(), classes_of(waiting((A, 20)))
    fused = PlanInput(make_policy("fifo"), known(A=CONSTANT), cluster(*slots(1)), waiting=members)
    apart = replace(fused, costs=known(A=LINEAR))
    sizes = [[len(job.members) for job, _ in plan(each, cache).starts] for each in (fused, apart, fused)]
    assert sizes == [[20], [1], [20]]


@settings(deadline=None, max_examples=60)
@given(
    hosts=st.lists(st.tuples(st.integers(1, 4), st.integers(5, 6), st.integers(0, 6)), min_size=1, max_size=8),
    joining=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_members_join_where_they_would_if_every_job_were_looked_at(hosts: list[Any], joining: list[int]) -> None:
    devices = slots(len(hosts))
    running, first = [], 100
    for device, (members, target, _) in zip(devices, hosts, strict=True):
        running.append((Job(f"on {device.name}", (array(A, *range(first, first + members), target=target),)), device))
        first += members
    arrays = [array(A, *range(10 * place, 10 * place + count)) for place, count in enumerate(joining)]
    free = {device.name: gigabytes * GB for device, (_, _, gigabytes) in zip(devices, hosts, strict=True)}
    found = admit(arrays, running, room(free), known(A=FUSES), ArrayPacker())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission._Opening, "offer", property(lambda opening: (opening.position, *_offer(opening))))
        assert admit(arrays, running, room(free), known(A=FUSES), ArrayPacker()) == found


def _offer(opening: Any) -> tuple[object, ...]:
    return opening.host.epochs(opening.array), opening.host.free_memory


@given(
    devices=st.lists(
        st.tuples(
            st.sampled_from([8, 16]), st.sampled_from(["", "python holds 3 GB"]), st.integers(0, 16), st.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
    memory=st.integers(1, 20),
    compute=st.sampled_from([0.5, 1.0, 1.5]),
)
def test_a_reason_is_that_of_a_look_at_every_device(devices: list[Any], memory: int, compute: float) -> None:
    some = [
        replace(each, memory=held * GB, note=note)
        for each, (held, note, _, _) in zip(slots(len(devices)), devices, strict=True)
    ]
    ledger = Ledger(cluster(*some))
    for device, (_, _, held, several) in zip(some, devices, strict=True):
        if held:
            ledger.add(f"on {device.name}", ledger[device.name], Share(0.5, held * GB // 2), 1 + several)
    job = JobView("waits", {"cpu/1": Demand(compute, memory * GB, 1.0, 10.0)})
    every = [(capacity, 1) for capacity in ledger.capacities]
    assert refusals._reason(job, ledger, refusals._alike(ledger)) == refusals._reason(job, ledger, every)
