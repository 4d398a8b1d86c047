"""Content of the report on a study: use of each device over time, best trials, failures; and as HTML for a notebook."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import Any, TypeVar

from shoal.core.job import Purpose
from shoal.core.objective import Objective
from shoal.core.ranking import ranked
from shoal.core.resources import bytes_text
from shoal.core.rows import DeviceRow, JobRow, Reservation, Telemetry, TrialRow
from shoal.core.space import flatten
from shoal.core.trial import TrialState
from shoal.journal.lock import LockOwner
from shoal.journal.view import JournalView
from shoal.look.elapsed import Elapsed
from shoal.look.failures import failing_json
from shoal.look.snapshot import Snapshot, snapshot
from shoal.look.table import savings_json, verdict_json
from shoal.look.text import (
    best_text,
    config_text,
    duration_text,
    epochs_text,
    finite_or_none,
    hypervolume_text,
    key_text,
    leaf_text,
    metric_text,
    number_text,
    printable,
    savings_text,
    states_text,
    study_state_text,
    time_text,
    trial_state_text,
    verdict_texts,
)

__all__ = [
    "Bar",
    "Overview",
    "Usage",
    "by_key",
    "failed_job_json",
    "notebook_html",
    "overview",
    "overview_json",
    "structure_names",
    "timed_jobs",
    "usage_text",
]

_T = TypeVar("_T")

_MAX_BEST = 10

_PARAMETERS = 3
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Bar:
    """A job on its device, with seconds of running time at its start and its end; a running one ends now."""

    job: JobRow
    begin: float
    end: float


@dataclass(frozen=True)
class Usage:
    """How the time of a device was used.

    Args:
        busy: Fraction of the time in which it had a job, whatever the job used of it.
        occupancy: Mean fraction of its compute that was reserved; a job without a profile has all of it.
        seconds: Seconds by the purpose of its jobs; concurrent jobs share them evenly.
        kernels: Mean fraction of the time with a running kernel, by NVML; None if it was not measured.
        memory: Most bytes in use at a time, by any program; None if they were not measured.
    """

    device: DeviceRow
    busy: float
    occupancy: float
    seconds: Mapping[Purpose, float]
    jobs: int
    failed: int
    kernels: float | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Overview:
    """A study, from its beginning to now or its end.

    Args:
        bars: All jobs, in the order of their start.
        curve: (seconds, value of the best trial by the first metric) where it has changed; the last is that of `state`.
        failed_trials: Trials that have failed and are not retried.
        structures: Name of each fusion key of its jobs, see `structure_names`.
    """

    name: str
    objectives: tuple[Objective, ...]
    state: Snapshot
    elapsed: Elapsed
    bars: tuple[Bar, ...]
    curve: tuple[tuple[float, float], ...]
    usage: tuple[Usage, ...]
    best: tuple[TrialRow, ...]
    failed_trials: tuple[TrialRow, ...]
    structures: Mapping[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[JobRow]:
        """The jobs that failed, in the order of their start."""
        return [bar.job for bar in self.bars if bar.job.failed]


def overview(journal: JournalView, now: float) -> Overview:
    """Read the content of a report from a study's journal; `now` is in seconds since 1970."""
    state = snapshot(journal, now)
    elapsed, bars = timed_jobs(journal, now)
    goals, rows = journal.objectives, journal.trials()
    ranking = ranked(journal.spec.configurations(rows), goals)
    valued = [row for row in ranking if row.objective is not None]
    reservations, telemetry = journal.reservations(), by_key(journal.telemetry(), lambda row: row.device)
    of_devices = by_key(bars, lambda bar: bar.job.device)
    return Overview(
        name=journal.directory.resolve().name,
        objectives=goals,
        state=state,
        elapsed=elapsed,
        bars=tuple(bars),
        curve=_best_over_time(journal, state, elapsed),
        usage=tuple(
            replace(
                _usage(device, of_devices.get(device.name, []), reservations, elapsed),
                kernels=_kernels(telemetry.get(device.name, []), elapsed),
                memory=max((x.memory for x in telemetry.get(device.name, []) if x.memory), default=None),
            )
            for device in journal.devices(all_runs=True)
        ),
        best=tuple(row for row in valued if row.state is not TrialState.FAILED)[:_MAX_BEST],
        failed_trials=tuple(row for row in rows if row.state is TrialState.FAILED),
        structures=structure_names([bar.job for bar in bars], rows),
    )


