"""Encoding and decoding of journal columns.

JSON text keeps all bits of floats, NaN and infinities included. Decoding an invalid value raises the exception of the
Python constructor that rejects it.
"""

import json
from collections.abc import Sequence
from typing import Any

from shoal.core.activity import Activity
from shoal.core.command import GroupsProposed
from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.space import is_number
from shoal.core.trial import Budget, Origin, Report, Trial, TrialGroup, TrialState
from shoal.journal.rows import Intervention, JobRow, Reservation, TrialRow

__all__ = [
    *("encode", "storable"),
    *("intervention_of", "job_row", "metric_values", "metrics_of", "proposal_of", "report_of", "trial_row"),
]


def encode(value: Any, what: str) -> str:
    """JSON text of a value."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise JournalError(
            f"{what} cannot be stored in the journal ({error}): {value!r}; use None, bool, int, float, str, or lists "
            "and string-keyed dicts of these"
        ) from error


def storable(text: str) -> str:
    """A text that SQLite can store. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def trial_row(row: tuple[Any, ...]) -> TrialRow:
    """Decode a row of the table trials; its columns are in the order of `TrialRow`."""
    (
        number,
        config,
        seed,
        data_seed,
        origin,
        start,
        state,
        reason,
        epoch,
        target,
        failures,
        device,
        job,
        seconds,
        *scores,
    ) = row
    metrics, best, objective = scores
    least = {"start": (start, 0), "epoch": (epoch, start), "target": (target, 1), "failures": (failures, 0)}
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ValueError(f"`{name}` is {value}, below {minimum}")
    return TrialRow(
        trial=Trial(number, _object(config), seed, data_seed, None if origin is None else Origin(origin, start)),
        state=TrialState(state),
        reason=reason,
        epoch=epoch,
        target=target,
        failures=failures,
        device=device,
        job=job,
        seconds=seconds,
        metrics=metrics_of(metrics),
        best=metrics_of(best),
        objective=objective,
    )


def job_row(row: tuple[Any, ...]) -> JobRow:
    """Decode a row of the table jobs with the trials that joined it and its last reservation."""
    job, purpose, device, text, started, ended, outcome, message, of_keys, activities, resumes, assists, *more = row
    joined, *rest = more
    trials, keys, reservation = json.loads(text), _object(of_keys), rest
    for key, number in json.loads(joined):
        trials.append(number)
        keys.setdefault(key, []).append(number)
    return JobRow(
        id=job,
        purpose=Purpose(purpose),
        device=device,
        trials=tuple(dict.fromkeys(trials)),
        started=started,
        ended=ended,
        outcome=outcome,
        message=message,
        reservation=None if reservation[0] is None else Reservation(*reservation),
        members={key: tuple(dict.fromkeys(numbers)) for key, numbers in keys.items()},
        resumes=resumes,
        assists=assists,
        activities={Activity(name): seconds for name, seconds in _numbers(activities, "activity").items()},
    )


def report_of(row: tuple[Any, ...]) -> Report:
    """Decode a row of the table reports; its first column is `seq`."""
    _, trial, epoch, metrics, seconds, state, reason = row
    return Report(trial, epoch, metrics_of(metrics), seconds, TrialState(state), reason)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a JSON object")
    return value


def metrics_of(text: str) -> dict[str, float]:
    """Decode metrics: name -> value."""
    return _numbers(text, "metric")


def metric_values(texts: Sequence[str], name: str) -> list[float | None]:
    """Decode the metrics of several reports at once: the value of one metric in each, None where it is missing."""
    values = [metrics.get(name) for metrics in json.loads(f"[{','.join(texts)}]")]
    if len(values) != len(texts):
        raise ValueError("a text is not one JSON object")
    for value in values:
        if value is not None and not is_number(value):
            raise ValueError(f"the metric {name!r} is {value!r}")
    return values


def _numbers(text: str, what: str) -> dict[str, float]:
    values = _object(text)
    for name, value in values.items():
        if not is_number(value):
            raise ValueError(f"the {what} {name!r} is {value!r}")
    return values


def proposal_of(free: int, proposed: str, trials: dict[int, Trial]) -> GroupsProposed:
    """Decode a row of the table proposals."""
    groups = tuple(
        TrialGroup(tuple(trials[number] for number in group["trials"]), Budget(group["epochs"]), group["name"])
        for group in json.loads(proposed)
    )
    return GroupsProposed(free, groups)


def intervention_of(row: tuple[Any, ...]) -> Intervention:
    """Decode a row of the table interventions; its first column is `seq`."""
    _, time, request, verb, trials, devices, text, refused = row
    lists = (tuple(json.loads(trials)), tuple(json.loads(devices)))
    return Intervention(request, verb, *lists, text, tuple(json.loads(refused)), time=time)
