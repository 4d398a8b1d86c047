"""The result of a simulation: completion times, use of the devices, and costs of decisions."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from statistics import fmean

from shoal.core.device import Cluster

__all__ = ["Interval", "SimulationResult"]


@dataclass(frozen=True)
class Interval:
    """The time of a job on a device.

    Args:
        begin: Start, in seconds.
        end: End, in seconds.
        compute: Compute that it reserved there, in units of `Demand.compute`.
    """

    trial: str
    trials: int
    device: str
    begin: float
    end: float
    compute: float


@dataclass
class SimulationResult:
    """The result of a simulation; equal for equal seeds, except for the real time of decisions.

    A segment is the training of a trial up to one of its budgets.

    Args:
        arrivals: Time at which each segment was proposed, in seconds.
        completion: Time at which each finished segment ended, in seconds.
        reached: Time at which the loss of a trial reached its target, in seconds.
        waiting: Reason of each segment that had not ended when no event was left.
        intervals: Times of jobs on devices, in the order of their ends.
        clusters: (seconds, devices from then on).
        switches: Number of times that a job was suspended, stopped or lost its device.
        longest_decision: Real time of the slowest decision, in seconds.
    """

    arrivals: dict[str, float] = field(default_factory=dict)
    completion: dict[str, float] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    clusters: list[tuple[float, Cluster]] = field(default_factory=list)
    decisions: int = 0
    switches: int = 0
    decision_seconds: float = field(default=0.0, compare=False)
    longest_decision: float = field(default=0.0, compare=False)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last end; inf if no segment ended."""
        return max(self.completion.values()) - min(self.arrivals.values()) if self.completion else math.inf

    @property
    def mean_completion(self) -> float:
        """Mean seconds from a segment's arrival to its end; inf if none ended."""
        return fmean(self._lengths()) if self.completion else math.inf

    @property
    def p95_completion(self) -> float:
        """Seconds from arrival to end that 95 % of the segments do not exceed (nearest rank); inf if none ended."""
        lengths = sorted(self._lengths())
        return lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else math.inf

    @property
    def time_to_target(self) -> float:
        """Mean seconds from the arrival of a trial until it reached its target; inf if none has."""
        return fmean(at - self.arrivals[trial] for trial, at in self.reached.items()) if self.reached else math.inf

    @property
    def time_to_good(self) -> float:
        """As `time_to_target`: the target of recorded curves is 90 % of the best reduction of the loss."""
        return self.time_to_target

    @property
    def device_seconds(self) -> float:
        """Seconds with jobs, summed over all devices."""
        return self._usage[1]

    @property
    def occupancy(self) -> Sequence[tuple[float, float]]:
        """(seconds, fraction of the compute of all healthy devices in demand), at every change."""
        return self._usage[0]

    @cached_property
    def _usage(self) -> tuple[Sequence[tuple[float, float]], float]:
        changes: list[tuple[float, int, str, float]] = [(at, 0, "", n) for n, (at, _) in enumerate(self.clusters)]
        for interval in [interval for interval in self.intervals if interval.begin < interval.end]:
            changes += [
                (interval.begin, 1, interval.device, interval.compute),
                (interval.end, -1, interval.device, -interval.compute),
            ]
        jobs, demanded, capacity = Counter[str](), defaultdict[str, float](float), dict[str, float]()
        occupancy: list[tuple[float, float]] = []
        device_seconds, previous, used, total = 0.0, 0.0, 0.0, 0.0
        for at, group in groupby(sorted(changes), key=lambda change: change[0]):
            device_seconds += (at - previous) * sum(1 for _ in +jobs)
            previous = at
            for _, change, device, compute in group:
                if change == 0:
                    capacity |= {device.name: device.compute for _, device in self.clusters[int(compute)][1]}
                    total = sum(x.compute for _, x in self.clusters[int(compute)][1] if x.healthy)
                    continue
                used -= min(capacity[device], demanded[device])
                jobs[device] += change
                demanded[device] = (
                    demanded[device] + compute if jobs[device] else 0.0
                )  # avoids a sum of rounding errors
                used += min(capacity[device], demanded[device])
            value = min(1.0, max(0.0, used / total)) if total else 0.0
            if not occupancy or abs(occupancy[-1][1] - value) > 1e-12:
                occupancy.append((at, value))
        return occupancy, device_seconds

    @property
    def mean_occupancy(self) -> float:
        """Mean occupancy from the first arrival to the last end; 0 if there is no such time."""
        if not self.completion or not self.makespan:
            return 0.0
        end = max(self.completion.values())
        changes = [*self.occupancy, (end, 0.0)]
        area = sum(value * (min(until, end) - at) for (at, value), (until, _) in pairwise(changes) if at < end)
        return area / self.makespan

    def rank(self, objective: str) -> tuple[int, float]:
        """Return the rank among results of one scenario, lower is better: first the number of unended segments."""
        return len(self.arrivals) - len(self.completion), getattr(self, objective)

    def _lengths(self) -> list[float]:
        return [end - self.arrivals[segment] for segment, end in self.completion.items()]
