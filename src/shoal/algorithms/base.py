"""The base class of search algorithms, and its contract with the engine."""

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from shoal.core.constraint import Constraint, parse_constraints
from shoal.core.domain import Domain
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.errors import AlgorithmError, SpaceError, TaskError
from shoal.core.objective import Objective, check_reported, objectives
from shoal.core.reference import UncomputableError
from shoal.core.score import Score, score_of, worst_score
from shoal.core.space import Space, config_text, flatten
from shoal.core.trial import (
    Config,
    Decision,
    EarlierTrial,
    Origin,
    Report,
    Trial,
    TrialGroup,
    TrialState,
    derive_seed,
)

__all__ = [
    "Algorithm",
    "Problem",
    "Totals",
    "call_text",
    "check_integer",
    "check_more_trials",
    "check_number",
    "check_trials",
]

_MOST = 10**12
_MOST_TRIALS = 10**6


@dataclass(frozen=True)
class Totals:
    """Trials and epochs that an algorithm requests in all, if no trial fails and none measures NaN.

    Args:
        trials: Number of trials.
        least: Least sum of the epochs of all trials.
        most: Greatest sum; equal to `least` if results decide only which trials are promoted, not how many.

    Raises:
        ValueError: there is no trial, fewer epochs than trials, or `most` is below `least`.
    """

    trials: int
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.trials <= self.least <= self.most:
            raise ValueError(f"totals need 1 <= trials <= least <= most, got {self}")


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except SpaceError as error:
        raise SpaceError(f"{what}: {error}") from error


