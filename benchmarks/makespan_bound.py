"""The best makespan that measured share curves allow."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf

import numpy as np
from scipy.optimize import linprog

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.errors import ScenarioError
from shoal.plan.cost.cost import Cost, packed_demand
from shoal.simulate.slowdown import Curve
from shoal.simulate.tables import MAX_COUNT
from shoal.simulate.workload import TrialSource

__all__ = ["best_makespan", "jobs_of"]

Job = tuple[str, Mapping[str, Demand]]
"""Its workload, a row of the table of shares, and its demand by kind of device."""


def jobs_of(sources: Iterable[TrialSource]) -> Iterator[Job]:
    """Yield a job for each trial that sources ask for at once; those of one structure hold one demand."""
    for source in sources:
        demands: dict[str, Mapping[str, Demand]] = {}
        for group in source.algorithm(lambda: inf).next_groups(MAX_COUNT):
            for trial in group.trials:
                structure = source.structure(trial)
                if structure.name not in demands:
                    demands[structure.name] = {
                        kind: packed_demand([(Cost(profile), [group.budget.epochs])])
                        for kind, profile in structure.profiles.items()
                    }
                yield structure.workload, demands[structure.name]


def best_makespan(jobs: Iterable[Job], cluster: Cluster, curves: Mapping[str, Curve]) -> float:
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
        ScenarioError: the jobs cannot run on these devices.
    """
    room: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for node in cluster.nodes:
        for device in node.devices:
            room[device.kind] += (device.compute, device.memory, 0.0)
        for kind in {device.kind for device in node.devices}:
            room[kind][2] += node.cores
    classes = Counter((workload, tuple(demands.items())) for workload, demands in jobs)
    columns = [
        (number, kind, speed / max(demand.seconds, 1e-12), (share, demand.memory, demand.cores))
        for number, (workload, demands) in enumerate(classes)
        for kind, demand in demands
        if kind in room
        for share, speed in curves[workload].speeds[1:]
    ]
    numbers, kinds, speeds, amounts = (np.array(each) for each in zip(*columns, strict=True))
    of_class = numbers == np.arange(len(classes))[:, None]
    counts = np.array([*classes.values()], dtype=float)[:, None]
    resources = [np.hstack([-have[:, None], (kinds == kind) * amounts.T]) for kind, have in room.items()]
    limits = np.vstack([np.hstack([-counts, of_class]), *resources])  # column 0 is T
    solution = linprog(
        np.eye(1, 1 + len(columns)).ravel(),
        A_ub=limits,
        b_ub=np.zeros(len(limits)),
        A_eq=np.hstack([np.zeros_like(counts), of_class * speeds]),
        b_eq=counts.ravel(),
    )
    if not solution.success:
        raise ScenarioError(f"the bound cannot be computed: {solution.message}")
    return float(solution.x[0])
