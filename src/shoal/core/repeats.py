"""Repeats: several trials of one configuration, with other seeds or on other folds, that count as one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean, median, stdev, variance

from shoal.core.constraint import Constraint, violation
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective, first_objective, lower_is_better
from shoal.core.rows import TrialRow
from shoal.core.space import Space
from shoal.core.trial import FIRST_ADDED, Config, Report, TrialState

__all__ = ["AGGREGATES", "FOLD", "ConfigurationRow", "Repeats", "p_value"]

FOLD = "fold"
"""Name of the fold's number in a config, from 0."""

_OPEN = (TrialState.RUNNING, TrialState.PENDING, TrialState.PAUSED)


def _worst(values: Sequence[float], lower: bool) -> float:
    return max(values) if lower else min(values)


AGGREGATES: dict[str, Callable[[Sequence[float], bool], float]] = {
    "mean": lambda values, lower: _mean(values),
    "median": lambda values, lower: median(values),
    "worst": _worst,
}
"""Name -> function of the values of all repeats, none of them NaN, and of whether lower values are better."""


@dataclass(frozen=True, slots=True)
class ConfigurationRow(TrialRow):
    """The repeats of a configuration as one row: its values are aggregates, of each repeat those of its own best epoch
    where trials rank by these; its number is that of the median repeat.

    Its config is that of all repeats, without the number of a fold.

    Args:
        repeats: Rows of its trials, by number.
    """

    repeats: tuple[TrialRow, ...] = ()

    @property
    def members(self) -> tuple[TrialRow, ...]:
        """The repeats."""
        return self.repeats

    @property
    def deviations(self) -> dict[str, float]:
        """Name of each metric of which all repeats rank by finite values -> their sample standard deviation."""
        values = {name: [row.ranked[name] for row in self.repeats] for name in self.ranked}
        return {name: stdev(each) for name, each in values.items() if len(each) > 1 and all(map(math.isfinite, each))}


