"""The arguments of `tune`: checks, and their form in the journal."""

import base64
import copy
import functools
import logging
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from shoal.algorithms.base import Algorithm, call_text, check_integer
from shoal.algorithms.default import DEFAULT_EPOCHS
from shoal.algorithms.repeated import Repeated
from shoal.algorithms.rules import StopRule
from shoal.algorithms.stop_rules import StopRules
from shoal.core.errors import AlgorithmError, ShoalError, TaskError
from shoal.core.foreign_spaces import SweepSettings, is_wandb_sweep
from shoal.core.objective import Objective, objectives
from shoal.core.plain import plain
from shoal.core.space import Space
from shoal.core.space_tree import constant
from shoal.core.trial import Config
from shoal.host.paths import check_path
from shoal.host.pickling import dumped, loaded, register_original, why_not_loaded
from shoal.host.process_settings import unheld
from shoal.host.sources import is_importable, script_source
from shoal.host.tracebacks import user_traceback
from shoal.plan.packing.base import Packing
from shoal.plan.schedule.base import Policy
from shoal.programs.opaque import Command, Opaque
from shoal.spec import StudySpec

__all__ = [
    "batch_size_override",
    "check_arguments",
    "check_kind",
    "check_memory_limit",
    "initial_points",
    "is_pickled_by_value",
    "load_algorithm",
    "load_strategy",
    "longest_budget",
    "metric_arguments",
    "pickled_algorithm",
    "pickled_task",
    "script_of",
    "searched_space",
    "strategy_text",
    "study_warnings",
    "with_best_epoch",
    "with_stop_rules",
]

_PICKLED = "pickled:"
_log = logging.getLogger("shoal.study")


def pickled_task(task: object) -> bytes:
    """Pickle the task for the workers; check its class, its `scheduler_interval` and the arguments of its `step`."""
    from shoal.task import Task, check_interval, takes_config  # imports torch, which other commands do not need

    if not isinstance(task, Task):
        raise TaskError(
            f"`task` must be a function of a config, or an instance of a subclass of shoal.Task, got {task!r}"
        )
    check_interval(task)
    takes_config(task)
    remedy = "create the objects that its attributes and methods hold in `data` or `model`"
    content = dumped(task, "the task cannot be pickled for its workers", TaskError, remedy)
    register_original(content, task)
    return content


def is_pickled_by_value(task: object) -> bool:
    """Return whether the pickle holds the definition of a task, as for scripts and notebooks, and not only its name."""
    defined = _definition(task)
    module = getattr(defined, "__module__", None)  # None for methods of built-in objects, such as `{}.get`
    return isinstance(module, str) and ("<locals>" in defined.__qualname__ or not is_importable(module))


def script_of(task: object) -> dict[str, str | None] | None:
    """Return `script_source` of a task, or of the first of its attributes, whose pickle holds the definition."""
    parts = (task, *getattr(task, "__dict__", {}).values())
    kept = next((part for part in parts if is_pickled_by_value(part)), None)
    return None if kept is None else script_source(_definition(kept))


def _definition(task: object) -> Any:
    while isinstance(task, functools.partial):
        task = task.func
    return task if isinstance(getattr(task, "__qualname__", None), str) else type(task)


def batch_size_override(task: object) -> str | None:
    """Return the name of a task that overrides `batch_size`; None if the config gives the batch size."""
    from shoal.task import Task

    own = isinstance(task, Task) and type(task).batch_size is not Task.batch_size
    return type(task).__name__ if own else None


def study_warnings(task: object, algorithm: Algorithm, *, is_function: bool = False) -> list[str]:
    """Return warnings about settings of the task that do not fit the study, and of this process that do not hold."""
    unheld_settings = [text for text in [unheld(program=is_function)] if text]
    warnings_of: Callable[..., list[str]] | None = getattr(task, "_study_warnings", None)  # of tasks, Optuna objectives
    if warnings_of is None or isinstance(task, type):  # a class is refused later
        return unheld_settings
    problem = algorithm.problem
    needed = tuple(dict.fromkeys((*problem.objectives, *problem.of_best.objectives)))
    return unheld_settings + warnings_of(needed, algorithm.longest_budget, problem.sample(0))