@dataclass(frozen=True)
class Problem:
    """The search problem that a study gives its algorithm.

    Args:
        space: Search space.
        metric: Name of the reported value to compare trials by; of several metrics, the first.
        mode: "min" or "max": the direction in which the metric is better.
        seed: Seed of the study; with a trial's number it determines that trial.
        data_seed: Data seed of all trials; None gives every trial its own.
        other_objectives: Further metrics, for algorithms that take several.
        group_by: Parameters, named as `flatten` names them, such as "width" or "optimizer.name". Random configurations
            with equal values of these are adjacent, so that their trials can form one array: of those that may begin
            together, a bracket or as many as train at a time. The set of configurations does not change.
        initial: Configurations of the first trials; values that they leave out are those of `sample`.
        constraints: Bounds that reported values must keep.
        of_best: Which epoch of a trial is its best, by which it ranks; for samplers that learn from ended trials.
        earlier: Finished trials of earlier studies, for the model of an algorithm that has one. They have no numbers in
            the study.

    Raises:
        AlgorithmError: `mode` is neither "min" nor "max", or `group_by` is not a list of names or has a name that no
            configuration has.
        SpaceError: a point of `initial` is not in the space, or two are equal.
    """

    space: Space
    metric: str
    mode: str
    seed: int
    data_seed: int | None
    other_objectives: tuple[Objective, ...] = ()
    group_by: Sequence[str] = ()
    constraints: tuple[Constraint, ...] = ()
    initial: Sequence[Config] = ()
    of_best: EpochOrder = LAST_EPOCHS
    earlier: Sequence[EarlierTrial] = ()

    def __post_init__(self) -> None:
        Objective(self.metric, self.mode)  # checks the mode
        self._check_initial()
        if isinstance(self.group_by, str):
            raise AlgorithmError(
                f"`group_by` must be a list of names, got {self.group_by!r}; write [{self.group_by!r}]"
            )
        if not isinstance(self.group_by, Sequence) or not all(isinstance(name, str) for name in self.group_by):
            raise AlgorithmError(f"`group_by` must be a list of names, such as ['width'], or [], got {self.group_by!r}")
        columns = self.space.leaves()
        for name in self.group_by:
            if name not in columns:
                names = ", ".join(map(repr, sorted(columns))) or "nothing"
                raise AlgorithmError(f"`group_by` names {name!r}, which is not in the search space; it has {names}")

    def _check_initial(self) -> None:
        seen: dict[str, int] = {}
        for number in range(len(self.initial)):
            config = self.sample(number)
            if (first := seen.setdefault(config_text(config), number)) != number:
                raise SpaceError(f"initial points {first} and {number} are equal: {config}")

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """All metrics with their modes, the first one first."""
        return (Objective(self.metric, self.mode), *self.other_objectives)

    def sample(self, number: int) -> Config:
        """The random configuration of trial `number`, with the values of its initial point, if it has one: a function
        of the number and the study's seed alone.

        Raises:
            SpaceError: a value of an initial point cannot be computed, or too many configurations are refused.
        """
        is_initial = number < len(self.initial)
        given = self.initial[number] if is_initial else {}
        with _naming(f"initial point {number}" if is_initial else f"trial {number}"):
            return self.space.sample(derive_seed(self.seed, "config", number), given)

    def draw(self, number: int, pick: Callable[[str, Domain], Any]) -> Config | None:
        """The configuration of trial `number` by `Space.draw`; None if the space's conditions refuse it, or a value
        cannot be computed.
        """
        with _naming(f"trial {number}"), suppress(UncomputableError):
            config = self.space.draw(pick)
            return config if self.space.refusal(config) is None else None
        return None

    def samples(self, numbers: Sequence[int]) -> list[Config]:
        """The random configurations of trials that may begin together, those without initial points ordered by
        `group_by`.
        """
        first = [self.sample(number) for number in numbers if number < len(self.initial)]
        return first + self.sorted_by_group([self.sample(number) for number in numbers[len(first) :]])

    def sorted_by_group(self, configs: Sequence[Config]) -> list[Config]:
        """The same configurations, reordered so that those with equal `group_by` parameters are adjacent."""
        by_value: dict[str, list[Config]] = {}
        for config in configs:
            row = flatten(config)
            by_value.setdefault(json.dumps([row.get(name) for name in self.group_by]), []).append(config)
        return [config for equal in by_value.values() for config in equal]

    def random_trials(self, numbers: Sequence[int]) -> list[Trial]:
        """Trials of random configurations that may begin together."""
        return [self.trial(number, config) for number, config in zip(numbers, self.samples(numbers), strict=True)]

    def trial(self, number: int, config: Config, origin: Origin | None = None) -> Trial:
        """A trial with the seeds that belong to its number."""
        data_seed = derive_seed(self.seed, "data", number) if self.data_seed is None else self.data_seed
        return Trial(number, config, derive_seed(self.seed, "trial", number), data_seed, origin)

    def value(self, report: Report) -> float:
        """The metric in a report; of several, the first.

        Raises:
            TaskError: it is missing, or no real number.
        """
        return self.values(report)[0]

    def values(self, report: Report) -> tuple[float, ...]:
        """All metrics in a report.

        Raises:
            TaskError: one of them is missing, or no real number.
        """
        check_reported(self.objectives, report.metrics)
        found = tuple([report.metrics[objective.metric] for objective in self.objectives])
        for objective, value in zip(self.objectives, found, strict=True):
            if not isinstance(value, (float, Real)):  # the first test is fast
                raise TaskError(
                    f"metric {objective.metric!r} must be a real number, but trial {report.trial} reports {value!r} at "
                    f"epoch {report.epoch}; return a number from the task, NaN where there is none"
                )
        return found

    def score_at_target(self, report: Report, target: int | None) -> Score | None:
        """The score of a trial at its target epoch: the worst one if the trial failed, None before that epoch.

        Args:
            report: Report of the trial.
            target: Target epoch of the trial; None for a trial that is not in training.

        Raises:
            AlgorithmError: the report is beyond the target epoch.
            TaskError: the report of a trial that did not fail lacks a metric, whatever epoch it is.
        """
        has_failed = report.state is TrialState.FAILED
        values = () if has_failed else self.values(report)
        if target is None:
            return None
        if report.epoch > target:
            raise AlgorithmError(
                f"trial {report.trial} reports epoch {report.epoch}, but its budget is {target} epochs"
            )
        if has_failed:
            return worst_score(len(self.objectives))
        if report.state is not TrialState.PAUSED or report.epoch < target:
            return None
        return score_of(values, report.metrics, self.objectives, self.constraints)

    def nan_reason(self, epoch: int) -> str:
        """Why a trial is stopped whose score at an epoch `is_nan`."""
        return f"{' or '.join(goal.metric for goal in self.objectives)} is nan at epoch {epoch}"


