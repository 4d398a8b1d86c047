"""Values of a study's trials at one budget, at which they can be compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from statistics import stdev

from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.rows import TrialRow
from shoal.core.space import Space
from shoal.core.trial import FIRST_ADDED, Config, TrialState
from shoal.journal.codec import metrics_of
from shoal.journal.view import JournalView
from shoal.look.axis import axes

__all__ = ["BudgetValues", "budget_values", "min_trials"]

_MIN_TRIALS = 10
"""Least number of trials for a comparison of parameters."""


@dataclass(frozen=True)
class BudgetValues:
    """The values of the study's metric, of several the first, that trials had after the same number of epochs.

    Trials that failed, that measured NaN there, or whose config a user added from outside the space are left out. Where
    configurations are repeated, each counts as one trial, with the aggregate of its repeats, under its row's number.

    Args:
        budget: Epochs, or the step of a program's reports; 0 without any value.
        unit: "epochs" or "reports".
        values: Number of a trial -> its value after `budget`, or at its last report before.
        configs: Number of each of these trials -> its config.
        deviations: Number of each repeated configuration with finite values -> their sample standard deviation.
        others: Number of trials with values that did not reach the budget.
        least: Number of values that a comparison of the parameters needs, see `min_trials`.
    """

    space: Space
    objective: Objective
    budget: int
    unit: str
    values: Mapping[int, float]
    configs: Mapping[int, Config]
    others: int
    least: int
    deviations: Mapping[int, float] = field(default_factory=dict)
    repeated: bool = False

    @property
    def enough(self) -> bool:
        """Whether there are enough values for a comparison of the parameters."""
        return len(self.values) >= self.least

    def __str__(self) -> str:
        """Where the values come from: "27 trials after 9 epochs"."""
        trials = f"{len(self.values)} {self._noun}{'' if len(self.values) == 1 else 's'}"
        if self.unit == "epochs":
            return f"{trials} after {self.budget} epoch{'' if self.budget == 1 else 's'}"
        return f"{trials} at step {self.budget}"

    @property
    def _noun(self) -> str:
        return "configuration" if self.repeated else "trial"

    @property
    def selection(self) -> str:
        """How the trials were selected; "" if all that have values reached the budget."""
        if not self.others:
            return ""
        others = f"{self.others} other {self._noun}{' has' if self.others == 1 else 's have'} values"
        return f"beyond the first rung only survivors remain: {others} at lower budgets only"


def min_trials(space: Space) -> int:
    """Least number of trials for a comparison of parameters: ten, and two for each parameter that varies."""
    return max(_MIN_TRIALS, 2 * len(axes(space)))


def budget_values(journal: JournalView, budget: int | None = None) -> BudgetValues:
    """Read the values at one budget.

    Args:
        budget: Epochs, or a step; None: the highest budget at which enough trials have values (see `min_trials`), or
            the lowest at which a trial ended if none has.

    Raises:
        ShoalError: `budget` is not a positive integer.
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ShoalError(f"`budget` must be a positive number of epochs, or None for the highest, got {budget!r}")
    space, objective, repetition = journal.space, journal.objectives[0], journal.spec.repetition
    rows = {
        row.number: row
        for row in journal.configurations()
        if objective.metric in row.metrics
        and repetition.is_whole(row)
        and not any(trial.state is TrialState.FAILED for trial in row.members)
        and _is_inside(space, row)
    }
    least = min_trials(space)
    measured: dict[int, list[float]] = {}
    for each in _candidates(rows.values(), least) if budget is None else (budget,):
        budget = each
        by_trial = _read_values(journal, objective.metric, budget)
        measured = {
            number: [by_trial[trial.number] for trial in row.members]
            for number, row in rows.items()
            if all(trial.number in by_trial for trial in row.members)
        }
        if len(measured) >= least:
            break
    return BudgetValues(
        space=space,
        objective=objective,
        budget=budget or 0,
        unit=journal.spec.unit,
        values={
            number: repetition.aggregated([{objective.metric: value} for value in each], [objective])[objective.metric]
            for number, each in measured.items()
        },
        configs={number: rows[number].config for number in measured},
        others=sum(row.epoch < (budget or 0) for row in rows.values()),
        least=least,
        deviations={x: stdev(each) for x, each in measured.items() if len(each) > 1 and all(map(isfinite, each))},
        repeated=repetition.size > 1,
    )


def _is_inside(space: Space, row: TrialRow) -> bool:
    """Whether a config belongs to the space; the algorithm proposes no others."""
    return row.number < FIRST_ADDED or not space.faults(row.config)


def _candidates(rows: Iterable[TrialRow], least: int) -> list[int]:
    """Budgets that at least so many trials have reached, falling; the lowest of all if there are fewer trials."""
    epochs = sorted((row.epoch for row in rows), reverse=True)
    return list(dict.fromkeys(epochs[least - 1 :] or epochs[-1:]))


def _read_values(journal: JournalView, metric: str, budget: int) -> dict[int, float]:
    """Read the last value up to a budget of each trial that reached it, without NaN."""
    reports = journal.tables.rows(
        "SELECT trial, reports.metrics FROM trials JOIN reports ON reports.rowid = (SELECT rowid FROM reports "
        "WHERE trial = number AND reports.epoch <= ? AND reports.state <> ? ORDER BY reports.epoch DESC LIMIT 1) "
        "WHERE trials.epoch >= ? ORDER BY number",
        *(budget, TrialState.FAILED, budget),
    )
    found = {}
    for number, text in reports:
        with journal.tables.decoding(f"a report of trial {number}"):
            value = metrics_of(text).get(metric)
        if value is not None and not isnan(value):
            found[number] = value
    return found
