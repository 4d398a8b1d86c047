"""The commands that a message names as the remedy, ready for a shell."""

import shlex
from pathlib import Path

from shoal.paths import as_given

__all__ = ["after_mending", "command"]


def command(verb: str, directory: Path, *options: str) -> str:
    """A command for a study: "shoal resume 'my runs/one' --accept-changes".

    Args:
        verb: what is to be done: "resume", "trial retry".
        directory: of the study, which is quoted if it must be.
        options: of the command, as they are.
    """
    return " ".join(["shoal", verb, shlex.quote(str(as_given(directory))), *options])


def after_mending(directory: Path, *, kept: bool, lost: bool = False) -> str:
    """What to do about a task that cannot go on.

    Args:
        directory: of the study.
        kept: whether the study keeps the task's definition, so that an edit does not reach it.
        lost: whether trials have failed for good.
    """
    again = command("resume", directory, "--accept-changes")  # to mend is to edit
    if lost:
        again = f"{command('trial retry', directory, '--failed')}, and then {again}"
    if not kept:
        return f"Mend that, then go on with: {again}"
    return (
        "The study keeps what a script or a notebook defines as it was: mend that and begin a new study. Where the "
        f"fault is elsewhere, in a module, in data or in the machine, mend it and go on with: {again}"
    )
