"""Hypothesis strategies of the conformance suites: scheduling problems for policies, packing contexts for packings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import strategies as st

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import TurnStats
from shoal.core.trial import Trial
from shoal.plan.cost.scaling import Scaling
from shoal.plan.packing.base import Candidate, PackingContext
from shoal.plan.schedule.base import JobState, JobView

__all__ = ["packing_contexts", "scheduling_problems"]

_GB = 10**9
_KINDS = ("small", "large", "cpu/2")
_BATCH_SIZES = (20, 25, 40)
_AXES: Mapping[str, Sequence[object]] = {"batch_size": _BATCH_SIZES, "size": ("small", "medium", "large")}
_RELATIVE_TIMES = (0.5, 0.9, 1.0, 1.1, 2.0)
_SCALINGS = (
    Scaling(),
    Scaling(alpha=1.2, max_jobs=4),
    Scaling(1.5, 1.1, max_jobs=2, devices=3, resize_seconds=2.0),
    Scaling(grows=True),
    Scaling(devices=2, grows=True, resize_seconds=1.0),
)


# Strategies are made once: making and validating them for each job took longer than all else in the suite.
_LOSSES = st.floats(0.0, 10.0)
_TURN_STATS = st.builds(
    lambda a, b, steps, seconds: TurnStats(max(a, b), min(a, b), b, steps, seconds),
    _LOSSES,
    _LOSSES,
    st.integers(1, 20),
    st.sampled_from((0.5, 10.0, 30.0)),
)
_DEMANDS = st.builds(
    Demand,
    compute=st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 4.0)),
    memory=st.integers(0, 90).map(lambda tenths: tenths * _GB // 10),
    cores=st.sampled_from((0.0, 0.1, 0.9, 1.0, 3.0)),
    seconds=st.sampled_from((0.0, 1.0, 10.0, 100.0)),
)
_JOBS = st.builds(
    lambda quanta, **fields: JobView("", ran=sum(each.seconds for each in quanta), quanta=tuple(quanta), **fields),
    quanta=st.lists(_TURN_STATS, max_size=3),
    demand=st.dictionaries(st.sampled_from((*_KINDS, "elsewhere")), _DEMANDS, max_size=len(_KINDS)),
    since=st.sampled_from((0.0, -5.0, -100.0)),
    trial_group=st.sampled_from((None, "group-0", "group-1")),
    budget=st.sampled_from((None, 1, 9)),
    scaling=st.sampled_from(_SCALINGS),
    preemptible=st.sampled_from((True, True, False)),
    switch_seconds=st.sampled_from((0.0, 1.0)),
    study=st.sampled_from((None, "study")),
    best=st.sampled_from((None, 0.5)),
)
"""Waiting jobs without names, at 0 seconds."""
_DEVICES = st.builds(
    Device,
    name=st.just(""),
    kind=st.sampled_from(_KINDS),
    memory=st.integers(0, 8).map(lambda gigabytes: gigabytes * _GB),
    oversubscription=st.sampled_from((1.0, 2.5, 3.0)),
    healthy=st.sampled_from((True, True, True, False)),
)
_NODES = st.builds(Node, st.just(""), cores=st.integers(1, 8), devices=st.lists(_DEVICES, max_size=4).map(tuple))


@st.composite
def scheduling_problems(draw: st.DrawFn) -> tuple[tuple[JobView, ...], Cluster, float]:
    """Return the arguments of a call of `Policy.plan`: jobs in every state, a cluster of mixed kinds, seconds."""
    cluster = _named_cluster(draw(st.lists(_NODES, min_size=1, max_size=3)))
    now = draw(st.floats(0, 1e6))
    waiting = draw(st.lists(_JOBS, max_size=12))
    jobs = [replace(job, id=f"job-{index}", since=now + job.since) for index, job in enumerate(waiting)]
    running = draw(st.integers(0, len(jobs)))
    return (*_started_jobs(draw, jobs[:running], cluster), *jobs[running:]), cluster, now


def _named_cluster(nodes: Sequence[Node]) -> Cluster:
    """Return a cluster in which each node and device has a name of its own."""
    numbers = count()
    return Cluster(
        tuple(
            replace(
                node,
                name=f"node-{index}",
                devices=tuple(replace(device, name=f"gpu:{next(numbers)}") for device in node.devices),
            )
            for index, node in enumerate(nodes)
        )
    )


def _started_jobs(draw: st.DrawFn, jobs: Sequence[JobView], cluster: Cluster) -> list[JobView]:
    """Return the jobs on devices with capacity for them, or suspended; jobs without capacity are dropped."""
    started: list[JobView] = []
    devices = [device for _, device in cluster]
    for job in jobs:
        if draw(st.booleans()) and draw(st.booleans()):
            home = draw(st.sampled_from((None, "gone", *(device.name for device in devices))))
            started.append(replace(job, state=JobState.SUSPENDED, home=home))
            continue
        usable = [device.name for device in devices if device.kind in job.demand]
        if not usable:
            continue
        max_devices = min(job.scaling.max_devices, len(usable))
        names = tuple(draw(st.lists(st.sampled_from(usable), min_size=1, max_size=max_devices, unique=True)))
        share = draw(st.sampled_from((None, 0.25, 1.0))) if len(names) == 1 else None
        home = names[0] if len(names) == 1 else None
        placed = replace(job, state=JobState.RUNNING, devices=names, share=share, home=home)
        if _within_limits([*started, placed], cluster):
            started.append(placed)
    return started


def _within_limits(running: Sequence[JobView], cluster: Cluster) -> bool:
    for node in cluster.nodes:
        cores = 0.0
        for device in node.devices:
            here = [job for job in running if device.name in job.devices]
            demands = [job.demand[device.kind] for job in here]
            cores += sum(demand.cores for demand in demands)
            if len(here) > 1 and any(len(job.devices) > 1 for job in here):
                return False
            if sum(job.compute(device) for job in here) > device.capacity:
                return False
            if sum(demand.memory for demand in demands) > device.memory:
                return False
        if cores > node.cores:
            return False
    return True


@st.composite
def packing_contexts(draw: st.DrawFn) -> tuple[tuple[Candidate, ...], PackingContext]:
    """Return the arguments of a call of `Packing.pack`."""
    numbers = iter(range(10**6))
    candidates = tuple(draw(_candidates(numbers)) for _ in range(draw(st.integers(0, 12))))
    keys = list(dict.fromkeys(candidate.key for candidate in candidates))
    pairs = [frozenset((one, other)) for index, one in enumerate(keys) for other in keys[index:]]
    relative_times = draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from(_RELATIVE_TIMES))) if pairs else {}
    context = PackingContext(
        loads=tuple(draw(st.lists(st.sampled_from((0.0, 0.0, 5.0, 100.0)), min_size=1, max_size=4))),
        memory=draw(st.sampled_from((0, 6, 12, 1000))) * _GB,
        start=draw(st.sampled_from((0.0, 1.0, 20.0))),
        relative_times=relative_times,
        axes=draw(st.sampled_from(({}, _AXES))),
        seed=draw(st.integers(0, 3)),
    )
    return candidates, context


@st.composite
def _candidates(draw: st.DrawFn, numbers: Iterator[int]) -> Candidate:
    batch_size = draw(st.sampled_from(_BATCH_SIZES))
    key = FusionKey(draw(st.sampled_from("ABC")), draw(st.sampled_from(("", "", "other"))), batch_size)
    members = tuple(
        Member(Trial(next(numbers), draw(_configs(batch_size)), seed=0, data_seed=0), start=0, target=1)
        for _ in range(draw(st.integers(1, 2)))
    )
    seconds = draw(st.sampled_from((0.0, 1.0, 10.0, 35.0, 100.0)))
    return Candidate(
        Array(key, members),
        seconds,
        fetching=seconds * draw(st.sampled_from((0.0, 0.1, 0.5, 1.0))),
        memory=draw(st.integers(0, 4)) * _GB,
        base=draw(st.integers(0, 2)) * _GB,
    )


@st.composite
def _configs(draw: st.DrawFn, batch_size: int) -> Mapping[str, Any]:
    optimizer = draw(st.sampled_from(({"name": "adam"}, {"name": "sgd", "momentum": 0.9})))
    config: dict[str, Any] = {"batch_size": batch_size, "optimizer": optimizer}
    config["lr"] = draw(st.sampled_from((1e-4, 0.003, 0.02, 0.3)))
    config["size"] = draw(st.sampled_from(("small", "medium", "large", "immense")))
    config["betas"] = draw(st.sampled_from(([0.9, 0.99], [0.5, 0.9])))
    return config
