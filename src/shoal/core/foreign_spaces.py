"""Search spaces of other libraries in Shoal's domains: Optuna, Ray Tune and sweeps of W&B; none of them is imported."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.distributions import LogNormal, Normal, QLogUniform
from shoal.core.domain import (
    Choice,
    Constant,
    Domain,
    LogRandInt,
    LogUniform,
    QUniform,
    RandInt,
    Uniform,
    decimal,
    is_finite,
    is_integer,
)
from shoal.core.errors import SpaceError

__all__ = ["RAY_DOMAINS", "SweepSettings", "from_optuna", "from_ray", "from_wandb", "is_wandb_sweep"]

RAY_DOMAINS = "ray.tune.search.sample"
"""Module of the domains of Ray Tune."""

_METHODS = ("grid", "random", "bayes", "custom")
_GOALS = {"minimize": "min", "maximize": "max"}
_NOT_TAKEN = {
    "method": "choose an algorithm",
    "early_terminate": "choose an algorithm that stops early",
    "program": "the task or command of the study is run",
    "command": "the task or command of the study is run",
    "run_cap": "`trials` or the algorithm says how many",
    "metric": "the study has another",
    "metric.target": "set the target of the study",
}
"""Part of a sweep that a study may not take -> its counterpart in a study."""
_PARAMETER_KEYS = ("value", "values", "distribution", "min", "max", "q", "mu", "sigma", "probabilities", "parameters")


def from_optuna(value: Any) -> Domain | None:
    """The domain that equals an Optuna distribution; None when `value` is not one. Does not import Optuna."""
    if type(value).__module__ != "optuna.distributions":
        return None
    match type(value).__name__:
        case "FloatDistribution" if value.step is not None:
            return QUniform(value.low, value.high, value.step)
        case "FloatDistribution":
            return LogUniform(value.low, value.high) if value.log else Uniform(value.low, value.high)
        case "IntDistribution" if value.log:
            return LogRandInt(value.low, value.high + 1)
        case "IntDistribution":
            return RandInt(value.low, value.high + 1, value.step)
        case "CategoricalDistribution":
            return Choice(tuple(value.choices))
    return None


def from_ray(value: Any) -> Domain | None:
    """The domain that equals one of Ray Tune; None when `value` is not one, or has no equal.

    As in Ray, `randint` and `lograndint` exclude their upper bound, as do their quantised forms with a step of 1; all
    other quantised domains include it, and have the multiples of their step.
    """
    if isinstance(value, dict) and value.keys() == {"grid_search"} and isinstance(value["grid_search"], list):
        return Choice(tuple(value["grid_search"]))
    if type(value).__module__ != RAY_DOMAINS or getattr(value, "sampler", None) is None:
        return None
    step = getattr(value.sampler, "q", None)
    sampler = value.sampler if step is None else value.sampler.sampler
    match type(value).__name__, type(sampler).__name__:
        case "Categorical", _:
            return Choice(tuple(value.categories))
        case "Float", "_Normal":
            return Normal(sampler.mean, sampler.sd, step=step)
        case "Float", "_Uniform":
            return _ranged(Uniform, QUniform, value.lower, value.upper, step)
        case "Float", "_LogUniform":
            return _ranged(LogUniform, QLogUniform, value.lower, value.upper, step)
        case "Integer", "_Uniform":
            if step is None or step == 1:
                return RandInt(value.lower, value.upper)
            return RandInt(-(-value.lower // step) * step, value.upper + 1, step)
        case "Integer", "_LogUniform":
            if step is None or step == 1:
                return LogRandInt(value.lower, value.upper)
            return QLogUniform(-(-value.lower // step) * step, value.upper, step, integer=True)
    return None


def is_wandb_sweep(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping has the shape of a sweep of W&B: a method, and parameters one of which is a mapping."""
    parameters = value.get("parameters")
    named = isinstance(parameters, Mapping) and any(isinstance(each, Mapping) for each in parameters.values())
    return named and value.get("method") in _METHODS


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep of W&B beside its parameters; None for those that it lacks.

    Args:
        mode: "min" or "max", by the metric's `goal`, for which W&B takes "minimize" where it is left out.
        target: Value of the metric that ends the search.
        trials: Its `run_cap`.
        others: Names of its keys that have no counterpart here.
    """

    metric: str | None = None
    mode: str | None = None
    target: float | None = None
    trials: int | None = None
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, sweep: Mapping[str, Any]) -> "SweepSettings":
        """The settings of a sweep.

        Raises:
            SpaceError: its metric or `run_cap` is invalid.
        """
        metric, cap = sweep.get("metric"), sweep.get("run_cap")
        metric = {} if metric is None else metric  # `metric:` in YAML, with nothing after it
        if not isinstance(metric, Mapping) or (metric and not isinstance(metric.get("name"), str)):
            raise SpaceError(
                f"`metric` of a W&B sweep is a dict such as {{'name': 'loss', 'goal': 'minimize'}}, got {metric!r}"
            )
        goal, target = metric.get("goal"), metric.get("target")
        if goal is not None and goal not in list(_GOALS):
            raise SpaceError(f"`metric.goal` of a W&B sweep is 'minimize' or 'maximize', got {goal!r}")
        if cap is not None and not (is_integer(cap) and cap > 0):
            raise SpaceError(f"`run_cap` of a W&B sweep is an integer of at least 1, or left out, got {cap!r}")
        return cls(
            metric.get("name"),
            goal and _GOALS[goal],
            None if target is None else _wandb_number("target", target, "metric"),
            cap,
            tuple(str(key) for key in sweep if key not in ("metric", "parameters", "run_cap")),
        )

    def not_taken(
        self, metrics: Collection[str], *, trials: int | None, target: float | None, has_algorithm: bool
    ) -> str:
        """The parts of the sweep that a study with these settings does not take, with their counterparts; "" for none.

        Args:
            trials: Number of configurations of the study; None if its algorithm finds it by itself.
            has_algorithm: Whether the user has chosen one, which stands for `method` and `early_terminate`.
        """
        keys = [key for key in self.others if not (has_algorithm and key in ("method", "early_terminate"))]
        if self.trials not in (None, trials):
            keys.append("run_cap")
        if self.metric not in (None, *metrics):
            keys.append("metric")
        elif self.target not in (None, target):
            keys.append("metric.target")
        return ", ".join(f"{key} ({_NOT_TAKEN[key]})" if key in _NOT_TAKEN else key for key in keys)

    def contradiction(self, metric: str, mode: str) -> str | None:
        """An error text if the sweep has another mode for this metric."""
        if metric != self.metric or self.mode in (None, mode):
            return None
        goal = next(name for name, own in _GOALS.items() if own == self.mode)
        return f"the W&B sweep has goal: {goal} for {metric!r}, and the mode is {mode!r}; change one of the two"


def from_wandb(parameters: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The parameters of a sweep of W&B as a space.

    As in W&B, `log_uniform` takes the exponents of e and `log_uniform_values` the values, `int_uniform` includes its
    upper bound, and the q_ forms have the multiples of `q` in their range.

    Raises:
        SpaceError: a parameter has an unknown key or distribution, or lacks a bound.
    """
    return {name: _wandb_parameter(value, f"{path}{name}") for name, value in parameters.items()}


