"""Arguments and options that several commands share, and functions that print output."""

import json
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.algorithms.rules import NoImprovement, Patience, StopRule, Threshold
from shoal.core.constraint import constraint_argument
from shoal.core.errors import AlgorithmError
from shoal.core.repeats import AGGREGATES
from shoal.host.remedy import command
from shoal.integrations.registry import TRACKERS
from shoal.journal.view import JournalView
from shoal.look.text import printable
from shoal.plan.packing.registry import PACKINGS
from shoal.plan.schedule.auto import OBJECTIVES
from shoal.plan.schedule.registry import BASELINES, POLICIES, baseline_text
from shoal.run.gpu_sharing import SHARINGS
from shoal.run.registry import BACKENDS

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    *(
        "Above",
        "Aggregate",
        "AsJson",
        "Backend",
        "Below",
        "BestBy",
        "Constraints",
        "Devices",
        "EpochsOfPatience",
        "File",
        "Folds",
        "Keep",
        "best_by_argument",
        "keep_argument",
    ),
    *("MemoryLimit", "Oversubscription", "Packing", "Page", "Policy", "Program", "RankBy", "RayAddress", "Repeats"),
    *("Sbatch", "Script", "Sharing", "StopAfter", "StudyDirectory", "Timeout", "Trackers", "WarmStart"),
    "stop_arguments",
    *("beginning", "device_list", "named_option", "one_of"),
    *("print_json", "print_message", "print_request", "print_table"),
]

_PIPE_WIDTH = 200
"""Width of a table that is not printed to a terminal, in characters."""


def one_of(names: Collection[str]) -> Callable[[str | None], str | None]:
    """Return a callback that refuses an option whose value is not in `names`."""

    def check(value: str | None) -> str | None:
        if value in BASELINES and value not in names:
            raise typer.BadParameter(baseline_text(value))
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}")
        return value

    return check


def _all_of(names: Collection[str]) -> Callable[[list[str] | None], list[str] | None]:
    """Return a callback that refuses a repeatable option with a value that is not in `names`."""
    check = one_of(names)

    def check_all(values: list[str] | None) -> list[str] | None:
        for value in values or ():
            check(value)
        return values

    return check_all


def _checked_bounds(texts: list[str] | None) -> list[str] | None:
    """Refuse constraints that are invalid, or two on one value."""
    try:
        names = [constraint_argument(text)[0] for text in texts or ()]
    except AlgorithmError as error:
        raise typer.BadParameter(str(error)) from error
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"a value has one bound, and the constraints are on {', '.join(map(repr, names))}")
    return texts


