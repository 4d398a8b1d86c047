"""The commands of `shoal`: they print results on standard output, everything else on standard error."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import api
from shoal.cli.command import (
    AlgorithmName,
    CommandRequest,
    Epochs,
    Loss,
    Metric,
    Mode,
    SpaceFile,
    TimeLimit,
    Trials,
    run_command,
    run_script,
)
from shoal.cli.export import export
from shoal.cli.history import history_app
from shoal.cli.interventions import devices_app, policy, study_app, trial_app
from shoal.cli.options import (
    AsJson,
    Backend,
    Devices,
    Oversubscription,
    Packing,
    Policy,
    Program,
    SchedulingObjective,
    Script,
    Sharing,
    StudyDirectory,
    Target,
    Trackers,
    device_list,
    print_json,
    print_message,
    print_table,
    ratio,
)
from shoal.cli.profile import profile
from shoal.cli.report import report, rerun
from shoal.cli.simulate import simulate
from shoal.core.errors import ShoalError, StudyFailedError, StudyInterrupted, TaskChangedError
from shoal.integrations.registry import TRACKERS
from shoal.journal.requests import pending_requests
from shoal.journal.schema import writable
from shoal.journal.view import JournalView
from shoal.paths import working_directory
from shoal.remedy import command
from shoal.reporting.grid import HeatMap, StudyGrid, grid_json, study_grid
from shoal.reporting.ranking import front, ranked, why_no_best
from shoal.reporting.snapshot import snapshot
from shoal.reporting.table import best_table, snapshot_json, status_table, trial_json, trials_table
from shoal.reporting.text import numbers_text, request_text
from shoal.results import Study
from shoal.worker.checkpoint_paths import checkpoint_files, program_checkpoints

__all__ = ["app"]

app = typer.Typer(
    help="Train a whole hyper-parameter search as a few full jobs.\n\nTry: shoal run examples/digits.py",
    epilog="Exit status: 0 done, 1 stopped or failed, 2 wrong usage. SHOAL_DEBUG=1 shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shoal {metadata.version('shoal')}")
        raise typer.Exit


@app.callback()
def _shoal(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: Program,
    arguments: Script = None,
    directory: Annotated[Path | None, typer.Option(help="New directory for the study.")] = None,
    devices: Devices = None,
    policy: Policy = None,
    objective: SchedulingObjective = None,
    target: Target = None,
    packing: Packing = None,
    backend: Backend = None,
    sharing: Sharing = None,
    oversubscription: Oversubscription = None,
    tracker: Trackers = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    space: SpaceFile = None,
    metric: Metric = None,
    mode: Mode = None,
    algorithm: AlgorithmName = None,
    trials: Trials = None,
    epochs: Epochs = None,
    time_limit: TimeLimit = None,
    loss: Loss = None,
    as_json: AsJson = False,
) -> None:
    """Run a Python file that calls shoal.tune; or, with --space, search the arguments of any program.

    Options replace the arguments that the file gives to shoal.tune. With --json the study shows no progress, the output
    of the file goes to standard error, and standard output ends with one line of JSON: the study.
    """
    asked = CommandRequest(space, metric, mode, algorithm, trials, epochs, time_limit, loss)
    if space is None:
        asked.check_unused()
        if not Path(file).is_file():
            fault = "is a directory" if Path(file).is_dir() else "does not exist"
            raise typer.BadParameter(f"File {file!r} {fault}.", param_hint="FILE")
    given: dict[str, Any] = {"directory": directory, "devices": device_list(devices), "policy": policy}
    given |= {"packing": packing, "backend": backend, "sharing": sharing, "seed": seed}
    given |= {"objective": objective, "target": target, "oversubscription": ratio(oversubscription)}
    chosen = {name: value for name, value in given.items() if value is not None}
    if tracker:
        chosen["trackers"] = [TRACKERS[name]() for name in tracker]
    if as_json:
        chosen["show_progress"] = False
    with api.overridden(**chosen) as begun:
        with _stoppable(begun, as_json), redirect_stdout(sys.stderr) if as_json else nullcontext():
            if space is None:
                if not as_json:
                    print_message(f"running {file}")
                run_script(Path(file), arguments or [])
            else:
                run_command(asked, [file, *(arguments or [])])
        if not begun:
            raise ShoalError(f"{file} ended without a call of shoal.tune, so there is no study")
        _conclude(begun[-1], as_json)


app.command()(profile)
app.add_typer(devices_app, name="devices")
app.command()(report)
app.command()(export)
app.command()(rerun)
app.add_typer(history_app, name="history")
app.add_typer(trial_app, name="trial")
app.command()(policy)
app.add_typer(study_app, name="study")


@app.command()
def resume(
    directory: StudyDirectory,
    devices: Devices = None,
    policy: Policy = None,
    packing: Packing = None,
    backend: Backend = None,
    sharing: Sharing = None,
    oversubscription: Oversubscription = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on with an edited task; the journal notes it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a study that was stopped or killed, or that has failed trials to try again (shoal trial retry).

    Options replace the study's own. This runs code from the study's directory, the pickled task, algorithm and
    callbacks: go on only with studies of people you trust. The commands status, trials, best and report run no code of
    the study.
    """
    working_directory()  # as of `run_script`
    with _stoppable([directory], as_json):
        go_on = partial(
            api.resume,
            directory,
            policy=policy,
            packing=packing,
            devices=device_list(devices),
            backend=backend,
            sharing=sharing,
            oversubscription=ratio(oversubscription),
            show_progress=not as_json,
        )
        try:
            go_on(accept_changes=accept_changes)
        except TaskChangedError as change:
            if not sys.stdin.isatty():
                raise
            typer.echo(f"{change}\n", err=True)
            typer.confirm("Go on with the edited task?", abort=True, err=True)
            go_on(accept_changes=True)
    _conclude(directory, as_json)


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


