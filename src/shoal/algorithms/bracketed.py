"""Algorithms whose trials climb independent brackets."""

from abc import abstractmethod
from collections.abc import Iterable

from shoal.algorithms.base import Algorithm, Problem, Totals
from shoal.algorithms.bracket import Bracket, totals_of
from shoal.core.errors import AlgorithmError
from shoal.core.trial import Decision, Report, TrialGroup

__all__ = ["BracketedAlgorithm"]


class BracketedAlgorithm(Algorithm):
    """Runs brackets side by side; which ones, and when each begins, is all that such algorithms differ in.

    A rung is asked for whole, whatever is free: the more trials are known, the fuller the arrays.
    """

    @abstractmethod
    def brackets_for(self, problem: Problem) -> Iterable[Bracket]:
        """All brackets of a study, their trials numbered from 0 on without gaps; called once.

        Each is taken when it may begin, so a generator can make it of what the ones before have shown by then.
        """

    def may_begin(self, training: int) -> bool:
        """Whether the next bracket may begin while so many trials are to be trained; unless overridden, all may."""
        return True

    def begin(self, problem: Problem) -> None:
        """Begin the first bracket, and all that may begin beside it."""
        self._coming = iter(self.brackets_for(problem))
        self._all_began = False
        self._brackets: list[Bracket] = []
        self._home: dict[int, Bracket] = {}
        self._begin_brackets()
        self._at_once = self._all_began

    def _begin_brackets(self) -> None:
        while not self._all_began and self.may_begin(sum(bracket.training for bracket in self._brackets)):
            bracket = next(self._coming, None)
            if bracket is None:
                self._all_began = True
            else:
                self._brackets.append(bracket)
                self._home |= {trial.number: bracket for trial in bracket.trials}

    @property
    def totals(self) -> Totals | None:
        """Sums over all brackets, if all begin at once; an algorithm that begins some later overrides this."""
        self.check_bound()
        return totals_of(bracket.rungs for bracket in self._brackets) if self._at_once else None

    def next_groups(self, free: int) -> list[TrialGroup]:
        """The rungs reached since the last call, each whole."""
        self.check_bound()
        return [group for bracket in self._brackets if (group := bracket.next_group()) is not None]

    def observe(self, report: Report) -> list[Decision]:
        """Decisions on the trials of one rung, at most; see `Bracket`."""
        self.check_bound()
        if report.trial not in self._home:
            raise AlgorithmError(f"trial {report.trial} is unknown; {self!r} has the trials 0 to {len(self._home) - 1}")
        decisions = self._home[report.trial].observe(report)
        self._begin_brackets()
        return decisions

    @property
    def finished(self) -> bool:
        """Whether every trial of every bracket has ended."""
        self.check_bound()
        return self._all_began and all(bracket.finished for bracket in self._brackets)
