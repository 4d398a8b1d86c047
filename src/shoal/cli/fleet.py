"""`shoal devices add` and `shoal devices remove`: other devices for a study, also while it runs."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson
from shoal.cli.request_timing import say_when
from shoal.results import Study

__all__ = ["add", "remove"]

_Study = Annotated[Path, typer.Option("--study", metavar="DIR", exists=True, file_okay=False, help="Of the study.")]
_Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Of devices: cuda:1 cpu:0 ...")]


def add(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Let a study use more devices, also such as were removed before: at once if it runs, else once it is resumed."""
    _say(study, Study(study).add_devices(names), as_json)


def remove(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Take devices from a study: at once if it runs, else once it is resumed.

    Jobs on them save their trials and stop; the trials go on elsewhere.
    """
    _say(study, Study(study).remove_devices(names), as_json)


def _say(directory: Path, devices: list[str], as_json: bool) -> None:
    what = f"the study in {directory} has {', '.join(devices) or 'no device'}"
    say_when(directory, what, {"devices": devices}, as_json)
