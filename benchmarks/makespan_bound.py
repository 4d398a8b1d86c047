"""The best makespan that measured share curves allow."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.errors import ScenarioError
from shoal.plan.cost.cost import Cost, packed_demand
from shoal.simulate.slowdown import Curve
from shoal.simulate.tables import MAX_COUNT
from shoal.simulate.workload import TrialSource

__all__ = ["Alike", "best_makespan", "jobs_of"]


class Alike(NamedTuple):
    """Jobs that are alike: their row of the table, and what one takes of each kind of device."""

    workload: str
    demand: tuple[tuple[str, Demand], ...]


def jobs_of(sources: Sequence[TrialSource]) -> Counter[Alike]:
    """Jobs of all trials that sources ask for at once, each in one of its own, with how many of each there are."""
    jobs: Counter[Alike] = Counter()
    for source in sources:
        for group in source.algorithm(lambda: inf).next_groups(MAX_COUNT):
            for trial in group.trials:
                structure = source.structure(trial)
                kinds = sorted(structure.profiles.items())
                demand = tuple(
                    [(kind, packed_demand([(Cost(profile), [group.budget.epochs])])) for kind, profile in kinds]
                )
                jobs[Alike(structure.workload, demand)] += 1
    return jobs


@dataclass(frozen=True)
class _Pool:
    """All healthy devices of a kind together; `cores` of all nodes that have one."""

    compute: float
    memory: float
    cores: float


def best_makespan(jobs: Mapping[Alike, int], cluster: Cluster, curves: Mapping[str, Curve]) -> float:
    """A lower bound on the makespan of any schedule that shares devices, in seconds; a linear program over shares.

    Let n_j be the number of jobs of class j (one workload and demand), τ_jκ their seconds alone on a device of kind κ,
    f_j(s) their speed with share s (`Curve`), s_k the measured shares, and M_κ devices of kind κ have compute C_κ,
    memory D_κ and cores Q_κ together. x_jκk is the time, over all jobs of class j, spent on kind κ with share s_k::

        minimise  T
        Σ_κk f_j(s_k) / τ_jκ · x_jκk  =  n_j             every job is done
        Σ_κk x_jκk                    ≤  n_j T           a job is at one place at a time
        Σ_jk s_k · x_jκk              ≤  C_κ T           compute
        Σ_jk d_jκ · x_jκk             ≤  D_κ T           memory
        Σ_jk q_jκ · x_jκk             ≤  Q_κ T           cores
        x ≥ 0

    Every schedule gives such an x with its makespan as T: speeds between measured shares are linear, so time at such a
    share counts as time at the two next to it. The converse does not hold: a solution may split jobs over time and
    devices at no cost, has no idle tail, and reserves memory of all devices as if it were one. Jobs are taken to be
    there from the start, and start, switch and checkpoint costs to be none.

    Raises:
        ScenarioError: a job's workload has no curve, or a job can run nowhere.
    """
    if not jobs:
        return 0.0
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    pools = _pools(cluster)
    for workload, _ in jobs:
        if workload not in curves:
            raise ScenarioError(f"there is no curve of {workload!r}; there are {', '.join(curves)}")
    equal: list[tuple[int, int, float]] = []
    upper: list[tuple[int, int, float]] = []
    limits = len(jobs)
    kinds = {kind: limits + 3 * index for index, kind in enumerate(pools)}
    column = 1  # column 0 is T
    for row, ((workload, demands), count) in enumerate(jobs.items()):
        upper.append((row, 0, -float(count)))
        first = column
        for kind, demand in demands:
            if kind not in pools:
                continue
            for share, speed in curves[workload].speeds[1:]:
                equal.append((row, column, speed / max(demand.seconds, 1e-12)))
                amounts = (share, float(demand.memory), demand.cores)
                upper.append((row, column, 1.0))
                upper.extend((kinds[kind] + i, column, amount) for i, amount in enumerate(amounts) if amount)
                column += 1
        if column == first:
            raise ScenarioError(f"a job of workload {workload!r} can run on none of {', '.join(pools)}")
    for kind, pool in pools.items():
        for i, amount in enumerate((pool.compute, pool.memory, pool.cores)):
            upper.append((kinds[kind] + i, 0, -amount))

    def matrix(entries: list[tuple[int, int, float]], rows: int) -> coo_matrix:
        places = np.array([entry[:2] for entry in entries]).T
        return coo_matrix(([value for *_, value in entries], places), shape=(rows, column))

    rows = limits + 3 * len(pools)
    solution = linprog(
        np.eye(1, column).ravel(),
        A_ub=matrix(upper, rows),
        b_ub=np.zeros(rows),
        A_eq=matrix(equal, limits),
        b_eq=list(jobs.values()),
        method="highs",
    )
    if not solution.success:
        raise ScenarioError(f"the bound cannot be computed: {solution.message}")
    return float(solution.x[0])


def _pools(cluster: Cluster) -> dict[str, _Pool]:
    pools: dict[str, _Pool] = {}
    for node in cluster.nodes:
        for kind in {device.kind for device in node.devices if device.healthy}:
            here = [device for device in node.devices if device.kind == kind and device.healthy]
            old = pools.get(kind, _Pool(0.0, 0.0, 0.0))
            pools[kind] = _Pool(
                old.compute + sum(device.compute for device in here),
                old.memory + sum(device.memory for device in here),
                old.cores + node.cores,
            )
    return dict(sorted(pools.items()))
