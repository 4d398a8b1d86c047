"""What a simulation finds, and how it is measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

__all__ = ["Interval", "Outcome", "Usage"]


@dataclass(frozen=True)
class Interval:
    """A stay of a job on a device.

    Args:
        job: its id.
        device: name.
        begin: seconds.
        end: seconds.
        compute: that it was promised there, in units of `Demand.compute`.
    """

    job: str
    device: str
    begin: float
    end: float
    compute: float


@dataclass(frozen=True)
class Outcome:
    """What came of a simulation; equal for equal seeds, but for the time that decisions took.

    Args:
        arrivals: job -> seconds at which it arrived; of all jobs.
        completion: job -> seconds at which it ended.
        reached: job -> seconds at which its loss came to its target, of those that did.
        refused: job -> why it fits on no device; it was turned away at its arrival.
        waiting: job -> why it had not ended when nothing more could happen.
        intervals: who was where, in the order of their ends.
        occupancy: (seconds, fraction of the compute of all healthy devices that is asked for), at every change.
        device_seconds: during which devices held jobs, over all devices.
        decisions: how often the policy was asked.
        switches: how often a job was suspended, resized, stopped or lost its device.
        oversubscription: device kind -> the ratio in force at the end, of the kinds that a tuner has observed.
        decision_seconds: real time of all decisions.
        longest_decision: real time of the slowest one, in seconds.
    """

    arrivals: Mapping[str, float]
    completion: Mapping[str, float]
    reached: Mapping[str, float]
    refused: Mapping[str, str]
    waiting: Mapping[str, str]
    intervals: Sequence[Interval]
    occupancy: Sequence[tuple[float, float]]
    device_seconds: float
    decisions: int
    switches: int
    oversubscription: Mapping[str, float]
    decision_seconds: float = field(compare=False)
    longest_decision: float = field(compare=False)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last end; inf if no job ended."""
        return max(self.completion.values()) - min(self.arrivals.values()) if self.completion else math.inf

    @property
    def mean_completion(self) -> float:
        """Mean seconds from a job's arrival to its end; inf if no job ended."""
        return fmean(self._lengths()) if self.completion else math.inf

    @property
    def p95_completion(self) -> float:
        """Seconds from arrival to end that 95 % of the jobs do not exceed (nearest rank); inf if no job ended."""
        lengths = sorted(self._lengths())
        return lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else math.inf

    @property
    def time_to_target(self) -> float:
        """Mean seconds from the arrival of a job that reached its target until it did; inf if none has."""
        return fmean(at - self.arrivals[job] for job, at in self.reached.items()) if self.reached else math.inf

    @property
    def mean_occupancy(self) -> float:
        """Occupancy, averaged over the time from the first arrival to the last end; 0 if there is no such time."""
        if not self.completion or not self.makespan:
            return 0.0
        end = max(self.completion.values())
        times = [*(time for time, _ in self.occupancy), end]
        area = sum(
            value * (min(until, end) - time)
            for (time, value), until in zip(self.occupancy, times[1:], strict=True)
            if time < end
        )
        return area / self.makespan

    def rank(self, objective: str) -> tuple[int, float]:
        """By which outcomes of one scenario are compared, the less the better: jobs that did not end come first.

        Args:
            objective: the property that counts among outcomes with as many ended jobs.
        """
        return len(self.arrivals) - len(self.completion), getattr(self, objective)

    def _lengths(self) -> list[float]:
        return [end - self.arrivals[job] for job, end in self.completion.items()]


class Usage:
    """Adds up what is in use from change to change."""

    def __init__(self) -> None:
        self.occupancy: list[tuple[float, float]] = []
        self.device_seconds = 0.0
        self._asked: dict[str, float] = {}
        self._compute = 0.0
        self._total = 0.0
        self.now = 0.0

    def set_total(self, compute: float) -> None:
        """From now on the healthy devices have this compute in all."""
        self._total = compute

    def set_device(self, name: str, compute: float | None) -> None:
        """From now on this much of a device's compute is asked for; None: it holds no job."""
        self._compute -= self._asked.pop(name, 0.0)
        if compute is not None:
            self._compute += compute
            self._asked[name] = compute
        if not self._asked:
            self._compute = 0.0  # rounding does not add up

    def advance(self, now: float) -> None:
        """Account for the time up to now; to be called before anything is set at a later time."""
        self.device_seconds += (now - self.now) * len(self._asked)
        self.now = now

    def note(self, now: float) -> None:
        """Write down the occupancy if it has changed."""
        value = min(1.0, self._compute / self._total) if self._total else 0.0
        if not self.occupancy or abs(self.occupancy[-1][1] - value) > 1e-12:
            if self.occupancy and self.occupancy[-1][0] == now:
                self.occupancy.pop()
            self.occupancy.append((now, value))
