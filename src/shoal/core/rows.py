"""Rows of a journal: what a study writes, and what its readers get.

The state machine returns the rows that a step has changed or added, and the journal stores them as they are. Rows of
trials, jobs, verdicts and values of the study replace earlier ones; all others are added. A new trial is a row itself,
which comes before its first `TrialRow`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.activity import Activity
from shoal.core.cause import cause_of, log_of
from shoal.core.event import NOT_TRIAL_FAILURES, Outcome, TurnStats
from shoal.core.job import Purpose
from shoal.core.objective import Objective
from shoal.core.request import requester
from shoal.core.trial import Config, Report, Trial, TrialGroup, TrialState

__all__ = [
    "NOT_FAILED",
    "PROGRESS",
    "REFUSED",
    "CheckRow",
    "Deletion",
    "DeviceRow",
    "Extension",
    "Intervention",
    "JobRow",
    "Joined",
    "Kill",
    "Proposal",
    "Quantum",
    "ReportRow",
    "Reservation",
    "Row",
    "Run",
    "StudyValue",
    "Telemetry",
    "TrialRow",
    "Verdict",
    "values",
]

NOT_FAILED = ("", Outcome.SUSPENDED, *NOT_TRIAL_FAILURES)
"""Outcomes of jobs that have not failed; "" is that of a running job."""

PROGRESS = "progress"
"""`StudyValue.key` of the progress within epochs: id of a running job -> `EpochProgress` of each of its arrays."""
REFUSED = "refused"
"""`CheckRow.what` of a trial that trains in plain PyTorch."""
_PLAIN_STEP = "step, plain"
"""`CheckRow.what` of a step that the trials of an array took one after another."""
_MAX_NAMED = 4
"""Most numbers of trials in a verdict."""


@dataclass(frozen=True, slots=True)
class StudyValue:
    """A value of the study, a JSON value."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Proposal:
    """Groups that the algorithm proposed while `free` more trials could start.

    Args:
        seq: Its place in the one order of proposals, reports and interventions.
        time: Time of the step, in seconds since 1970, as in all rows.
    """

    free: int
    groups: tuple[TrialGroup, ...]
    seq: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Extension:
    """A call of `Algorithm.extend`, recorded as an item of the value "extensions" of the study."""

    trials: int
    seq: int = 0


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A report of a trial that was no repetition.

    Args:
        job: Id of the job; "" if the study itself has failed the trial.
        best_value: Value of the best trial by the first metric after the report, if it has changed; else None.
    """

    seq: int
    time: float
    job: str
    report: Report
    best_value: float | None


@dataclass(frozen=True)
class CheckRow:
    """A comparison of a trial in an array with the same trial in plain PyTorch, or why it trains in plain PyTorch.

    Args:
        job: Id of the job.
        key: `FusionKey.steps` of the array.
        members: Number of trials of the array.
        epoch: Epochs that the trial had finished.
        step: Steps of the epoch that it had taken.
        what: What was compared: "step, eager" (the step mode) or "validation"; "refused" with a `reason`; "" if
            the row only says that the trial was in the array.
        difference: Largest relative difference of the tensors compared, which rounding explains; None if there is none.
        reason: Reason why the trial trains in plain PyTorch from there; "" if it continues in the array.
    """

    job: str
    key: str
    trial: int
    members: int
    epoch: int
    step: int
    what: str
    difference: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether trials of one structure train as arrays or in plain PyTorch, and what was compared.

    Args:
        key: `FusionKey.steps` of the arrays.
        trials: Numbers of the trials, ascending; of many the first ones.
        members: Number of trials of the largest array.
        checks: Number of comparisons with plain PyTorch in which they were equal but for rounding.
        difference: Largest relative difference in these; 0 without one.
        newest: `CheckRow.what` of the newest comparison of a step; "" without one.
        refusal: First reason why they train in plain PyTorch; "" if there is none. It outweighs all checks.
        epoch: Epochs that the trials had finished when they were refused.
        step: Steps of the epoch that they had taken as an array then.
    """

    key: str
    trials: tuple[int, ...] = ()
    members: int = 0
    checks: int = 0
    difference: float = 0.0
    newest: str = ""
    refusal: str = ""
    epoch: int = 0
    step: int = 0

    @property
    def is_slower(self) -> bool:
        """Whether the trials train in plain PyTorch because steps of an array are slower."""
        return self.newest == _PLAIN_STEP and not self.refusal

    @property
    def is_plain(self) -> bool:
        """Whether the trials train in plain PyTorch."""
        return self.is_slower or bool(self.refusal)

    def followed_by(self, row: CheckRow) -> "Verdict":
        """The verdict after a further row."""
        refused = row if row.reason and not self.refusal else None
        return Verdict(
            self.key,
            tuple(sorted({*self.trials, row.trial})[:_MAX_NAMED]),
            max(self.members, row.members),
            self.checks + (row.difference is not None),
            max(self.difference, row.difference or 0.0),
            row.what if row.what.startswith("step") else self.newest,
            self.refusal if refused is None else refused.reason,
            self.epoch if refused is None else refused.epoch,
            self.step if refused is None else refused.step,
        )


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial with its state and results.

    Args:
        reason: Reason why it waits, was stopped or failed.
        failures: Number of jobs that failed while they trained it.
        device: Name of its present or last device; "" before the first job.
        job: Id of its present or last job; "" before the first.
        seconds: Sum of the seconds of its reports.
        metrics: Name -> last value.
        best: Name -> best value, never NaN. For the study's metric the mode decides; for others the lowest value is the
            best if the name ends with "loss" or "error", else the highest. Values of different metrics may be of
            different epochs.
        objective: Value of the study's metric that ranks the trial: that of its best epoch, or its last value in a
            study with `rank_by="last"`. None before the first value, or if it is NaN. Of several metrics it is the
            value of the first; None if one is missing or NaN.
        violation: Violation of the study's constraints at the epoch that ranks the trial, 0 if they are kept, infinite
            if a value was not reported with them or is NaN; see `shoal.core.constraint.violation`.
        ranked: Name -> value at the epoch that ranks the trial; empty before the first value.
        best_epoch: Its best epoch, whose weights are kept; None before the first value, and with `rank_by="last"`.
        errors: Name -> standard error of the mean over the validation set that is in `ranked`, where it is known.
        paused_by: Login name of the user who has paused it; "" if nobody has.
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
    violation: float = 0.0
    ranked: Mapping[str, float] = field(default_factory=dict)
    best_epoch: int | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    paused_by: str = ""

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    @property
    def config(self) -> Config:
        """The trial's config."""
        return self.trial.config

    @property
    def members(self) -> tuple["TrialRow", ...]:
        """The rows of the trials that count as this one: itself, or the repeats of a configuration."""
        return (self,)

    @property
    def actions(self) -> tuple[str, ...]:
        """Requests that users can make: "pause", "resume", "stop", "retry". A trial that its algorithm holds is at
        the end of its budget, where a pause changes nothing yet.
        """
        if self.state is TrialState.FAILED:
            return ("retry",)
        if self.state.final:
            return ()
        if self.paused_by:
            return ("resume", "stop")
        return ("stop",) if self.state is TrialState.PAUSED else ("pause", "stop")

    @property
    def deviations(self) -> Mapping[str, float]:
        """Name of a metric -> standard deviation over the repeats of a configuration; empty for a single trial."""
        return {}

    @property
    def spreads(self) -> Mapping[str, float]:
        """The number after the "±" of each metric: of a trial `errors`, of repeats their `deviations`."""
        return self.errors if len(self.members) == 1 else self.deviations

    @property
    def seed(self) -> int:
        """Seed of the trial's initial weights and dropout."""
        return self.trial.seed

    @property
    def data_seed(self) -> int:
        """Seed of the order of its samples."""
        return self.trial.data_seed


