"""Accounting of a study: the activity of each device in each second, from the call of `tune` to the last event."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from rich.table import Table

from shoal.core.activity import Activity
from shoal.core.job import Purpose
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.elapsed import Elapsed
from shoal.look.overview import Bar, by_key, timed_jobs
from shoal.look.text import rounded

__all__ = ["Accounting", "account", "accounting", "accounting_json", "accounting_table"]

_MEANINGS = {
    Activity.START: "processes start: imports, the task, and the wait for the first process",
    Activity.DATA: "data sets are loaded",
    Activity.SIGNATURE: "models are built and compared, to find those that can train as one array",
    Activity.PROFILE: "a few steps of new models are measured, and not kept",
    Activity.BUILD: "models and arrays are made, or restored",
    Activity.COMPILE: "steps are traced and compiled",
    Activity.AUTOTUNE: "kernels of an operation are timed, to choose the fastest",
    Activity.TIMED_STEPS: "training steps that also find the fastest way of stepping",
    Activity.STEPS: "training steps",
    Activity.CHECKS: "some trials train in plain PyTorch beside their array, and are compared with it",
    Activity.END_EPOCH: "`Task.end_epoch` is called for each trial",
    Activity.VALIDATION: "validation",
    Activity.CHECKPOINTS: "trials are saved",
    Activity.ENGINE: "the device waits: its next job is planned, or messages are on their way",
    Activity.WAITS_FOR_MEASURING: "no job: models are compared or measured on other devices",
    Activity.WAITS_FOR_TRIALS: "no job: the next trials depend on results of other devices",
    Activity.FINISHED: "no job any more: other devices finish",
    Activity.UNREPORTED: "a job says what its time was spent on when it ends; these still run, or were killed",
}

_Interval = tuple[float, float]


@dataclass(frozen=True)
class Accounting:
    """Seconds of running time of a study, and those of each device by activity, which have this sum."""

    wall: float
    devices: Mapping[str, Mapping[Activity, float]]

    @property
    def seconds(self) -> dict[Activity, float]:
        """Seconds of all devices by activity, in the order of `Activity`."""
        return {activity: sum(spent.get(activity, 0.0) for spent in self.devices.values()) for activity in Activity}

    @property
    def total(self) -> float:
        """Seconds of running time, summed over all devices."""
        return self.wall * len(self.devices)


def accounting(journal: JournalView, now: float) -> Accounting:
    """Account for the time of a study from its journal; `now` is in seconds since 1970."""
    return account(journal, *timed_jobs(journal, now))


def account(journal: JournalView, elapsed: Elapsed, bars: Sequence[Bar]) -> Accounting:
    """Account for the time of a study from its journal and all its jobs.

    While several jobs run on a device, its time is divided evenly among them. The time of a job that the job has not
    reported counts as ENGINE. Time of a device without a job is START until the first process runs, ENGINE between the
    last event that the engine took and the next job of the device, and idle otherwise. A device counts from the start
    of the study, even if it was added later.
    """
    running = journal.writer() is not None
    results = [elapsed(moment) for moment in StudyStatistics(journal).results()]
    idle = _IdleTime(bars, [0.0, *elapsed.resumes], results)
    devices: dict[str, dict[Activity, float]] = {}
    of_devices = by_key(bars, lambda bar: bar.job.device)
    for device in journal.devices(all_runs=True):
        own = of_devices.get(device.name, [])
        spent = devices.setdefault(device.name, {})
        for activity, seconds in (*_job_seconds(own), *idle.device_seconds(own, elapsed.total, running)):
            spent[activity] = spent.get(activity, 0.0) + seconds
    return Accounting(elapsed.total, devices)


def _job_seconds(bars: Sequence[Bar]) -> Iterator[tuple[Activity, float]]:
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
    """Seconds of each job of one device, where concurrent jobs share the time evenly."""
    changes = sorted({moment for bar in bars for moment in (bar.begin, bar.end)})
    begins: dict[float, list[int]] = {}
    for index, bar in enumerate(bars):
        begins.setdefault(bar.begin, []).append(index)
    shares, active = [0.0] * len(bars), set[int]()
    for begin, end in pairwise(changes):
        active = {index for index in active if bars[index].end > begin}
        active |= {index for index in begins.get(begin, ()) if bars[index].end > begin}
        for index in active:
            shares[index] += (end - begin) / len(active)
    return shares


class _IdleTime:
    """Divides the time in which a device has no job by activity."""

    def __init__(self, bars: Sequence[Bar], runs: Sequence[float], results: Sequence[float]) -> None:
        self._results = results
        self._training = _union((bar.begin, bar.end) for bar in bars if bar.job.purpose is Purpose.TRAIN)
        self._trained = [0.0, *accumulate(end - begin for begin, end in self._training)]
        self._starts: list[_Interval] = []
        self._after_start: list[_Interval] = []
        for begin, end in pairwise([*runs, inf]):
            own = [bar for bar in bars if begin <= bar.begin < end]
            ready = min((bar.begin + bar.job.activities.get(Activity.START, 0.0) for bar in own), default=begin)
            self._starts.append((begin, min(ready, end)))
            self._after_start.append((min(ready, end), end))

    def device_seconds(self, bars: Sequence[Bar], total: float, running: bool) -> Iterator[tuple[Activity, float]]:
        busy = _union((bar.begin, bar.end) for bar in bars)
        edges = [0.0, *(moment for interval in busy for moment in interval), total]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            for first, last in _cut(self._starts, begin, end):
                yield Activity.START, last - first
            for first, last in _cut(self._after_start, begin, end):
                if end == total and not running:
                    yield Activity.FINISHED, last - first
                    continue
                ready = last
                if last == end < total:
                    index = bisect_left(self._results, last)
                    ready = max([first, *self._results[max(0, index - 1) : index]])
                trained = max(0.0, self._trained_until(ready) - self._trained_until(first))
                yield Activity.ENGINE, last - ready
                yield Activity.WAITS_FOR_TRIALS, trained
                yield Activity.WAITS_FOR_MEASURING, max(0.0, ready - first - trained)

    def _trained_until(self, moment: float) -> float:
        """Seconds before a moment in which a job trains."""
        begun = bisect_left(self._training, (moment,))
        if not begun:
            return 0.0
        begin, end = self._training[begun - 1]
        return self._trained[begun - 1] + min(moment, end) - begin


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """The union of intervals as disjoint ones, ascending."""
    union: list[_Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def _cut(intervals: Sequence[_Interval], begin: float, end: float) -> list[_Interval]:
    """The parts of disjoint intervals that lie between `begin` and `end`."""
    parts = ((max(begin, first), min(end, last)) for first, last in intervals)
    return [(first, last) for first, last in parts if first < last]


def accounting_table(found: Accounting) -> Table:
    """Return a row for each activity that took time: its seconds, its share of all devices' time, and its meaning."""
    count = len(found.devices)
    title = f"{rounded(found.wall, 4)} s of {count} device{'' if count == 1 else 's'}"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("activity", no_wrap=True)
    for name in ("seconds", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("meaning", overflow="fold")
    for activity, seconds in found.seconds.items():
        if seconds > 0:
            table.add_row(activity, f"{seconds:.3f}", f"{seconds / found.total:.1%}", _MEANINGS[activity])
    return table


def accounting_json(found: Accounting) -> dict[str, Any]:
    """Return the accounting as plain values: seconds of all devices and of each one by activity, with its meaning."""
    return {
        "wall_seconds": found.wall,
        "slots": len(found.devices),
        "seconds": {str(activity): seconds for activity, seconds in found.seconds.items()},
        "meanings": {str(activity): meaning for activity, meaning in _MEANINGS.items()},
        "devices": {
            name: {str(activity): seconds for activity, seconds in spent.items()}
            for name, spent in found.devices.items()
        },
    }
