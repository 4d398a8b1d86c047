"""Commit of a step: writes its records to the journal in one transaction."""

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
            journal.record_proposal(record.free, record.groups)
        case TrialsReported():
            journal.record_reports(record.job, record.reports)
        case Decided():
            journal.record_decisions(record.decisions)
        case Waiting():
            journal.record_waiting_reasons(record.reasons)
        case JobStarted():
            journal.record_job_start(record.job, record.device)
        case JobJoined():
            journal.record_join(record.job, record.device, record.arrays)
        case ReservationsChanged():
            journal.record_reservations(record.demands)
        case JobLeaving():
            journal.record_preemption(record.job, record.reason)
        case JobKilled():
            journal.record_kill(record.job, record.outcome, record.reason)
        case JobEnded():
            journal.record_job_end(
                record.job, record.outcome, record.message, failed=record.failed, activities=record.activities
            )
        case ArrayLeft():
            journal.record_dropped_trials(record.job, record.trials, record.message, failed=record.failed)
        case DevicesChanged():
            journal.record_devices(record.cluster)
        case StudyChanged():
            journal.put(record.key, record.value)
        case Requeued():
            journal.requeue_failed(record.trials)
        case TrialAdded():
            journal.record_added_trial(record.trial, record.target)
        case TrialsStopped():
            journal.record_user_stop(record.trials, record.reason)
        case Intervened():
            journal.record_intervention(record)
        case StoppedOnCommonFailure():
            journal.record_common_failure(record.cause)
