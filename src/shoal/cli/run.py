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
from shoal.algorithms.registry import ALGORITHMS
from shoal.algorithms.rules import NoImprovement, Patience, StopRule, Threshold
from shoal.cli.command import CommandRequest, read_initial, run_command, run_script
from shoal.cli.options import (
    AsJson,
    Devices,
    Packing,
    Script,
    StudyDirectory,
    best_by_argument,
    device_list,
    keep_argument,
    named_option,
    print_json,
    print_message,
)
from shoal.core.constraint import constraint_argument
from shoal.core.errors import AlgorithmError, ShoalError, StudyFailedError, StudyInterrupted, TaskChangedError
from shoal.core.repeats import AGGREGATES
from shoal.core.version import VERSION
from shoal.host.paths import working_directory
from shoal.host.remedy import command
from shoal.integrations.registry import TRACKERS
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot
from shoal.plan.schedule.auto import OBJECTIVES
from shoal.plan.schedule.registry import POLICIES
from shoal.programs.opaque import TIME_LIMIT
from shoal.run.gpu_sharing import SHARINGS
from shoal.run.nodes.slurm_commands import requeue
from shoal.run.registry import BACKENDS
from shoal.run_study import overridden

__all__ = ["new_app", "resume", "run"]


_PANEL = "With --space"

_Policy = Annotated[str | None, named_option(POLICIES, "Scheduling policy, which places jobs on devices")]
_Backend = Annotated[str | None, named_option(BACKENDS, "Where jobs run")]
_RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="For --backend ray: address of the cluster; by default $RAY_ADDRESS, else the one on this machine.",
    ),
]
_Sbatch = Annotated[
    str | None,
    typer.Option(
        metavar="OPTIONS",
        help="For --backend slurm: options of sbatch with which the study requests nodes one by one, such as "
        "'--nodes=4 --time=4:00:00'. By default it runs on the nodes of its own Slurm job.",
    ),
]
_Sharing = Annotated[str | None, named_option(SHARINGS, "How jobs share a GPU")]
_Oversubscription = Annotated[
    float | None,
    typer.Option(metavar="RATIO", help="Factor by which jobs may reserve more compute than a device has, at least 1."),
]
_Timeout = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Longest running time of the study: 90s, 20m, 2h, 1d or 1h30m. It can be resumed later."
    ),
]
_Page = Annotated[bool, typer.Option("--page", help="Serve the web page of the study while it runs; see shoal page.")]


def new_app() -> typer.Typer:
    """Return the command line without commands."""
    app = typer.Typer(
        help="Speed up PyTorch hyper-parameter search by training many models as one.\n\n"
        "Try: shoal run examples/digits.py",
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


def _checked_bounds(texts: list[str] | None) -> list[str] | None:
    """Refuse constraints that are invalid, or two on one value."""
    try:
        names = [constraint_argument(text)[0] for text in texts or ()]
    except AlgorithmError as error:
        raise typer.BadParameter(str(error)) from error
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"a value has one bound, and the constraints are on {', '.join(map(repr, names))}")
    return texts


def _stop_arguments(
    patience: int | None, below: float | None, above: float | None, after: int | None
) -> dict[str, Any]:
    """Return the arguments `stop` and `stop_after` of `tune`; None for missing options."""
    rules: list[StopRule] = [] if patience is None else [Patience(patience)]
    if below is not None or above is not None:
        rules.append(Threshold(below, above))
    return {"stop": rules or None, "stop_after": None if after is None else NoImprovement(after)}


