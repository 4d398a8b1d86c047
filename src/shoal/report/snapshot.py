"""A study at one moment, as the display and `shoal status` show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.journal.view import JournalView
from shoal.report.ranking import front, ranked, values
from shoal.trial import Config, TrialState

__all__ = ["Best", "DeviceUse", "Snapshot", "snapshot"]


@dataclass(frozen=True)
class Best:
    """The best trial so far, by its last value of the study's metric; or one of the best, by those of several."""

    trial: int
    config: Config
    value: float | tuple[float, ...]


@dataclass(frozen=True)
class DeviceUse:
    """What a device runs.

    Args:
        device: its name.
        job: id of the job on it; "" when it is idle.
        purpose: "train", "survey" or "profile"; "" when it is idle.
        members: trials in the job.
    """

    device: str
    job: str = ""
    purpose: str = ""
    members: int = 0


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
        elapsed: seconds since the process that runs it, or ran it last, began.
        seconds_left: until `epochs_asked` are done, at the pace so far; None while that is unknown.
        devices: each with what it runs.
        pid: of the process that runs it; None when nobody does.
        front: of several metrics, the trials that no other dominates, by the first metric.
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


def snapshot(journal: JournalView, now: float, devices: Sequence[str] = ()) -> Snapshot:
    """Read a study's state from its journal: a few queries, a few milliseconds at 10,000 trials.

    Args:
        journal: of the study; the engine's own, or one opened for reading.
        now: seconds since 1970.
        devices: names of all devices, so that idle ones are shown; devices with a job are shown in any case.
    """
    done, asked = journal.epochs()
    run = journal.runs()[-1]
    pid = journal.writer()
    moment = now if pid is not None else max(journal.last_report_time() or run.started, run.started)
    elapsed = max(moment - run.started, 0.0)
    goals = journal.objectives
    several = len(goals) > 1
    best = None if several else journal.best()
    return Snapshot(
        metric=tuple(goal.metric for goal in goals) if several else goals[0].metric,
        mode=tuple(goal.mode for goal in goals) if several else goals[0].mode,
        states=journal.states(),
        waiting=journal.waiting(),
        best=Best(best.number, best.config, best.objective) if best and best.objective is not None else None,
        epochs_done=done,
        epochs_asked=asked,
        elapsed=elapsed,
        seconds_left=None if pid is None else _seconds_left(done - run.epochs, asked - done, elapsed),
        devices=_devices(journal, devices) if pid is not None else tuple(DeviceUse(name) for name in devices),
        pid=pid,
        front=_front(journal) if several else (),
    )


def _front(journal: JournalView) -> tuple[Best, ...]:
    rows = journal.trials()
    best = front(rows, journal.objectives)
    order = ranked(rows, journal.objectives, best)
    shown = [(row, values(row, journal.objectives)) for row in order if row.number in best]
    return tuple(Best(row.number, row.config, value) for row, value in shown if value is not None)


def _seconds_left(done: int, left: int, elapsed: float) -> float | None:
    return elapsed * left / done if done else None


def _devices(journal: JournalView, names: Sequence[str]) -> tuple[DeviceUse, ...]:
    jobs = journal.jobs(running=True)
    uses = [DeviceUse(job.device, job.id, job.purpose, len(job.trials)) for job in jobs]
    busy = {job.device for job in jobs}
    order = {name: place for place, name in enumerate(names)}
    uses += [DeviceUse(name) for name in names if name not in busy]
    return tuple(sorted(uses, key=lambda use: order.get(use.device, len(order))))
