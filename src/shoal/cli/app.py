"""The commands of `shoal`: they print results on standard output, everything else on standard error."""

import os
import shutil
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from shoal.cli.export import export
from shoal.cli.history import history_app
from shoal.cli.interventions import devices_app, keep, pin, policy, study_app, trial_app
from shoal.cli.options import (
    AsJson,
    Devices,
    StudyDirectory,
    device_list,
    named_option,
    print_json,
    print_message,
    print_table,
)
from shoal.cli.profile import profile
from shoal.cli.run import new_app, resume, run
from shoal.cli.simulate import simulate
from shoal.core.errors import ShoalError
from shoal.core.hypervolume import MAX_METRICS
from shoal.core.ranking import front, next_best, ranked, why_no_best
from shoal.core.resources import bytes_text
from shoal.core.rows import TrialRow
from shoal.core.trial import numbers_text
from shoal.host.paths import working_directory
from shoal.host.remedy import command
from shoal.journal.requests import pending_requests
from shoal.journal.schema import writable
from shoal.journal.view import JournalView
from shoal.look.accounting import account, accounting_json, accounting_table
from shoal.look.diagnosis import diagnosis, diagnosis_json
from shoal.look.disk import free_text, nearly_full_text
from shoal.look.grid import HeatMap, StudyGrid, grid_json, journal_grid
from shoal.look.importance import METHODS, importance_json
from shoal.look.overview import overview, overview_json
from shoal.look.page.files import check_page_file, frozen_page, write_page
from shoal.look.page.server import serve
from shoal.look.rerun import find_rerun, rerun_json, rerun_notes, rerun_table, rerun_verdict
from shoal.look.snapshot import snapshot
from shoal.look.table import best_table, snapshot_json, status_table, trial_json, trials_table
from shoal.look.text import hypervolume_text, request_text
from shoal.results import Study
from shoal.train.checkpoint_paths import (
    checkpoint_bytes,
    checkpoint_files,
    checkpoint_stem,
    is_exportable,
    program_checkpoints,
)

__all__ = ["app", "page", "report", "rerun"]


