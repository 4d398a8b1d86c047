"""The views of a study as plain values and JSON: taken from `shoal.look`, which computes all figures."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.job import log_path
from shoal.core.request import requester
from shoal.core.rows import DeviceRow, Telemetry
from shoal.core.trial import Report, TrialState, state_name
from shoal.journal.codec import metrics_of
from shoal.journal.requests import pending_requests
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.accounting import account, accounting_json
from shoal.look.budget_values import budget_values
from shoal.look.diagnosis import diagnosis, diagnosis_json
from shoal.look.grid import grid_json, study_grid
from shoal.look.importance import eta_squared
from shoal.look.overview import Bar, Overview, by_key, failed_job_json, overview, overview_json
from shoal.look.snapshot import Snapshot, snapshot, trial_verdicts
from shoal.look.table import reasons_json, snapshot_json
from shoal.look.text import (
    best_text,
    duration_text,
    epochs_text,
    finite_or_none,
    hypervolume_text,
    intervention_text,
    progress_texts,
    request_text,
    states_text,
    study_state_text,
    time_text,
    timeout_text,
    trial_verdict_text,
)
from shoal.plan.schedule.registry import POLICIES
from shoal.train.checkpoint_paths import checkpoint_files, program_checkpoints

__all__ = [
    "curves_view",
    "json_text",
    "log_view",
    "overview_view",
    "report_values",
    "snapshot_view",
    "space_view",
    "summary_view",
    "trial_view",
]


def json_text(value: Any) -> str:
    """Compact JSON text; a NaN or an infinity in a configuration becomes a text, as JSON has neither."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


MAX_POINTS = 60_000
"""Most points of all curves of a metric; of longer curves every second, third ... epoch is sent."""
_MAX_NAMED = 12
"""Most trials that are named for a reason of waiting."""
_MAX_REQUESTS = 200
"""Most requests of users that are shown, the newest."""
_MAX_FAILURES = 200
"""Most failed jobs that are shown, the newest."""
_MAX_TEXT = 20_000
"""Most characters of a traceback; the last ones."""
_MAX_MEASURED = 500
"""Most points of the use of a GPU over time."""
_MAX_LOG = 64 * 1024
"""Most bytes of a log; the last ones."""


def snapshot_view(journal: JournalView, found: Snapshot) -> dict[str, Any]:
    """Return the state of a study with the texts that `shoal status` has, and the requests of users."""
    shown = snapshot_json(found)
    requests = shown.pop("interventions")[-_MAX_REQUESTS:]
    texts = [intervention_text(each) for each in found.interventions[-_MAX_REQUESTS:]]
    runs = found.pid is not None and not (found.finished or found.paused or found.all_paused)
    policy = journal.policy
    return shown | {
        "states": {state_name(state, found.pid is not None): count for state, count in found.states.items() if count},
        "waiting": reasons_json(found.waiting, _MAX_NAMED),
        "waiting_for_others": reasons_json(found.waiting_for_others, _MAX_NAMED),
        "unit": found.unit,
        "constants": list(found.constants),
        "text": {
            "state": study_state_text(found),
            "states": states_text(found),
            "now": progress_texts(found),
            "epochs": epochs_text(found),
            "elapsed": duration_text(found.elapsed),
            "time": time_text(found),
            "left": duration_text(found.seconds_left) if runs else "",
            "timeout": timeout_text(found),
            "best": best_text(found),
            "front": hypervolume_text(found.hypervolume, found.metric) if found.hypervolume else "",
        },
        "requests": [each | {"said": text} for each, text in zip(requests, texts, strict=True)],
        "policy": {"now": policy if policy in POLICIES else "an object of the study's program", "all": list(POLICIES)},
        "pending": [
            {"user": requester(each.name), "said": request_text(each)} for each in pending_requests(journal.directory)
        ],
        "ended": _has_ended(journal, found),
    }


def _has_ended(journal: JournalView, found: Snapshot) -> bool:
    """Whether the study has ended; the algorithm may propose more trials when all trials so far have ended."""
    study = journal.study
    return bool(study.get("finished", found.finished) or (found.pid is None and study.get("ended")))


def summary_view(directory: Path, now: float) -> dict[str, Any]:
    """A study in a list of studies: its state in words, or why its journal cannot be read."""
    try:
        with JournalView.read(directory) as journal:
            found = snapshot(journal, now)
            return {
                "state": study_state_text(found),
                "states": states_text(found),
                "epochs": epochs_text(found),
                "best": best_text(found),
                "began": journal.runs()[0].started,
            }
    except ShoalError as error:
        return {"error": str(error)}


