"""The programs of `shoal run`: a Python file, or with `--space FILE -- COMMAND` a study of any program."""

import dataclasses
import json
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from shoal import api
from shoal.algorithms.base import Algorithm
from shoal.algorithms.registry import ALGORITHMS
from shoal.cli.options import named_option, print_message
from shoal.core.domain import LogRandInt
from shoal.core.errors import ShoalError, SpaceError
from shoal.core.space import Space, choice, is_number, loguniform, quniform, randint, uniform
from shoal.core.space_tree import Constant
from shoal.host.paths import absolute, working_directory
from shoal.host.toml_file import TomlLocation
from shoal.programs.opaque import TIME_LIMIT, Command

__all__ = [
    "AlgorithmName",
    "CommandRequest",
    "Epochs",
    "Initial",
    "Loss",
    "Metric",
    "Mode",
    "SpaceFile",
    "TimeLimit",
    "Trials",
    "read_initial",
    "read_space",
    "run_command",
    "run_script",
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

Initial = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="JSON file of configurations to try first: a list of objects, whole or partial."),
]

Metric = Annotated[str | None, typer.Option(help="The reported value to compare trials by.", rich_help_panel=_PANEL)]

Mode = Annotated[str | None, named_option(("min", "max"), "Which end of it is good", panel=_PANEL)]

AlgorithmName = Annotated[
    str | None, named_option(ALGORITHMS, "What is tried next, by default random", "--algorithm", panel=_PANEL)
]

Trials = Annotated[int | None, typer.Option(min=1, help="How many are tried.", rich_help_panel=_PANEL)]

Epochs = Annotated[
    int | None, typer.Option(min=1, help="Reports that a trial may make at most.", rich_help_panel=_PANEL)
]

TimeLimit = Annotated[
    float | None,
    typer.Option(help=f"Seconds without a report; by default {TIME_LIMIT:g}.", rich_help_panel=_PANEL),
]

Loss = Annotated[
    str | None,
    typer.Option(
        help="The reported value that policies take as the loss; by default the metric, if its mode is min.",
        rich_help_panel=_PANEL,
    ),
]

_RANGE = {"low", "high", "log", "step"}


def run_script(file: Path, arguments: Sequence[str]) -> None:
    """Run a file as `__main__` with these arguments, as the last action of this process.

    `sys.argv[1:]`, `sys.path[0]` and `__file__` are those of `python FILE ARGUMENTS`. So is the traceback of an
    exception: it begins in the file.
    """
    working_directory()  # without a working directory an import of torch ends the process, with a misleading error
    path = str(absolute(file))
    sys.argv[1:] = arguments
    sys.path[0] = str(file.resolve().parent)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    sys.excepthook = show
    runpy.run_path(path, run_name="__main__")


@dataclasses.dataclass(frozen=True)
class CommandRequest:
    """The options of `_PANEL`; None for missing options."""

    space: Path | None
    metric: str | None
    mode: str | None
    algorithm: str | None
    trials: int | None
    epochs: int | None
    time_limit: float | None
    loss: str | None

    def check_unused(self) -> None:
        """Refuse these options for a Python file."""
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                raise typer.BadParameter("goes with --space only", param_hint=f"--{name.replace('_', '-')}")


def run_command(request: CommandRequest, line: Sequence[str]) -> None:
    """Run a study of a program; options that are missing or do not fit the algorithm are a BadParameter."""
    for name in ("metric", "mode", "epochs"):
        if getattr(request, name) is None:
            raise typer.BadParameter("is needed with --space", param_hint=f"--{name}")
    assert request.space is not None
    assert request.metric is not None
    space = read_space(request.space)
    limit = TIME_LIMIT if request.time_limit is None else request.time_limit
    command = Command(tuple(line), (request.metric,), working_directory(), limit)
    algorithm = _algorithm(request.algorithm or "random", {"trials": request.trials, "epochs": request.epochs})
    for name in command.check(space):
        print_message(f"the command does not name {{{name}}}, so its values have no effect")
    mode: Any = request.mode
    api.tune(command, space, metric=request.metric, mode=mode, algorithm=algorithm, time_limit=limit, loss=request.loss)