def report(
    directory: StudyDirectory,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write (.html); by default DIR/report/report.html.")
    ] = None,
    spent: Annotated[
        bool, typer.Option("--accounting", help="Print how device time was spent; write no file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a report of a study: best trials, timeline of each device, failures with reasons.

    The report is one HTML file with the views of shoal page, and needs no server. It is written to DIR/report or,
    without write permission there, to the working directory. The study may be running. With --json the report is
    printed as JSON, and a file is written only with --html.

    With --accounting a table is printed instead: how the seconds of all devices were spent, from the start of the study
    to its last event. They add up to the running time times the number of devices. The largest losses follow, each with
    its cause and a remedy.
    """
    if html is not None and spent:
        raise ShoalError("--html writes a file of its own; leave --accounting out")
    if spent:
        _print_accounting(directory, as_json)
        return
    if html is not None:
        check_page_file(html)
    if html is not None or not as_json:
        text = frozen_page(directory, time.time())  # a study that is refused gets no folder
        html = html or _default_file(directory)
        write_page(html, text)
    if as_json:
        with JournalView.read(directory) as journal:
            study = overview(journal, time.time())
        print_json({"directory": str(directory), **overview_json(study), "files": [str(html)] if html else []})
    if html is not None:
        print_message(f"written: {html}")


def rerun(
    directory: StudyDirectory,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", min=0, help="Number of the trial; see shoal trials DIR.")],
    devices: Devices = None,
    as_json: AsJson = False,
) -> None:
    """Train one trial again, alone, and compare its metrics with those that the study recorded.

    The trial is trained from its start for as many epochs as it has reported, in this process, on the first of the
    study's devices or of --devices, with its own seed, order of samples and random numbers. DIR is not changed. This
    runs code from the study's directory, the pickled task: rerun only trials of people you trust. A class of a module
    is imported as it is now; files of the task that were edited since the last run of the study are named.

    Prints the largest relative difference of each metric, the first epoch whose difference exceeds the rounding of one
    step, and whether that is expected. Training amplifies rounding, mostly in float32. For a larger difference, the
    trial is trained up to three times more: once equally, to find metrics that are not reproducible, then from initial
    weights changed by a few roundings, which measures by how much rounding grows: see docs/fusion.md. If the task was
    edited, nothing can be told. The exit status is 0 in any case. With --json all curves are printed, and the output
    of the task goes to standard error.
    """
    working_directory()  # for the reason in `run_script`
    with JournalView.read(directory) as journal:
        _, device = find_rerun(journal, trial, device_list(devices))
    print_message(
        f"training trial {trial} again, alone, on {device.name}; up to three times more if the difference is not clear"
    )
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        done = Study(directory).rerun(trial, device_list(devices))
    if as_json:
        print_json(rerun_json(done))
        return
    print_table(rerun_table(done))
    for line in (*rerun_verdict(done), *rerun_notes(done)):
        print_message(line)
    if len(done.found) < len(done.recorded):
        print_message(f"it ended after {len(done.found)} of {len(done.recorded)} epochs, as its loss was not a number")
    print_message(f"{len(done.found)} epoch{'s' * (len(done.found) != 1)} on {done.device}")


def _print_accounting(directory: Path, as_json: bool) -> None:
    with JournalView.read(directory) as journal:
        study = overview(journal, time.time())
        found = account(journal, study.elapsed, study.bars)
        losses = diagnosis(journal, study, found)
    if as_json:
        print_json({"directory": str(directory), **accounting_json(found), "diagnosis": diagnosis_json(losses)})
        return
    print_table(accounting_table(found))
    print_table(Text("\n".join(["", *losses.lines])))


def _default_file(directory: Path) -> Path:
    """Return a file below the study or, without permission to write there, below the working directory."""
    folder = directory / "report"
    if not os.access(folder if folder.exists() else directory, os.W_OK):
        print_message(f"{folder} cannot be written; the report is written below the working directory")
        folder = Path(f"{directory.resolve().name}-report")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ShoalError(f"the report cannot be written: {error}; name another file with --html") from error
    return folder / "report.html"


def page(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", exists=True, file_okay=False, help="Directory of a study, or a folder of studies."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; by default a free one.")] = 0,
) -> None:
    """Serve a web page of running and ended studies; stop it with Ctrl-C.

    The page shows the state, the best trials, learning curves, the search space, all trials, the timeline of devices
    and failures. Its buttons do what shoal trial, study, policy and devices do; anyone with the printed address, which
    contains a token, can press them. The page is reachable from this machine only; from another one, forward the port
    under the same number: ssh -L PORT:127.0.0.1:PORT. Journals are only read, and no code of a study runs. For a file
    with the same views: shoal report DIR --html FILE.
    """
    serve(directory, port=port, announce=lambda address: print_message(f"the page is at {address}"))


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
app.command()(keep)
app.command()(pin)
app.add_typer(study_app, name="study")
app.command()(resume)


@app.command()
def status(
    directory: StudyDirectory,
    axes: Annotated[
        str | None,
        typer.Option(metavar="DOWN,ACROSS", help="One or two parameters for the axes of the map: lr,width."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of a study: running jobs, why trials wait, the best trial, the time left.

    Once there are results, a map of the space follows: the best value and the states of trials by two parameters. By
    default these are the two that explain most of the variance of the ranks of trials. With --json the grid has all
    parameters, or those of --axes.
    """
    with JournalView.read(directory) as journal:
        now = snapshot(journal, time.time())
        grid = journal_grid(journal)
    if axes is not None:
        grid = _projected(grid, axes)
    asked = pending_requests(directory)
    checkpoints, disk = checkpoint_bytes(directory), shutil.disk_usage(directory)
    again = sorted({number for each in asked if each.verb == "retry" for number in each.trials})
    if as_json:
        print_json(
            {
                "directory": str(directory),
                **snapshot_json(now),
                "retry": again,
                "disk": {"checkpoints": checkpoints, **disk._asdict()},
                "grid": grid_json(grid, runs=now.pid is not None),
            }
        )
        return
    table = status_table(now)
    table.add_row("checkpoints", f"{bytes_text(checkpoints)}; {free_text(disk)}")
    print_table(table)
    shown = grid.project(*grid.main_axes) if axes is None else grid
    if shown.axes and (shown.has_results or axes is not None):
        typer.echo()
        print_table(HeatMap(shown, runs=now.pid is not None))
    if warning := nearly_full_text(journal, disk):
        print_message(warning)
    for each in asked:
        if each.verb != "retry":
            print_message(f"to be done: {request_text(each)}")
    if now.paused:
        print_message(f"the study is paused; resume it with: {command('study resume', directory)}")
    elif now.pid and now.all_paused:
        remedy = command("trial resume", directory, *map(str, now.held))
        print_message(f"all trials that could train are paused, so the study waits; resume them with: {remedy}")
    if again:
        print_message(
            f"to be retried: trials {numbers_text(again)}{'' if now.pid else f'; {_how_to_resume(directory)}'}"
        )
    elif now.pid is None and not now.finished:
        print_message(f"the study is not running; {_how_to_resume(directory)}")


@app.command()
def trials(
    directory: StudyDirectory,
    limit: Annotated[int | None, typer.Option(min=1, help="Show only the best trials, this many.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all trials of a study, the best first.

    With several metrics, the Pareto front comes first, marked with a star.
    """
    with JournalView.read(directory) as journal:
        goals = journal.objectives
        runs = journal.writer() is not None
        rows, of_best = journal.configurations(), journal.spec.of_best
    best = front(rows, goals) if len(goals) > 1 else set()
    rows = ranked(rows, goals)
    if as_json:
        marks = [{"front": row.number in best} if len(goals) > 1 else {} for row in rows]
        print_json([trial_json(row, runs=runs) | mark for row, mark in list(zip(rows, marks, strict=True))[:limit]])
        return
    print_table(trials_table(rows[:limit], goals, best, runs=runs, of_best=of_best))
    if limit is not None and limit < len(rows):
        print_message(f"{limit} of {len(rows)} trials")


@app.command()
def best(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Show the best trial of a study: its config, its metrics and the checkpoint of its best epoch.

    With several metrics, all trials of the Pareto front; with --json a list.
    """
    with JournalView.read(directory) as journal:
        runs, opaque = journal.writer() is not None, journal.spec.opaque
    found = Study(directory)
    several = len(found.objectives) > 1
    rows = found.pareto if several else found.pareto[:1]
    if not rows:
        raise ShoalError(f"no trial of the study in {directory} {why_no_best(found.configurations, found.objectives)}")
    checkpoints = [_checkpoint(directory, row) for row in rows]
    following = None if several else next_best(found.configurations, found.objectives)
    if as_json:
        other = {} if following is None else {"next": {"trial": following[0].number, "p_value": following[1]}}
        shown = [
            trial_json(row, runs=runs) | {"checkpoint": path and str(path)} | other
            for row, path in zip(rows, checkpoints, strict=True)
        ]
        print_json(shown if several else shown[0])
        return
    for index, (row, checkpoint) in enumerate(zip(rows, checkpoints, strict=True)):
        if index:
            typer.echo()
        print_table(best_table(row, found.objectives, runs=runs, following=following))
        if checkpoint:
            typer.echo(f"checkpoint: {checkpoint}")
    if 1 < len(found.objectives) <= MAX_METRICS and (volume := found.hypervolume()) is not None:
        typer.echo(hypervolume_text(volume, found.metric))
    numbers = [str(row.number) for row in rows if is_exportable(directory, row.number, row.best_epoch)]
    if numbers:
        what = "files" if opaque else "models" if len(numbers) > 1 else "model"
        print_message(f"export the {what}: {command('export', directory, *numbers)}")


@app.command()
def importance(
    directory: StudyDirectory,
    method: Annotated[str, named_option(METHODS, "Importance measure")] = "ped-anova",
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="EPOCHS",
            help="Epoch at which trials are compared; by default the last one that enough trials reached.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much each parameter matters for the metric (with several metrics, the first).

    Trials are compared at the same epoch. Beyond the first rung of an algorithm that stops trials, only survivors
    remain; the output says how many trials are left out. ped-anova: importance for reaching the best tenth of the
    values. fanova: share of the variance of a random forest (needs scikit-learn). eta2: share of the variance of ranks
    that the parameter alone explains, as in shoal status.
    """
    found = Study(directory).importance(method, budget)
    if as_json:
        print_json({"directory": str(directory), **importance_json(found)})
    else:
        typer.echo(repr(found))


app.command()(simulate)


def _projected(grid: StudyGrid, axes: str) -> StudyGrid:
    names = [name.strip() for name in axes.split(",")]
    if len(names) > 2:
        raise typer.BadParameter(f"{axes!r} names {len(names)} axes, a map has two", param_hint="--axes")
    try:
        return grid.project(*names)
    except ShoalError as error:
        raise typer.BadParameter(str(error), param_hint="--axes") from error


def _checkpoint(directory: Path, row: TrialRow) -> Path | None:
    """Return the checkpoint of a trial's best epoch, else its newest, by the names: to read them would need torch."""
    found = checkpoint_files(directory, row.number) or program_checkpoints(directory, row.number)
    best = checkpoint_stem(row.best_epoch or 0, 0)
    path = next((path for path in found if path.name.startswith(best)), next(iter(found), None))
    return path and (path / "files" if path.is_dir() else path)


def _how_to_resume(directory: Path) -> str:
    who = "" if writable(directory) else " (as a user with write permission)"
    return f"resume it with: {command('resume', directory)}{who}"
