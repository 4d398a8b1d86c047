"""Actuation: executes the commands of a study's state machine."""

from pathlib import Path

from shoal.backends.base import Backend
from shoal.core.command import (
    CloseRequest,
    Command,
    CopyCheckpoint,
    KillJob,
    ReleaseDevice,
    StartJob,
    StopJob,
    UpdateJob,
)
from shoal.core.errors import CheckpointError
from shoal.journal.requests import delete_request
from shoal.journal.schema import translate_errors
from shoal.study.event import TrialFailed

__all__ = ["carry_out"]


def carry_out(command: Command, backend: Backend, directory: Path) -> TrialFailed | None:
    """Execute a command.

    Args:
        command: Command of the state machine.
        backend: Back end of the study.
        directory: Directory of the study.

    Returns:
        `TrialFailed` if the origin of a trial has no checkpoint to copy, otherwise None. The caller handles this event
        at once.

    Raises:
        BackendError: a job cannot be started.
        StorageFullError: the disk has no room for a copy.
    """
    match command:
        case StartJob():
            backend.start(command.job, command.device)
        case UpdateJob():
            backend.change(command.job, command.update)
        case StopJob():
            backend.stop(command.job)
        case KillJob():
            backend.kill(command.job)
        case ReleaseDevice():
            backend.release_device(command.device)
        case CopyCheckpoint():
            try:
                with translate_errors(directory):
                    backend.copy_checkpoint(directory, command.trial)
            except CheckpointError as error:
                return TrialFailed(command.trial.number, str(error))
        case CloseRequest():
            delete_request(directory, command.request)
    return None
