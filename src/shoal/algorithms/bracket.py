"""Brackets of synchronous successive halving, and the base class of the algorithms that run them."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from shoal.algorithms.base import Algorithm, Problem, Totals, check_integer
from shoal.core.errors import AlgorithmError
from shoal.core.score import Score, order, worst_score
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState

__all__ = [
    "Bracket",
    "BracketedAlgorithm",
    "Rung",
    "check_halving",
    "check_whole_training",
    "milestones",
    "totals_of",
    "whole_training",
]


@dataclass(frozen=True)
class Rung:
    """Number of trials on a rung, and their epochs counted from the start of each trial."""

    trials: int
    epochs: int


class Bracket:
    """One run of successive halving (Jamieson and Talwalkar 2016), with given sizes and budgets of its rungs.

    When every trial of a rung is PAUSED or FAILED, the best trials are promoted to the next rung. Trials with a metric
    that is NaN are not promoted. Equal scores are ranked by the trial's number. A trial that reaches the last rung is
    COMPLETE at once.

    Args:
        rungs: Rungs, each with fewer trials and more epochs than the one before.
    """

    results: dict[int, dict[int, Score]]
    """Epochs of a rung -> number of a trial that has reached it -> its score there, the worst if it failed on the way.
    """

    def __init__(self, name: str, rungs: Sequence[Rung], trials: Sequence[Trial], problem: Problem) -> None:
        self.trials = tuple(trials)
        self.rungs = tuple(rungs)
        self._name = name
        self._problem = problem
        self._budgets = [rung.epochs for rung in rungs]
        self._promotions = [rung.trials for rung in rungs[1:]]
        self._rung = 0
        self._open_trials = {trial.number: trial for trial in trials}
        self._scores: dict[int, Score] = {}
        self._proposed = False
        self.results = {}

    @property
    def training(self) -> int:
        """Number of trials that have not reached the next rung."""
        return len(self._open_trials) - len(self._scores)

    @property
    def finished(self) -> bool:
        """Whether every trial has ended."""
        return not self._open_trials

    def next_group(self) -> TrialGroup | None:
        """The trials to train up to the current rung, once for each rung; else None."""
        if self._proposed or self.finished:
            return None
        self._proposed = True
        name = f"{self._name}, rung {self._rung}" if self._promotions else self._name
        epochs, *later = self._budgets[self._rung :]
        steps = zip(self._promotions[self._rung :], pairwise((epochs, *later)), strict=True)
        work = sum(trials * (after - before) for trials, (before, after) in steps)
        ahead = self._budgets[-1] - epochs
        return TrialGroup(tuple(self._open_trials.values()), Budget(epochs), name, epochs_ahead=ahead, work_ahead=work)

    def observe(self, report: Report) -> list[Decision]:
        """Process a report of a trial; it must have the metric before the last epoch of a rung, too, to find a misspelt
        name.
        """
        number, budget = report.trial, self._budgets[self._rung]
        if report.state is TrialState.FAILED:
            if self._open_trials.pop(number, None) is not None:
                self._scores.pop(number, None)
                self._record_result(number, worst_score(len(self._problem.objectives)))
            return self._promote_if_complete()

        score = self._problem.score_at_target(report, budget if number in self._open_trials else None)
        if score is None:
            return []
        if self._rung == len(self._promotions):
            del self._open_trials[number]
            self._record_result(number, score)
            return [Decision(number, TrialState.COMPLETE)]
        if number not in self._scores:
            self._scores[number] = score
            self._record_result(number, score)
        return self._promote_if_complete()

    def _record_result(self, number: int, score: Score) -> None:
        self.results.setdefault(self._budgets[self._rung], {})[number] = score

    def _promote_if_complete(self) -> list[Decision]:
        if not self._open_trials or len(self._scores) < len(self._open_trials):
            return []
        nan_trials = sorted(number for number, score in self._scores.items() if score.is_nan)
        measured = {number: score for number, score in self._scores.items() if not score.is_nan}
        ranking = order(measured)
        best = ranking[: self._promotions[self._rung]]
        epochs = self._budgets[self._rung]
        rule = "only the best continues" if len(best) == 1 else f"the best {len(best)} continue"
        decisions = [
            Decision(
                number,
                TrialState.STOPPED,
                f"rank {rank} of {len(ranking)} at epoch {epochs}; {rule}{measured[number].note}",
            )
            for rank, number in enumerate(ranking[len(best) :], start=len(best) + 1)
        ]
        decisions += [Decision(number, TrialState.STOPPED, self._problem.nan_reason(epochs)) for number in nan_trials]
        self._open_trials = {number: self._open_trials[number] for number in sorted(best)}
        self._scores = {}
        self._rung += 1
        self._proposed = False
        return decisions


class BracketedAlgorithm(Algorithm):
    """Base class of algorithms that run independent brackets; a subclass decides which brackets run and when each
    begins.

    A rung is proposed as a whole, even if few devices are free, because more trials fill larger arrays.
    """

    takes_several_metrics = True

    @abstractmethod
    def brackets_for(self, problem: Problem) -> Iterable[Bracket]:
        """All brackets of a study, their trials numbered from 0 on without gaps; called once.

        The next bracket is taken when it may begin, so a generator can use the results of earlier brackets.
        """

    def further_brackets(self, trials: int) -> Iterable[Bracket] | None:
        """Brackets after all others, for `trials` trials in all or a few more; None, by default: there can be none.

        Raises:
            AlgorithmError: there are as many trials already.
        """
        return None

    def may_begin(self, training: int) -> bool:
        """Whether the next bracket may begin while `training` trials have not reached their rung; by default always."""
        return True

    def begin(self, problem: Problem) -> None:
        """Begin the first bracket, and all that may begin at the same time."""
        self._next_brackets = iter(self.brackets_for(problem))
        self._all_begun = False
        self._brackets: list[Bracket] = []
        self._bracket_of: dict[int, Bracket] = {}
        self._begin_brackets()
        self._begun_together = self._all_begun

    def _begin_brackets(self) -> None:
        while not self._all_begun and self.may_begin(sum(bracket.training for bracket in self._brackets)):
            bracket = next(self._next_brackets, None)
            if bracket is None:
                self._all_begun = True
            else:
                self._brackets.append(bracket)
                self._bracket_of |= {trial.number: bracket for trial in bracket.trials}

    @property
    def totals(self) -> Totals | None:
        """Sums over all brackets if all begin at once; an algorithm with later brackets overrides this."""
        self.check_bound()
        return totals_of(bracket.rungs for bracket in self._brackets) if self._begun_together else None

    def extend(self, trials: int) -> None:
        """Begin further brackets after all others; no rung of a bracket gets more trials."""
        self.check_bound()
        if (brackets := self.further_brackets(trials)) is None:
            super().extend(trials)
            return
        self._next_brackets = chain(self._next_brackets, brackets)
        self._all_begun = False
        self._begin_brackets()

    def next_groups(self, free: int) -> list[TrialGroup]:
        """The trials of each bracket whose next rung can begin since the last call."""
        self.check_bound()
        return [group for bracket in self._brackets if (group := bracket.next_group()) is not None]

    def observe(self, report: Report) -> list[Decision]:
        """Decisions on the trials of at most one rung, see `Bracket`."""
        self.check_bound()
        if report.trial not in self._bracket_of:
            raise AlgorithmError(
                f"trial {report.trial} is unknown; {self!r} has the trials 0 to {len(self._bracket_of) - 1}"
            )
        decisions = self._bracket_of[report.trial].observe(report)
        self._begin_brackets()
        return decisions

    @property
    def finished(self) -> bool:
        """Whether every trial of every bracket has ended."""
        self.check_bound()
        return self._all_begun and all(bracket.finished for bracket in self._brackets)


def totals_of(tables: Iterable[Sequence[Rung]]) -> Totals:
    """Sums of the trials and epochs of brackets."""
    trials = epochs = 0
    for rungs in tables:
        trials += rungs[0].trials
        done = 0
        for rung in rungs:
            epochs += rung.trials * (rung.epochs - done)
            done = rung.epochs
    return Totals(trials, epochs, epochs)


def milestones(min_epochs: int, max_epochs: int, eta: int) -> list[int]:
    """The epochs of each rung: min_epochs · eta^i below `max_epochs`, then `max_epochs`."""
    epochs = []
    while min_epochs < max_epochs:
        epochs.append(min_epochs)
        min_epochs *= eta
    return [*epochs, max_epochs]


def whole_training(trials: int, compare_after: int | None, epochs: int) -> list[Rung]:
    """Rungs of a bracket whose trials all train to the end, and all to epoch `compare_after` before one continues."""
    return [Rung(trials, each) for each in (compare_after, epochs) if each is not None]


def check_whole_training(compare_after: object, epochs: object) -> None:
    """Check the settings of `whole_training`."""
    check_integer("epochs", epochs)
    if compare_after is None:
        return
    check_integer("compare_after", compare_after)
    if compare_after >= epochs:  # type: ignore[operator]  # both are integers
        raise AlgorithmError(
            f"`compare_after` must be below `epochs`, {epochs}, got {compare_after}; leave it out to compare trials at "
            "their ends"
        )


def check_halving(min_epochs: object, max_epochs: object, eta: object) -> None:
    """Check the settings of successive halving."""
    check_integer("eta", eta, least=2)
    check_integer("min_epochs", min_epochs)
    check_integer("max_epochs", max_epochs)
    if min_epochs > max_epochs:  # type: ignore[operator]  # both are integers
        raise AlgorithmError(
            f"`min_epochs` must be at most `max_epochs`, got {min_epochs} and {max_epochs}; exchange them"
        )
