"""Clusters and jobs that hypothesis invents, for the conformance suite of policies."""

from collections.abc import Sequence

from hypothesis import strategies as st

from shoal.cluster.device import Cluster, Device, Node
from shoal.cost.demand import Demand
from shoal.schedule.base import JobState, JobView

__all__ = ["situations"]

_GB = 10**9
_KINDS = ("small", "large", "cpu/2")


@st.composite
def situations(draw: st.DrawFn) -> tuple[tuple[JobView, ...], Cluster, float]:
    """The arguments of a call of `Policy.plan`: waiting and running jobs, a cluster of mixed kinds, seconds."""
    cluster = draw(_clusters())
    demands = st.dictionaries(st.sampled_from((*_KINDS, "elsewhere")), _demands(), max_size=len(_KINDS))
    jobs = [JobView(f"job-{index}", demand) for index, demand in enumerate(draw(st.lists(demands, max_size=12)))]
    already = draw(st.integers(0, len(jobs)))
    running = _running(draw, jobs[:already], cluster)
    return (*running, *jobs[already:]), cluster, draw(st.floats(0, 1e6))


@st.composite
def _clusters(draw: st.DrawFn) -> Cluster:
    nodes: list[Node] = []
    names = iter(range(100))
    for index in range(draw(st.integers(1, 3))):
        devices = tuple(
            Device(
                name=f"gpu:{next(names)}",
                kind=draw(st.sampled_from(_KINDS)),
                memory=draw(st.integers(0, 8)) * _GB,
                oversubscription=draw(st.sampled_from((1.0, 2.5, 3.0))),
                healthy=draw(st.sampled_from((True, True, True, False))),
            )
            for _ in range(draw(st.integers(0, 4)))
        )
        nodes.append(Node(f"node-{index}", cores=draw(st.integers(1, 8)), devices=devices))
    return Cluster(tuple(nodes))


def _demands() -> st.SearchStrategy[Demand]:
    return st.builds(
        Demand,
        compute=st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 4.0)),
        memory=st.integers(0, 90).map(lambda tenths: tenths * _GB // 10),
        cores=st.sampled_from((0.0, 0.1, 0.9, 1.0, 3.0)),
        seconds=st.sampled_from((0.0, 1.0, 10.0, 100.0)),
    )


def _running(draw: st.DrawFn, jobs: Sequence[JobView], cluster: Cluster) -> list[JobView]:
    """The jobs on devices that have room for them; those that find none have ended long ago."""
    running: list[JobView] = []
    devices = [device for _, device in cluster]
    for job in jobs:
        able = [device.name for device in devices if device.kind in job.demand]
        if not able:
            continue
        placed = JobView(job.id, job.demand, JobState.RUNNING, (draw(st.sampled_from(able)),))
        if _within_limits([*running, placed], cluster):
            running.append(placed)
    return running


def _within_limits(running: Sequence[JobView], cluster: Cluster) -> bool:
    for node in cluster.nodes:
        cores = 0.0
        for device in node.devices:
            demands = [job.demand[device.kind] for job in running if device.name in job.devices]
            cores += sum(demand.cores for demand in demands)
            if sum(demand.compute for demand in demands) > device.capacity:
                return False
            if sum(demand.memory for demand in demands) > device.memory:
                return False
        if cores > node.cores:
            return False
    return True
