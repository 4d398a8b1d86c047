"""The base class of algorithms that decide about each trial when it reports."""

from abc import abstractmethod

from shoal.algorithms.base import Algorithm, Problem, check_more_trials
from shoal.core.score import Score
from shoal.core.trial import Budget, Config, Decision, Report, Trial, TrialGroup, TrialState

__all__ = ["ConcurrentAlgorithm"]


class ConcurrentAlgorithm(Algorithm):
    """Trains at most `concurrency` trials at a time, `n` in all; a subclass decides which trial is next.

    Each call proposes one group for each target epoch, the largest target first.
    """

    n: int
    concurrency: int

    def begin(self, problem: Problem) -> None:
        """Begin without trials."""
        self.trials: list[Trial] = []
        """All trials that have begun, by number."""
        self.training: dict[int, int] = {}
        """Number of each trial in training -> its target epoch."""
        self._configs: dict[int, Config] = {}
        self._ends = [self.n]  # `n` at the beginning and after each extension

    @abstractmethod
    def next_training(self) -> tuple[int, int] | None:
        """Number and target epoch of the next trial to train; None if no trial can train now."""

    @abstractmethod
    def reached(self, report: Report, score: Score) -> list[Decision]:
        """Decide after a trial has reached its target epoch, that of the report, and left training."""

    def failed(self, number: int) -> list[Decision]:
        """Decide after a trial has failed."""
        return []

    @property
    def has_paused(self) -> bool:
        """Whether a trial that is not in training may be trained further; by default each is trained in one stretch."""
        return False

    def begin_trial(self, config: Config | None = None) -> int:
        """The number of a new trial; its configuration is random unless given."""
        number = len(self.trials)
        self.trials.append(self.problem.trial(number, self._random_config(number) if config is None else config))
        return number

    def _random_config(self, number: int) -> Config:
        """A random configuration; those of `concurrency` trials are drawn together, since only these can begin in one
        array. An extension does not change those of trials that were to come anyway.
        """
        if number not in self._configs:
            end = next(end for end in self._ends if end > number)
            numbers = range(number, min(number + self.concurrency, end))
            self._configs = dict(zip(numbers, self.problem.samples(numbers), strict=True))
        return self._configs[number]

    def next_groups(self, free: int) -> list[TrialGroup]:
        """The next trials, while fewer than `concurrency` are in training."""
        self.check_bound()
        by_target: dict[int, list[int]] = {}
        while len(self.training) < self.concurrency and (following := self.next_training()) is not None:
            number, epochs = following
            self.training[number] = epochs
            by_target.setdefault(epochs, []).append(number)
        return [
            TrialGroup(tuple(self.trials[number] for number in sorted(numbers)), Budget(epochs), f"to epoch {epochs}")
            for epochs, numbers in sorted(by_target.items(), reverse=True)
        ]

    def observe(self, report: Report) -> list[Decision]:
        """Process a report. It decides nothing before the target epoch, or if the trial is not in training."""
        number = report.trial
        self.check_begun(number, len(self.trials))
        score = self.problem.score_at_target(report, self.training.get(number))
        if score is None:
            return []
        del self.training[number]
        if report.state is TrialState.FAILED:
            return self.failed(number)
        return self.reached(report, score)

    def extend(self, trials: int) -> None:
        """Begin further trials, up to `trials` in all; what is known of the others still counts."""
        check_more_trials(self, trials, self.n)
        self.n = trials
        self._ends.append(trials)

    @property
    def finished(self) -> bool:
        """Whether all trials have begun and ended."""
        self.check_bound()
        return len(self.trials) == self.n and not self.training and not self.has_paused
