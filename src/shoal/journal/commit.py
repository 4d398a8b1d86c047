"""Commit of a step: writes its records to the journal, all of them or, after a kill, none."""

from collections.abc import Iterable

from shoal.core.command import (
    ArrayLeft,
    Decided,
    DevicesChanged,
    GroupsProposed,
    Intervened,
    JobEnded,
    JobJoined,
    JobKilled,
    JobLeaving,
    JobStarted,
    Record,
    Requeued,
    ReservationsChanged,
    StoppedOnCommonFailure,
    StudyChanged,
    TrialAdded,
    TrialsReported,
    TrialsStopped,
    Waiting,
)
from shoal.journal.writer import Journal

__all__ = ["commit"]


def commit(journal: Journal, records: Iterable[Record]) -> None:
    """Write records in one transaction, in order.

    Raises:
        StorageFullError: the disk is full; no record is written.
    """
    records = list(records)
    if not records:
        return
    with journal.transaction():
        for record in records:
            _write(journal, record)


def _write(journal: Journal, record: Record) -> None:
    match record:
        case GroupsProposed():
            journal.asked(record.free, record.groups)
        case TrialsReported():
            journal.reported(record.job, record.reports)
        case Decided():
            journal.decided(record.decisions)
        case Waiting():
            journal.waiting_reasons(record.reasons)
        case JobStarted():
            journal.job_started(record.job, record.device)
        case JobJoined():
            journal.joined(record.job, record.device, record.arrays)
        case ReservationsChanged():
            journal.promised(record.demands)
        case JobLeaving():
            journal.leaving(record.job, record.reason)
        case JobKilled():
            journal.killing(record.job, record.outcome, record.reason)
        case JobEnded():
            journal.job_ended(record.job, record.outcome, record.message, failed=record.failed)
        case ArrayLeft():
            journal.dropped(record.job, record.trials, record.message, failed=record.failed)
        case DevicesChanged():
            journal.devices_are(record.cluster)
        case StudyChanged():
            journal.put(record.key, record.value)
        case Requeued():
            journal.retry(record.trials)
        case TrialAdded():
            journal.trial_added(record.trial, record.target)
        case TrialsStopped():
            journal.overruled(record.trials, record.reason)
        case Intervened():
            journal.intervened(record)
        case StoppedOnCommonFailure():
            journal.stopped(record.cause)
