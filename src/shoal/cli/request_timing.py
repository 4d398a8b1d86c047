"""When what a user has asked of a study will be done."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli.options import print_json, say
from shoal.journal.view import JournalView
from shoal.remedy import command

__all__ = ["say_when"]


def say_when(directory: Path, what: str, told: Mapping[str, Any], as_json: bool) -> None:
    """Tell whether it will be done now, or when the study goes on.

    Args:
        directory: of the study.
        what: will be done: "trial 3 will be paused".
        told: the same for programs.
        as_json: whether to print that.
    """
    with JournalView.read(directory) as journal:
        runs = journal.writer() is not None
    if as_json:
        print_json({"directory": str(directory), **told, "runs": runs})
        return
    say(f"{what} now" if runs else f"{what} once a process runs the study: {command('resume', directory)}")
