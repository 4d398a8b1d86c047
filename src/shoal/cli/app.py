"""The commands of `shoal`: they print results on standard output, everything else on standard error."""

import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.export import export
from shoal.cli.history import history_app
from shoal.cli.interventions import devices_app, policy, study_app, trial_app
from shoal.cli.options import AsJson, StudyDirectory, print_json, print_message, print_table
from shoal.cli.page import page
from shoal.cli.profile import profile
from shoal.cli.report import report, rerun
from shoal.cli.run import new_app, resume, run
from shoal.cli.simulate import simulate
from shoal.core.errors import ShoalError
from shoal.journal.requests import pending_requests
from shoal.journal.schema import writable
from shoal.journal.view import JournalView
from shoal.remedy import command
from shoal.reporting.grid import HeatMap, StudyGrid, grid_json, study_grid
from shoal.reporting.ranking import front, ranked, why_no_best
from shoal.reporting.snapshot import snapshot
from shoal.reporting.table import best_table, snapshot_json, status_table, trial_json, trials_table
from shoal.reporting.text import numbers_text, request_text
from shoal.results import Study
from shoal.worker.checkpoint_paths import checkpoint_files, program_checkpoints

__all__ = ["app"]

app = new_app()
app.command()(run)
app.command()(profile)
app.add_typer(devices_app, name="devices")
app.command()(page)
app.command()(report)
app.command()(export)
app.command()(rerun)
app.add_typer(history_app, name="history")
app.add_typer(trial_app, name="trial")
app.command()(policy)
app.add_typer(study_app, name="study")
app.command()(resume)


@app.command()
def status(
    directory: StudyDirectory,
    axes: Annotated[
        str | None,
        typer.Option(metavar="DOWN,ACROSS", help="One or two searched parameters to draw the trials by: lr,width."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of a study: running jobs, waiting trials with reasons, the best so far, the time left.

    Below, as soon as there are values, a map of the space: the best value and the trials' states by two searched
    parameters. Without --axes these are the two parameters whose means explain most of the variance of the trials'
    ranks. With --json it is the grid over all parameters, or over those of --axes.
    """
    with JournalView.read(directory) as journal:
        now = snapshot(journal, time.time())
        grid = study_grid(journal.space, journal.trials(), journal.objectives[0])
    if axes is not None:
        grid = _projected(grid, axes)
    asked = pending_requests(directory)
    again = sorted({number for each in asked if each.verb == "retry" for number in each.trials})
    if as_json:
        print_json(
            {
                "directory": str(directory),
                **snapshot_json(now),
                "retry": again,
                "grid": grid_json(grid, runs=now.pid is not None),
            }
        )
        return
    print_table(status_table(now))
    shown = grid.project(*grid.main_axes) if axes is None else grid
    if shown.axes and (shown.has_results or axes is not None):
        typer.echo()
        print_table(HeatMap(shown, runs=now.pid is not None))
    for each in asked:
        if each.verb != "retry":
            print_message(f"to be done: {request_text(each)}")
    if now.paused:
        print_message(f"the study is paused; {command('study resume', directory)} lets it go on")
    elif now.pid and now.all_paused:
        remedy = command("trial resume", directory, *map(str, now.held))
        print_message(f"all trials that are open are paused, so it waits; {remedy} lets them go on")
    if again:
        print_message(
            f"to be tried again: trials {numbers_text(again)}{'' if now.pid else f'; {_how_to_go_on(directory)}'}"
        )
    elif now.pid is None and not now.finished:
        print_message(f"no process runs it; {_how_to_go_on(directory)}")


@app.command()
def trials(
    directory: StudyDirectory,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of trials to show, the best ones.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all trials of a study, the best first.

    With several metrics, trials that no other trial dominates come first, marked with a star.
    """
    with JournalView.read(directory) as journal:
        goals = journal.objectives
        runs = journal.writer() is not None
        rows = journal.trials()
    best = front(rows, goals) if len(goals) > 1 else set()
    rows = ranked(rows, goals, best)
    if as_json:
        marks = [{"front": row.number in best} if len(goals) > 1 else {} for row in rows]
        print_json([trial_json(row, runs=runs) | mark for row, mark in list(zip(rows, marks, strict=True))[:limit]])
        return
    print_table(trials_table(rows[:limit], goals, best, runs=runs))
    if limit is not None and limit < len(rows):
        print_message(f"{limit} of {len(rows)} trials")


@app.command()
def best(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Show the best trial of a study: its config, its metrics and its newest checkpoint.

    With several metrics, all trials that no other trial dominates; with --json a list.
    """
    with JournalView.read(directory) as journal:
        runs = journal.writer() is not None
    found = Study(directory)
    several = len(found.objectives) > 1
    rows = found.best_trials if several else found.best_trials[:1]
    if not rows:
        raise ShoalError(f"no trial of the study in {directory} {why_no_best(found.trials, found.objectives)}")
    checkpoints = [_newest_checkpoint(directory, row.number) for row in rows]
    if as_json:
        shown = [
            trial_json(row, runs=runs) | {"checkpoint": path and str(path)}
            for row, path in zip(rows, checkpoints, strict=True)
        ]
        print_json(shown if several else shown[0])
        return
    for index, (row, checkpoint) in enumerate(zip(rows, checkpoints, strict=True)):
        if index:
            typer.echo()
        print_table(best_table(row, found.objectives, runs=runs))
        if checkpoint:
            typer.echo(f"checkpoint: {checkpoint}")


app.command()(simulate)


def _projected(grid: StudyGrid, axes: str) -> StudyGrid:
    """Return the grid over the axes of a user."""
    names = [name.strip() for name in axes.split(",")]
    if len(names) > 2:
        raise typer.BadParameter(f"{axes!r} names {len(names)} axes, a map has two", param_hint="--axes")
    try:
        return grid.project(*names)
    except ShoalError as error:
        raise typer.BadParameter(str(error), param_hint="--axes") from error


def _newest_checkpoint(directory: Path, trial: int) -> Path | None:
    """Return the newest checkpoint of a trial by its file name, as reading it would need torch."""
    own = (path / "files" for path in program_checkpoints(directory, trial))
    return next(iter(checkpoint_files(directory, trial)), None) or next(own, None)


def _how_to_go_on(directory: Path) -> str:
    who = "" if writable(directory) else " (as a user with write permission)"
    return f"go on with: {command('resume', directory)}{who}"