def with_stop_rules(algorithm: Algorithm, stop: object, task: object, objectives: Sequence[Objective]) -> Algorithm:
    """Return the algorithm with the rules of the argument `stop` and of the task; itself if there are none.

    Raises:
        ShoalError: `stop` is no list of rules, the algorithm does not take one, or one of the task does not fit.
    """
    if not isinstance(stop, list | tuple):
        raise ShoalError(
            f"`stop` must be a list of rules, such as [shoal.Patience(epochs=10)], or [], got {reprlib.repr(stop)}"
        )
    rules_of: Callable[..., list[StopRule]] | None = getattr(task, "_stop_rules", None)  # of tasks
    own = [] if rules_of is None or isinstance(task, type) else rules_of(objectives)  # a class is refused later
    return StopRules(algorithm, [*stop, *own]) if stop or own else algorithm


def with_best_epoch(spec: StudySpec, task: object) -> StudySpec:
    """Return the specification with the best epoch of the trainer for which the task was written; itself if it has it.

    Raises:
        TaskError: other arguments of `tune` say otherwise.
    """
    best_of: Callable[[], tuple[str, Objective] | None] | None = getattr(task, "_best_epoch", None)  # of tasks
    asked = None if best_of is None or isinstance(task, type) else best_of()  # a class is refused later
    if asked is None:
        return spec
    shown, goal = asked
    own = {objective.metric: objective.mode for objective in spec.objectives}
    if spec.rank_by == "last":
        given, remedy = 'rank_by="last", without best epochs', "leave one of the two out"
    elif own.get(goal.metric, goal.mode) != goal.mode:
        given, remedy = f"metric={goal.metric!r} with mode={own[goal.metric]!r}", "make them agree"
    elif spec.best_by is not None and spec.of_best.objectives[0] != goal:
        given, remedy = f"best_by={spec.best_by!r}", "make them agree, or leave one of the two out"
    else:
        return spec if spec.of_best.objectives[0] == goal else replace(spec, best_by={goal.metric: goal.mode})
    raise TaskError(
        f"{shown} keeps the weights of the epoch with the best {goal.metric}, mode={goal.mode!r}, and shoal.tune was "
        f"given {given}; {remedy}"
    )


def pickled_algorithm(algorithm: Algorithm) -> bytes:
    """Pickle the algorithm for the journal."""
    algorithm.check_new()
    remedy = "create the objects that its settings hold inside a function, such as that of its sampler"
    return dumped(algorithm, f"{algorithm!r} cannot be pickled for the journal", AlgorithmError, remedy)


def load_algorithm(pickled_algorithm: bytes, spec: StudySpec, original: Algorithm | None = None) -> Algorithm:
    """Load the algorithm from its pickle and bind it to the problem of the study.

    Args:
        original: The caller's object, which has just been pickled. The result is then a copy of it, with the caller's
            classes, functions and globals, in the state of the pickle, so that a resumed study gets the same decisions.
            The object itself is not used, so that the caller can pass it to a further study.
    """
    try:
        algorithm: Algorithm = loaded(pickled_algorithm)
    except (Exception, SystemExit) as error:
        raise AlgorithmError(f"the algorithm of the study cannot be loaded: {_cause(error)}") from error
    if original is not None:
        with suppress(TypeError):  # some attributes can be pickled but not copied, such as modules
            algorithm = copy.deepcopy(original)
    space = Space.from_json(spec.space)
    if spec.repetition.size > 1:
        algorithm = Repeated(algorithm, spec.repetition)
    problem = {"metric": spec.metric, "mode": spec.mode, "seed": spec.seed, "data_seed": spec.shared_data_seed}
    limits = {"initial": spec.initial, "constraints": spec.constraints, "earlier": spec.earlier}
    algorithm.bind(space, **problem, **limits, of_best=spec.of_best)  # type: ignore[arg-type]
    return algorithm


def strategy_text(strategy: str | Policy | Packing) -> str:
    """Return a policy or packing for the journal: its name, or its pickle."""
    if isinstance(strategy, str):
        return strategy
    remedy = "create the objects that its attributes hold when it is first called"
    content = dumped(strategy, f"{strategy!r} cannot be pickled for the journal", ShoalError, remedy)
    return _PICKLED + base64.b64encode(content).decode()


