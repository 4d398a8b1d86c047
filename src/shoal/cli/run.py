"""The commands that train: `shoal run` and `shoal resume`. They import nothing that only other commands need."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import api
from shoal.cli.command import (
    AlgorithmName,
    CommandRequest,
    Epochs,
    Initial,
    Loss,
    Metric,
    Mode,
    SpaceFile,
    TimeLimit,
    Trials,
    read_initial,
    run_command,
    run_script,
)
from shoal.cli.options import (
    Above,
    Aggregate,
    AsJson,
    Backend,
    Below,
    BestBy,
    Constraints,
    Devices,
    EpochsOfPatience,
    Folds,
    Keep,
    MemoryLimit,
    Oversubscription,
    Packing,
    Page,
    Policy,
    Program,
    RankBy,
    RayAddress,
    Repeats,
    Sbatch,
    SchedulingObjective,
    Script,
    Sharing,
    StopAfter,
    StudyDirectory,
    Target,
    Timeout,
    Trackers,
    WarmStart,
    best_by_argument,
    device_list,
    keep_argument,
    print_json,
    print_message,
    stop_arguments,
)
from shoal.core.constraint import constraint_argument
from shoal.core.errors import ShoalError, StudyFailedError, StudyInterrupted, TaskChangedError
from shoal.core.version import VERSION
from shoal.host.paths import working_directory
from shoal.host.remedy import command
from shoal.integrations.registry import TRACKERS
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot
from shoal.run.nodes.slurm_commands import requeue
from shoal.run_study import overridden

__all__ = ["new_app", "resume", "run"]


def new_app() -> typer.Typer:
    """Return the command line without commands."""
    app = typer.Typer(
        help="Train a whole hyper-parameter search as a few full jobs.\n\nTry: shoal run examples/digits.py",
        epilog="Exit status: 0 done, 1 stopped or failed, 2 wrong usage. "
        "SHOAL_DEBUG=1 shows the traceback of an error.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_shoal)
    return app


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shoal {VERSION}")
        raise typer.Exit


def _shoal(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run(
    file: Program,
    arguments: Script = None,
    directory: Annotated[Path | None, typer.Option(help="New directory for the study.")] = None,
    devices: Devices = None,
    policy: Policy = None,
    objective: SchedulingObjective = None,
    target: Target = None,
    patience: EpochsOfPatience = None,
    stop_below: Below = None,
    stop_above: Above = None,
    stop_after: StopAfter = None,
    constraint: Constraints = None,
    rank_by: RankBy = None,
    best_by: BestBy = None,
    keep: Keep = None,
    packing: Packing = None,
    backend: Backend = None,
    ray_address: RayAddress = None,
    sbatch: Sbatch = None,
    sharing: Sharing = None,
    oversubscription: Oversubscription = None,
    memory_limit: MemoryLimit = None,
    timeout: Timeout = None,
    trial_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long each trial may train; then it is stopped.")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Most trials that train at a time.")] = None,
    tracker: Trackers = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    initial: Initial = None,
    warm_start: WarmStart = None,
    repeats: Repeats = None,
    folds: Folds = None,
    aggregate: Aggregate = None,
    space: SpaceFile = None,
    metric: Metric = None,
    mode: Mode = None,
    algorithm: AlgorithmName = None,
    trials: Trials = None,
    epochs: Epochs = None,
    time_limit: TimeLimit = None,
    loss: Loss = None,
    page: Page = False,
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
            other = "is a pipe or a device, and Python reads a script twice; save it in a file"
            fault = "is a directory" if Path(file).is_dir() else other if Path(file).exists() else "does not exist"
            raise typer.BadParameter(f"File {file!r} {fault}.", param_hint="FILE")
        if Path(file).suffix == ".toml":
            remedy = f"if it is a search space, run a program with it: shoal run --space {file} -- COMMAND"
            raise typer.BadParameter(f"File {file!r} is not a Python file; {remedy}", param_hint="FILE")
    given: dict[str, Any] = {"directory": directory, "devices": device_list(devices), "policy": policy, "seed": seed}
    given |= {"packing": packing, "backend": backend, "ray_address": ray_address, "sbatch": sbatch, "sharing": sharing}
    given |= {"objective": objective, "target": target, "oversubscription": oversubscription}
    given |= {"initial": None if initial is None else read_initial(initial), "warm_start": warm_start or None}
    given |= {"repeats": repeats, "folds": folds, "aggregate": aggregate}
    given |= stop_arguments(patience, stop_below, stop_above, stop_after)
    given |= {"timeout": timeout, "trial_timeout": trial_timeout, "max_concurrent": max_concurrent}
    given |= {"constraints": dict(map(constraint_argument, constraint or ())) or None}
    given |= {"rank_by": rank_by, "best_by": None if best_by is None else best_by_argument(best_by)}
    given |= {"keep": None if keep is None else keep_argument(keep)}
    given |= {"page": page or None, "trackers": [TRACKERS[name]() for name in tracker or ()] or None}
    given |= {"show_progress": False if as_json else None}
    chosen = {name: value for name, value in given.items() if value is not None}
    if memory_limit is not None:
        chosen["memory_limit"] = None if memory_limit == "none" else memory_limit
    with overridden(**chosen) as begun:
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


def resume(
    directory: StudyDirectory,
    devices: Devices = None,
    policy: Policy = None,
    packing: Packing = None,
    backend: Backend = None,
    ray_address: RayAddress = None,
    sbatch: Sbatch = None,
    sharing: Sharing = None,
    oversubscription: Oversubscription = None,
    timeout: Timeout = None,
    trials: Annotated[int | None, typer.Option(min=1, help="More trials: how many are tried in all.")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on with an edited task; the journal notes it.")
    ] = False,
    page: Page = False,
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
            ray_address=ray_address,
            sbatch=sbatch,
            sharing=sharing,
            oversubscription=oversubscription,
            timeout=timeout,
            trials=trials,
            show_progress=not as_json,
            page=page,
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


@contextmanager
def _stoppable(directories: Sequence[Path], as_json: bool) -> Iterator[None]:
    """On a Ctrl-C within, print the command that resumes the last of these studies, and end the process.

    With --json print the last study also then, and when its trials failed. In a Slurm job, SIGUSR1 is a Ctrl-C, after
    which Slurm puts the job back into its queue.
    """
    at_limit: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not at_limit:
            at_limit.append(number)
            signal.raise_signal(signal.SIGINT)

    if "SLURM_JOB_ID" in os.environ:
        signal.signal(signal.SIGUSR1, stop)
    try:
        yield
    except StudyFailedError:
        if as_json and directories:
            _print_study(directories[-1])
        raise
    except KeyboardInterrupt as interruption:
        saved = "; everything is saved" if isinstance(interruption, StudyInterrupted) else ""
        print_message(f"stopped{saved}")
        if directories:
            print_message(f"go on with: {command('resume', directories[-1])}")
            if as_json:
                _print_study(directories[-1])
        if at_limit:
            requeue()
            print_message("Slurm has put the job back into its queue")
        raise typer.Exit(1) from interruption


def _conclude(directory: Path, as_json: bool) -> None:
    """Print the study, or the command that shows it."""
    if as_json:
        _print_study(directory)
    else:
        print_message(f"look at all trials with: {command('trials', directory)}")


def _print_study(directory: Path) -> None:
    from shoal.look.table import snapshot_json  # imports rich, which the study may not have needed

    with JournalView.read(directory) as journal:
        print_json({"directory": str(directory), **snapshot_json(snapshot(journal, time.time()))})
