"""Opaque trainings: a function of a config, or a command. A study receives only the reports of such a training."""

import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, SpaceError, TaskError
from shoal.core.plain import plain
from shoal.core.space import Space, flatten
from shoal.core.trial import Trial
from shoal.host.pickling import dumped
from shoal.host.sources import files_in_command, project_files

__all__ = ["RUNNER", "TIME_LIMIT", "Command", "Function", "Opaque", "opaque", "source_files", "structure"]

RUNNER = "shoal.programs.run:run"
"""Runner of their jobs; see `WorkerContext.runner`. It imports no torch."""

TIME_LIMIT = 3600.0
"""Default of the most seconds without a report."""

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_TRIAL_VALUES = ("trial", "seed", "directory")
"""Names that a command may use beside the parameters."""


@dataclass(frozen=True)
class Function:
    """A Python function that trains one configuration and calls `shoal.report`.

    Args:
        identity: File and name of the function. Functions with equal identities share their job history.
        time_limit: Most seconds without a report.
        longest: Largest budget of a trial; None if it is unknown.
        alone: Whether a trial takes a whole device, however little of it it uses.
    """

    name: str
    content: bytes
    identity: str
    time_limit: float = TIME_LIMIT
    module: str = "__main__"
    longest: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class Command:
    """A command that trains one configuration.

    Args:
        arguments: Program and its arguments. `{name}` stands for a parameter's value (`{optimizer.lr}` for one of a
            nested table), `{trial}` for the trial's number, `{seed}` for its seed, `{directory}` for the directory of
            its checkpoint; `{{` and `}}` are braces. No shell is involved.
        metrics: Metrics that a line of JSON on standard output must have to be a report.
        time_limit: Most seconds without a report.
    """

    arguments: tuple[str, ...]
    metrics: tuple[str, ...]
    directory: Path
    time_limit: float = TIME_LIMIT

    @property
    def name(self) -> str:
        """Name of the command: of its script if it has one, else of its program."""
        scripts = [Path(x).stem for x in self.arguments[1:] if re.fullmatch(r"[^{}-][^{}]*\.\w+", x)]
        return scripts[0] if scripts else Path(self.arguments[0]).name

    @property
    def identity(self) -> str:
        """Directory and arguments. Commands with equal identities share their job history."""
        return json.dumps([str(self.directory), *self.arguments])

    def check(self, space: Space) -> list[str]:
        """Check that the command can be started for every config of a space; return the searched parameters it does not
        name.
        """
        leaves = space.leaves()
        named = [name for text in self.arguments for name in _placeholder_names(text)]
        for name in named:
            if name not in leaves and name not in _TRIAL_VALUES:
                known = ", ".join(f"{{{each}}}" for each in (*leaves, *_TRIAL_VALUES))
                raise SpaceError(
                    f"the command names {{{name}}}, which is not a parameter; it may name {known}; "
                    "braces are {{ and }}"
                )
            if name in leaves and name in _TRIAL_VALUES:
                raise SpaceError(
                    f"the command names {{{name}}}, which is a parameter and a value of the trial; rename the parameter"
                )
            if name in leaves and leaves[name].optional:
                raise SpaceError(f"the command names {{{name}}}, which only some configurations of the space have")
        program = self.arguments[0]
        if "{" not in program and shutil.which(program) is None:
            raise TaskError(_why_not_started(program))
        return [name for name, leaf in leaves.items() if leaf.choice_name and name not in named]

    def line(self, trial: Trial, directory: Path) -> list[str]:
        """Return the program and its arguments for a trial."""
        trial_values = {"trial": trial.number, "seed": trial.seed, "directory": directory}
        values = {**trial_values, **flatten(trial.config)}
        return [_PLACEHOLDER.sub(lambda match: _substitute(match, values), text) for text in self.arguments]


Opaque = Function | Command


def source_files(training: Opaque) -> tuple[Path | None, list[Path]]:
    """Return the source files of a training: for a function as `project_files`; for a command no project, and the files
    that it names.
    """
    if isinstance(training, Command):
        return None, files_in_command(training.arguments, training.directory)
    return project_files(training.content, training.module)


def structure(training: Opaque) -> str:
    """Return the structure of its trials in the job history, equal in all studies of the same function or command."""
    digest = hashlib.blake2b(training.identity.encode(), digest_size=8).hexdigest()
    return f"opaque {training.name} {digest}"


def opaque(task: object, space: Space, time_limit: float, longest: int | None = None) -> Opaque | None:
    """Convert a function or a command to an opaque training; returns None for anything else.

    Args:
        longest: As for `Function`.
    """
    time_limit = plain(time_limit)
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0:
        raise ShoalError(f"`time_limit` must be a number of seconds above 0, got {time_limit!r}")
    if isinstance(task, Command):
        task.check(space)
        return task
    if isinstance(task, type) or not callable(task) or _is_task(task):
        return None
    if _is_module(task):
        raise TaskError(
            f"`task` must be a shoal.Task or a function of a config, got a model, {type(task).__name__}; "
            "return it from the `model` of a shoal.Task"
        )
    _check_signature(task)
    function = _unwrap_partial(task)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    match = code.co_filename if code is not None else getattr(function, "__module__", "")
    what = f"the function {name} cannot be pickled for its workers"
    content = dumped(task, what, TaskError, "create the objects that it uses inside it")
    module = getattr(function, "__module__", None) or ""
    alone = getattr(function, "alone", False)
    return Function(name.rpartition(".")[2], content, f"{match}:{name}", time_limit, module, longest, alone)


def _why_not_started(program: str) -> str:
    if os.sep in program and os.path.isdir(program):
        return f"the program {program!r} is a directory; name a program"
    if os.sep in program and os.path.exists(program):
        remedy = f"make it so (chmod +x {program}), or name its interpreter before it (python {program})"
        return f"the program {program!r} may not be executed by this user; {remedy}"
    return f"there is no program {program!r}; name one on the PATH, or by its whole path"


_NEVER_RUN = {
    inspect.iscoroutinefunction: "is a coroutine function (async def), which nobody awaits; call asyncio.run in it",
    inspect.isgeneratorfunction: "is a generator function (it has a yield), of which a call runs nothing; use no yield",
    inspect.isasyncgenfunction: "is an asynchronous generator function, of which a call runs nothing; use neither",
}
"""Kind of a function whose call runs none of its code -> what it is, and the remedy."""


def _check_signature(task: Callable[..., Any]) -> None:
    function = _unwrap_partial(task)
    for is_kind, fault in _NEVER_RUN.items():
        if is_kind(function) or is_kind(type(function).__call__):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise TaskError(f"a function to be tuned trains when it is called; {name} {fault}")
    try:
        found = inspect.signature(task)
    except ValueError:  # a builtin without a signature
        return
    try:
        found.bind({})
    except TypeError as error:
        raise TaskError(f"a function to be tuned takes one argument, the config; {task!r} takes {found}") from error


def _is_task(task: object) -> bool:
    """Return whether an object is a `Task`, without an import of torch: if `shoal.task` is not imported, there are
    none.
    """
    module = sys.modules.get("shoal.task")
    return module is not None and isinstance(task, module.Task)


def _is_module(task: object) -> bool:
    """Return whether an object is a model of torch, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(task, torch.nn.Module)


def _unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _placeholder_names(text: str) -> list[str]:
    return [match.group(1) for match in _PLACEHOLDER.finditer(text) if match.group(1) is not None]


def _substitute(match: re.Match[str], values: Mapping[str, Any]) -> str:
    if match.group(1) is None:
        return match.group()[0]
    value = values[match.group(1)]
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)