@app.command()
def mirror(
    directory: StudyDirectory,
    storage: Annotated[
        str, typer.Argument(metavar="STORAGE", help="sqlite:///optuna.db, or a file for Optuna's JournalStorage.")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the Optuna study; by default that of DIR.")] = None,
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two updates.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show a study in Optuna's dashboard: update an Optuna study until no process runs the study.

    Look with: optuna-dashboard STORAGE. Called again, it goes on in the same Optuna study. There a failed trial stays
    failed, also if it is tried again.
    """
    found = Study(directory)
    try:
        optuna_study = found.mirror_to_optuna(storage, name, interval)
    except KeyboardInterrupt as stop:
        print_message("stopped; the study goes on, and so does its mirror when it is called again")
        raise typer.Exit(1) from stop
    trials = optuna_study.get_trials(deepcopy=False)
    unfinished = sum(not trial.state.is_finished() for trial in trials)
    if as_json:
        print_json({"storage": storage, "name": optuna_study.study_name, "trials": len(trials), "open": unfinished})
        return
    print_message(f"{len(trials)} trials are in {optuna_study.study_name!r} in {storage}")
    if unfinished:
        print_message(f"{unfinished} are open, and no process runs the study; {_how_to_go_on(directory)}")


app.command()(simulate)


@contextmanager
def _stoppable(directories: Sequence[Path], as_json: bool) -> Iterator[None]:
    """On a Ctrl-C within, print the command that resumes the last of these studies, and end the process.

    With --json print the last study also then, and when its trials failed.
    """
    try:
        yield
    except StudyFailedError:
        if as_json and directories:
            _print_study(directories[-1])
        raise
    except (StudyInterrupted, KeyboardInterrupt) as stop:
        saved = "; everything is saved" if isinstance(stop, StudyInterrupted) else ""
        print_message(f"stopped{saved}")
        if directories:
            print_message(f"go on with: {command('resume', directories[-1])}")
            if as_json:
                _print_study(directories[-1])
        raise typer.Exit(1) from stop


def _conclude(directory: Path, as_json: bool) -> None:
    """Print the study, or the command that shows it."""
    if as_json:
        _print_study(directory)
    else:
        print_message(f"look at all trials with: {command('trials', directory)}")


def _print_study(directory: Path) -> None:
    with JournalView.read(directory) as journal:
        print_json({"directory": str(directory), **snapshot_json(snapshot(journal, time.time()))})


def _projected(grid: StudyGrid, axes: str) -> StudyGrid:
    """Return the grid over the axes of a user.

    Raises:
        typer.BadParameter: An axis does not exist, or there are too many.
    """
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