def _wandb_parameter(parameter: Any, path: str) -> Any:
    if not isinstance(parameter, Mapping):
        raise SpaceError(
            f"`{path}`: a parameter of a W&B sweep is a dict, such as {{'min': 0, 'max': 1}} or {{'value': 3}}, got "
            f"{parameter!r}"
        )
    if unknown := [key for key in parameter if key not in _PARAMETER_KEYS]:
        raise SpaceError(
            f"`{path}`: a parameter of a W&B sweep has the keys {', '.join(_PARAMETER_KEYS)}, got {unknown[0]!r}"
        )
    if "parameters" in parameter:
        return from_wandb(parameter["parameters"], f"{path}.")
    kind = parameter.get("distribution") or _wandb_default(parameter, path)
    if kind not in _WANDB:
        raise SpaceError(
            f"`{path}`: Shoal has no counterpart of the distribution {kind!r} of W&B; it has {', '.join(_WANDB)}"
        )
    needed, make = _WANDB[kind]
    if missing := [key for key in needed if key not in parameter]:
        raise SpaceError(f"`{path}`: the distribution {kind!r} of W&B needs `{missing[0]}`, got {dict(parameter)!r}")
    try:
        return make({key: _wandb_value(key, value, path) for key, value in parameter.items()})
    except OverflowError as error:
        raise SpaceError(
            f"`{path}`: {kind!r} of W&B takes exponents of e, got {dict(parameter)!r}; for values write {kind}_values"
        ) from error


