"""What is read from a journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.cause import cause_of, log_of
from shoal.core.event import BLAMELESS, Outcome
from shoal.core.job import Purpose
from shoal.core.trial import Config, Trial, TrialGroup, TrialState

__all__ = ["UNFAILED", "DeviceRow", "Intervention", "JobRow", "Proposal", "Reservation", "Run", "TrialRow"]

UNFAILED = ("", Outcome.SUSPENDED, *BLAMELESS)
"""Outcomes of jobs that did not fail: of one that runs, and of those whose device or engine was lost, too."""


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
        job: id of the one that trains it or trained it last; "" before.
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
    job: str
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

    @property
    def seed(self) -> int:
        """Of the trial's initial weights and dropout."""
        return self.trial.seed

    @property
    def data_seed(self) -> int:
        """Of the order of its samples."""
        return self.trial.data_seed


@dataclass(frozen=True)
class Reservation:
    """What a job is promised of its device from a moment on; None where nothing is known.

    Args:
        time: seconds since 1970.
        compute: fraction of the device.
        memory: bytes.
        cores: CPU cores of the node.
    """

    time: float
    compute: float | None = None
    memory: int | None = None
    cores: float | None = None


@dataclass(frozen=True)
class DeviceRow:
    """A device of the study, as it was last recorded.

    Args:
        name: unique in the study.
        node: the machine it belongs to.
        node_cores: CPU cores of that machine, which the jobs on all its devices share.
        kind: devices of one kind share measurements.
        memory: bytes that jobs may use.
        cores: CPU cores that a job on it may use as threads.
        compute: its capacity, in units of a promise's compute.
        healthy: whether it gets jobs.
        reason: why not; "" if it does.
    """

    name: str
    node: str
    node_cores: float
    kind: str
    memory: int
    cores: int
    compute: float = 1.0
    healthy: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Intervention:
    """A request of a person that was carried out or refused.

    Args:
        seq: its place in the one sequence of what was asked, reported and requested.
        time: when it was carried out, in seconds since 1970.
        request: its name.
        verb: what was to be done; see `Request`.
        trials: numbers of those with which it was done.
        devices: names of those with which it was done.
        text: what else is to be said of what was done.
        refused: what was not done, and why, a line each.
    """

    seq: int
    time: float
    request: str
    verb: str
    trials: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    text: str = ""
    refused: tuple[str, ...] = ()


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
        message: what the back end said of its end; before it why it dropped arrays, if it did, or was to leave its
            device; or with which job it goes on.
        keys: what each of its arrays is, as in `FusionKey.steps`; none if it is no training job.
        promise: what it is promised, or was last.
        members: numbers of the trials of each of `keys`; empty in a journal of an older version.
    """

    id: str
    purpose: Purpose
    device: str
    trials: tuple[int, ...]
    started: float
    ended: float | None
    outcome: str
    message: str
    keys: tuple[str, ...] = ()
    promise: Reservation | None = None
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it has ended as it should not."""
        return self.outcome not in UNFAILED

    @property
    def cause(self) -> str:
        """Why it failed, in a line: what a traceback ends with."""
        return cause_of(self.message)

    @property
    def log(self) -> str:
        """Path of the log that its message names; "" if it names none."""
        return log_of(self.message)


@dataclass(frozen=True)
class Proposal:
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
