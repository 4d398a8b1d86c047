"""`shoal policy`: another policy for a study, also while it runs."""

from typing import Annotated

import typer

from shoal.cli.options import AsJson, StudyDirectory, one_of
from shoal.cli.request_timing import say_when
from shoal.results import Study
from shoal.schedule.registry import POLICIES

__all__ = ["policy"]


def policy(
    directory: StudyDirectory,
    name: Annotated[str, typer.Argument(metavar="NAME", callback=one_of(POLICIES), help=f"{', '.join(POLICIES)}.")],
    as_json: AsJson = False,
) -> None:
    """Let another policy decide which job of a study runs where: from its next plan on, also when it is resumed."""
    Study(directory).policy(name)
    say_when(directory, f"policy {name} will be followed", {"policy": name}, as_json)