def load_strategy(text: str) -> Any:
    """Return the policy or packing in the journal: its name, or the object."""
    if not text.startswith(_PICKLED):
        return text
    try:
        return loaded(base64.b64decode(text.removeprefix(_PICKLED)))
    except (Exception, SystemExit) as error:
        raise ShoalError(f"the policy or packing of the study cannot be loaded: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    return f"{why_not_loaded(error)}\n\n{user_traceback(error)}"


def metric_arguments(metric: Any, mode: Any) -> Any:
    """Return the metric and the mode of `tune`, a list of one as a name.

    Raises:
        AlgorithmError: They do not name metrics, with a mode for each.
    """
    first, *others = objectives(metric, mode)
    if not others:
        return first.metric, first.mode
    return list(metric), list(mode)


def searched_space(
    space: Any,
    metric: str | Sequence[str],
    mode: str | Sequence[str],
    algorithm: Algorithm | None,
    trials: int | None,
    target: float | None,
) -> Space:
    """Return the argument `space` of `tune` as a `Space`; log what a sweep of W&B has that the other arguments lack.

    Raises:
        SpaceError: It is no search space.
        ShoalError: It is a sweep of W&B with another goal.
    """
    if isinstance(space, Space):
        return space
    if isinstance(space, Mapping) and is_wandb_sweep(space):
        sweep, searched = SweepSettings.of(space), objectives(metric, mode)
        for each in searched:
            if fault := sweep.contradiction(each.metric, each.mode):
                raise ShoalError(fault)
        metrics, number = [each.metric for each in searched], getattr(algorithm, "n", trials)
        if notes := sweep.not_taken(metrics, trials=number, target=target, has_algorithm=algorithm is not None):
            _log.warning("of the W&B sweep is not taken: %s", notes)
    return Space(space)


def initial_points(points: object) -> list[Config]:
    """Return the initial points of `tune` as JSON values.

    Raises:
        ShoalError: They are no list of dicts.
        SpaceError: A value cannot be one of a configuration.
    """
    if not isinstance(points, list | tuple) or not all(isinstance(point, Mapping) for point in points):
        raise ShoalError(f'`initial` must be a list of dicts, such as [{{"lr": 0.1}}], got {reprlib.repr(points)}')
    return [constant(point, f"initial[{number}]") for number, point in enumerate(points)]


def longest_budget(algorithm: object, trials: object, epochs: object) -> int | None:
    """Return the epochs of the longest trials, None if they are unknown, of an algorithm or of the budget that is given
    instead.

    Raises:
        ShoalError: both are given, or neither, or one is invalid.
    """
    if algorithm is None:
        if trials is None:
            raise ShoalError("give `trials`, the number of configurations to try, or an `algorithm`")
        check_integer("trials", trials)
        if epochs is not None:
            check_integer("epochs", epochs)
        return cast("int", epochs) or DEFAULT_EPOCHS
    if not isinstance(algorithm, Algorithm):
        expected = "an algorithm, such as shoal.Random(32, epochs=10)"
        raise ShoalError(f"`algorithm` must be {expected}, got {reprlib.repr(algorithm)}")
    for name, value in {"trials": trials, "epochs": epochs}.items():
        if value is not None:
            raise ShoalError(
                f"`algorithm` and `{name}` are both given, {call_text(algorithm)} and {value!r}; the algorithm has its "
                "own numbers, so leave one of the two out"
            )
    return algorithm.longest_budget


def check_arguments(directory: object, show_progress: object, page: object) -> None:
    """Refuse invalid arguments of `tune` that `StudySpec` does not have."""
    for name, value in {"show_progress": show_progress, "page": page}.items():
        if not isinstance(plain(value), bool):
            raise ShoalError(f"`{name}` must be True or False, got {reprlib.repr(value)}")
    if directory is not None:
        check_path(directory)


def check_kind(training: Opaque | None, described: Mapping[str, Any], measure: int) -> None:
    """Refuse arguments of `tune` that do not fit what is trained."""
    if measure and training is not None:
        why = "which cannot be tried for a few steps; a study measures its cost while it runs"
        raise ShoalError(f"{training.name} is a program of yours, {why}. Only a shoal.Task can be fused and packed")
    if isinstance(training, Command) and described["folds"] != 1:
        raise ShoalError("`folds` need a function or a Task, to which config['fold'] says the fold; a command has none")
    if described["loss"] is not None and training is None:
        raise ShoalError("`loss` names a reported value of a function or command; a Task has its own `loss`")


def check_memory_limit(training: Opaque | None, limit: object) -> None:
    """Refuse a number of bytes where nothing enforces it; `StudySpec` checks the value."""
    if limit in ("auto", None):
        return
    if training is None:
        raise ShoalError(
            f"`memory_limit` {limit!r} is for a process of its own, of a function or command; trials of a Task share "
            "processes. Leave it out: beside others on a GPU each job is limited to what it has reserved"
        )
    if sys.platform != "linux":
        raise ShoalError(f"`memory_limit` {limit!r} needs Linux, whose kernel enforces it; leave it out here")
