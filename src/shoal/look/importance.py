"""How much the parameters of a study matter, by the values of its trials at one budget."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from itertools import groupby
from math import isfinite
from statistics import fmean
from typing import Any

from shoal.algorithms.sampler import log_optuna_warnings, varying_domains, without_optuna_info
from shoal.core.errors import ShoalError
from shoal.core.space import flatten
from shoal.look.axis import axes
from shoal.look.budget_values import BudgetValues
from shoal.look.optuna_study import optuna_study_at
from shoal.look.text import printable

__all__ = ["METHODS", "Importance", "eta_squared", "importance", "importance_json"]


_MANY = 50
"""Number of trials whose best tenth are at least the five that Optuna recommends for PED-ANOVA."""
_FEW = f"the best tenth of fewer than {_MANY} trials are few, so that the shares may change much with more trials"


@dataclass(frozen=True, repr=False)
class Importance:
    """How much the parameters of a study matter.

    Args:
        method: One of `METHODS`.
        shares: Name of each parameter -> its share, the largest first. Those of "ped-anova" and "fanova" sum to 1; one
            of "eta2" is the part of the variance of the trials' ranks that this parameter alone explains.
        trials: Number of trials that were compared.
        found: The values that were compared: `metric`, `budget`, and how the trials were selected.
        omitted: Parameters that vary and that the method could not assess.
    """

    method: str
    shares: Mapping[str, float]
    trials: int
    found: BudgetValues
    omitted: tuple[str, ...] = ()

    @property
    def budget(self) -> int:
        """Epochs after which the trials were compared, or the step of a program's reports."""
        return self.found.budget

    @property
    def notes(self) -> tuple[str, ...]:
        """What was compared, how the trials were selected, and what was not assessed, a line each."""
        compared = f"by {self.method} of {printable(self.found.objective.metric)}: {self.found}"
        finite = self.trials == len(self.found.values)
        return (
            compared if finite else f"{compared}, {len(self.found.values) - self.trials} of them infinite and left out",
            *([self.found.selection] if self.found.selection else []),
            *([_FEW] if self.method == "ped-anova" and self.trials < _MANY else []),
            *([f"not assessed: {', '.join(map(printable, self.omitted))}"] if self.omitted else []),
        )

    def __repr__(self) -> str:
        width = max(map(len, map(printable, self.shares)), default=0)
        lines = [f"{printable(name):{width}}  {share:.3f}" for name, share in self.shares.items()]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><th>{escape(printable(name))}</th><td>{share:.3f}</td>"
            f'<td><div style="width: {120 * share:.0f}px; height: .7em; background: currentColor"></div></td></tr>'
            for name, share in self.shares.items()
        ]
        return "\n".join(
            ["<div><table>", *rows, "</table>", *(f"<p><small>{escape(x)}</small></p>" for x in self.notes), "</div>"]
        )


def importance(found: BudgetValues, method: str) -> Importance:
    """Compare the parameters by the values at one budget.

    Raises:
        ShoalError: the method does not exist or needs a package, there are too few values, or all are equal.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise ShoalError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}")
    names = set(varying_domains(found.space))
    if not names:
        raise ShoalError("nothing is searched, so no parameter has an importance")
    # Optuna leaves out infinite values; ranks do not.
    trials = len(found.values) if method == "eta2" else sum(map(isfinite, found.values.values()))
    if trials < found.least:
        raise ShoalError(
            f"the importance of {len(names)} parameters needs at least {found.least} trials with values of "
            f"{found.objective.metric!r} at one budget, got {found}; wait for more trials, or give a lower budget"
        )
    if len(set(found.values.values())) == 1:
        raise ShoalError(
            f"all values of {found.objective.metric!r} are equal ({found}), so that no parameter matters; compare at "
            "another budget"
        )
    shares = METHODS[method](found)
    assessed = {axis.name for axis in axes(found.space)} if method == "eta2" else names
    ordered = sorted(shares.items(), key=lambda share: (-share[1], share[0]))
    return Importance(method, dict(ordered), trials, found, tuple(sorted(assessed - shares.keys())))


def importance_json(found: Importance) -> dict[str, Any]:
    """Return the importance as plain values."""
    return {
        "method": found.method,
        "metric": found.found.objective.metric,
        "budget": found.budget,
        "unit": found.found.unit,
        "trials": found.trials,
        "importance": dict(found.shares),
        "notes": list(found.notes),
    }


def eta_squared(found: BudgetValues) -> dict[str, float]:
    """Part of the variance of the trials' ranks that the means at the positions of each axis explain.

    It is corrected for the number of positions (Kelley's epsilon squared, 0 to 1). Empty if there are too few values,
    or all are equal.
    """
    if not found.enough:
        return {}
    configs = [flatten(found.configs[number]) for number in found.values]
    ranks = _ranks(list(found.values.values()))
    explained = ((axis.name, _explained(list(map(axis.position_in, configs)), ranks)) for axis in axes(found.space))
    return {name: share for name, share in explained if share is not None}


def _ped_anova(found: BudgetValues) -> dict[str, float]:
    """Importance for reaching the best tenth (PED-ANOVA, Watanabe et al. 2023; conditional parameters included)."""
    from optuna.importance import PedAnovaImportanceEvaluator

    return _assessed_by_optuna(found, PedAnovaImportanceEvaluator())


def _fanova(found: BudgetValues) -> dict[str, float]:
    """Part of the variance of a random forest's predictions (fANOVA, Hutter et al. 2014); parameters of all trials."""
    if find_spec("sklearn") is None:
        raise ShoalError("method 'fanova' needs scikit-learn. Install it with: pip install scikit-learn")
    from optuna.importance import FanovaImportanceEvaluator

    return _assessed_by_optuna(found, FanovaImportanceEvaluator(seed=0))


def _assessed_by_optuna(found: BudgetValues, evaluator: Any) -> dict[str, float]:
    from optuna.importance import get_param_importances

    with log_optuna_warnings(set()), without_optuna_info():
        return get_param_importances(optuna_study_at(found), evaluator=evaluator)


METHODS: dict[str, Callable[[BudgetValues], dict[str, float]]] = {
    "ped-anova": _ped_anova,
    "fanova": _fanova,
    "eta2": eta_squared,
}
"""Name of each method -> function of the values at one budget that returns the shares of the parameters."""


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value in ascending order; equal values share the mean of their ranks."""
    ranks = [0.0] * len(values)
    place = 0
    for _, equals in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        indices = list(equals)
        for index in indices:
            ranks[index] = place + (len(indices) - 1) / 2
        place += len(indices)
    return ranks


def _explained(positions: Sequence[int], ranks: Sequence[float]) -> float | None:
    """Part of the variance of ranks that the means of values explain: 1 - (1 - eta squared) (n - 1) / (n - k)."""
    ranks_by_value = defaultdict(list)
    for position, rank in zip(positions, ranks, strict=True):
        ranks_by_value[position].append(rank)
    if len(ranks) < len(ranks_by_value) + 1:
        return None
    mean_rank = fmean(ranks)
    total = sum((rank - mean_rank) ** 2 for rank in ranks)
    if not total:
        return None
    between = sum(len(equal) * (fmean(equal) - mean_rank) ** 2 for equal in ranks_by_value.values())
    return max(0.0, 1 - (1 - between / total) * (len(ranks) - 1) / (len(ranks) - len(ranks_by_value)))
