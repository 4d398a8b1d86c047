"""Actuation: commits the records of a step to the journal, and executes its commands."""

from collections.abc import Sequence
from pathlib import Path

from shoal.backends.base import Backend
from shoal.core.command import (
    ArrayLeft,
    CloseRequest,
    Command,
    CopyCheckpoint,
    Decided,
    DevicesChanged,
    GroupsProposed,
    Intervened,
    JobEnded,
    JobJoined,
    JobKilled,
    JobLeaving,
    JobStarted,
    QuantumMeasured,
    Record,
    Requeued,
    ReservationsChanged,
    StoppedOnCommonFailure,
    StudyChanged,
    TelemetryMeasured,
    TrialAdded,
    TrialsReported,
    TrialsStopped,
    Waiting,
)
from shoal.core.errors import CheckpointError
from shoal.core.event import Proven
from shoal.journal.requests import delete_request
from shoal.journal.schema import translate_errors
from shoal.journal.writer import Journal
from shoal.study.event import TrialFailed

__all__ = ["carry_out", "commit"]


def commit(journal: Journal, records: Sequence[Record]) -> None:
    """Write records in one transaction, in order; raises StorageFullError if the disk is full, and writes none then."""
    if records:
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
        case QuantumMeasured():
            journal.record_quantum(record.job, record.number, record.losses)
        case TelemetryMeasured():
            journal.record_telemetry(record.usage)
        case StudyChanged():
            journal.put(record.key, record.value)
        case Requeued():
            journal.requeue_failed(record.trials)
        case TrialAdded():
            journal.record_added_trial(record.trial, record.target)
        case TrialsStopped():
            journal.record_user_stop(record.trials, record.reason)
        case Proven():
            journal.record_checks(record)
        case Intervened():
            journal.record_intervention(record)
        case StoppedOnCommonFailure():
            journal.record_common_failure(record.cause)


def carry_out(command: Command, backend: Backend, directory: Path) -> TrialFailed | None:
    """Execute a command; `TrialFailed`, to be handled at once, if the origin of a trial has no checkpoint to copy."""
    match command:
        case CopyCheckpoint():
            try:
                with translate_errors(directory):
                    backend.copy_checkpoint(directory, command.trial)
            except CheckpointError as error:
                return TrialFailed(command.trial.number, str(error))
        case CloseRequest():
            delete_request(directory, command.request)
        case _:
            backend.carry_out(command)
    return None
