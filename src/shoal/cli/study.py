"""`shoal study`: what users ask of a whole study while it runs."""

import typer

from shoal.cli.options import AsJson, StudyDirectory
from shoal.cli.request_timing import say_when
from shoal.results import Study

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def _study() -> None:
    """A whole study that runs: pause it, let it go on, or end it early."""


@app.command()
def pause(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Let all jobs save their trials and free the devices; the process goes on, and waits for shoal study resume."""
    Study(directory).pause_study()
    say_when(directory, "the study will be paused", {}, as_json)


@app.command()
def resume(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Let a study that was paused go on. One that nobody runs goes on with shoal resume."""
    Study(directory).resume_study()
    say_when(directory, "the study will go on", {}, as_json)


@app.command()
def end(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Let all jobs save their trials, and end the study as it is: open trials are stopped, none is proposed again."""
    Study(directory).end_study()
    say_when(directory, "the study will end", {}, as_json)