class Algorithm(ABC):
    """Decides which configurations are tried and for how long.

    The constructor takes the user's settings and checks them; an instance serves one study. An algorithm in
    `ALGORITHMS` is a dataclass: the command line reads its fields `n`, and `epochs` or `max_epochs`. `tune` compares
    its `longest_budget` with the schedule of a task that plans one.

    Calls, all from one thread:

    1. `tune` calls `bind` once, which calls `begin`; then it reads `totals` once.
    2. The engine reads `finished` and, while it is false, calls `next_groups` in each turn of its loop.
    3. It calls `extend` when a user asks for more trials.
    4. It calls `may_return` of an algorithm that copies trials, about trials that have ended, until `finished`.
    5. The engine calls `observe` with every report of a trial of the algorithm, in the order of the journal. It
       withholds reports of trials that users added, or that failed and were retried.

    What an algorithm may return:

    - Numbers of trials are given out from 0 on without gaps, each once in the study.
    - A trial is in at most one group that is still being trained. It comes again only after it was PAUSED, as the same
      `Trial` with a greater budget.
    - Every trial that is PAUSED is, in the end, either in a later group or decided on, once, as COMPLETE or STOPPED.
    - A trial that FAILED ends without a decision and never comes again.
    - A new trial may start from the checkpoint of another trial (`Trial.origin`) that is PAUSED when the new one is
      proposed, or was ended then; the algorithm then sets `copies_trials`. No group names a trial, as a member or as an
      origin, of which `may_return` was false.
    - While no trial is in training and `finished` is false, `next_groups` returns at least one group.

    Legal exceptions: `bind` raises `AlgorithmError` or `SpaceError`, before the study exists; `observe` raises
    `AlgorithmError` or `TaskError`. Any exception of `next_groups` or `observe` ends the run. All reports are recorded
    by then, and `resume` continues.

    Resuming builds the algorithm anew and repeats the recorded calls. So groups and decisions must follow from the
    settings, the arguments of `bind` and `extend` and the reports alone: no clock, no randomness but the seed. A
    synchronous algorithm does not even depend on the order in which the reports of different trials arrive. A report
    may come twice; the second time it changes nothing and the answer is empty.

    `shoal.testing.check_algorithm` checks this contract.

    `tune` works with a deep copy of the given object, so the object can be given to further studies. Classes, functions
    and globals of a script or a notebook are the caller's own: what the algorithm prints, counts or collects in a
    global is there afterwards, but attributes that it sets on itself are not. `resume` works with the pickle from the
    beginning of the study; its writes to such globals stay invisible.
    """

    takes_several_metrics: bool = False
    """Whether the algorithm can compare trials by more than one metric."""
    copies_trials: bool = False
    """Whether new trials may start from the checkpoints of others."""
    models_best_epochs: bool = False
    """Whether the value of a trial at a modelled budget is that of its best epoch until then, see `Problem.of_best`."""
    group_by: Sequence[str] = ()
    """Names of parameters, see `Problem`; a setting of algorithms with random configurations or a grid."""

    _problem: Problem | None = None

    def bind(
        self,
        space: Space,
        *,
        metric: str | Sequence[str],
        mode: str | Sequence[str],
        seed: int,
        data_seed: int | None = None,
        initial: Sequence[Config] = (),
        constraints: Mapping[str, str] = MappingProxyType({}),
        of_best: EpochOrder = LAST_EPOCHS,
        earlier: Sequence[EarlierTrial] = (),
    ) -> None:
        """Set the search problem.

        Args:
            space: Search space.
            metric: Name of the reported value to compare trials by, or several names.
            mode: "min" or "max"; of several metrics one for each.
            seed: Seed of the study.
            data_seed: Seed of the order of samples of every trial; None gives each trial its own.
            initial: Whole or partial configurations to try first, see `Problem`.
            constraints: Names of reported values with their bounds, as `tune` takes them.
            of_best: As in `Problem`.
            earlier: Finished trials of earlier studies, with their values at the `modelled_budgets`.

        Raises:
            AlgorithmError: `mode`, a constraint or a name in `group_by` is invalid, the algorithm does not support so
                many metrics, has fewer trials than initial points, or the instance serves another study already.
            SpaceError: the algorithm cannot search this space, or an initial point is not in it.
        """
        self.check_new()
        first, *others = objectives(metric, mode)
        if others and not self.takes_several_metrics:
            raise AlgorithmError(
                f"{type(self).__name__} compares trials by one metric, got {metric!r}; for several use ASHA, "
                "SuccessiveHalving, Hyperband, PBT, OptunaSearch, Random or Grid"
            )
        problem = Problem(
            *(space, first.metric, first.mode, seed, data_seed, tuple(others), self.group_by),
            *(parse_constraints(constraints), initial, of_best, earlier),
        )
        self.begin(problem)
        self._problem = problem
        if (totals := self.totals) is not None and totals.trials < (given := len(problem.initial)):
            raise AlgorithmError(f"{call_text(self)} has {totals.trials} trials, too few for {given} initial points")

    @property
    def problem(self) -> Problem:
        """The search problem of the study.

        Raises:
            AlgorithmError: `bind` was not called yet.
        """
        self.check_bound()
        return self._problem  # type: ignore[return-value]  # it is bound

    def check_new(self) -> None:
        """Raise an AlgorithmError if the instance is bound already."""
        if self._problem is not None:
            raise AlgorithmError(f"{self!r} serves another study already; make a new one for each study")

    def check_bound(self) -> None:
        """Raise an AlgorithmError if the instance is not bound."""
        if self._problem is None:
            raise AlgorithmError(f"{self!r} has no search space yet; call bind(...) first")

    def check_begun(self, number: int, begun: int) -> None:
        """Raise an AlgorithmError for a report of a trial that has not begun, or if the instance is not bound."""
        self.check_bound()
        if not 0 <= number < begun:
            raise AlgorithmError(f"trial {number} is unknown; {self!r} has begun {begun} trials")

    @property
    def totals(self) -> Totals | None:
        """Trials and epochs of the whole search; None if they are not known beforehand.

        The study reads this once, after `bind` and before `next_groups`, and keeps it in its journal: the progress, the
        time left and the summary at the start of a run count against it. With None they count the trials and epochs
        requested so far. The value follows from the settings and the problem, not from reports.
        """
        return None

    @property
    def longest_budget(self) -> int | None:
        """Epochs of the longest trials, the setting `max_epochs` or `epochs`; None if they are unknown."""
        longest = getattr(self, "max_epochs", getattr(self, "epochs", None))
        return longest if isinstance(longest, int) else None

    @property
    def modelled_budgets(self) -> Sequence[int]:
        """Epochs at which values of `Problem.earlier` enter the model; empty, by default, if there is no such model."""
        return ()

    @abstractmethod
    def begin(self, problem: Problem) -> None:
        """Prepare the search; `bind` calls this once.

        Raises:
            SpaceError: the algorithm cannot search the problem's space.
        """

    @abstractmethod
    def next_groups(self, free: int) -> list[TrialGroup]:
        """The next trials to train; empty while there are none.

        Args:
            free: Number of further trials that could start now. A hint: the engine queues trials beyond it.
        """

    @abstractmethod
    def observe(self, report: Report) -> list[Decision]:
        """Process a report and return the decisions that end trials, this one or others.

        Args:
            report: Report that is RUNNING after an epoch, PAUSED at the end of the budget, FAILED when the trial ended
                by itself.

        Raises:
            AlgorithmError: the trial is not one of this algorithm's, or is beyond its budget.
            TaskError: the report of a trial that did not fail lacks the metric.
        """

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no trial is outstanding and no further trial will come."""

    def may_return(self, number: int) -> bool:
        """Whether a later group may name a trial that was proposed, as a member or as an origin; by default always.

        The checkpoint of an ended trial may be deleted once the answer is false; it then stays false. A trial that has
        ended and is no origin needs no checkpoint anyway, so only an algorithm that `copies_trials` is asked.
        """
        return True

    def extend(self, trials: int) -> None:
        """Continue the search to `trials` trials in all, or a few more if they come in rounds; `totals` and `finished`
        follow. By default a search cannot be extended.

        A user may ask for this at any time, also after the end. Trials that were to come anyway stay the same.

        Raises:
            AlgorithmError: the search cannot have more trials, or has as many already; then nothing has changed.
        """
        raise AlgorithmError(
            f"{call_text(self)} cannot try more trials in a study that has begun; begin a new study for them, in "
            "another directory"
        )


def call_text(made: object) -> str:
    """The constructor call of an algorithm or a rule, without default settings: "Hyperband(max_epochs=9)"."""
    if isinstance(made, type) or not is_dataclass(made):  # a class is refused later, in words
        return repr(made)
    settings = {field.name: getattr(made, field.name) for field in fields(made) if field.init}
    defaults = {field.name: field.default for field in fields(made)}
    chosen = [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name]]
    return f"{type(made).__name__}({', '.join(chosen)})"


def check_integer(name: str, value: object, least: int = 1) -> None:
    """Check an integer setting, sums of which a journal must be able to store."""
    if isinstance(value, Integral) and not isinstance(value, int):
        raise AlgorithmError(f"`{name}` must be a Python int of at least {least}, got {value!r}; write int(...)")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AlgorithmError(f"`{name}` must be an integer of at least {least}, got {value!r}")
    if value > _MOST:
        raise AlgorithmError(f"`{name}` must be at most {_MOST}, got {reprlib.repr(value)}")


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Check a numeric setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise AlgorithmError(f"`{name}` must be a number from {least:g} to {most:g}, got {value!r}")


def check_more_trials(algorithm: Algorithm, trials: object, known: int) -> None:
    """Check the argument of `Algorithm.extend` of an algorithm that is to try `known` trials."""
    algorithm.check_bound()
    check_integer("trials", trials)
    if isinstance(trials, int) and trials <= known:
        raise AlgorithmError(f"{call_text(algorithm)} tries {known} trials, so `trials` must be more, got {trials}")
    check_trials(f"{call_text(algorithm)} with {trials} trials", trials)  # type: ignore[arg-type]  # it is an integer


def check_trials(algorithm: str, trials: int) -> None:
    """Refuse more trials than an algorithm, given as its constructor call, can draw when it begins."""
    if trials > _MOST_TRIALS:
        raise AlgorithmError(f"{algorithm} begins with {trials} trials, and at most {_MOST_TRIALS} are drawn at once")
