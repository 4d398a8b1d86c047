"""Encoding and decoding of journal columns.

JSON text keeps all bits of floats, NaN and infinities included. Decoding an invalid value raises the exception of
msgspec or of the Python constructor that rejects it.
"""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import DecodeError, Struct, convert
from msgspec.json import Decoder, Encoder

from shoal.core.activity import Activity
from shoal.core.errors import JournalError
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.core.rows import Intervention, JobRow, Kill, Proposal, Reservation, TrialRow, Verdict
from shoal.core.space import is_number
from shoal.core.trial import Budget, Origin, Report, Trial, TrialGroup, TrialState

__all__ = [
    *("encode", "storable"),
    *(
        "intervention_of",
        "job_row",
        "metrics_of",
        "metrics_text",
        "proposal_of",
        "report_of",
        "trial_row",
        "verdict_of",
    ),
]


class _TrialGroupRow(Struct):
    name: str
    epochs: int
    trials: list[int]


_NUMBERS, _TEXTS, _GROUPS = Decoder(list[int]), Decoder(list[str]), Decoder(list[_TrialGroupRow])
_OBJECT = Decoder(dict[str, Any])
_ENCODER = Encoder()
_MEMBERS, _JOINED = Decoder(dict[str, list[int]]), Decoder(list[tuple[str, int]])
_ACTIVITIES = Decoder(dict[Activity, float])
_METRICS: Decoder[dict[str, float]] = Decoder(dict[str, int | float])


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
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def metrics_text(metrics: Mapping[str, float]) -> str:
    """JSON text of metrics. That of msgspec takes a fifth of the time; it has null for NaN and infinities, and no
    integers beyond 64 bits.
    """
    try:
        text = _ENCODER.encode(metrics).decode()
    except (OverflowError, TypeError):
        text = "null"
    return json.dumps(dict(metrics)) if "null" in text else text


def trial_row(row: tuple[Any, ...]) -> TrialRow:
    """Decode a row of the table trials; its columns are in the order of `TrialRow`."""
    number, config, seed, data_seed, origin, start, state, reason, epoch, target, failures, *others = row
    device, job, seconds, last, best, objective, violation, ranked, best_epoch, errors, paused_by = others
    if start < 0 or epoch < start or target < 1 or failures < 0:
        least = {"start": (start, 0), "epoch": (epoch, start), "target": (target, 1), "failures": (failures, 0)}
        name, found, minimum = next((name, *pair) for name, pair in least.items() if pair[0] < pair[1])
        raise ValueError(f"`{name}` is {found}, below {minimum}")
    source = None if origin is None else Origin(origin, start)
    trial = Trial(number, _decoded(config, _OBJECT), seed, data_seed, source)
    scores = metrics_of(last), metrics_of(best), objective, violation, metrics_of(ranked), best_epoch
    state, errors = TrialState(state), metrics_of(errors)
    return TrialRow(trial, state, reason, epoch, target, failures, device, job, seconds, *scores, errors, paused_by)


def job_row(row: tuple[Any, ...]) -> JobRow:
    """Decode a row of the table jobs with the trials that joined it and its last reservation."""
    job, purpose, device, trials, started, ended, outcome, message, keys, activities, *others = row
    resumes, assists, killed, why, joined, *reservation = others
    numbers, members = _decoded(trials, _NUMBERS), _decoded(keys, _MEMBERS)
    for key, number in _decoded(joined, _JOINED):
        numbers.append(number)
        members.setdefault(key, []).append(number)
    return JobRow(
        job,
        Purpose(purpose),
        device,
        tuple(dict.fromkeys(numbers)),
        started,
        ended,
        outcome,
        message,
        None if reservation[0] is None else Reservation(*reservation, job=job),
        {key: tuple(dict.fromkeys(found)) for key, found in members.items()},
        _decoded(activities, _ACTIVITIES),
        resumes,
        assists,
        Kill(Outcome(killed), why) if killed else None,
    )


def report_of(row: tuple[Any, ...]) -> Report:
    """Decode a row of the table reports; its first column is `seq`."""
    _, trial, epoch, metrics, seconds, state, reason = row
    return Report(trial, epoch, metrics_of(metrics), seconds, TrialState(state), reason)


def verdict_of(row: tuple[Any, ...]) -> Verdict:
    """Decode a row of the table verdicts."""
    key, trials, *others = row
    return Verdict(key, tuple(_decoded(trials, _NUMBERS)), *others)


def _decoded(text: str, decoder: Decoder[Any]) -> Any:
    try:
        return decoder.decode(text)
    except DecodeError:  # a NaN or an infinity, which msgspec does not read, or really an error
        return convert(json.loads(text), decoder.type)


def metrics_of(text: str) -> dict[str, float]:
    """Decode metrics: name -> value."""
    try:
        return _METRICS.decode(text)
    except DecodeError:  # as in `_decoded`
        metrics: dict[str, float] = _decoded(text, _OBJECT)
    for name, value in metrics.items():
        if not is_number(value):
            raise ValueError(f"the metric {name!r} is {value!r}")
    return metrics


def proposal_of(free: int, proposed: str, trials: dict[int, Trial]) -> Proposal:
    """Decode a row of the table proposals."""
    groups = (
        TrialGroup(tuple(trials[number] for number in group.trials), Budget(group.epochs), group.name)
        for group in _decoded(proposed, _GROUPS)
    )
    return Proposal(free, tuple(groups))


def intervention_of(row: tuple[Any, ...]) -> Intervention:
    """Decode a row of the table interventions; its first column is `seq`."""
    seq, time, request, verb, trials, devices, text, refused = row
    lists = tuple(_decoded(trials, _NUMBERS)), tuple(_decoded(devices, _TEXTS))
    return Intervention(request, verb, *lists, text, tuple(_decoded(refused, _TEXTS)), time, seq)
