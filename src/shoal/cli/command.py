"""`shoal run --space FILE -- COMMAND`: a study of any program."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import api
from shoal.algorithms.base import Algorithm
from shoal.algorithms.registry import ALGORITHMS
from shoal.cli.options import one_of, say
from shoal.cli.space_file import read_space
from shoal.opaque import TIME_LIMIT, Command
from shoal.paths import here

__all__ = [
    "AlgorithmName",
    "CommandRequest",
    "Epochs",
    "Metric",
    "Mode",
    "SpaceFile",
    "TimeLimit",
    "Trials",
    "run_command",
]

_PANEL = "With --space"

SpaceFile = Annotated[
    Path | None,
    typer.Option(
        "--space",
        exists=True,
        dir_okay=False,
        help="TOML file of the search space of a command; shoal run --space FILE -- python train.py --lr {lr}",
        rich_help_panel=_PANEL,
    ),
]
Metric = Annotated[str | None, typer.Option(help="The reported value to compare trials by.", rich_help_panel=_PANEL)]
Mode = Annotated[
    str | None,
    typer.Option(callback=one_of(("min", "max")), help="Which end of it is good: min, max.", rich_help_panel=_PANEL),
]
AlgorithmName = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        callback=one_of(ALGORITHMS),
        help=f"What is tried next, by default random: {', '.join(ALGORITHMS)}.",
        rich_help_panel=_PANEL,
    ),
]
Trials = Annotated[int | None, typer.Option(min=1, help="How many are tried.", rich_help_panel=_PANEL)]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Reports that a trial may make at most.", rich_help_panel=_PANEL)
]
TimeLimit = Annotated[
    float | None,
    typer.Option(help=f"Seconds without a report; by default {TIME_LIMIT:g}.", rich_help_panel=_PANEL),
]


@dataclasses.dataclass(frozen=True)
class CommandRequest:
    """What the options of `_PANEL` say; None where they do not."""

    space: Path | None
    metric: str | None
    mode: str | None
    algorithm: str | None
    trials: int | None
    epochs: int | None
    time_limit: float | None

    def check_unused(self) -> None:
        """Refuse these options where a Python file is run.

        Raises:
            typer.BadParameter: one is there.
        """
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                raise typer.BadParameter("goes with --space only", param_hint=f"--{name.replace('_', '-')}")


def run_command(asked: CommandRequest, line: Sequence[str]) -> None:
    """Run a study of a command.

    Args:
        asked: its space and how to search that.
        line: the program and its arguments.

    Raises:
        typer.BadParameter: an option is missing, or goes without the algorithm.
        ShoalError: as of `tune`.
    """
    for name in ("metric", "mode", "epochs"):
        if getattr(asked, name) is None:
            raise typer.BadParameter("is needed with --space", param_hint=f"--{name}")
    assert asked.space is not None
    assert asked.metric is not None
    space = read_space(asked.space)
    limit = TIME_LIMIT if asked.time_limit is None else asked.time_limit
    command = Command(tuple(line), (asked.metric,), here(), limit)
    algorithm = _algorithm(asked.algorithm or "random", {"trials": asked.trials, "epochs": asked.epochs})
    for name in command.check(space):
        say(f"the command does not name {{{name}}}, so trials differ in it for nothing")
    mode: Any = asked.mode
    api.tune(command, space, metric=asked.metric, mode=mode, algorithm=algorithm, time_limit=limit)


def _algorithm(name: str, given: Mapping[str, int | None]) -> Algorithm:
    """An algorithm by its name, with the numbers of trials and epochs that it is to have."""
    kind = ALGORITHMS[name]
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    settings: dict[str, Any] = {"max_epochs" if "max_epochs" in known else "epochs": given["epochs"]}
    if "n" in known and given["trials"] is None:
        raise typer.BadParameter(f"is needed by {name}", param_hint="--trials")
    if "n" in known:
        settings["n"] = given["trials"]
    elif given["trials"] is not None:
        raise typer.BadParameter(f"{name} finds their number by itself", param_hint="--trials")
    return kind(**settings)
