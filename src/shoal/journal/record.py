"""What one report does to the tables, if it is news."""

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence

from shoal.core.errors import JournalError
from shoal.core.objective import Objective
from shoal.core.trial import Report, TrialState
from shoal.journal.codec import storable

__all__ = ["lower_is_better", "merge_best", "record"]


def record(
    connection: sqlite3.Connection, seq: int, now: float, job: str, report: Report, objectives: Sequence[Objective]
) -> bool:
    """Write a report and what follows for its trial.

    Args:
        connection: in a transaction.
        seq: above that of every ask and report so far.
        now: seconds since 1970.
        job: that the report came from.
        report: what was reported.
        objectives: of the study; of several, the first one's value is kept as the trial's if it has all of them.

    Returns:
        Whether it was news. It is not when the trial has ended, or when that epoch has been reported and this report
        does not say for the first time that the trial is PAUSED there, or that it is FAILED. How a trial failed that
        is tried again is no report of that epoch.

    Raises:
        JournalError: a trial that was never asked for.
    """
    row = connection.execute("SELECT state, metrics, best FROM trials WHERE number = ?", (report.trial,)).fetchone()
    if row is None:
        raise JournalError(f"trial {report.trial} has reported, but was never asked for")
    state, metrics, best = row
    seen = connection.execute(
        "SELECT state FROM reports WHERE trial = ? AND epoch = ? AND state <> ?",
        (report.trial, report.epoch, TrialState.FAILED),
    ).fetchall()
    repeated = bool(seen) and (report.state is TrialState.RUNNING or (report.state,) in seen)
    if repeated or TrialState(state).final:
        return False
    last = json.loads(metrics) | dict(report.metrics)
    values = [last.get(objective.metric, math.nan) for objective in objectives]
    connection.execute(
        # A trial that is tried again may fail once more where it did before.
        "INSERT OR IGNORE INTO reports VALUES (:seq, :now, :job, :trial, :epoch, :state, :reason, :seconds, :metrics)",
        {
            "seq": seq,
            "now": now,
            "job": job,
            "trial": report.trial,
            "epoch": report.epoch,
            "state": report.state,
            "reason": storable(report.reason),
            "seconds": report.seconds,
            "metrics": json.dumps(dict(report.metrics)),
        },
    )
    connection.execute(
        "UPDATE trials SET state = :state, reason = :reason, epoch = max(epoch, :epoch), seconds = seconds + :seconds, "
        "metrics = :last, best = :best, objective = :objective WHERE number = :trial",
        {
            "state": report.state,
            "reason": storable(report.reason),
            "epoch": report.epoch,
            "seconds": report.seconds,
            "last": json.dumps(last),
            "best": json.dumps(merge_best(json.loads(best), report.metrics, objectives)),
            "objective": None if any(map(math.isnan, values)) else values[0],
            "trial": report.trial,
        },
    )
    return True


def lower_is_better(name: str, objectives: Sequence[Objective]) -> bool:
    """Whether a metric is minimised: the study's by its mode, others if their name ends with "loss" or "error".

    Args:
        name: of the metric asked about.
        objectives: of the study.
    """
    for objective in objectives:
        if objective.metric == name:
            return objective.mode == "min"
    return name.endswith(("loss", "error"))


def merge_best(
    best: Mapping[str, float], metrics: Mapping[str, float], objectives: Sequence[Objective]
) -> dict[str, float]:
    """The best values so far, after one more report; NaN is never one.

    Args:
        best: name to best value so far.
        metrics: name to value, as reported.
        objectives: of the study.
    """
    merged = dict(best)
    for name, value in metrics.items():
        if math.isnan(value):
            continue
        better = min if lower_is_better(name, objectives) else max
        merged[name] = better(merged.get(name, value), value)
    return merged
