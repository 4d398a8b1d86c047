"""`shoal devices add` and `shoal devices remove`: other devices for a study that runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.options import AsJson, print_json, say
from shoal.core.errors import DeviceError
from shoal.journal.requests import ask
from shoal.journal.view import JournalView
from shoal.remedy import command

__all__ = ["add", "remove"]

_Study = Annotated[Path, typer.Option("--study", metavar="DIR", exists=True, file_okay=False, help="Of the study.")]
_Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Of devices: cuda:1 cpu:0 ...")]


def add(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Let a study that runs use more devices, also such as were removed from it before."""
    _change("add", study, names, as_json)


def remove(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Take devices from a study that runs.

    Jobs on them save their trials and stop; the trials go on elsewhere.
    """
    _change("remove", study, names, as_json)


def _change(verb: Literal["add", "remove"], directory: Path, names: list[str], as_json: bool) -> None:
    with JournalView.read(directory) as journal:
        runs = journal.writer() is not None
    if not runs:
        raise DeviceError(
            f"nobody runs the study in {directory}; choose its devices when it goes on: "
            f"{command('resume', directory, '--devices ...')}"
        )
    devices = ask(directory, verb, names)
    if as_json:
        print_json({"directory": str(directory), "devices": devices})
    else:
        say(f"the study in {directory} now has {', '.join(devices) or 'no device, and waits for one'}")