def _algorithm(name: str, counts: Mapping[str, int | None]) -> Algorithm:
    kind = ALGORITHMS[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    settings: dict[str, Any] = {"max_epochs" if "max_epochs" in fields else "epochs": counts["epochs"]}
    if "n" in fields and counts["trials"] is None:
        raise typer.BadParameter(f"is needed by {name}", param_hint="--trials")
    if "n" in fields:
        settings["n"] = counts["trials"]
    elif counts["trials"] is not None:
        raise typer.BadParameter(f"{name} finds their number by itself", param_hint="--trials")
    return kind(**settings)


def read_space(file: Path) -> Space:
    """Read the search space of a TOML file.

    `lr = {low = 1e-4, high = 1e-1, log = true}` is a range of floats, `layers = {low = 1, high = 8}` a range of
    integers with `high`; `step` is the distance of their values. `width = [64, 128]` is a choice, whose options may be
    tables with parameters of their own. Any other table nests parameters, `{value = [1, 2]}` is a list as a value, and
    all else is a constant.
    """
    integers = TomlLocation.of(file, SpaceError)
    parameters = {name: _parameter(value, integers / name) for name, value in integers.content.items()}
    try:
        return Space(parameters)
    except SpaceError as error:
        raise SpaceError(f"{file}: {error}") from error


def read_initial(file: Path) -> list[Any]:
    """Read the initial points of a JSON file; `tune` checks them."""
    try:
        points = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShoalError(f"{file} is not a JSON file of initial points: {error}") from error
    if not isinstance(points, list):
        raise ShoalError(f'{file} must hold a list of objects, such as [{{"lr": 0.1}}]')
    return points


def _parameter(value: Any, location: TomlLocation) -> Any:
    if isinstance(value, list):
        if any(isinstance(option, list) for option in value):
            raise _error(
                location,
                "a list is a choice of its items, and an item that is a list itself could be a value or a choice; "
                f"write {{value = [...]}} for a list that is a value, got {value!r}",
            )
        return choice([_parameter(option, location / i) for i, option in enumerate(value)])
    if not isinstance(value, dict):
        return value
    if value.keys() == {"value"}:
        return Constant(value["value"])
    if not value.keys() & {"low", "high"}:
        return {name: _parameter(inner, location / name) for name, inner in value.items()}
    return _range(value, location)


def _range(value: Mapping[str, Any], location: TomlLocation) -> Any:
    if unknown_keys := value.keys() - _RANGE:
        raise _error(location, f"a range has {', '.join(sorted(_RANGE))}, got {sorted(unknown_keys)[0]!r}")
    for name in ("low", "high"):
        if not is_number(value.get(name)):
            raise _error(location, f"a range has a number for `low` and for `high`, got {dict(value)!r}")
    low, high, log, step = value["low"], value["high"], value.get("log", False), value.get("step")
    if not isinstance(log, bool):
        raise _error(location, f"`log` must be true or false, got {log!r}")
    if step is not None and (log or not is_number(step)):
        raise _error(location, f"`step` must be a number, and goes without `log`, got {dict(value)!r}")
    integers = isinstance(low, int) and isinstance(high, int)
    if step is not None:
        whole = integers and isinstance(step, int) and step > 0
        return choice(list(range(low, high + 1, step))) if whole else quniform(low, high, step)
    if integers:
        return LogRandInt(low, high + 1) if log else randint(low, high + 1)
    return loguniform(low, high) if log else uniform(low, high)


def _error(location: TomlLocation, fault: str) -> ShoalError:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location.path).removeprefix(".")
    return location.error(f"`{name}`: {fault}")
