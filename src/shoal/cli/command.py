"""The programs of `shoal run`: a Python file, or with `--space FILE -- COMMAND` a study of any program."""

import dataclasses
import json
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import typer

from shoal import api
from shoal.algorithms.base import Algorithm
from shoal.algorithms.registry import ALGORITHMS
from shoal.cli.options import print_message
from shoal.cli.space_file import read_space
from shoal.core.errors import ShoalError
from shoal.core.foreign_spaces import SweepSettings
from shoal.host.paths import absolute, working_directory
from shoal.host.tracebacks import user_lines
from shoal.programs.opaque import TIME_LIMIT, Command

__all__ = ["CommandRequest", "read_initial", "run_command", "run_script"]


def run_script(file: Path, arguments: Sequence[str]) -> None:
    """Run a file as `__main__` with these arguments, as the last action of this process.

    `sys.argv[1:]`, `sys.path[0]` and `__file__` are those of `python FILE ARGUMENTS`. So is the traceback of an
    exception: it begins in the file. Before an error of Shoal only the user's lines are printed.
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
    try:
        runpy.run_path(path, run_name="__main__")
    except ShoalError as error:  # its message is printed as that of any command
        print(user_lines(error.__traceback__, path), end="", file=sys.stderr)
        raise


@dataclasses.dataclass(frozen=True)
class CommandRequest:
    """The options that go with `--space` only; None for missing options."""

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

    def completed(self, sweep: SweepSettings) -> "CommandRequest":
        """The same options, with those of a sweep of W&B for missing ones; what is not taken of it is printed."""
        metric = self.metric or sweep.metric
        if self.mode and metric and (fault := sweep.contradiction(metric, self.mode)):
            raise typer.BadParameter(fault, param_hint="--mode")
        takes_number = not self.algorithm or "n" in _fields(ALGORITHMS[self.algorithm])
        trials = self.trials or (sweep.trials if takes_number else None)
        metrics, has_algorithm = [metric] if metric else [], self.algorithm is not None
        if notes := sweep.not_taken(metrics, trials=trials, target=sweep.target, has_algorithm=has_algorithm):
            print_message(f"of {self.space} is not taken: {notes}")
        mode = self.mode or ((sweep.mode or "min") if metric == sweep.metric else None)  # the default of W&B
        return dataclasses.replace(self, metric=metric, mode=mode, trials=trials)


def run_command(request: CommandRequest, line: Sequence[str], best_by: object = None) -> None:
    """Run a study of a program; options that are missing or do not fit the algorithm are a BadParameter.

    Args:
        best_by: As of `tune`; a line of the program without its metric is no report.
    """
    assert request.space is not None
    space, sweep = read_space(request.space)
    request = request.completed(sweep)
    for name in ("metric", "mode", "epochs"):
        if getattr(request, name) is None:
            raise typer.BadParameter("is needed with --space", param_hint=f"--{name}")
    assert request.metric is not None
    limit = TIME_LIMIT if request.time_limit is None else request.time_limit
    metrics = dict.fromkeys([request.metric, *(best_by if isinstance(best_by, dict) else ())])
    command = Command(tuple(line), tuple(metrics), working_directory(), limit)
    counts = {"trials": request.trials, "epochs": request.epochs}
    if request.algorithm is None and request.trials is None:
        raise typer.BadParameter("is needed without --algorithm", param_hint="--trials")
    search = counts if request.algorithm is None else {"algorithm": _algorithm(request.algorithm, counts)}
    for name in command.check(space):
        print_message(f"the command does not name {{{name}}}, so its values have no effect")
    mode: Any = request.mode
    target = sweep.target if request.metric == sweep.metric else None
    given: dict[str, Any] = {"metric": request.metric, "mode": mode, "time_limit": limit, "loss": request.loss}
    api.tune(command, space, target=target, **given, **search)  # --target replaces the target


def _algorithm(name: str, counts: Mapping[str, int | None]) -> Algorithm:
    kind = ALGORITHMS[name]
    fields = _fields(kind)
    settings: dict[str, Any] = {"max_epochs" if "max_epochs" in fields else "epochs": counts["epochs"]}
    if "n" in fields and counts["trials"] is None:
        raise typer.BadParameter(f"is needed by {name}", param_hint="--trials")
    if "n" in fields:
        settings["n"] = counts["trials"]
    elif counts["trials"] is not None:
        raise typer.BadParameter(f"{name} finds their number by itself", param_hint="--trials")
    return kind(**settings)


def _fields(kind: type[Algorithm]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def read_initial(file: Path) -> list[Any]:
    """Read the initial points of a JSON file; `tune` checks them."""
    try:
        points = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShoalError(f"{file} is not a JSON file of initial points: {error}") from error
    if not isinstance(points, list):
        raise ShoalError(f'{file} must hold a list of objects, such as [{{"lr": 0.1}}]')
    return points
