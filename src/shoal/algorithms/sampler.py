"""Optuna's samplers: creation by name or function, and checks that they can search a space."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shoal.algorithms.base import Problem
from shoal.core.domain import Choice, Domain
from shoal.core.errors import AlgorithmError, SpaceError
from shoal.core.objective import Objective
from shoal.core.space import Space

if TYPE_CHECKING:
    import optuna

__all__ = [
    "SAMPLERS",
    "check_constrained",
    "check_sampler",
    "check_searchable",
    "directions",
    "learns_from_others",
    "log_optuna_warnings",
    "make_sampler",
    "sampler_text",
    "varying_domains",
    "without_optuna_info",
]

SAMPLERS = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsga2": "NSGAIISampler",
    "random": "RandomSampler",
}

_NEEDS = {"gp": ("torch", "scipy"), "cmaes": ("cmaes",), "qmc": ("scipy",)}
"""Packages that Optuna imports only at the second or the eleventh proposal of such a sampler."""

# Shoal warns once instead of Optuna's warning for every trial.
_SETTINGS = {"tpe": {"constant_liar": True}} | {name: {"warn_independent_sampling": False} for name in _NEEDS}

_log = logging.getLogger("shoal.algorithms")


def check_sampler(sampler: object) -> None:
    """Refuse a sampler that is neither a name nor a function."""
    if not callable(sampler) and (not isinstance(sampler, str) or sampler not in SAMPLERS):
        raise AlgorithmError(
            f"`sampler` must be one of {', '.join(SAMPLERS)}, or a function that makes one of a seed, got {sampler!r}"
        )


def sampler_text(sampler: "str | Callable[[int], optuna.samplers.BaseSampler]") -> str:
    """The name of a sampler in error messages."""
    return f"sampler {sampler!r}" if isinstance(sampler, str) else f"the sampler of {sampler!r}"


def learns_from_others(sampler: "str | Callable[[int], optuna.samplers.BaseSampler]") -> bool:
    """Whether a sampler models trials that it did not propose. Of the named ones "tpe" and "gp" do; "nsga2" and "cmaes"
    know only their own generations. A user's sampler may.
    """
    return not isinstance(sampler, str) or sampler in ("tpe", "gp")


def make_sampler(
    sampler: "str | Callable[[int], optuna.samplers.BaseSampler]", seed: int
) -> "optuna.samplers.BaseSampler":
    """A new sampler."""
    from optuna import samplers
    from optuna.exceptions import ExperimentalWarning

    if isinstance(sampler, str):
        with warnings.catch_warnings():
            # The user chose a name of Shoal's and cannot act on a warning about the class.
            warnings.simplefilter("ignore", ExperimentalWarning)
            named: samplers.BaseSampler = getattr(samplers, SAMPLERS[sampler])(seed=seed, **_SETTINGS.get(sampler, {}))
        return named
    try:
        with log_optuna_warnings(set()):
            own = sampler(seed)
    except Exception as error:
        kind = sampler.__name__ if isinstance(sampler, type) else "NSGAIISampler"
        raise AlgorithmError(
            f"`sampler` must be a function that makes an Optuna sampler of a seed, but {sampler!r} raised "
            f"{type(error).__name__}: {error}. Give one such as lambda seed: {kind}(seed=seed)"
        ) from error
    if not isinstance(own, samplers.BaseSampler):
        raise AlgorithmError(
            f"`sampler` must be a function that makes an Optuna sampler of a seed, but {sampler!r} returned {own!r}"
        )
    return own


@contextmanager
def log_optuna_warnings(logged: set[str]) -> Iterator[None]:
    """Send Optuna's warnings to the log "shoal.algorithms", but those in `logged`, to which new ones are added.

    No warning filter of the user turns them into errors.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for message in (f"{warning.category.__name__}: {warning.message}" for warning in caught):
                if message not in logged:
                    logged.add(message)
                    _log.warning("Optuna warns: %s", message)