def run(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Python file that calls shoal.tune; or, with --space, a command after --."),
    ],
    arguments: Script = None,
    directory: Annotated[
        Path | None, typer.Option(help="New directory for the study; by default one below runs.")
    ] = None,
    devices: Devices = None,
    policy: _Policy = None,
    objective: Annotated[
        str | None, named_option(OBJECTIVES, "Time that the policy auto minimises", "--objective")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="The study ends when a trial reaches this value of the metric.")
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option("--patience", metavar="EPOCHS", help="Stop a trial after this many epochs without improvement."),
    ] = None,
    stop_below: Annotated[
        float | None, typer.Option("--stop-below", help="Stop a trial whose metric falls below this, or is NaN.")
    ] = None,
    stop_above: Annotated[
        float | None, typer.Option("--stop-above", help="Stop a trial whose metric rises above this, or is NaN.")
    ] = None,
    stop_after: Annotated[
        int | None,
        typer.Option(
            "--stop-after", metavar="TRIALS", help="End the study after this many trials without improvement."
        ),
    ] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            "--constraint",
            metavar="BOUND",
            callback=_checked_bounds,
            help="Bound on a reported value, such as 'latency_ms <= 10'. Repeatable.",
        ),
    ] = None,
    rank_by: Annotated[
        str | None,
        named_option(("best", "last"), "Epoch by which a trial is ranked, and whose weights are kept", "--rank-by"),
    ] = None,
    best_by: Annotated[
        str | None,
        typer.Option(
            "--best-by",
            metavar="METRIC",
            help="Metric that selects the best epoch: one of the study's, or another with its mode: val_loss:min.",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="Ended trials that keep their weights: the K best, best (with several metrics the front) or all.",
        ),
    ] = None,
    packing: Packing = None,
    backend: _Backend = None,
    ray_address: _RayAddress = None,
    sbatch: _Sbatch = None,
    sharing: _Sharing = None,
    oversubscription: _Oversubscription = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Limit of the main memory of each process of a function or command, such as 8GiB; auto (default): "
            "limits on shared GPUs only; none: no limit.",
        ),
    ] = None,
    timeout: _Timeout = None,
    trial_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="Longest training time of a trial; it is then stopped.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Largest number of trials that train at once.")
    ] = None,
    tracker: Annotated[
        list[str] | None, named_option(TRACKERS, "Also log the trials to", "--tracker", repeatable=True)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    initial: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="JSON file with configurations to try first: a list of objects, complete or partial."
        ),
    ] = None,
    warm_start: Annotated[
        list[Path] | None,
        typer.Option(
            "--warm-start",
            metavar="DIR",
            help="Directory of an earlier study, whose results the algorithm learns from. Repeatable.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds for each configuration; it is ranked by the aggregate."),
    ] = None,
    folds: Annotated[
        int | None, typer.Option(min=1, help="Number of cross-validation folds for each configuration.")
    ] = None,
    aggregate: Annotated[str | None, named_option(AGGREGATES, "How the values of seeds and folds are combined")] = None,
    space: Annotated[
        Path | None,
        typer.Option(
            "--space",
            exists=True,
            dir_okay=False,
            help="TOML file with the search space of a command, or YAML file of a W&B sweep: "
            "shoal run --space FILE -- python train.py --lr {lr}",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Reported value by which trials are compared.", rich_help_panel=_PANEL)
    ] = None,
    mode: Annotated[
        str | None, named_option(("min", "max"), "Whether the metric is minimised or maximised", panel=_PANEL)
    ] = None,
    algorithm: Annotated[
        str | None,
        named_option(ALGORITHMS, "Search algorithm; by default chosen by the budget", "--algorithm", panel=_PANEL),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of configurations to try.", rich_help_panel=_PANEL)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Largest number of reports of a trial.", rich_help_panel=_PANEL)
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds without a report after which a trial fails; by default {TIME_LIMIT:g}.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="Reported value that policies use as the loss; by default the metric, if its mode is min.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    page: _Page = False,
    as_json: AsJson = False,
) -> None:
    """Run a Python file that calls shoal.tune; or, with --space, search the arguments of any command.

    Options override the arguments of shoal.tune in the file. With --json the study shows no progress, the output of the
    file goes to standard error, and standard output ends with one line of JSON that describes the study.
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
    given |= _stop_arguments(patience, stop_below, stop_above, stop_after)
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
                run_command(asked, [file, *(arguments or [])], given["best_by"])
        if not begun:
            raise ShoalError(f"{file} ended without a call of shoal.tune, so there is no study")
        if as_json:
            _print_study(begun[-1])


def resume(
    directory: StudyDirectory,
    devices: Devices = None,
    policy: _Policy = None,
    packing: Packing = None,
    backend: _Backend = None,
    ray_address: _RayAddress = None,
    sbatch: _Sbatch = None,
    sharing: _Sharing = None,
    oversubscription: _Oversubscription = None,
    timeout: _Timeout = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Extend the search to this many trials in all.")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume with an edited task; the journal records the edits.")
    ] = False,
    page: _Page = False,
    as_json: AsJson = False,
) -> None:
    """Resume a study that was stopped or killed, or whose failed trials are to be retried (shoal trial retry).

    Options override those of the study. Resuming runs code from the study's directory (the pickled task, algorithm and
    callbacks), so resume only studies of people you trust. The commands status, trials, best and report run no code
    of the study.
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
            typer.confirm("Resume with the edited task?", abort=True, err=True)
            go_on(accept_changes=True)
    if as_json:
        _print_study(directory)


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
            print_message(f"resume with: {command('resume', directories[-1])}")
            if as_json:
                _print_study(directories[-1])
        if at_limit:
            requeue()
            print_message("Slurm has put the job back into its queue")
        raise typer.Exit(1) from interruption


def _print_study(directory: Path) -> None:
    from shoal.look.table import snapshot_json  # imports rich, which the study may not have needed

    with JournalView.read(directory) as journal:
        print_json({"directory": str(directory), **snapshot_json(snapshot(journal, time.time()))})
