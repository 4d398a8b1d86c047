"""Insertion of reports, and the resulting updates of their trials."""

import json
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence

from shoal.core.errors import JournalError
from shoal.core.objective import Objective
from shoal.core.trial import Report, TrialState
from shoal.journal.codec import metrics_of, storable

__all__ = ["lower_is_better", "merge_best", "record"]

_FINAL_STATES = frozenset(state for state in TrialState if state.final)
_SELECT_TRIALS = "SELECT number, state, metrics, best FROM trials WHERE number IN (SELECT value FROM json_each(?))"
_SELECT_STATES = (
    "SELECT trial, epoch, state FROM json_each(?) AS given JOIN reports ON trial = json_extract(given.value, '$[0]') "
    "AND epoch = json_extract(given.value, '$[1]') WHERE state <> ?"
)
# A retried trial may fail again at the same epoch.
_INSERT_REPORT = "INSERT OR IGNORE INTO reports VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE_TRIAL = (
    "UPDATE trials SET state = ?, reason = ?, epoch = max(epoch, ?), seconds = seconds + ?, metrics = ?, best = ?, "
    "objective = ? WHERE number = ?"
)


def record(
    connection: sqlite3.Connection,
    next_seq: Callable[[], int],
    now: float,
    job: str,
    reports: Sequence[Report],
    objectives: Sequence[Objective],
) -> list[Report]:
    """Write reports, and update their trials.

    Args:
        next_seq: Function that returns a number above those of all proposals, reports and interventions so far.
        now: Time in seconds since 1970.
        reports: Reports in the order of arrival.
        objectives: Objectives of the study. The objective of a trial is its value of the first one, if it has values of
            all.

    Returns:
        The new reports, as of `Journal.record_reports`. Earlier FAILED reports of a retried trial do not count.
    """
    numbers = json.dumps([report.trial for report in reports])
    trials = {
        number: (state in _FINAL_STATES, metrics_of(metrics), metrics_of(best))
        for number, state, metrics, best in connection.execute(_SELECT_TRIALS, (numbers,))
    }
    seen = _reported_states(connection, reports)
    new_reports: list[Report] = []
    report_rows: list[tuple[object, ...]] = []
    trial_rows: list[tuple[object, ...]] = []
    improvements: list[tuple[int, float, float]] = []
    first = objectives[0]
    newest = connection.execute("SELECT objective FROM improvements ORDER BY seq DESC LIMIT 1").fetchone()
    least = math.inf if newest is None else first.loss(newest[0])
    for report in reports:
        if report.trial not in trials:
            raise JournalError(f"trial {report.trial} has reported, but the algorithm has not proposed it")
        final, last, best = trials[report.trial]
        states = seen.setdefault((report.trial, report.epoch), set())
        if final or (states and (report.state is TrialState.RUNNING or report.state in states)):
            continue
        new_reports.append(report)
        if report.state is not TrialState.FAILED:
            states.add(report.state)
        metrics, reason = dict(report.metrics), storable(report.reason)
        last, best = last | metrics, merge_best(best, metrics, objectives)
        trials[report.trial] = report.state.final, last, best
        objective = _first_objective(last, objectives)
        text = json.dumps(metrics)
        texts = [text if values == metrics else json.dumps(values) for values in (last, best)]
        seq = next_seq()
        row = seq, now, job, report.trial, report.epoch, report.state, reason, report.seconds, text
        report_rows.append((*row, report.checkpoint))
        if (value := metrics.get(first.metric)) is not None and first.loss(value) < least:  # false for NaN
            least = first.loss(value)
            improvements.append((seq, now, value))
        trial_rows.append((report.state, reason, report.epoch, report.seconds, *texts, objective, report.trial))
    connection.executemany(_INSERT_REPORT, report_rows)
    connection.executemany("INSERT INTO improvements VALUES (?, ?, ?)", improvements)
    connection.executemany(_UPDATE_TRIAL, trial_rows)
    return new_reports


def _reported_states(connection: sqlite3.Connection, reports: Sequence[Report]) -> dict[tuple[int, int], set[str]]:
    """Number and epoch of each report -> states with which they were reported before, without FAILED."""
    seen: dict[tuple[int, int], set[str]] = {}
    places = json.dumps([(report.trial, report.epoch) for report in reports])
    for trial, epoch, state in connection.execute(_SELECT_STATES, (places, TrialState.FAILED)):
        seen.setdefault((trial, epoch), set()).add(state)
    return seen


def _first_objective(metrics: Mapping[str, float], objectives: Sequence[Objective]) -> float | None:
    """The value of the first objective; None if the metrics lack one of the objectives."""
    values = [metrics.get(objective.metric, math.nan) for objective in objectives]
    return None if any(map(math.isnan, values)) else values[0]


def lower_is_better(name: str, objectives: Sequence[Objective]) -> bool:
    """Whether a metric is minimised: the study's by its mode, others if their name ends with "loss" or "error"."""
    for objective in objectives:
        if objective.metric == name:
            return objective.mode == "min"
    return name.endswith(("loss", "error"))


def merge_best(
    best: Mapping[str, float], metrics: Mapping[str, float], objectives: Sequence[Objective]
) -> dict[str, float]:
    """Update the best values with a report; NaN is never the best."""
    merged = dict(best)
    for name, value in metrics.items():
        if math.isnan(value):
            continue
        better = min if lower_is_better(name, objectives) else max
        merged[name] = better(merged.get(name, value), value)
    return merged
