"""A study at one moment, as the display and `shoal status` show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.algorithms.base import Totals
from shoal.core.cause import Cause, causes
from shoal.core.job import Purpose
from shoal.core.trial import Config, TrialState
from shoal.journal.check import check_noted
from shoal.journal.rows import DeviceRow, Intervention, JobRow, TrialRow
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.reporting.edits import Edited, edited
from shoal.reporting.ranking import all_nan, front, ranked, values

__all__ = ["Best", "DeviceUse", "Failing", "JobUse", "Snapshot", "snapshot"]


@dataclass(frozen=True)
class Best:
    """The best trial so far, by its last value of the study's metric; or one of the best, by those of several."""

    trial: int
    config: Config
    value: float | tuple[float, ...]


@dataclass(frozen=True)
class JobUse:
    """A job that runs, and what it was promised of its device; None where nothing is known.

    Args:
        job: its id.
        purpose: why it runs.
        members: trials in it now.
        compute: fraction of the device.
        memory: bytes.
        cores: CPU cores of the node.
        rate: epochs, or reports, of all its trials together a second, by what it reported lately.
    """

    job: str
    purpose: Purpose
    members: int
    compute: float | None = None
    memory: int | None = None
    cores: float | None = None
    rate: float | None = None


@dataclass(frozen=True)
class DeviceUse:
    """What a device runs.

    Args:
        device: as the journal has it.
        jobs: those on it, in the order in which they began; none when it is idle.
    """

    device: DeviceRow
    jobs: tuple[JobUse, ...] = ()

    @property
    def occupancy(self) -> float:
        """Part of its compute that jobs were promised, above 1 if that is more than it has.

        A job of which nothing is known has all of it, and so has one that was promised even more.
        """
        whole = self.device.compute
        return sum(whole if job.compute is None else min(job.compute, whole) for job in self.jobs) / whole

    @property
    def promised(self) -> int | None:
        """Bytes that jobs were promised; None if that is not known of one of them."""
        memory = [job.memory for job in self.jobs]
        return None if None in memory else sum(filter(None, memory))


@dataclass(frozen=True)
class Failing:
    """A trial that has failed and is tried again.

    Args:
        trial: it waits, or runs.
        job: the newest of its jobs that failed; None where only its array did.
        retries: how often the study tries a trial again that fails by itself; None if that is not known.
        runs: whether a process runs the study.
    """

    trial: TrialRow
    job: JobRow | None
    retries: int | None = None
    runs: bool = True


