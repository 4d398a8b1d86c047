"""All that a report on a study says: what each device did and when, what was found, what failed."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shoal.core.job import Purpose
from shoal.core.objective import Objective
from shoal.core.trial import TrialState
from shoal.journal.rows import DeviceRow, JobRow, Reservation, Run, TrialRow
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.reporting.ranking import front, ranked
from shoal.reporting.snapshot import Snapshot, snapshot
from shoal.reporting.structures import structure_names

__all__ = ["SHARES", "Bar", "Elapsed", "Overview", "Usage", "overview"]

SHARES = "used: share of the time with a job on the device; promised: mean share of its compute that jobs were promised"
"""What is said of the two numbers of a device."""


class Elapsed:
    """How long a study has been running at a moment: the time in which nobody ran it does not count.

    Args:
        runs: the processes that ran it, at least one.
        moments: when anything happened, ascending. A process that died ran until the last of its moments.
        now: if the study is running; else None.

    Attributes:
        breaks: seconds at which it was gone on with.
        total: seconds.
    """

    def __init__(self, runs: Sequence[Run], moments: Sequence[float], now: float | None) -> None:
        self._begin = runs[0].started
        self._gaps: list[tuple[float, float]] = []
        for before, run in pairwise(runs):
            place = bisect_left(moments, run.started)
            last = max(moments[place - 1] if place else before.started, before.started)
            self._gaps.append((last, run.started))
        self.breaks = [self(begin) for begin, _ in self._gaps]
        self.total = max(self(max([runs[-1].started, *moments[-1:]]) if now is None else now), 1e-3)

    def __call__(self, moment: float) -> float:
        """Seconds at a moment, in seconds since 1970."""
        absent = sum(min(moment, end) - begin for begin, end in self._gaps if moment > begin)
        return max(moment - self._begin - absent, 0.0)


@dataclass(frozen=True)
class Bar:
    """A job on its device.

    Args:
        job: as the journal has it.
        begin: seconds that the study had been running.
        end: likewise; of a job that runs, up to now.
    """

    job: JobRow
    begin: float
    end: float


@dataclass(frozen=True)
class Usage:
    """What became of a device's time.

    Args:
        device: as the journal has it.
        busy: part of the time in which it had a job, "used" in a report.
        occupancy: mean part of its compute that was promised; a job of which nothing is known has all of it.
        seconds: by the purpose of its jobs; of several at once, each has its part.
        jobs: that began on it.
        failed: of these.
    """

    device: DeviceRow
    busy: float
    occupancy: float
    seconds: Mapping[Purpose, float]
    jobs: int
    failed: int


@dataclass(frozen=True)
class Overview:
    """A study, from its beginning to now or its end.

    Args:
        name: of its directory.
        objectives: what its trials are compared by.
        state: at the last moment.
        elapsed: seconds that it ran at a moment.
        bars: all jobs, in the order in which they began.
        curve: (seconds, best value so far of the first metric) each time that one was better.
        usage: of each device, in order.
        best: the best trials, the very best first.
        buried: the trials that have failed for good.
        structures: a name for each of the keys of its jobs, see `structure_names`.
    """

    name: str
    objectives: tuple[Objective, ...]
    state: Snapshot
    elapsed: Elapsed
    bars: tuple[Bar, ...]
    curve: tuple[tuple[float, float], ...]
    usage: tuple[Usage, ...]
    best: tuple[TrialRow, ...]
    buried: tuple[TrialRow, ...]
    structures: Mapping[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[JobRow]:
        """The jobs that failed, in the order in which they began."""
        return [bar.job for bar in self.bars if bar.job.failed]


def overview(journal: JournalView, now: float, best: int = 10) -> Overview:
    """Read all that a report says from a study's journal.

    Args:
        journal: of the study; may be running.
        now: seconds since 1970.
        best: so many trials are named as the best.
    """
    state, figures = snapshot(journal, now), StudyStatistics(journal)
    elapsed = Elapsed(journal.runs(), figures.moments(), now if state.pid is not None else None)
    bars = []
    for job in journal.jobs():
        begin = elapsed(job.started)
        bars.append(Bar(job, begin, elapsed.total if job.ended is None else max(elapsed(job.ended), begin)))
    goals, rows = journal.objectives, journal.trials()
    leading = front(rows, goals) if len(goals) > 1 else set()
    valued = [row for row in ranked(rows, goals, leading) if row.objective is not None]
    promises = journal.promises()
    return Overview(
        name=journal.directory.resolve().name,
        objectives=goals,
        state=state,
        elapsed=elapsed,
        bars=tuple(bars),
        curve=tuple(_improvements(figures.values(), goals[0], elapsed)),
        usage=tuple(
            _usage(device, [bar for bar in bars if bar.job.device == device.name], promises, elapsed)
            for device in journal.devices(all_runs=True)
        ),
        best=tuple(row for row in valued if row.state is not TrialState.FAILED)[:best],
        buried=tuple(row for row in rows if row.state is TrialState.FAILED),
        structures=structure_names([bar.job for bar in bars], rows),
    )


def _improvements(
    values: Sequence[tuple[float, float]], objective: Objective, elapsed: Elapsed
) -> list[tuple[float, float]]:
    best = math.inf
    found: list[tuple[float, float]] = []
    for time, value in values:
        if objective.loss(value) < best:  # false of NaN
            best = objective.loss(value)
            found.append((elapsed(time), value))
    return found


@dataclass
class _Sums:
    busy: float = 0.0
    promised: float = 0.0
    seconds: dict[Purpose, float] = field(default_factory=dict)


def _usage(
    device: DeviceRow, bars: Sequence[Bar], promises: Mapping[str, Sequence[Reservation]], elapsed: Elapsed
) -> Usage:
    """Sweep over the moments at which a device's jobs began, ended or were promised something else."""
    changes: list[tuple[float, bool, JobRow, float]] = []
    for bar in bars:
        for promise in promises.get(bar.job.id, ()):
            whole = promise.compute is None
            compute = device.compute if whole else min(promise.compute or 0.0, device.compute)
            changes.append((min(elapsed(promise.time), bar.end), True, bar.job, compute))
        changes.append((bar.end, False, bar.job, 0.0))
    sums, held, before = _Sums(), dict[str, tuple[JobRow, float]](), 0.0
    for moment, holds, job, compute in sorted(changes, key=lambda change: change[0]):
        _add(sums, held, moment - before)
        before = moment
        if holds:
            held[job.id] = (job, compute)
        else:
            held.pop(job.id, None)
    return Usage(
        device=device,
        busy=sums.busy / elapsed.total,
        occupancy=sums.promised / device.compute / elapsed.total,
        seconds=sums.seconds,
        jobs=len(bars),
        failed=sum(bar.job.failed for bar in bars),
    )


def _add(sums: _Sums, held: Mapping[str, tuple[JobRow, float]], seconds: float) -> None:
    if not held or seconds <= 0:
        return
    sums.busy += seconds
    for job, compute in held.values():
        sums.promised += compute * seconds
        sums.seconds[job.purpose] = sums.seconds.get(job.purpose, 0.0) + seconds / len(held)