def _best_over_time(journal: JournalView, state: Snapshot, elapsed: Elapsed) -> tuple[tuple[float, float], ...]:
    """The values that the journal has recorded, and the present one, which differs after a retry of the best trial."""
    best = state.best or next(iter(state.front), None)
    if best is None:
        return ()
    now = best.value[0] if isinstance(best.value, tuple) else best.value
    curve = [(elapsed(time), value) for time, value in journal.best_values()]
    return tuple(curve if curve and curve[-1][1] == now else [*curve, (elapsed.total, now)])


def failed_job_json(study: Overview, job: JobRow) -> dict[str, Any]:
    """Return a job that failed, as plain values, without its log and its message."""
    return {
        "job": job.id,
        "device": job.device,
        "trials": list(job.trials),
        "seconds": study.elapsed(job.started),
        "outcome": job.outcome,
        "cause": job.cause,
    }


def overview_json(study: Overview) -> dict[str, Any]:
    """Return the report as plain values, without those of `snapshot_json`; None for NaN and the infinities."""
    return {
        "name": study.name,
        "seconds": study.elapsed.total,
        "span": study.elapsed.span,
        "jobs": len(study.bars),
        "curve": [{"seconds": seconds, "value": finite_or_none(value)} for seconds, value in study.curve],
        "devices": [
            {
                "device": usage.device.name,
                "kind": usage.device.kind,
                "busy": usage.busy,
                "occupancy": usage.occupancy,
                "kernels": usage.kernels,
                "memory_in_use": usage.memory,
                "seconds": {str(purpose): seconds for purpose, seconds in usage.seconds.items()},
                "jobs": usage.jobs,
                "failed": usage.failed,
                "text": usage_text(usage),
            }
            for usage in study.usage
        ],
        "arrays": list(map(verdict_json, study.state.arrays)),
        "savings": study.state.savings and savings_json(study.state.savings, study.state.unit),
        "best": [row.number for row in study.best],
        "failing": [failing_json(failing) for failing in study.state.failing],
        "failures": [failed_job_json(study, job) | {"log": job.log or None} for job in study.failures],
        "failed": [{"trial": row.number, "epoch": row.epoch, "reason": row.reason} for row in study.failed_trials],
    }


def usage_text(usage: Usage) -> str:
    """How the time of a device was used, in words: what was planned for it, then what was measured of it."""
    measured = [] if usage.kernels is None else [f"kernels ran {usage.kernels:.0%} of the time"]
    measured += [] if usage.memory is None else [f"at most {bytes_text(usage.memory)} in use"]
    return (
        f"had a job {usage.busy:.0%} of the time, with {usage.occupancy:.0%} of its compute reserved on average; "
        + (f"measured: {', '.join(measured)}" if measured else "what jobs used of it was not measured")
    )