def _wandb_default(parameter: Mapping[str, Any], path: str) -> str:
    """The distribution that W&B takes where none is named."""
    if "value" in parameter:
        return "constant"
    if "values" in parameter:
        return "categorical"
    if parameter.keys() >= {"min", "max"}:
        return "int_uniform" if all(isinstance(parameter[key], int) for key in ("min", "max")) else "uniform"
    raise SpaceError(
        f"`{path}`: a parameter of a W&B sweep has a value, values, min and max, or a distribution, got "
        f"{dict(parameter)!r}"
    )


def _wandb_value(key: str, value: Any, path: str) -> Any:
    if key == "probabilities":
        return [_wandb_number(key, each, path) for each in value] if isinstance(value, list | tuple) else value
    return _wandb_number(key, value, path) if key in ("min", "max", "q", "mu", "sigma") else value


def _wandb_number(key: str, value: Any, path: str) -> Any:
    """A number; YAML reads 1e-4, without a dot, as text."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not is_finite(number):
        raise SpaceError(f"`{path}`: `{key}` of a W&B sweep must be a finite number, got {value!r}")
    return number


def _categorical(given: Mapping[str, Any]) -> Any:
    values, weights = tuple(given["values"]), tuple(given.get("probabilities") or ())
    if len(weights) == len(values):  # else the space refuses the lengths; a probability of 0 leaves a value out
        values = tuple(value for value, weight in zip(values, weights, strict=True) if weight != 0)
        weights = tuple(weight for weight in weights if weight != 0)
    return Choice(values, weights)


def _ranged(
    plain: Callable[..., Domain], stepped: Callable[..., Domain], low: float, high: float, step: float | None
) -> Domain:
    """A domain of all floats from `low` to `high`, or of the multiples of a step."""
    if step is None:
        return plain(low, high)
    if not (is_finite(low) and is_finite(high) and is_finite(step) and step > 0):
        return stepped(low, high, step)  # which the space refuses
    return stepped(float(-(-decimal(low) // decimal(step)) * decimal(step)), high, step)


def _normal(given: Mapping[str, Any], step: float | None = None) -> Domain:
    return Normal(given.get("mu", 0.0), given.get("sigma", 1.0), step=step)


def _log_normal(given: Mapping[str, Any], step: float | None = None) -> Domain:
    return LogNormal(math.exp(given.get("mu", 0.0)), math.exp(given.get("sigma", 1.0)), step)


def _exponents(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "min": math.exp(given["min"]), "max": math.exp(given["max"])}


def _uniform(given: Mapping[str, Any], step: float | None = None) -> Domain:
    return _ranged(Uniform, QUniform, given["min"], given["max"], step)


def _log_uniform(given: Mapping[str, Any], step: float | None = None) -> Domain:
    return _ranged(LogUniform, QLogUniform, given["min"], given["max"], step)


def _step(given: Mapping[str, Any]) -> Any:
    return given.get("q", 1)


_BOUNDS = ("min", "max")
_WANDB: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Any]]] = {
    "constant": (("value",), lambda given: Constant(given["value"])),
    "categorical": (("values",), _categorical),
    "categorical_w_probabilities": (("values", "probabilities"), _categorical),
    "int_uniform": (_BOUNDS, lambda given: RandInt(given["min"], given["max"] + 1)),
    "uniform": (_BOUNDS, _uniform),
    "q_uniform": (_BOUNDS, lambda given: _uniform(given, _step(given))),
    "log_uniform": (_BOUNDS, lambda given: _log_uniform(_exponents(given))),
    "log_uniform_values": (_BOUNDS, _log_uniform),
    "q_log_uniform": (_BOUNDS, lambda given: _log_uniform(_exponents(given), _step(given))),
    "q_log_uniform_values": (_BOUNDS, lambda given: _log_uniform(given, _step(given))),
    "inv_log_uniform": (_BOUNDS, lambda given: _log_uniform(_exponents({"min": -given["max"], "max": -given["min"]}))),
    "inv_log_uniform_values": (_BOUNDS, _log_uniform),
    "normal": ((), _normal),
    "q_normal": ((), lambda given: _normal(given, _step(given))),
    "log_normal": ((), _log_normal),
    "q_log_normal": ((), lambda given: _log_normal(given, _step(given))),
}
"""Distribution of W&B -> the keys that it needs, and the function that makes the domain of a parameter."""