def directions(objectives: Sequence[Objective]) -> "list[optuna.study.StudyDirection]":
    """Optuna's directions of the objectives."""
    from optuna.study import StudyDirection

    return [StudyDirection.MINIMIZE if objective.mode == "min" else StudyDirection.MAXIMIZE for objective in objectives]


@contextmanager
def without_optuna_info() -> Iterator[None]:
    """Within this context, Optuna logs only warnings and errors."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def check_searchable(sampler: "str | Callable[[int], optuna.samplers.BaseSampler]", problem: Problem) -> None:
    """Refuse a space that Optuna would search badly or fail to search, before any training.

    Observed with Optuna 5: "tpe" and "random" search every space. The others model only the parameters that every trial
    has: a parameter of some options only is random to them, and to "cmaes" all choices are. That is logged once. With
    "cmaes" a number that exists for some options only can turn the whole search into a random one: as soon as a trial
    lacks it, the space and the state of CMA-ES differ in dimension.

    Raises:
        SpaceError: the sampler proposes, or may propose, only random configurations.
        AlgorithmError: it takes one metric only, or needs a package that is not installed.
    """
    if not isinstance(sampler, str):
        return
    if missing := [package for package in _NEEDS.get(sampler, ()) if find_spec(package) is None]:
        raise AlgorithmError(
            f"{sampler_text(sampler)} needs {' and '.join(missing)}. Install it with: pip install {' '.join(missing)}"
        )
    if sampler == "cmaes":
        _check_numbers(problem)
    if ignored := _unmodelled_parameters(sampler, problem.space):
        _log.warning(
            "sampler %r does not model %s, which it draws at random; sampler 'tpe' models everything",
            sampler,
            ", ".join(f"`{path}`" for path in ignored),
        )


def check_constrained(sampler: "optuna.samplers.BaseSampler", name: str, problem: Problem) -> None:
    """Refuse or name a sampler that ignores the constraints of the problem.

    Raises:
        AlgorithmError: it is CMA-ES, whose population would follow infeasible trials.
    """
    from optuna import samplers

    if not problem.constraints:
        return
    bounds = ", ".join(map(str, problem.constraints))
    if isinstance(sampler, samplers.CmaEsSampler):
        raise AlgorithmError(f"{name} ignores constraints ({bounds}); use 'tpe', 'gp' or 'nsga2'")
    if isinstance(sampler, samplers.RandomSampler | samplers.QMCSampler | samplers.GridSampler):
        _log.warning("%s ignores constraints (%s) in its proposals; 'tpe', 'gp' and 'nsga2' heed them", name, bounds)


def _check_numbers(problem: Problem) -> None:
    """Refuse a problem in which CMA-ES has nothing to model."""
    if problem.other_objectives:
        metrics = [objective.metric for objective in problem.objectives]
        raise AlgorithmError(f"sampler 'cmaes' takes one metric, got {metrics}; use 'nsga2', 'tpe' or 'gp'")
    remedy = "use sampler 'tpe', which searches every space"
    parameters = varying_domains(problem.space)
    numbers = {path: entry for path, entry in parameters.items() if not isinstance(entry[0], Choice)}
    for path, (domain, conditional) in numbers.items():
        if conditional:
            raise SpaceError(
                f"`{path}`: sampler 'cmaes' cannot search {domain} that exists for some options only; {remedy}"
            )
    if parameters and not numbers:
        raise SpaceError(
            f"`{next(iter(parameters))}`: sampler 'cmaes' searches numbers, and this space has only choices, which it "
            f"would draw at random; {remedy}"
        )


def _unmodelled_parameters(sampler: str, space: Space) -> list[str]:
    """Parameters that a sampler does not model, although it models others."""
    if sampler in ("tpe", "random"):
        return []
    return [
        path
        for path, (domain, conditional) in varying_domains(space).items()
        if conditional or (sampler == "cmaes" and isinstance(domain, Choice))
    ]


def varying_domains(space: Space) -> dict[str, tuple[Domain, bool]]:
    """The parameters of `Space.domains` that have more than one value."""
    return {path: entry for path, entry in space.domains().items() if not entry[0].to_optuna().single()}
