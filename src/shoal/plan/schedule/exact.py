"""The exact policy: the multiple knapsack as a mixed-integer linear program (HyperSack, section 3)."""

import ctypes
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from operator import itemgetter
from typing import NamedTuple, final

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.core.plain import plain_fields
from shoal.core.resources import Capacity, Ledger
from shoal.plan.schedule.base import JobState, JobView, Plan, Policy, Resume, Start
from shoal.plan.schedule.knapsack import WFD
from shoal.plan.schedule.refusals import Refusals, start_or_resume

__all__ = ["Exact"]

_log = getLogger(__name__)

_LENGTH_WEIGHT = 1e-5
"""Extra value of the longest job over a job of no length, in compute of a device; it breaks ties of equal sums."""

_DemandKey = tuple[tuple[str, Demand], ...]
"""A demand: kinds of devices with their demands, sorted by name."""


@final
@dataclass(frozen=True)
class Exact(Policy):
    """Uses as much compute of the devices as possible.

    With x(s, d) the number of jobs of demand s that begin on device d, it maximises Σ c(s, d) x(s, d) subject to

    1. Σ_d x(s, d) ≤ the jobs of demand s: each job on at most one device;
    2. Σ_s c(s, d) x(s, d) ≤ the compute left of d;
    3. Σ_s m(s, d) x(s, d) ≤ the memory left of d;
    4. Σ_{d of n} Σ_s q(s, d) x(s, d) ≤ the cores left of node n.

    HyperSack has one variable per job; one variable for all jobs of equal demand is equivalent, without the symmetry
    that slows down a solver. Longer jobs have a slightly larger value. HiGHS solves the program, through
    `scipy.optimize.milp`. A job that would exceed a limit by the tolerance of the solver is left out. Jobs that still
    fit after that are placed by worst fit decreasing.

    This policy is a reference for the others: it takes seconds instead of a fraction of a millisecond, and at the time
    limit its result depends on the speed of the machine.

    Args:
        seconds: Time limit of the solver, after which its best placement so far is used. If there is none, a warning is
            logged, and the plan is that of worst fit decreasing.
        gap: Relative difference to the upper bound at which a placement is good enough.

    Raises:
        PolicyError: scipy is not installed, `seconds` is not above 0, or `gap` is negative.
    """

    seconds: float = 60.0
    gap: float = 1e-4

    def __post_init__(self) -> None:
        plain_fields(self)
        if not self.seconds > 0:
            raise PolicyError(f"`seconds` must be above 0, got {self.seconds!r}")
        if not self.gap >= 0:
            raise PolicyError(f"`gap` must be at least 0, got {self.gap!r}")

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        ledger = Ledger(cluster, jobs)
        queues: dict[_DemandKey, deque[JobView]] = defaultdict(deque)
        for job in jobs:
            if job.state is not JobState.RUNNING:
                queues[tuple(sorted(job.demand.items(), key=itemgetter(0)))].append(job)
        pairs = [
            _Pair(demand_key, capacity, dict(demand_key)[capacity.device.kind], len(queue))
            for demand_key, queue in queues.items()
            for capacity in ledger.capacities
            if ledger.fits(queue[0], capacity)
        ]
        actions: list[Start | Resume] = []
        for pair, count in zip(pairs, self._solve(pairs, ledger) if pairs else (), strict=True):
            queue = queues[pair.demand_key]
            for _ in range(count):
                if ledger.fits(queue[0], pair.capacity):
                    ledger.take(queue[0], pair.capacity)
                    actions.append(start_or_resume(queue.popleft(), pair.capacity))
        begun = {action.job: action for action in actions}
        after = [job.after(begun[job.id]) if job.id in begun else job for job in jobs]
        fallback = WFD().plan(after, cluster, now)
        placed = (*actions, *(action for action in fallback.actions if isinstance(action, (Start, Resume))))
        return Plan(placed, Refusals(len(fallback.refusals), lambda: jobs, placed, cluster))

    def _solve(self, pairs: Sequence["_Pair"], ledger: Ledger) -> list[int]:
        """Return the number of jobs of each pair's demand that start on its device."""
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise PolicyError("Policy 'exact' needs scipy. Install it with: pip install scipy") from error

        rows: dict[tuple[str, object], int] = {}
        entries: list[tuple[float, int, int]] = []
        for column, (demand_key, capacity, demand, max_jobs) in enumerate(pairs):
            for limit, amount, left in (
                (("jobs", demand_key), 1, max_jobs),
                (("compute", capacity), demand.compute, capacity.compute),
                (("memory", capacity), demand.memory, capacity.memory),
                (("cores", capacity.node.name), demand.cores, ledger.cores(capacity.node.name)),
            ):
                if amount > 0:  # relative to the limit, since memory and compute differ by 10^10
                    entries.append((amount / left, rows.setdefault(limit, len(rows)), column))
        coefficients, row_indices, column_indices = zip(*entries, strict=True)
        longest = max(pair.demand.seconds for pair in pairs) or 1.0
        value = np.array([pair.demand.compute + _LENGTH_WEIGHT * (1 + pair.demand.seconds / longest) for pair in pairs])
        with _stdout_to_stderr():
            result = milp(
                -value,
                integrality=np.ones(len(pairs)),
                bounds=Bounds(0, [pair.max_jobs for pair in pairs]),
                constraints=LinearConstraint(
                    csr_array((coefficients, (row_indices, column_indices)), (len(rows), len(pairs))), ub=1.0
                ),
                options={"time_limit": self.seconds, "mip_rel_gap": self.gap},
            )
        if result.x is None:
            _log.warning(
                "worst fit decreasing is used instead of a solution within %g s: %s", self.seconds, result.message
            )
            return [0] * len(pairs)
        return [round(count) for count in result.x]


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, since HiGHS prints lines regardless of its options."""
    buffers = ctypes.CDLL(None)
    sys.stdout.flush()
    buffers.fflush(None)
    saved_stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
        buffers.fflush(None)
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


class _Pair(NamedTuple):
    """A demand, a device on which it fits, the demand on its kind, and the number of jobs with this demand."""

    demand_key: _DemandKey
    capacity: Capacity
    demand: Demand
    max_jobs: int
