"""The state of a study at one moment, read from its journal for the display and `shoal status`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from msgspec import convert

from shoal.algorithms.base import Totals
from shoal.core.cause import Cause, causes
from shoal.core.domain import Domain
from shoal.core.event import EpochProgress
from shoal.core.hypervolume import MAX_METRICS, Hypervolume
from shoal.core.job import Purpose
from shoal.core.objective import Objective
from shoal.core.ranking import all_nan, front, front_volume, least_violating, ranked
from shoal.core.reference import Dependent, Expression
from shoal.core.rows import PROGRESS, DeviceRow, Intervention, JobRow, TrialRow, Verdict, values
from shoal.core.space import Space
from shoal.core.trial import Config, TrialState
from shoal.journal.check import check_values
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.elapsed import Elapsed
from shoal.look.savings import Savings, Speedup

__all__ = [
    "Best",
    "DeviceUse",
    "Failing",
    "JobUse",
    "Snapshot",
    "TaskEdit",
    "announced",
    "how_ended",
    "snapshot",
    "task_edits",
    "time_left",
    "trial_verdicts",
    "verdicts",
]


@dataclass(frozen=True)
class Best:
    """The best trial so far, with the metric's value that ranks it; or one trial of the front of several metrics.

    Every place that shows a best trial shows this one.

    Args:
        value: Value of the metric that ranks it, that of its best epoch, or its last with `rank_by="last"`; of several
            metrics, that of each.
        epoch: Epoch of that value; None where it is an aggregate of repeats, each at its own epoch.
        last: Value of the metric at its newest epoch; of several metrics, that of each. None if it is the same.
        spreads: Standard errors by metric; for a repeated configuration, sample standard deviations.
        repeats: Number of its trials; 1 where nothing is repeated.
    """

    trial: int
    config: Config
    value: float | tuple[float, ...]
    spreads: Mapping[str, float] = field(default_factory=dict)
    repeats: int = 1
    epoch: int | None = None
    last: float | tuple[float, ...] | None = None

    @staticmethod
    def of(row: TrialRow, objectives: Sequence[Objective]) -> "Best | None":
        """The best of its row, of a trial or of a configuration; None without values."""
        if (shown := values(row, objectives)) is None:
            return None
        newest = tuple(row.metrics.get(goal.metric, math.nan) for goal in objectives)
        several, repeats = len(objectives) > 1, len(row.members)
        return Best(
            *(row.number, row.config, shown if several else shown[0], row.spreads, repeats),
            epoch=None if repeats > 1 else row.best_epoch or row.epoch,
            last=None if newest == shown else newest if several else newest[0],
        )


@dataclass(frozen=True)
class JobUse:
    """A running job and its reservation on the device; None for unknown values.

    Args:
        compute: Reserved fraction of the device.
        memory: Reserved bytes.
        rate: Recent epochs, or reports, per second of all its trials together.
        assists: Id of the job for which it computes gradients, or "".
        progress: Progress of its arrays within their epochs; of short epochs there is none.
    """

    job: str
    purpose: Purpose
    members: int
    compute: float | None = None
    memory: int | None = None
    cores: float | None = None
    rate: float | None = None
    assists: str = ""
    progress: tuple[EpochProgress, ...] = ()


@dataclass(frozen=True)
class DeviceUse:
    """A device and its jobs, in the order of their start."""

    device: DeviceRow
    jobs: tuple[JobUse, ...] = ()

    @property
    def occupancy(self) -> float:
        """Fraction of its compute that is reserved, above 1 if that is more than it has.

        A job without a known reservation, or with a larger one, counts as the whole device.
        """
        whole = self.device.compute
        return sum(whole if job.compute is None else min(job.compute, whole) for job in self.jobs) / whole

    @property
    def reserved(self) -> int | None:
        """Reserved bytes; None if those of a job are unknown."""
        memory = [job.memory for job in self.jobs]
        return None if None in memory else sum(filter(None, memory))


@dataclass(frozen=True)
class Failing:
    """A trial that has failed and is retried.

    Args:
        job: Newest of its failed jobs; None if only its array failed.
        retries: Number of retries that the study allows a trial that fails by itself.
    """

    trial: TrialRow
    job: JobRow | None
    retries: int
    runs: bool = True


@dataclass(frozen=True)
class TaskEdit:
    """A resume of the study with edited files of the task, accepted by the user.

    Args:
        time: Seconds since 1970.
        files: Path of each file -> its changes, in a line or as a unified diff.
        open: Numbers of the trials that had not ended.
        next: Number of the first trial that was proposed afterwards.
    """

    time: float
    files: Mapping[str, str]
    open: tuple[int, ...]
    next: int


@dataclass(frozen=True)
class Snapshot:
    """A study at one moment.

    Args:
        mode: "min" or "max", or one for each of several metrics.
        states: Number of trials in each state.
        waiting: Reason -> numbers of the trials that wait to train, or that a user has paused.
        waiting_for_others: Reason -> numbers of the trials that their algorithm holds at the end of a budget.
        best: Best trial; None before the first value, and for several metrics.
        epochs_asked: `epochs_done` plus the open epochs of the trials that wait or run. An algorithm may request more
            later.
        elapsed: Running time in seconds, of all runs, without the time in which no process ran the study.
        seconds_left: Seconds until `epochs_total` are done, at the rate so far, before the first epoch of this run at
            that of the steps; None if that is unknown, or the study is paused.
        devices: Devices with their jobs; none if no process runs the study.
        host: Name of its machine, if that is another one; else "".
        front: Feasible trials that no other dominates, for several metrics; see `shoal.core.score.order`.
        totals: Trials and epochs that the algorithm announced, plus those that users added; None if unknown.
        causes: Causes of the trials that failed for good, the most frequent first.
        stopped: Common cause of the first trials' failures, which stopped the study; None if it was not stopped, or was
            resumed.
        epochs_lost: Epochs of `totals` that failed trials will not do.
        starting: Whether its workers are starting, and nothing can run before; only its own process knows.
        unmeasured: Causes of failed profiles of this run, each with the first trial of the profile.
        unit: Unit of progress: "epochs", or "reports" of programs.
        all_nan: Whether no trial is the best because all values of a metric were NaN.
        constraints: The constraints of the study, "latency_ms <= 10".
        least_violation: Trial that violates them least, and its violation, if no trial with values is feasible.
        hypervolume: Hypervolume of the front of two or three metrics.
        earlier_from: How many trials of which earlier studies its model knows, a line for each study.
        note: Unusual features of the task, one per line; "" if none are known.
        interventions: Requests of users with their outcomes, in order.
        held: Numbers of the open trials that a user has paused.
        paused: Whether a user has paused the whole study.
        savings: Device time that fusing and packing saved, when the study last ended; None if nothing was fused.
        speedup: Measured speed-up of training trials together; None before it is known.
        arrays: Whether each structure trains as arrays or in plain PyTorch, and what was proven of it.
        end: How it has ended, see `how_ended`.
        time_left: Seconds that are left of its timeout; None without one.
        span: Seconds from the first start until now or the end: `elapsed`, and the time between the runs.
        runs: Number of its runs: one, and one for each resume.
        constants: Names of the parameters that the space fixes -> their values; a line on the best trial omits them.
    """

    metric: str | tuple[str, ...]
    mode: str | tuple[str, ...]
    states: Mapping[TrialState, int]
    waiting: Mapping[str, Sequence[int]]
    best: Best | None
    epochs_done: int
    epochs_asked: int
    elapsed: float
    seconds_left: float | None
    devices: tuple[DeviceUse, ...]
    pid: int | None
    host: str = ""
    front: tuple[Best, ...] = ()
    failing: tuple[Failing, ...] = ()
    totals: Totals | None = None
    causes: tuple[Cause, ...] = ()
    stopped: Cause | None = None
    epochs_lost: int = 0
    edits: tuple[TaskEdit, ...] = ()
    starting: bool = False
    unmeasured: tuple[Cause, ...] = ()
    unit: str = "epochs"
    all_nan: bool = False
    constraints: tuple[str, ...] = ()
    least_violation: tuple[int, float] | None = None
    hypervolume: Hypervolume | None = None
    earlier_from: tuple[str, ...] = ()
    note: str = ""
    interventions: tuple[Intervention, ...] = ()
    held: tuple[int, ...] = ()
    paused: bool = False
    savings: Savings | None = None
    speedup: Speedup | None = None
    arrays: tuple[Verdict, ...] = ()
    end: str = ""
    time_left: float | None = None
    waiting_for_others: Mapping[str, Sequence[int]] = field(default_factory=dict)
    span: float = 0.0
    runs: int = 1
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_paused(self) -> bool:
        """Whether users have paused trials, none runs, and no other one waits but for the results of others."""
        waiting = {number for numbers in self.waiting.values() for number in numbers}
        return bool(self.held) and not self.states.get(TrialState.RUNNING) and waiting <= set(self.held)

    @property
    def epochs_total(self) -> int:
        """Epochs of all trials of all rungs at the end: the certain number, if results decide how many there are."""
        return self._final_epochs(None if self.totals is None else self.totals.least)

    @property
    def epochs_most(self) -> int:
        """As `epochs_total`, but the greatest possible number."""
        return self._final_epochs(None if self.totals is None else self.totals.most)

    def _final_epochs(self, announced: int | None) -> int:
        known = self.epochs_asked
        return known if announced is None or self.finished else max(known, announced - self.epochs_lost)

    @property
    def unproposed(self) -> int:
        """Number of trials that the algorithm has announced and not yet proposed."""
        return 0 if self.totals is None or self.finished else max(0, self.totals.trials - self.trials)

    @property
    def progress(self) -> tuple[EpochProgress, ...]:
        """Progress of all arrays within their epochs."""
        return tuple(each for use in self.devices for job in use.jobs for each in job.progress)

    @property
    def epochs_begun(self) -> float:
        """The done parts of the epochs that trials train now, in epochs."""
        return sum(each.epochs for each in self.progress)

    @property
    def trials(self) -> int:
        """Number of all trials."""
        return sum(self.states.values())

    @property
    def ended(self) -> int:
        """Number of trials in a final state."""
        return sum(count for state, count in self.states.items() if state.final)

    @property
    def finished(self) -> bool:
        """Whether there are trials and all have ended."""
        return 0 < self.trials == self.ended


def snapshot(
    journal: JournalView,
    now: float,
    *,
    starting: bool = False,
    progress: Mapping[str, tuple[EpochProgress, ...]] | None = None,
) -> Snapshot:
    """Read a study's state from its journal: a few queries, a few milliseconds at 10,000 trials.

    All trials are decoded, which takes some tenths of a second at 10,000, where all of them decide what is best: with
    several metrics, with repeats, and while the study has reports but no value.

    Args:
        now: Seconds since 1970.
        starting: As in `Snapshot`.
        progress: Id of a job -> that of `JobUse`; None: as the journal has it, which may be some seconds old.
    """
    check_values(journal)
    statistics = StudyStatistics(journal)
    done, asked = statistics.epochs()
    runs = journal.runs()
    run = runs[-1]
    owner = journal.writer()
    elapsed = Elapsed.of(journal, now)
    objectives = journal.objectives
    several = len(objectives) > 1
    totals, stopped = announced(journal), journal.study.get("stopped")
    saved, gained = journal.study.get("savings"), journal.study.get("speedup")
    if totals is not None and (added := statistics.added())[0]:
        totals = Totals(totals.trials + added[0], totals.least + added[1], totals.most + added[1])
    rows = journal.configurations() if several or journal.spec.repetition.size > 1 else []
    best, least = _best_and_least_violating(journal, rows)
    if best is None and least is None and done and not rows:
        rows = journal.configurations()
    found = Snapshot(
        metric=tuple(goal.metric for goal in objectives) if several else objectives[0].metric,
        mode=tuple(goal.mode for goal in objectives) if several else objectives[0].mode,
        states=statistics.states(),
        waiting=statistics.waiting(),
        waiting_for_others=statistics.waiting(TrialState.PAUSED),
        best=best,
        epochs_done=done,
        epochs_asked=asked,
        elapsed=elapsed.total,
        span=elapsed.span,
        runs=len(runs),
        constants=_constants(journal.space),
        seconds_left=None,
        devices=_devices(journal, progress) if owner is not None else (),
        pid=None if owner is None else owner.pid,
        host="" if owner is None or owner.is_here else owner.host,
        front=_front(rows, objectives) if several else (),
        failing=tuple(Failing(*x, journal.spec.retries, owner is not None) for x in journal.failures()),
        totals=totals,
        causes=causes(journal.failed()),
        edits=task_edits(journal.study),
        stopped=None if stopped is None else Cause(stopped["text"], tuple(stopped["trials"]), stopped["log"]),
        epochs_lost=statistics.epochs_lost(),
        starting=starting,
        unmeasured=causes(statistics.unmeasured(run.started)),
        unit=journal.spec.unit,
        all_nan=best is None and done > 0 and all_nan(rows, objectives) is not None,
        constraints=tuple(map(str, journal.spec.bounds)),
        least_violation=None if least is None else (least.number, least.violation),
        hypervolume=front_volume(rows, objectives, journal.study) if 1 < len(objectives) <= MAX_METRICS else None,
        earlier_from=tuple(journal.spec.earlier_from),
        note=journal.study.get("note", ""),
        interventions=tuple(journal.interventions()),
        held=journal.paused_trials(),
        paused=journal.study.get("paused", False),
        savings=None if saved is None else Savings(**saved),
        speedup=None if gained is None else Speedup(**gained),
        arrays=verdicts(journal),
        end=how_ended(journal),
        time_left=time_left(journal),
    )
    waits = owner is None or found.paused or found.all_paused
    in_run = elapsed.total - elapsed(run.started)
    left = None if waits else _seconds_left(found, done - run.epochs, in_run)
    return replace(found, seconds_left=left)


def how_ended(journal: JournalView) -> str:
    """How a study has ended: "finished" by its algorithm, "timeout", or in words which trial or user has ended it; ""
    while it is open.
    """
    study = journal.study
    if study.get("ended"):
        return study.get("ended_because") or "ended by a user"
    if study.get("finished"):
        return "finished"
    return "timeout" if time_left(journal) == 0 else ""


def time_left(journal: JournalView) -> float | None:
    """Seconds that are left of a study's timeout, 0 if it has ended the study; None without a timeout."""
    left: float | None = journal.study.get("time_left", journal.spec.timeout)
    return left


