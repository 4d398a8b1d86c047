"""Shell commands that error messages give as remedies."""

import shlex
from pathlib import Path

from shoal.host.paths import as_given

__all__ = ["command", "next_commands", "resume_remedy"]


def command(verb: str, directory: Path, *options: str) -> str:
    """Return a command for a study: "shoal resume 'my runs/one' --accept-changes"."""
    return " ".join(["shoal", verb, shlex.quote(str(as_given(directory))), *options])


def next_commands(directory: Path, best: int | None) -> list[str]:
    """Return the lines at the end of a run: commands that show the study and export its best trial, one a line.

    Args:
        best: Number of the best trial; None if there is none, or no model to export.
    """
    commands = [command(verb, directory) for verb in ("status", "best", "page")]
    if best is not None:
        commands.append(command("export", directory, str(best)))
    return ["next:", *(f"  {each}" for each in commands)]


def resume_remedy(directory: Path, *, kept: bool, lost: bool = False) -> str:
    """Return the remedy for a task that cannot continue.

    Args:
        directory: Directory of the study.
        kept: Whether the study keeps the task's definition, so that an edit has no effect.
        lost: Whether trials have failed for good.
    """
    again = command("resume", directory, "--accept-changes")  # a corrected task counts as an edited task
    if lost:
        again = f"{command('trial retry', directory, '--failed')}, and then {again}"
    if not kept:
        return f"Fix the cause, then resume with: {again}"
    return (
        "The study keeps the definitions of a script or notebook as they were. If the cause is in them, fix it and "
        "begin a new study, in another directory. If the cause is in a module, in data or in the machine, fix it and "
        f"resume with: {again}"
    )