@dataclass(frozen=True, slots=True)
class Repeats:
    """How a study repeats configurations: each with `seeds` seeds on each of `folds` folds of the data.

    Configuration i has the trials from i * size on. Numbers tell all; nothing else is recorded of it.

    Args:
        folds: Number of folds; with more than one, `config["fold"]` of a trial is the number of its fold.
        aggregate: Name in `AGGREGATES`.

    Raises:
        AlgorithmError: a number is not an integer of at least 1, or there is no such aggregate.
    """

    seeds: int = 1
    folds: int = 1
    aggregate: str = "mean"

    def __post_init__(self) -> None:
        for argument, value in {"repeats": self.seeds, "folds": self.folds}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise AlgorithmError(f"`{argument}` must be an integer of at least 1, got {value!r}")
        if self.aggregate not in AGGREGATES:
            raise AlgorithmError(f"`aggregate` must be one of {', '.join(AGGREGATES)}, got {self.aggregate!r}")
        if self.size == 1 and self.aggregate != "mean":
            raise AlgorithmError(f"`aggregate={self.aggregate!r}` needs `repeats` or `folds` above 1, or leave it out")

    @property
    def size(self) -> int:
        """Number of trials of a configuration."""
        return self.seeds * self.folds

    def configuration(self, trial: int) -> int:
        """The number of a trial's configuration; of a trial that a user added, its own number."""
        return trial if trial >= FIRST_ADDED else trial // self.size

    def trials(self, configuration: int) -> range:
        """Numbers of the trials of a configuration."""
        if configuration >= FIRST_ADDED:
            return range(configuration, configuration + 1)
        return range(configuration * self.size, (configuration + 1) * self.size)

    def is_whole(self, row: TrialRow) -> bool:
        """Whether the row of a configuration has all its trials."""
        return len(row.members) == len(self.trials(self.configuration(row.number)))

    def seeds_of(self, trial: int) -> list[int]:
        """Numbers of the trials that differ from a trial only in their seed, with its own."""
        same = self.trials(self.configuration(trial))
        return [number for number in same if number % self.folds == trial % self.folds]

    def config(self, config: Config, trial: int) -> Config:
        """The config of a trial of a configuration: with the number of its fold, if there are folds."""
        return config if self.folds == 1 else {**config, FOLD: trial % self.folds}

    def searched(self, config: Config) -> Config:
        """The config of a configuration: that of a trial without the number of its fold, which the space lacks."""
        return config if self.folds == 1 else {name: value for name, value in config.items() if name != FOLD}

    def faults(self, space: Space, config: Config) -> tuple[str, ...]:
        """Reasons why a config does not belong to a trial of the study, one line for each value."""
        fold = config.get(FOLD)
        valid = self.folds == 1 or (type(fold) is int and 0 <= fold < self.folds)
        missing = () if valid else (f"`{FOLD}` must be the number of a fold, from 0 to {self.folds - 1}, got {fold!r}",)
        return (*space.faults(self.searched(config)), *missing)

    def aggregated(self, metrics: Sequence[Mapping[str, float]], objectives: Sequence[Objective]) -> dict[str, float]:
        """The values of a configuration, of the metrics that all repeats have; NaN where a repeat has NaN.

        Args:
            objectives: Which values are better, see `EpochOrder.directions`.
        """
        return {
            name: self._aggregated([each[name] for each in metrics], lower_is_better(name, objectives))
            for name in metrics[0]
            if all(name in each for each in metrics)
        }

    def _aggregated(self, values: Sequence[float], lower: bool) -> float:
        return math.nan if any(map(math.isnan, values)) else AGGREGATES[self.aggregate](values, lower)

    def rows(
        self,
        rows: Sequence[TrialRow],
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint] = (),
        of_best: EpochOrder = LAST_EPOCHS,
    ) -> list[TrialRow]:
        """A row for each configuration, in the order of numbers; the trials' own rows if nothing is repeated."""
        if self.size == 1:
            return list(rows)
        members: dict[int, list[TrialRow]] = {}
        for row in rows:
            members.setdefault(self.configuration(row.number), []).append(row)
        return [
            self._row(number, found, objectives, constraints, of_best)
            if number < FIRST_ADDED
            else replace(found[0], trial=replace(found[0].trial, config=self.searched(found[0].config)))
            for number, found in members.items()
        ]

    def _row(
        self,
        number: int,
        rows: Sequence[TrialRow],
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint],
        of_best: EpochOrder,
    ) -> ConfigurationRow:
        """A configuration has no objective without all its trials, with a failed one, or at different epochs."""
        first, states = objectives[0], {row.state for row in rows}
        failed = next((row for row in rows if row.state is TrialState.FAILED), None)
        valued = sorted((first.loss(row.objective), row.number, row) for row in rows if row.objective is not None)
        level = len({row.epoch for row in rows}) == 1
        whole = failed is None and level and len(valued) == len(self.trials(number))
        shown = valued[(len(valued) - 1) // 2][2] if whole else failed or rows[0]
        open_state = next((state for state in _OPEN if state in states), None)
        directions = of_best.directions(objectives, constraints)
        metrics, ranked, best = (
            self.aggregated([kind(row) for row in rows], directions)
            for kind in (attrgetter("metrics"), attrgetter("ranked"), attrgetter("best"))
        )
        return ConfigurationRow(
            trial=replace(shown.trial, config=self.searched(shown.trial.config)),
            state=open_state or shown.state,
            reason=shown.reason,
            epoch=min(row.epoch for row in rows),
            target=shown.target,
            failures=sum(row.failures for row in rows),
            device=shown.device,
            job=shown.job,
            seconds=math.fsum(row.seconds for row in rows),
            metrics=metrics,
            best=best,
            objective=first_objective(ranked, objectives) if whole else None,
            violation=violation(constraints, ranked) if ranked else 0.0,
            ranked=ranked,
            best_epoch=shown.best_epoch,
            paused_by=shown.paused_by,
            repeats=tuple(rows),
        )

    def curve_of(
        self, row: TrialRow, read: Callable[[int], list[Report]], objectives: Sequence[Objective]
    ) -> list[Report]:
        """The reports of a row of `rows`; `read` returns those of the trial with a number."""
        if not isinstance(row, ConfigurationRow):
            return read(row.number)
        return self.curve([read(each.number) for each in row.repeats], objectives)

    def curve(self, curves: Sequence[Sequence[Report]], objectives: Sequence[Objective]) -> list[Report]:
        """The reports of a configuration: one for each epoch that all its repeats have reported.

        Args:
            curves: Reports of each repeat, in the order of arrival.
        """
        by_epoch = [
            {report.epoch: report for report in curve if report.state is not TrialState.FAILED} for curve in curves
        ]
        common = sorted(set.intersection(*(set(each) for each in by_epoch)))
        return [
            Report(
                by_epoch[0][epoch].trial,
                epoch,
                self.aggregated([each[epoch].metrics for each in by_epoch], objectives),
                math.fsum(each[epoch].seconds for each in by_epoch),
                by_epoch[0][epoch].state,
            )
            for epoch in common
        ]


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """The two-sided p-value of Welch's t-test, its degrees of freedom rounded down: of equal means, how probable is a
    difference as large as that of these samples, each of at least two finite values?
    """
    errors = [variance(values) / len(values) for values in (one, other)]
    difference, error = fmean(one) - fmean(other), math.fsum(errors)
    if error == 0:
        return float(difference == 0)
    parts = [(own / error) ** 2 / (len(values) - 1) for own, values in zip(errors, (one, other), strict=True)]
    degrees = math.floor(1 / math.fsum(parts))
    return 1 - _within(abs(difference) / math.sqrt(error), degrees)


def _within(t: float, degrees: int) -> float:
    """The probability that a variable of Student's distribution lies within -t and t (Abramowitz and Stegun, 26.7.3
    and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for k in range(degrees // 2):
        total += term
        term *= math.cos(angle) ** 2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + total) if odd else total


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN of infinities of both signs."""
    return fmean(values) if all(map(math.isfinite, values)) else sum(values)