def announced(journal: JournalView) -> Totals | None:
    """Trials and epochs that the algorithm has announced, with those that users have asked for since."""
    if "totals" not in journal.study:
        return journal.spec.totals
    return convert(journal.study["totals"], Totals | None)


def task_edits(study: Mapping[str, Any]) -> tuple[TaskEdit, ...]:
    """All resumes of a study with an edited task, in order, from `JournalView.study`."""
    entries = study.get("edits", ())
    return tuple(TaskEdit(each["time"], each["files"], tuple(each["open"]), each["next"]) for each in entries)


def _best_and_least_violating(journal: JournalView, rows: Sequence[TrialRow]) -> tuple[Best | None, TrialRow | None]:
    """The best trial by one metric, and the one that violates the constraints least if none is feasible.

    Args:
        rows: All configurations of several metrics or with repeats; none if single rows of the journal tell.
    """
    objectives = journal.objectives
    if not rows:
        if (row := journal.best()) is not None:
            return Best.of(row, objectives), None
        return None, journal.least_violating()
    least = least_violating(rows, objectives)
    if len(objectives) > 1 or least is not None:
        return None, least
    return Best.of(ranked(rows, objectives)[0], objectives), None


def _constants(space: Space) -> dict[str, Any]:
    """The parameters with one value in all configurations, by their names in flattened ones."""
    found = {}
    for name, leaf in space.leaves().items():
        value, *others = leaf.values
        points = list(islice(value.points() or (), 2)) if isinstance(value, Domain) else [value]
        if not others and not leaf.optional and len(points) == 1 and not isinstance(value, Dependent | Expression):
            found[name] = points[0]
    return found


