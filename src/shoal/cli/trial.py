"""`shoal trial`: what users ask of single trials."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, StudyDirectory
from shoal.cli.when import say_when
from shoal.results import Study

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


_Numbers = Annotated[list[int], typer.Argument(metavar="N...", help="Of trials.")]


@app.callback()
def _trial() -> None:
    """Single trials of a study, running or ended."""


@app.command()
def retry(
    directory: StudyDirectory,
    numbers: Annotated[list[int] | None, typer.Argument(metavar="N", help="Of trials that failed.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="All that have failed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try failed trials again: at once if the study runs, else once it is resumed, also if it has ended.

    A trial goes on from its newest checkpoint, or begins anew, up to the budget at which it failed. What it reports
    counts in all tables and for the best trial. The algorithm is not told, as it has decided without that trial.
    """
    if bool(numbers) == failed:
        raise typer.BadParameter("Name the trials, or all that failed with --failed.", param_hint="N")
    asked = Study(directory).retry(None if failed else numbers)
    _say(directory, asked, "tried again", as_json)


@app.command()
def pause(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """Let trials wait until they are resumed; one that is trained leaves its job at the next step, saved.

    Others that can only be compared with it wait for it. It stays paused when the study is stopped and goes on.
    """
    _say(directory, Study(directory).pause(numbers), "paused", as_json)


@app.command()
def resume(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """Let trials that were paused go on where they left off."""
    _say(directory, Study(directory).resume(numbers), "resumed", as_json)


@app.command()
def stop(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """End trials for good; what they have reported counts, and the algorithm goes on as if they had failed."""
    _say(directory, Study(directory).stop(numbers), "stopped", as_json)


def _say(directory: Path, asked: list[int], what: str, as_json: bool) -> None:
    """Tell which trials it will be done with, and when."""
    named = f"trial{'s' if len(asked) > 1 else ''} {', '.join(map(str, asked))}"
    say_when(directory, f"{named} will be {what}", {"trials": asked}, as_json)
