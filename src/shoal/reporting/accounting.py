"""Accounting of a study: what each second of its slots was spent on, from its call to its last event."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from rich.table import Table

from shoal.core.activity import Activity
from shoal.core.job import Purpose
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.reporting.overview import Bar, Elapsed, job_bars
from shoal.reporting.text import rounded

__all__ = ["Accounting", "accounting", "accounting_json", "accounting_table"]

_MEANINGS = {
    Activity.START: "processes start: imports, the task, and slots that wait for the first process",
    Activity.DATA: "data sets are loaded",
    Activity.SURVEY: "models are built for their fusion keys",
    Activity.PROFILE: "profile jobs measure steps",
    Activity.BUILD: "models and arrays are made, or restored",
    Activity.COMPILE: "steps are traced and compiled",
    Activity.RACES: "the autotuner times lowerings",
    Activity.TIMED_STEPS: "training steps that find the fastest kind of step",
    Activity.STEPS: "training steps",
    Activity.VALIDATION: "validation",
    Activity.CHECKPOINTS: "trials are saved",
    Activity.ENGINE: "the worker or the slot waits for the engine",
    Activity.WAITS_FOR_MEASURING: "no job: other slots survey or profile",
    Activity.WAITS_FOR_TRIALS: "no job: other slots train",
    Activity.FINISHED: "no job any more: other slots finish",
    Activity.UNREPORTED: "jobs that run, or were killed",
}

_Interval = tuple[float, float]
"""Begin and end in seconds of running time."""


@dataclass(frozen=True)
class Accounting:
    """What the time of a study's slots was spent on.

    Args:
        wall: Seconds of running time of the study.
        slots: Name of each device -> seconds by activity, which sum to `wall`.
    """

    wall: float
    slots: Mapping[str, Mapping[Activity, float]]

    @property
    def seconds(self) -> dict[Activity, float]:
        """Seconds of all slots by activity, in the order of `Activity`."""
        return {activity: sum(slot.get(activity, 0.0) for slot in self.slots.values()) for activity in Activity}

    @property
    def total(self) -> float:
        """Seconds of running time of all slots."""
        return self.wall * len(self.slots)


def accounting(journal: JournalView, now: float) -> Accounting:
    """Account for the time of a study from its journal.

    Jobs that share a device at a time share that time evenly. A job spends on the engine what it has not reported.
    Time of a slot without a job is START until the first process runs, ENGINE between the last event that the engine
    took and the next job of the slot, and idle otherwise. A device counts from the start of the study, even if it was
    added later.

    Args:
        journal: Journal of the study, which may be running.
        now: Seconds since 1970.
    """
    statistics = StudyStatistics(journal)
    running = journal.writer() is not None
    elapsed = Elapsed(journal.runs(), statistics.moments(), now if running else None)
    bars = job_bars(journal, elapsed)
    idle = _IdleTime(bars, [0.0, *elapsed.resumes], [elapsed(moment) for moment in statistics.results()])
    slots: dict[str, dict[Activity, float]] = {}
    for device in journal.devices(all_runs=True):
        own = [bar for bar in bars if bar.job.device == device.name]
        spent = slots.setdefault(device.name, {})
        for activity, seconds in (*_of_jobs(own), *idle.of_slot(own, elapsed.total, running)):
            spent[activity] = spent.get(activity, 0.0) + seconds
    return Accounting(elapsed.total, slots)


def _of_jobs(bars: Sequence[Bar]) -> Iterator[tuple[Activity, float]]:
    """Yield the seconds of the jobs of one device by activity."""
    for bar, share in zip(bars, _shares(bars), strict=True):
        reported = bar.job.activities
        if not reported:
            yield Activity.UNREPORTED, share
            continue
        part = share / (bar.end - bar.begin) if bar.end > bar.begin else 0.0
        for activity, seconds in reported.items():
            yield activity, seconds * part
        yield Activity.ENGINE, max(0.0, share - part * sum(reported.values()))


def _shares(bars: Sequence[Bar]) -> list[float]:
    """Return the seconds of each job of one device, where concurrent jobs share the time evenly."""
    changes = sorted({moment for bar in bars for moment in (bar.begin, bar.end)})
    begins: dict[float, list[int]] = {}
    for place, bar in enumerate(bars):
        begins.setdefault(bar.begin, []).append(place)
    shares, active = [0.0] * len(bars), set[int]()
    for begin, end in pairwise(changes):
        active = {place for place in active if bars[place].end > begin}
        active |= {place for place in begins.get(begin, ()) if bars[place].end > begin}
        for place in active:
            shares[place] += (end - begin) / len(active)
    return shares


class _IdleTime:
    """Divides the time in which a slot has no job.

    Args:
        bars: Jobs of all slots.
        runs: Starts of the runs of the study, ascending.
        results: Times of what the engine may act on, ascending.
    """

    def __init__(self, bars: Sequence[Bar], runs: Sequence[float], results: Sequence[float]) -> None:
        self._results = results
        self._training = _union((bar.begin, bar.end) for bar in bars if bar.job.purpose is Purpose.TRAIN)
        self._starts: list[_Interval] = []
        self._others: list[_Interval] = []
        for begin, end in pairwise([*runs, inf]):
            own = [bar for bar in bars if begin <= bar.begin < end]
            ready = min((bar.begin + bar.job.activities.get(Activity.START, 0.0) for bar in own), default=begin)
            self._starts.append((begin, min(ready, end)))
            self._others.append((min(ready, end), end))

    def of_slot(self, bars: Sequence[Bar], total: float, running: bool) -> Iterator[tuple[Activity, float]]:
        """Yield the seconds without a job by activity.

        Args:
            bars: Jobs of the slot.
            total: Seconds of running time of the study.
            running: Whether the study runs, so that the slot may have more jobs.
        """
        busy = _union((bar.begin, bar.end) for bar in bars)
        edges = [0.0, *(moment for interval in busy for moment in interval), total]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            for first, last in _cut(self._starts, begin, end):
                yield Activity.START, last - first
            for first, last in _cut(self._others, begin, end):
                if end == total and not running:
                    yield Activity.FINISHED, last - first
                    continue
                acted = last
                if last == end < total:
                    place = bisect_left(self._results, last)
                    acted = max([first, *self._results[max(0, place - 1) : place]])
                trained = sum(until - since for since, until in _cut(self._training, first, acted))
                yield Activity.ENGINE, last - acted
                yield Activity.WAITS_FOR_TRIALS, trained
                yield Activity.WAITS_FOR_MEASURING, acted - first - trained


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Return the union of intervals as disjoint ones, ascending."""
    union: list[_Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def _cut(intervals: Sequence[_Interval], begin: float, end: float) -> list[_Interval]:
    """Return the parts of disjoint intervals that lie in another one."""
    parts = ((max(begin, first), min(end, last)) for first, last in intervals)
    return [(first, last) for first, last in parts if first < last]


def accounting_table(found: Accounting) -> Table:
    """Return a row for each activity that took time: its seconds, its share of all slots' time, and its meaning."""
    title = f"{rounded(found.wall, 4)} s of {len(found.slots)} slots"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("activity", no_wrap=True)
    for name in ("seconds", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for activity, seconds in found.seconds.items():
        if seconds > 0:
            table.add_row(activity, f"{seconds:.3f}", f"{seconds / found.total:.1%}", _MEANINGS[activity])
    return table


def accounting_json(found: Accounting) -> dict[str, Any]:
    """Return the accounting as plain values: seconds of all slots and of each one, by activity."""
    return {
        "wall_seconds": found.wall,
        "slots": len(found.slots),
        "seconds": {str(activity): seconds for activity, seconds in found.seconds.items()},
        "devices": {
            name: {str(activity): seconds for activity, seconds in slot.items()} for name, slot in found.slots.items()
        },
    }