def by_key(items: Iterable[_T], key: Callable[[_T], str]) -> dict[str, list[_T]]:
    """Items by their key, those of a key in their order."""
    found: dict[str, list[_T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def timed_jobs(journal: JournalView, now: float) -> tuple[Elapsed, list[Bar]]:
    """Return the running time of a study, and all its jobs on it in the order of their start."""
    elapsed = Elapsed.of(journal, now)
    bars = []
    for job in journal.jobs():
        begin = elapsed(job.started)
        bars.append(Bar(job, begin, elapsed.total if job.ended is None else max(elapsed(job.ended), begin)))
    return elapsed, bars


@dataclass
class _UsageSums:
    busy: float = 0.0
    reserved: float = 0.0
    seconds: dict[Purpose, float] = field(default_factory=dict)


def _usage(
    device: DeviceRow, bars: Sequence[Bar], reservations: Mapping[str, Sequence[Reservation]], elapsed: Elapsed
) -> Usage:
    """Sum over the moments at which a device's jobs began, ended or changed their reservation."""
    changes: list[tuple[float, bool, JobRow, float]] = []
    for bar in bars:
        for reservation in reservations.get(bar.job.id, ()):
            unknown = reservation.compute is None
            compute = device.compute if unknown else min(reservation.compute or 0.0, device.compute)
            changes.append((min(elapsed(reservation.time), bar.end), True, bar.job, compute))
        changes.append((bar.end, False, bar.job, 0.0))
    sums, active, before = _UsageSums(), dict[str, tuple[JobRow, float]](), 0.0
    for moment, reserves, job, compute in sorted(changes, key=lambda change: change[0]):
        _accumulate(sums, active, moment - before)
        before = moment
        if reserves:
            active[job.id] = (job, compute)
        else:
            active.pop(job.id, None)
    return Usage(
        device=device,
        busy=sums.busy / elapsed.total,
        occupancy=sums.reserved / device.compute / elapsed.total,
        seconds=sums.seconds,
        jobs=len(bars),
        failed=sum(bar.job.failed for bar in bars),
    )


def _kernels(rows: Sequence[Telemetry], elapsed: Elapsed) -> float | None:
    """Return the mean fraction of the time with a running kernel, where it was measured; None if it never was."""
    moments = [*(elapsed(row.time) for row in rows), elapsed.total]
    measured = [
        (end - begin, row.utilisation / 100)
        for row, (begin, end) in zip(rows, pairwise(moments), strict=True)
        if row.utilisation is not None and end > begin
    ]
    seconds = sum(length for length, _ in measured)
    return sum(length * fraction for length, fraction in measured) / seconds if seconds else None


def _accumulate(sums: _UsageSums, active: Mapping[str, tuple[JobRow, float]], seconds: float) -> None:
    if not active or seconds <= 0:
        return
    sums.busy += seconds
    for job, compute in active.values():
        sums.reserved += compute * seconds
        sums.seconds[job.purpose] = sums.seconds.get(job.purpose, 0.0) + seconds / len(active)


def structure_names(jobs: Iterable[JobRow], rows: Iterable[TrialRow]) -> dict[str, str]:
    """A name, "width=64", by `JobRow.keys`: the parameters on which its trials agree and no others do.

    A structure without such parameters, or the only one, is named by its digest or its batch size; two with equal
    parameters have the digest added. The batch size is added if it differs and is none of the parameters.
    """
    members: dict[str, dict[int, None]] = {}
    for job in jobs:
        for key, trials in job.members.items():
            members.setdefault(key, {}).update(dict.fromkeys(trials))
    if len(members) == 1:
        return {key: f"batches of {_batch_size(key)}" for key in members}
    configs = {row.number: flatten(row.config) for row in rows}
    common = {
        key: _common_parameters([configs[trial] for trial in trials if trial in configs])
        for key, trials in members.items()
    }
    differing = _differing_parameters([found for found in common.values() if found])
    same_size = len({_batch_size(key) for key in members}) == 1
    names = {}
    for key, found in common.items():
        shown_names = [name for name in differing if name in found]
        shown = [f"{name}={leaf_text(found[name])}" for name in shown_names[:_PARAMETERS]] + ["…"] * (
            len(shown_names) > _PARAMETERS
        )
        size = "" if same_size or "batch_size" in shown_names[:_PARAMETERS] else f", batches of {_batch_size(key)}"
        names[key] = f"{' '.join(shown)}{size}" if shown else key_text(key)
    count = Counter(names.values())
    return {key: name if count[name] == 1 else f"{name} ({key_text(key)})" for key, name in names.items()}


def _common_parameters(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters on which all configs agree."""
    if not configs:
        return {}
    first, *others = configs
    return {
        name: value
        for name, value in first.items()
        if all(_are_equal(value, other.get(name, _MISSING)) for other in others)
    }


def _differing_parameters(structures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameters on which structures differ; floats last, since they seldom decide a structure."""
    names = dict.fromkeys(name for found in structures for name in found)
    differing = [
        name
        for name in names
        if not all(_are_equal(structures[0].get(name, _MISSING), found.get(name, _MISSING)) for found in structures)
    ]
    return sorted(differing, key=lambda name: any(isinstance(found.get(name), float) for found in structures))


def _are_equal(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _batch_size(key: str) -> str:
    return key.rpartition(" x ")[2]


_PURPOSE_WORDS = {
    Purpose.TRAIN: "training",
    Purpose.SIGNATURE: "comparing models",
    Purpose.PROFILE: "measuring",
    Purpose.ASSIST: "helping jobs of other devices",
}


def notebook_html(study: Overview) -> str:
    """Return the state of a study, the best value over time as a picture, and the best trials, for a notebook."""
    return f"<div><b>{_text(study.name)}</b>\n{_summary_table(study)}\n{_curve(study)}\n{_best(study)}</div>"


def _curve(study: Overview) -> str:
    """Return the best value so far as SVG in the colour of the text, dark or light; "" without a value."""
    points = [(time, value) for time, value in study.curve if math.isfinite(value)]
    if not points:
        return ""
    low, high = (function(value for _, value in points) for function in (min, max))
    across, down = 480 / study.elapsed.total, 90 / (high - low or 1.0)
    steps = [(time * across, 95 - (value - low) * down) for time, value in points]
    path = f"M{steps[0][0]:.1f} {steps[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps[1:])
    title = _text(
        f"best {study.objectives[0].metric} so far, {number_text(points[0][1])} to {number_text(points[-1][1])}"
    )
    return (
        f'<svg role="img" viewBox="0 0 480 100" width="480" height="100" style="max-width: 100%"><title>{title}</title>'
        f'<path d="{path}H480" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>\n'
        f"<p><small>{title}</small></p>"
    )


def _summary_table(study: Overview) -> str:
    state = study.state
    goals = ", ".join(f"{goal.metric} ({goal.mode})" for goal in study.objectives)
    runner = study_state_text(state) if state.pid is None else f"{LockOwner(state.pid, state.host)} runs it"
    remaining = "" if state.seconds_left is None else f", {duration_text(state.seconds_left)} left"
    return _table(
        (),
        [
            ("compared by", goals),
            ("trials", states_text(state)),
            (state.unit, epochs_text(state)),
            ("time", f"{time_text(state)}{remaining}; {runner}"),
            ("device time", _by_purpose(_sum(usage.seconds for usage in study.usage))),
            ("best", best_text(state)),
            *([("constraints", ", ".join(state.constraints))] if state.constraints else []),
            *([("front", hypervolume_text(state.hypervolume, state.metric))] if state.hypervolume else []),
            *([("fusing", savings_text(state.savings, state.unit))] if state.savings else []),
            *([("arrays", "\n".join(verdict_texts(state.arrays)))] if state.arrays else []),
        ],
    )


def _best(study: Overview) -> str:
    names = [goal.metric for goal in study.objectives]
    rows = [
        (
            row.number,
            trial_state_text(row, study.state.pid is not None),
            *(metric_text(row, name) for name in names),
            row.epoch,
            f"{row.seconds:.1f}",
            config_text(row.config),
        )
        for row in study.best
    ]
    return _table(("trial", "state", *names, "epochs", "seconds", "config"), rows)


def _sum(each: Iterable[Mapping[Purpose, float]]) -> dict[Purpose, float]:
    total: dict[Purpose, float] = {}
    for seconds in each:
        for purpose, value in seconds.items():
            total[purpose] = total.get(purpose, 0.0) + value
    return total


def _by_purpose(seconds: Mapping[Purpose, float]) -> str:
    return (
        ", ".join(
            f"{_PURPOSE_WORDS[purpose]} {duration_text(seconds[purpose])}" for purpose in Purpose if purpose in seconds
        )
        or "–"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = ["<table>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{_text(title)}</th>' for title in head)}</tr>")
    for row in rows:
        tags = ["td" if head or column else "th" for column in range(len(row))]
        lines.append(
            f"<tr>{''.join(f'<{tag}>{_text(value)}</{tag}>' for tag, value in zip(tags, row, strict=True))}</tr>"
        )
    return "\n".join([*lines, "</table>"])


def _text(what: object) -> str:
    return escape(printable(str(what), lines=True))