@dataclass(frozen=True)
class Snapshot:
    """A study at one moment.

    Args:
        metric: what it optimises, or several.
        mode: "min" or "max", or one for each of several metrics.
        states: number of trials in each state.
        waiting: reason to the numbers of the trials that wait for it.
        best: None before the first value, and of several metrics.
        epochs_done: of all trials.
        epochs_asked: `epochs_done` and what the trials that wait or run still have before them. An algorithm may ask
            for more later.
        elapsed: seconds since `tune` or `resume` was called in the process that runs it, or ran it last.
        seconds_left: until `epochs_total` are done, at the pace so far; None while that is unknown, or it is paused.
        devices: each with what it runs; none when nobody runs the study.
        pid: of the process that runs it; None when nobody does.
        front: of several metrics, the trials that no other dominates, by the first metric.
        failing: the trials that have failed and are tried again.
        totals: what the algorithm said beforehand that it will ask for, and what users have added; None where that
            is not known.
        causes: what trials have failed for good of, the most frequent first.
        stopped: what its first trials failed of, alike, so that it was stopped; None if it was not, or goes on.
        epochs_lost: of `totals`, what trials that have failed will not do.
        edits: each time that it went on with an edited task.
        starting: whether its workers are being started, and nothing can run before; only its own process knows.
        unmeasured: what profiles of this run failed of, each with the first trial that it was to measure.
        unit: what epochs are: "epochs", or "reports" of programs.
        all_nan: no trial is the best since a metric was never a number.
        note: what is unusual in the task, a line for each finding; "" if nothing is known to be.
        interventions: what users asked for, in order, and what came of it.
        held: numbers of the open trials that a user has paused.
        paused: whether a user has paused the whole study.
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
    front: tuple[Best, ...] = ()
    failing: tuple[Failing, ...] = ()
    totals: Totals | None = None
    causes: tuple[Cause, ...] = ()
    stopped: Cause | None = None
    epochs_lost: int = 0
    edits: tuple[Edited, ...] = ()
    starting: bool = False
    unmeasured: tuple[Cause, ...] = ()
    unit: str = "epochs"
    all_nan: bool = False
    note: str = ""
    interventions: tuple[Intervention, ...] = ()
    held: tuple[int, ...] = ()
    paused: bool = False

    @property
    def at_rest(self) -> bool:
        """Whether nothing goes on before a user resumes trials that are paused."""
        waiting = {number for numbers in self.waiting.values() for number in numbers}
        return bool(waiting) and not self.states.get(TrialState.RUNNING) and waiting <= set(self.held)

    @property
    def epochs_total(self) -> int:
        """Epochs of all trials of all rungs at the end: what is certain, where results decide how many there are."""
        return self._at_end(None if self.totals is None else self.totals.least)

    @property
    def epochs_most(self) -> int:
        """As `epochs_total`, but what is possible."""
        return self._at_end(None if self.totals is None else self.totals.most)

    def _at_end(self, told: int | None) -> int:
        known = self.epochs_asked
        return known if told is None or self.finished else max(known, told - self.epochs_lost)

    @property
    def to_come(self) -> int:
        """Number of trials that the algorithm has still to propose, as far as it said beforehand how many there are."""
        return 0 if self.totals is None or self.finished else max(0, self.totals.trials - self.trials)

    @property
    def trials(self) -> int:
        """Number of all trials."""
        return sum(self.states.values())

    @property
    def ended(self) -> int:
        """Number of trials that never run again."""
        return sum(count for state, count in self.states.items() if state.final)

    @property
    def finished(self) -> bool:
        """Whether there are trials and all have ended."""
        return 0 < self.trials == self.ended


def snapshot(journal: JournalView, now: float, *, starting: bool = False) -> Snapshot:
    """Read a study's state from its journal: a few queries, a few milliseconds at 10,000 trials.

    Args:
        journal: of the study; the engine's own, or one opened for reading.
        now: seconds since 1970.
        starting: see `Snapshot`.
    """
    check_noted(journal)
    figures = StudyStatistics(journal)
    done, asked = figures.epochs()
    run = journal.runs()[-1]
    pid = journal.writer()
    moment = now if pid is not None else max(figures.last_moment() or run.started, run.started)
    elapsed = max(moment - run.started, 0.0)
    goals = journal.objectives
    several = len(goals) > 1
    told, stopped = journal.study.get("totals"), journal.study.get("stopped")
    with journal.tables.sound("how much its algorithm asks for"):
        totals = None if told is None else Totals(**told)
    if totals is not None and (added := figures.added())[0]:
        totals = Totals(totals.trials + added[0], totals.least + added[1], totals.most + added[1])
    best = None if several else journal.best()
    seen = Snapshot(
        metric=tuple(goal.metric for goal in goals) if several else goals[0].metric,
        mode=tuple(goal.mode for goal in goals) if several else goals[0].mode,
        states=figures.states(),
        waiting=figures.waiting(),
        best=Best(best.number, best.config, best.objective) if best and best.objective is not None else None,
        epochs_done=done,
        epochs_asked=asked,
        elapsed=elapsed,
        seconds_left=None,
        devices=_devices(journal) if pid is not None else (),
        pid=pid,
        front=_front(journal) if several else (),
        failing=tuple(Failing(*x, journal.study.get("retries"), pid is not None) for x in journal.failures()),
        totals=totals,
        causes=causes(journal.failed()),
        edits=edited(journal.study),
        stopped=None if stopped is None else Cause(stopped["text"], tuple(stopped["trials"]), stopped["log"]),
        epochs_lost=figures.epochs_lost(),
        starting=starting,
        unmeasured=causes(figures.unmeasured(run.started)),
        unit="reports" if journal.study.get("opaque") else "epochs",
        all_nan=best is None and done > 0 and all_nan(journal.trials(), goals) is not None,
        note=journal.study.get("note", ""),
        interventions=tuple(journal.interventions()),
        held=journal.held(),
        paused=journal.study.get("paused", False),
    )
    rests = pid is None or seen.paused or seen.at_rest
    left = None if rests else _seconds_left(done - run.epochs, seen.epochs_total - done, elapsed)
    return replace(seen, seconds_left=left)


def _front(journal: JournalView) -> tuple[Best, ...]:
    rows = journal.trials()
    best = front(rows, journal.objectives)
    order = ranked(rows, journal.objectives, best)
    shown = [(row, values(row, journal.objectives)) for row in order if row.number in best]
    return tuple(Best(row.number, row.config, value) for row, value in shown if value is not None)


def _seconds_left(done: int, left: int, elapsed: float) -> float | None:
    return elapsed * left / done if done else None


def _devices(journal: JournalView) -> tuple[DeviceUse, ...]:
    figures = StudyStatistics(journal)
    members, rates = figures.training(), figures.rates()
    uses: dict[str, list[JobUse]] = {}
    for job in journal.jobs(running=True):
        count = members.get(job.id, 0) if job.purpose is Purpose.TRAIN else len(job.trials)
        promise = job.promise
        known = (None, None, None) if promise is None else (promise.compute, promise.memory, promise.cores)
        uses.setdefault(job.device, []).append(JobUse(job.id, job.purpose, count, *known, rates.get(job.id)))
    return tuple(DeviceUse(device, tuple(uses.get(device.name, ()))) for device in journal.devices())
