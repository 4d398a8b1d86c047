"""Algorithms whose trials are all known from the start and climb independent brackets."""

from abc import abstractmethod

from shoal.algorithms.base import Algorithm, Problem
from shoal.algorithms.bracket import Bracket
from shoal.errors import AlgorithmError
from shoal.trial import Decision, Report, TrialGroup

__all__ = ["BracketedAlgorithm"]


class BracketedAlgorithm(Algorithm):
    """Runs brackets side by side; which ones is all that such algorithms differ in.

    Every first rung is asked for at once, whatever is free: the more trials are known, the fuller the arrays.
    """

    @abstractmethod
    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """All brackets of a study, their trials numbered from 0 on without gaps; called once."""

    def begin(self, problem: Problem) -> None:
        """Make the brackets and all their trials."""
        self._brackets = self.brackets_for(problem)
        self._home = {trial.number: bracket for bracket in self._brackets for trial in bracket.trials}

    def next_groups(self, free: int) -> list[TrialGroup]:
        """The rungs reached since the last call, each whole."""
        self.check_bound()
        return [group for bracket in self._brackets if (group := bracket.next_group()) is not None]

    def observe(self, report: Report) -> list[Decision]:
        """Decisions on the trials of one rung, at most; see `Bracket`."""
        self.check_bound()
        if report.trial not in self._home:
            raise AlgorithmError(f"trial {report.trial} is unknown; {self!r} has the trials 0 to {len(self._home) - 1}")
        return self._home[report.trial].observe(report)

    @property
    def finished(self) -> bool:
        """Whether every trial of every bracket has ended."""
        self.check_bound()
        return all(bracket.finished for bracket in self._brackets)
