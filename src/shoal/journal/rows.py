"""What is read from a journal."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.planner.job import Purpose
from shoal.trial import Config, Trial, TrialGroup, TrialState

__all__ = ["Ask", "JobRow", "Run", "TrialRow"]


@dataclass(frozen=True)
class TrialRow:
    """A trial with all that became of it.

    Args:
        trial: its number, config and seeds.
        state: where it stands.
        reason: why it waits, was stopped or failed.
        epoch: epochs it has reported.
        target: epochs its algorithm has asked for.
        failures: jobs that failed while they trained it.
        device: where it runs or ran last; "" before.
        array: the job that trains it or trained it last; "" before.
        seconds: sum over its reports.
        metrics: name to last value.
        best: name to best value, NaN never; in the study's direction for the study's metric, and for others the
            lowest if the name ends with "loss" or "error", else the highest.
        objective: last value of the study's metric; None before the first and when that is NaN. Of several metrics,
            that of the first; None until there are all, and when one is NaN.
    """

    trial: Trial
    state: TrialState
    reason: str
    epoch: int
    target: int
    failures: int
    device: str
    array: str
    seconds: float
    metrics: Mapping[str, float]
    best: Mapping[str, float]
    objective: float | None

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    @property
    def config(self) -> Config:
        """The trial's config."""
        return self.trial.config


@dataclass(frozen=True)
class JobRow:
    """A job that was started.

    Args:
        id: unique in the study.
        purpose: training or profiling.
        device: its name.
        trials: numbers of its members.
        started: seconds since 1970.
        ended: seconds since 1970; None while it runs.
        outcome: how it ended; "" while it runs.
        message: what the back end said of its end.
    """

    id: str
    purpose: Purpose
    device: str
    trials: tuple[int, ...]
    started: float
    ended: float | None
    outcome: str
    message: str


@dataclass(frozen=True)
class Ask:
    """The algorithm was asked for groups while `free` more trials could start, and returned these."""

    free: int
    groups: tuple[TrialGroup, ...]


@dataclass(frozen=True)
class Run:
    """One process's time as the study's writer.

    Args:
        pid: of the process.
        started: seconds since 1970.
        epochs: epochs of all trials that were done before.
    """

    pid: int
    started: float
    epochs: int
