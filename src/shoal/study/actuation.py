"""Carries out the commands of a study's state machine."""

from pathlib import Path

from shoal.backend.base import Backend
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
from shoal.journal.requests import carried_out
from shoal.journal.schema import translated

__all__ = ["carry_out"]


def carry_out(command: Command, backend: Backend, directory: Path) -> None:
    """Carry out a command.

    Args:
        command: what is to be done.
        backend: runs the jobs.
        directory: of the study.

    Raises:
        BackendError: a job cannot be started.
        CheckpointError: there is none to be copied.
        StorageFullError: there is no room for a copy.
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
            backend.vacate(command.device)
        case CopyCheckpoint():
            with translated(directory):
                backend.inherit(directory, command.trial)
        case CloseRequest():
            carried_out(directory, command.request)