def beginning(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function by which a shell completes one of some names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def named_option(
    names: Collection[str], text: str, *declarations: str, repeatable: bool = False, panel: str | None = None
) -> Any:
    """Return an option whose value is one of some names, which a shell completes."""
    check: Callable[..., Any] = _all_of(names) if repeatable else one_of(names)
    listed = f"{text}: {', '.join(names)}.{' Repeatable.' if repeatable else ''}"
    return typer.Option(
        *declarations, callback=check, autocompletion=beginning(names), help=listed, rich_help_panel=panel
    )


def device_list(value: str | None) -> str | list[str] | None:
    """Convert "cuda:0,cuda:1" to the list that `tune` takes."""
    return value.split(",") if value is not None and "," in value else value


File = Annotated[
    Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Python file that calls shoal.tune.")
]
Program = Annotated[
    str, typer.Argument(metavar="FILE", help="Python file that calls shoal.tune; or, with --space, a program after --.")
]
Script = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the file; its options after --.")
]
StudyDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Directory of a study.")
]
Devices = Annotated[str | None, typer.Option(help='"auto", "cpu:2", "cuda", "cuda:0,cuda:1" ...')]
Policy = Annotated[str | None, named_option(POLICIES, "Which job runs where")]
SchedulingObjective = Annotated[str | None, named_option(OBJECTIVES, "What the policy auto makes short", "--objective")]
Target = Annotated[
    float | None, typer.Option(help="Value of the metric that is good enough: reached, it ends the study.")
]
RankBy = Annotated[
    str | None, named_option(("best", "last"), "Epoch of a trial that ranks it, whose weights are kept", "--rank-by")
]
BestBy = Annotated[
    str | None,
    typer.Option(
        "--best-by",
        metavar="METRIC",
        help="Metric that decides the best epoch: of several the one, or another with its mode, as val_loss:min.",
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        metavar="K", help="Ended trials that keep their weights: the K best ones, best (of several the front) or all."
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(min=1, help="Seeds with which each configuration is trained; what counts is the aggregate."),
]
Folds = Annotated[
    int | None, typer.Option(min=1, help="Folds of the data, for each of which each configuration is trained.")
]
Aggregate = Annotated[str | None, named_option(AGGREGATES, "The value of a configuration that is repeated")]
Constraints = Annotated[
    list[str] | None,
    typer.Option(
        "--constraint",
        metavar="BOUND",
        callback=_checked_bounds,
        help="Bound of a reported value that trials must keep, such as 'latency_ms <= 10'. Repeatable.",
    ),
]
EpochsOfPatience = Annotated[
    int | None, typer.Option("--patience", metavar="EPOCHS", help="End a trial after so many without an improvement.")
]
Below = Annotated[float | None, typer.Option("--stop-below", help="Stop a trial whose metric is below this, or NaN.")]
Above = Annotated[float | None, typer.Option("--stop-above", help="Stop a trial whose metric is above this, or NaN.")]
StopAfter = Annotated[
    int | None,
    typer.Option("--stop-after", metavar="TRIALS", help="End the study after so many without an improvement."),
]
Packing = Annotated[str | None, named_option(PACKINGS, "Which arrays share a process")]
Backend = Annotated[str | None, named_option(BACKENDS, "What runs the jobs")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster, for --backend ray; by default $RAY_ADDRESS, else that of this machine.",
    ),
]
Sbatch = Annotated[
    str | None,
    typer.Option(
        metavar="OPTIONS",
        help="For --backend slurm: options of Slurm's sbatch for nodes that the study asks for one by one, such as "
        "'--nodes=4 --time=4:00:00'; by default it runs on the nodes of the Slurm job that it is in.",
    ),
]
Sharing = Annotated[str | None, named_option(SHARINGS, "How jobs share a GPU")]
Oversubscription = Annotated[
    float | None,
    typer.Option(metavar="RATIO", help="How many times the compute of a device may be reserved, at least 1."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Main memory that each process of a function or command may allocate, such as 8GiB; auto, the default: "
        "limits on a shared GPU only; none: not even these.",
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="How long the study may run, as 90s, 20m, 2h, 1d or 1h30m; then it can go on."),
]
WarmStart = Annotated[
    list[Path] | None,
    typer.Option(
        "--warm-start",
        metavar="DIR",
        help="Directory of an earlier study, whose values enter the model of the algorithm. Repeatable.",
    ),
]
Trackers = Annotated[
    list[str] | None, named_option(TRACKERS, "Where to track the trials, too", "--tracker", repeatable=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Page = Annotated[bool, typer.Option("--page", help="Serve the page of the study while it runs; see shoal page.")]


def best_by_argument(text: str) -> str | dict[str, str]:
    """Return the argument `best_by` of `tune`."""
    name, _, mode = text.rpartition(":")
    return {name: mode} if name and mode in ("min", "max") else text


def keep_argument(text: str) -> int | str:
    """Return the argument `keep` of `tune`."""
    return int(text) if text.isdecimal() else text


def stop_arguments(patience: int | None, below: float | None, above: float | None, after: int | None) -> dict[str, Any]:
    """Return the arguments `stop` and `stop_after` of `tune`; None for missing options."""
    rules: list[StopRule] = [] if patience is None else [Patience(patience)]
    if below is not None or above is not None:
        rules.append(Threshold(below, above))
    return {"stop": rules or None, "stop_after": None if after is None else NoImprovement(after)}


def print_table(text: "RenderableType") -> None:
    """Print a rich renderable at the width of the terminal; in a file or a pipe its lines end with their text."""
    from rich.console import Console  # not needed by `shoal run`

    if sys.stdout.isatty():
        Console().print(text)
        return
    console = Console(width=_PIPE_WIDTH)
    with console.capture() as captured:
        console.print(text)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def print_json(value: object) -> None:
    """Print a line of JSON."""
    typer.echo(json.dumps(value))


def print_message(line: str) -> None:
    """Print a line for the user on standard error, if it can be written there."""
    with suppress(OSError):
        typer.echo(f"shoal: {printable(line, lines=True)}", err=True)


def print_request(directory: Path, text: str, values: Mapping[str, Any], as_json: bool) -> None:
    """Print whether a request is carried out now, or when the study is resumed."""
    with JournalView.read(directory) as journal:
        runs = journal.writer() is not None
    if as_json:
        print_json({"directory": str(directory), **values, "runs": runs})
        return
    print_message(f"{text} now" if runs else f"{text} once a process runs the study: {command('resume', directory)}")
