"""Hyperband, with synchronous brackets."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, check_integer, check_more_trials, check_trials
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, Rung
from shoal.core.errors import AlgorithmError
from shoal.core.plain import plain_fields

__all__ = ["Hyperband", "deepest_bracket", "rungs"]


@dataclass(eq=False)
class Hyperband(BracketedAlgorithm):
    """Runs successive halving at every trade-off between many trials and long ones (Li et al. 2018, Algorithm 1).

    Bracket s begins with many trials, trained about `max_epochs / eta^s` epochs; the best of each rung, about one in
    `eta`, continue from their checkpoints, and the last reach `max_epochs`. Every bracket costs about the same.

    Args:
        max_epochs: Longest training of a trial; R in the paper.
        eta: Factor by which each rung has fewer trials, and more epochs.
        brackets: Number of brackets to run, beginning with the one that has the most trials; None runs all
            floor(log_eta(R)) + 1 brackets, 1 is plain successive halving.
        group_by: Parameters by which configurations are ordered, see `Problem.group_by`.
        skip_last: Rungs that each bracket leaves out at its end (HFTA, Table 11: last rounds to skip). The trials on
            its last remaining rung are complete, after `max_epochs / eta^skip_last` epochs, and brackets of no more
            rungs than that do not begin. The last rungs train few trials for long, so they fuse least.

    Raises:
        AlgorithmError: a setting is not an integer, or out of range.
    """

    max_epochs: int
    eta: int = 3
    brackets: int | None = None
    group_by: Sequence[str] = ()
    skip_last: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("eta", self.eta, least=2)
        check_integer("max_epochs", self.max_epochs)
        if self.max_epochs < self.eta:
            raise AlgorithmError(
                f"`max_epochs` must be at least eta, {self.eta}, or there is nothing to halve; got {self.max_epochs}"
            )
        check_integer("skip_last", self.skip_last, least=0)
        deepest, given = deepest_bracket(self.max_epochs, self.eta), f"max_epochs={self.max_epochs} and eta={self.eta}"
        if self.skip_last > deepest:
            raise AlgorithmError(
                f"`skip_last` must be at most {deepest} for {given}, or no rung is left; got {self.skip_last}"
            )
        if self.brackets is not None:
            check_integer("brackets", self.brackets)
            most = deepest + 1 - self.skip_last
            if self.brackets > most:
                skipped = f", skip_last={self.skip_last}" if self.skip_last else ""
                raise AlgorithmError(f"`brackets` must be at most {most} for {given}{skipped}, got {self.brackets}")
        check_trials(repr(self), sum(rungs(self.max_epochs, self.eta, s)[0].trials for s in self._depths()))

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """All brackets, the one with the most trials first, the one with the longest trials last."""
        return self._round(problem, 0, "")

    def further_brackets(self, trials: int) -> list[Bracket]:
        """Whole rounds of the same brackets, of other trials."""
        known = sum(len(bracket.trials) for bracket in self._brackets)
        check_more_trials(self, trials, known)
        brackets: list[Bracket] = []
        while known < trials:
            brackets += self._round(self.problem, known, f" from trial {known}")
            known = brackets[-1].trials[-1].number + 1
        return brackets

    def _round(self, problem: Problem, first: int, name: str) -> list[Bracket]:
        """The brackets of one round, whose trials have the numbers from `first` on."""
        brackets: list[Bracket] = []
        for s in self._depths():
            table = rungs(self.max_epochs, self.eta, s)[: s + 1 - self.skip_last]
            numbers = range(first, first + table[0].trials)
            brackets.append(Bracket(f"bracket {s}{name}", table, problem.random_trials(numbers), problem))
            first = numbers.stop
        return brackets

    def _depths(self) -> range:
        """Number of halvings of each bracket, from the one with the most trials."""
        deepest = deepest_bracket(self.max_epochs, self.eta)
        count = deepest + 1 - self.skip_last if self.brackets is None else self.brackets
        return range(deepest, deepest - count, -1)


def deepest_bracket(max_epochs: int, eta: int) -> int:
    """s_max = floor(log_eta(max_epochs)), in integers: in floats log_3(243) is 4.999..."""
    s = 0
    while eta ** (s + 1) <= max_epochs:
        s += 1
    return s


def rungs(max_epochs: int, eta: int, s: int, min_epochs: int = 1) -> list[Rung]:
    """The rungs of bracket `s`, the first to the last.

    With n = ceil((s_max + 1) / (s + 1) * eta^s), rung i has floor(n * eta^-i) trials and floor(R * eta^(i - s)) epochs:
    whole epochs, at least `min_epochs`, and exactly R on the last rung.
    """
    n = -(-(deepest_bracket(max_epochs // min_epochs, eta) + 1) * eta**s // (s + 1))
    return [Rung(n // eta**i, max_epochs // eta ** (s - i)) for i in range(s + 1)]
