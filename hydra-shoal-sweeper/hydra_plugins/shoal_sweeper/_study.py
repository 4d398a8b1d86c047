"""A multirun as a study: from the overrides and `hydra.sweeper` to `optimization_results.yaml`."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import shoal
from shoal.algorithms.base import Algorithm, call_text
from shoal.algorithms.registry import ALGORITHMS
from shoal.core.errors import ShoalError, StudyExistsError
from shoal.core.space import Space, flatten
from shoal.journal.schema import FILE_NAME
from shoal.journal.view import JournalView

from ._fused import fused, plain
from ._job import Job
from ._space import flat, nested, overrides, parameters

__all__ = ["run_study"]

_log = logging.getLogger("shoal.study")

_TRIALS = 20
"""Default number of trials, for an algorithm that takes one."""
_OWN = ("task", "space", "algorithm", "directory")
"""Arguments of `shoal.tune` that the sweep gives."""


def run_study(context: HydraContext, function: TaskFunction, config: DictConfig, lines: Sequence[str]) -> shoal.Study:
    """Run the study of a multirun, or go on with the one that is in `hydra.sweep.dir`, and write its results there.

    Args:
        lines: Overrides of the command line.

    Raises:
        CompactHydraException: What `shoal.tune` or `shoal.resume` raises, as Hydra prints it without a traceback.
    """
    sweeper, loader = config.hydra.sweeper, context.config_loader
    directory = Path(config.hydra.sweep.dir).absolute()
    settings = {name: plain(sweeper[name]) for name in sweeper if not (name == "task" or name.startswith("_"))}
    params, study = settings.pop("params") or {}, settings.pop("study") or {}
    found = parameters([*(f"{key}={'null' if text is None else text}" for key, text in params.items()), *lines], loader)
    try:
        given, n = settings.pop("algorithm"), settings.pop("n")
        arguments = {name: value for name, value in settings.items() if value is not None}
        arguments |= instantiate(study, _convert_="all")
        _check(arguments)
        if "initial" in arguments:
            arguments["initial"] = [nested(flatten(point), found) for point in arguments["initial"]]
        if sweeper.task is None:
            space, metric = Space(nested(found, found)), arguments["metric"]
            metrics = [metric] if isinstance(metric, str) else metric
            loader.load_sweep_config(
                config, overrides(space.sample(0))
            )  # refuses a key that is not in the configuration
            task: Any = Job(function, context, config, directory, metrics, has_folds=arguments.get("folds", 1) != 1)
        else:
            task, space = fused(loader, config, found)
        if given is not None or "trials" not in arguments:
            arguments["algorithm"] = _algorithm(given, n, {} if sweeper.task else {"epochs": 1})
        if (directory / FILE_NAME).exists():
            done = _resumed(directory, space, arguments)
        else:
            done = shoal.tune(task, space, directory=directory, **arguments)
        results = _results(done, space)
    except ShoalError as error:
        raise CompactHydraException(str(error)) from error
    OmegaConf.save(OmegaConf.create(results), directory / "optimization_results.yaml")
    return done


def _check(arguments: Mapping[str, Any]) -> None:
    accepted = [name for name in inspect.signature(shoal.tune).parameters if name not in _OWN]
    if unknown := [name for name in arguments if name not in accepted]:
        raise ShoalError(
            f"hydra.sweeper does not take {', '.join(unknown)}; this version of shoal.tune takes {', '.join(accepted)}"
        )


def _algorithm(given: Any, n: int | None, defaults: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm of `hydra.sweeper.algorithm` and `hydra.sweeper.n`.

    Args:
        defaults: Arguments where the algorithm takes them.
    """
    arguments = {"name": "random"} if given is None else {"name": given} if isinstance(given, str) else dict(given)
    arguments |= {} if n is None else {"n": n}
    if "_target_" in arguments:
        made: Algorithm = instantiate(arguments, _convert_="all")
        return made
    name = arguments.pop("name", None)
    if name not in ALGORITHMS:
        raise ShoalError(f"hydra.sweeper.algorithm must name one of {', '.join(ALGORITHMS)}, got {name!r}")
    signature = inspect.signature(ALGORITHMS[name])
    known = {key: value for key, value in {"n": _TRIALS, **defaults}.items() if key in signature.parameters}
    try:
        signature.bind(**known | arguments)
    except TypeError as error:
        raise ShoalError(f"hydra.sweeper.algorithm: {error}; {name} takes {signature}") from error
    return ALGORITHMS[name](**known | arguments)


def _resumed(directory: Path, space: Space, arguments: Mapping[str, Any]) -> shoal.Study:
    """Go on with the study in the directory, if the same is searched in the same way."""
    with JournalView.read(directory) as journal:
        spec = journal.spec
    before, now = Space.from_json(spec.space).leaves(), space.leaves()
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if "algorithm" in arguments and spec.algorithm != (text := call_text(arguments["algorithm"])):
        differing.append(f"algorithm ({text}, was {spec.algorithm})")
    differing += [
        name for name in ("metric", "mode", "seed") if arguments.get(name, vars(spec)[name]) != vars(spec)[name]
    ]
    if differing:
        raise StudyExistsError(
            f"{directory} holds a study of another search, which differs in {', '.join(differing)}; repeat its sweep "
            "to go on with it, or name another hydra.sweep.dir"
        )
    changeable = inspect.signature(shoal.resume).parameters
    return shoal.resume(directory, **{name: value for name, value in arguments.items() if name in changeable})


def _results(study: shoal.Study, space: Space) -> dict[str, Any]:
    """Return the results with the keys of those of the Optuna sweeper."""

    keys = flat({name: leaf for name, leaf in space.leaves().items() if leaf.choice_name})

    def searched(config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in flat(config).items() if key in keys}

    if isinstance(study.metric, str):
        best = study.best_trial
        _log.info("Best: %s of trial %d, by %s", best.objective, best.number, searched(best.config))
        return {"name": "shoal", "best_params": searched(best.config), "best_value": best.objective}
    rows = [(searched(row.config), [row.metrics[name] for name in study.metric]) for row in study.pareto]
    return {"name": "shoal", "solutions": [{"params": params, "values": values} for params, values in rows]}
