"""Actuation: carries out the commands of a study's state machine."""

from pathlib import Path

from shoal.backends.base import Backend
from shoal.core.command import (
    CloseRequest,
    Command,
    CopyCheckpoint,
    KillJob,
    StartJob,
    StopJob,
    UpdateJob,
    VacateDevice,
)
from shoal.core.errors import CheckpointError
from shoal.journal.requests import carried_out
from shoal.journal.schema import translated
from shoal.study.event import TrialFailed

__all__ = ["carry_out"]


def carry_out(command: Command, backend: Backend, directory: Path) -> TrialFailed | None:
    """Carry out a command.

    Args:
        command: Command of the state machine.
        backend: Back end of the study.
        directory: Directory of the study.

    Returns:
        The event that follows at once, or None: a trial fails if its origin has no checkpoint to copy.

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
        case VacateDevice():
            backend.release_device(command.device)
        case CopyCheckpoint():
            try:
                with translated(directory):
                    backend.inherit(directory, command.trial)
            except CheckpointError as error:
                return TrialFailed(command.trial.number, str(error))
        case CloseRequest():
            carried_out(directory, command.request)
    return None