def report_values(report: Report, time: float) -> list[Any]:
    """Return a report as [trial, epoch, seconds since 1970, metrics]; None for NaN and the infinities."""
    return [report.trial, report.epoch, round(time, 3), {name: _shown(x) for name, x in report.metrics.items()}]


def trial_view(directory: Path, number: int) -> dict[str, Any]:
    """Return all reports of a trial, whether it trains in an array, and the checkpoints that it has now."""
    with JournalView.read(directory) as journal:
        rows = journal.tables.rows("SELECT seq, time FROM reports WHERE trial = ? ORDER BY seq", number)
        reports = journal.curve(number)
        proof = trial_verdicts(journal, number).get(number)
    kept = [(report, time) for report, (_, time) in zip(reports, rows, strict=False) if report.metrics]
    return {
        "trial": number,
        "reports": [report_values(report, time) for report, time in kept],
        "proof": "" if proof is None else trial_verdict_text(proof),
        "checkpoints": _checkpoints(directory, number),
    }


def _checkpoints(directory: Path, trial: int) -> list[dict[str, Any]]:
    """Return the checkpoints of a trial, the newest first, with their bytes; some are directories."""
    found = []
    for path in [*checkpoint_files(directory, trial), *program_checkpoints(directory, trial)]:
        epoch, step, *_ = path.name.split("-")
        try:
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            size = sum(each.lstat().st_size for each in files)
            time = path.lstat().st_mtime
        except OSError:  # a newer one has just taken its place
            continue
        shown = {"epoch": int(epoch), "step": int(step), "bytes": size, "time": time}
        found.append(shown | {"path": str(path.relative_to(directory))})
    return found


def space_view(directory: Path) -> dict[str, Any]:
    """Return the axes of the space, the grid of its trials, which axes explain most, and the values at one budget."""
    with JournalView.read(directory) as journal:
        found = budget_values(journal)
        grid = study_grid(journal.space, journal.configurations(), journal.objectives[0], eta_squared(found))
        runs = journal.writer() is not None
    return grid_json(grid, runs=runs) | {
        "mode": grid.mode,
        "metric": grid.metric,
        "main": list(grid.main_axes),
        "log": [axis.name for axis in grid.axes if axis.log],
        "explained": dict(grid.explained),
        "compared": str(found),
        "selection": found.selection,
        "values": [[number, _shown(value)] for number, value in found.values.items()],
    }


def curves_view(directory: Path, metric: str) -> dict[str, Any]:
    """Return the values of a metric of all trials: number of the trial -> epochs, seconds since 1970, values.

    Of more than `MAX_POINTS` reports only every `stride`-th epoch and the first one are read.
    """
    curves: dict[int, tuple[list[int], list[float], list[float | None]]] = {}
    with JournalView.read(directory) as journal:
        ((count,),) = journal.tables.rows("SELECT count(*) FROM reports")
        stride = max(1, math.ceil(count / MAX_POINTS))
        rows = journal.tables.stream(
            "SELECT trial, epoch, time, metrics FROM reports WHERE (epoch % ? = 0 OR epoch = 1) AND state <> ? "
            "ORDER BY seq",
            *(stride, TrialState.FAILED),
        )
        for trial, epoch, time, text in rows:
            with journal.tables.decoding(f"a report of trial {trial}"):
                values = metrics_of(text)
            epochs, times, shown = curves.setdefault(trial, ([], [], []))
            if metric in values and (not epochs or epoch > epochs[-1]):
                epochs.append(epoch)
                times.append(round(time, 1))
                shown.append(_shown(values[metric]))
    return {"metric": metric, "stride": stride, "curves": {str(trial): each for trial, each in curves.items()}}


