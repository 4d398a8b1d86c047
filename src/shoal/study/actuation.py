"""Actuation: executes the commands of a step."""

from pathlib import Path

from shoal.core.command import CloseRequest, Command, CopyCheckpoint, DeleteCheckpoints
from shoal.core.errors import CheckpointError
from shoal.journal.requests import delete_request, pending_requests
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
        case DeleteCheckpoints():
            if command.trial not in _pending_sources(directory):
                with translate_errors(directory):
                    backend.delete_checkpoints(directory, command.trial, weights=command.weights)
        case CloseRequest():
            delete_request(directory, command.request)
        case _:
            backend.carry_out(command)
    return None


def _pending_sources(directory: Path) -> set[int]:
    """Trials with whose checkpoints clones begin that a user has requested and the engine has not handled."""
    origins = [request.arguments.get("origin") for request in pending_requests(directory)]
    return {origin["trial"] for origin in origins if origin}