@dataclass(frozen=True, slots=True)
class Reservation:
    """A job's reservation on its device from a point in time on; None where its demand is unknown.

    Args:
        time: Begin, in seconds since 1970.
        compute: Fraction of the device.
        memory: Bytes.
        job: Id of the job.
    """

    time: float
    compute: float | None = None
    memory: int | None = None
    cores: float | None = None
    job: str = field(default="", kw_only=True, compare=False)


@dataclass(frozen=True)
class DeviceRow:
    """A device of the study, as it was last recorded.

    Args:
        node_cores: CPU cores of this machine, which the jobs on all its devices share.
        memory: Bytes that jobs may use.
        cores: CPU cores that a job on it may use as threads.
        reason: Reason why it gets none; "" if it is healthy.
        time: Time of the change, in seconds since 1970.
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
    time: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Intervention:
    """Result of a user's request: trials and devices for which it was carried out, and refused parts, a line each.

    Args:
        time: Time at which it was carried out or refused, in seconds since 1970.
        seq: As in `Proposal`.
    """

    request: str
    verb: str
    trials: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    text: str = ""
    refused: tuple[str, ...] = ()
    time: float = 0.0
    seq: int = 0

    @property
    def user(self) -> str:
        """Login name of the user who made the request."""
        return requester(self.request)


@dataclass(frozen=True, slots=True)
class Deletion:
    """Checkpoints of an ended trial that are deleted once this row is committed.

    Args:
        weights: Whether all of its checkpoints go; else only the state of its optimizers.
        time: Time of the step, in seconds since 1970.
    """

    trial: int
    weights: bool
    time: float


@dataclass(frozen=True, slots=True)
class Kill:
    """Outcome that a job has once its kill has ended it, and the reason of the kill."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A trial that joins a running job."""

    job: str
    key: str
    trial: int


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job that was started; as read with the trials that joined it and its last reservation, as written without.

    Args:
        started: Start, in seconds since 1970.
        ended: End, in seconds since 1970; None while it runs.
        outcome: Outcome; "" while it runs.
        message: Message of its end. Lines before it name the suspended job that it continues, dropped arrays, or the
            reason why it left its device.
        members: `FusionKey.steps` of each of its arrays -> numbers of its trials; empty unless it trains.
        activities: Seconds by activity; empty while it runs, and if it could not report them.
        resumes: Id of the suspended job that it continues, or "".
        assists: Id of the job for which it computes gradients on a further device, or "".
        kill: Its kill, if it was killed or is about to be.
    """

    id: str
    purpose: Purpose
    device: str
    trials: tuple[int, ...]
    started: float
    ended: float | None
    outcome: str
    message: str
    reservation: Reservation | None = None
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    activities: Mapping[Activity, float] = field(default_factory=dict)
    resumes: str = ""
    assists: str = ""
    kill: Kill | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """`FusionKey.steps` of each of its arrays; empty unless it trains."""
        return tuple(self.members)

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return self.outcome not in NOT_FAILED

    @property
    def cause(self) -> str:
        """Cause of its failure in a line, the last line of a traceback."""
        return cause_of(self.message)

    @property
    def log(self) -> str:
        """Path of the log in its message; "" if there is none."""
        return log_of(self.message)


@dataclass(frozen=True)
class Quantum:
    """The losses of one turn of a job.

    Args:
        number: Number of the turn, counted from 0 over all stretches of the job on devices.
        time: Time at which it was recorded, its end, in seconds since 1970.
    """

    job: str
    number: int
    time: float
    losses: TurnStats


@dataclass(frozen=True)
class Telemetry:
    """Use of a GPU from a point in time on.

    Args:
        time: Begin, in seconds since 1970.
        utilisation: Percent of the last sampling period with a running kernel; None if unknown.
        memory: Bytes in use; None if unknown.
    """

    time: float
    device: str
    utilisation: int | None
    memory: int | None


@dataclass(frozen=True)
class Run:
    """A period during which one process was the study's writer.

    Args:
        started: Start, in seconds since 1970.
        epochs: Number of epochs that all trials had trained before.
        before: Time of the last event of the runs before, in seconds since 1970; None without one.
    """

    pid: int
    started: float
    epochs: int
    before: float | None = None


Row = (
    StudyValue
    | Proposal
    | ReportRow
    | Trial
    | TrialRow
    | JobRow
    | Joined
    | Reservation
    | Intervention
    | DeviceRow
    | Quantum
    | Telemetry
    | CheckRow
    | Verdict
    | Deletion
)


def values(row: TrialRow, objectives: Sequence[Objective]) -> tuple[float, ...] | None:
    """Return the values of a study's metrics that rank a trial; None if it lacks one, or has failed."""
    if row.objective is None or row.state is TrialState.FAILED:
        return None
    return (row.objective, *(row.ranked[other.metric] for other in objectives[1:]))