def overview_view(directory: Path, now: float) -> dict[str, Any]:
    """Return the use of a study's devices: jobs, failures, time by activity, and measured use."""
    with JournalView.read(directory) as journal:
        study = overview(journal, now)
        spent = account(journal, study.elapsed, study.bars)
        losses = diagnosis(journal, study, spent)
        began = journal.runs()[0].started
        reported = StudyStatistics(journal).epochs()[0]
        telemetry = by_key(journal.telemetry(), lambda row: row.device)
    return overview_json(study) | {
        "began": began,
        "total": study.elapsed.total,
        "resumes": study.elapsed.resumes,
        "epochs": reported,
        "accounting": accounting_json(spent),
        "diagnosis": diagnosis_json(losses),
        "structures": list(dict.fromkeys(study.structures.values())),
        "bars": _bars(study),
        "telemetry": {
            use.device.name: _telemetry(study, use.device, telemetry.get(use.device.name, [])) for use in study.usage
        },
        "failures": [
            failed_job_json(study, job) | {"message": job.message[-_MAX_TEXT:]}
            for job in study.failures[-_MAX_FAILURES:]
        ],
        "failures_total": len(study.failures),
    }


def log_view(directory: Path, job: str) -> dict[str, Any]:
    """The end of the log of a job; only a job of the journal has one."""
    with JournalView.read(directory) as journal:
        known = journal.tables.rows("SELECT id FROM jobs WHERE id = ?", job)
    path = log_path(directory, job)
    if not known:
        raise ShoalError(f"the study in {directory} has no job {job!r}")
    # An id is any text of the journal: a damaged journal must not open a file elsewhere, or wait for a pipe.
    if path.resolve() != directory.resolve() / "logs" / path.name or not path.is_file():
        raise ShoalError(f"job {job!r} has no log in {directory / 'logs'}")
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_LOG))
            content = file.read(_MAX_LOG)
    except OSError as error:
        raise ShoalError(f"job {job} has no log that can be read ({error.strerror})") from error
    return {"job": job, "cut": size > _MAX_LOG, "text": content.decode("utf-8", "replace")}


def _telemetry(study: Overview, device: DeviceRow, rows: Sequence[Telemetry]) -> list[tuple[float, Any, Any]]:
    """What was measured of a GPU: seconds of running time from which on it counts, use, share of its memory.

    Of many measurements, means over equal times are returned; None is unknown.
    """
    width = study.elapsed.total / _MAX_MEASURED
    found: dict[int, list[Telemetry]] = {}
    own = sorted(rows, key=lambda row: row.time)
    for row in own:
        moment = study.elapsed(row.time)
        found.setdefault(int(moment / width) if len(own) > _MAX_MEASURED else len(found), []).append(row)
    return [
        (
            round(study.elapsed(some[0].time), 3),
            _mean([row.utilisation / 100 for row in some if row.utilisation is not None]),
            _mean([row.memory / device.memory for row in some if row.memory is not None and device.memory]),
        )
        for some in found.values()
    ]


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 3) if values else None


def _bars(study: Overview) -> list[Mapping[str, Any]]:
    """Return all jobs with the lane of each on its device."""
    names = {name: index for index, name in enumerate(dict.fromkeys(study.structures.values()))}
    found: list[Mapping[str, Any]] = []
    of_devices = by_key(study.bars, lambda bar: bar.job.device)
    for use in study.usage:
        for lane, lanes, bar in _lanes(of_devices.get(use.device.name, [])):
            job = bar.job
            arrays = {study.structures.get(key, key): list(trials) for key, trials in job.members.items()}
            found.append(
                {
                    "job": job.id,
                    "purpose": str(job.purpose),
                    "device": job.device,
                    "lane": lane,
                    "lanes": lanes,
                    "begin": round(bar.begin, 3),
                    "end": round(bar.end, 3),
                    "runs": job.ended is None,
                    "outcome": job.outcome,
                    "failed": job.failed,
                    "trials": list(job.trials),
                    "arrays": arrays,
                    "structure": names.get(study.structures.get(job.keys[0], ""), -1) if job.keys else -1,
                }
            )
    return found


def _lanes(bars: Sequence[Bar]) -> list[tuple[int, int, Bar]]:
    """Return a lane of the device's row for each bar, so that none covers another, and the number of lanes."""
    free: list[float] = []
    placed: list[tuple[int, Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin, bar.end)):
        lane = next((lane for lane, until in enumerate(free) if until <= bar.begin), len(free))
        free[lane : lane + 1] = [bar.end]
        placed.append((lane, bar))
    return [(lane, len(free), bar) for lane, bar in placed]


def _shown(value: float) -> float | None:
    """Return a value to seven digits, which are more than a screen has pixels."""
    finite = finite_or_none(value)
    return None if finite is None else float(f"{finite:.7g}")