def _front(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> tuple[Best, ...]:
    best = front(rows, objectives)
    shown = ranked([row for row in rows if row.number in best], objectives)
    return tuple(filter(None, (Best.of(row, objectives) for row in shown)))


def _seconds_left(found: Snapshot, done: int, in_run: float) -> float | None:
    """See `Snapshot`; `done` and `in_run` are the epochs and the seconds of this run."""
    begun = found.epochs_begun
    left = max(found.epochs_total - found.epochs_done - begun, 0.0)
    if done:
        return in_run * left / (done + begun)
    rate = sum(each.epochs_per_second for each in found.progress)
    return left / rate if rate else None


def _devices(journal: JournalView, progress: Mapping[str, tuple[EpochProgress, ...]] | None) -> tuple[DeviceUse, ...]:
    if progress is None:
        progress = convert(journal.study.get(PROGRESS, {}), dict[str, tuple[EpochProgress, ...]])
    statistics = StudyStatistics(journal)
    members, rates = statistics.training(), statistics.rates()
    uses: dict[str, list[JobUse]] = {}
    for job in journal.jobs(running=True):
        count = members.get(job.id, 0) if job.purpose is Purpose.TRAIN else len(job.trials)
        reservation = job.reservation
        known = (
            (None, None, None) if reservation is None else (reservation.compute, reservation.memory, reservation.cores)
        )
        uses.setdefault(job.device, []).append(
            JobUse(job.id, job.purpose, count, *known, rates.get(job.id), job.assists, progress.get(job.id, ()))
        )
    return tuple(DeviceUse(device, tuple(uses.get(device.name, ()))) for device in journal.devices())


def verdicts(journal: JournalView) -> tuple[Verdict, ...]:
    """Return the verdict of each structure of which several trials were an array or any was refused, these first."""
    found = [each for each in journal.verdicts() if each.members > 1 or each.refusal]
    return tuple(sorted(found, key=lambda each: (not each.refusal, not each.is_slower, each.trials)))


def trial_verdicts(journal: JournalView, trial: int | None = None) -> dict[int, Verdict]:
    """Number of each trial of an array -> its own verdict, or that of its structure if it was not compared itself.

    Args:
        trial: The trial to look up; None: all of them.
    """
    own: dict[int, Verdict] = {}
    for row in journal.checks(trial):
        own[row.trial] = own.get(row.trial, Verdict(row.key)).followed_by(row)
    of_structures = {each.key: each for each in journal.verdicts()}
    return {number: each if each.checks or each.refusal else of_structures[each.key] for number, each in own.items()}
