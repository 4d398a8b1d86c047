"""Actuation: executes the commands of a step."""

from pathlib import Path

from shoal.core.command import CloseRequest, Command, CopyCheckpoint
from shoal.core.errors import CheckpointError
from shoal.journal.requests import delete_request
from shoal.journal.schema import translate_errors
from shoal.run.base import Backend
from shoal.study.event import TrialFailed

__all__ = ["carry_out"]


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
