"""Algorithms that decide on one trial at a time, as it reports."""

from abc import abstractmethod

from shoal.algorithms.base import Algorithm, Problem
from shoal.core.trial import Budget, Config, Decision, Report, Trial, TrialGroup, TrialState

__all__ = ["ConcurrentAlgorithm"]


class ConcurrentAlgorithm(Algorithm):
    """Trains at most `concurrency` trials at a time, `n` in all; who is next is all that such algorithms differ in.

    The groups of one call are the trials that train up to the same epoch, the longest first.
    """

    n: int
    concurrency: int

    def begin(self, problem: Problem) -> None:
        """Nothing has been tried yet."""
        self.trials: list[Trial] = []
        """All that have begun, by number."""
        self.training: dict[int, int] = {}
        """Number of a trial that is being trained -> the epoch up to which."""
        self._drawn: dict[int, Config] = {}

    @abstractmethod
    def next_stretch(self) -> tuple[int, int] | None:
        """The number of a trial, and the epoch up to which it is to be trained; None while there is nothing new."""

    @abstractmethod
    def reached(self, number: int, epoch: int, value: float) -> list[Decision]:
        """A trial has got to the end of its stretch; `value` may be NaN. It is not being trained any more."""

    def failed(self, number: int) -> list[Decision]:
        """A trial has ended by itself."""
        return []

    @property
    @abstractmethod
    def has_paused(self) -> bool:
        """Whether a trial that is not being trained may go on."""

    def begin_trial(self, config: Config | None = None) -> int:
        """The number of a new trial; its configuration is random unless given."""
        number = len(self.trials)
        self.trials.append(self.problem.trial(number, self._random(number) if config is None else config))
        return number

    def _random(self, number: int) -> Config:
        """Drawn for as many trials at once as are trained at a time, for only those can begin in one array."""
        if number not in self._drawn:
            numbers = range(number, min(number + self.concurrency, self.n))
            self._drawn = dict(zip(numbers, self.problem.samples(numbers), strict=True))
        return self._drawn[number]

    def next_groups(self, free: int) -> list[TrialGroup]:
        """Who is next, while fewer than `concurrency` are trained."""
        self.check_bound()
        stretches: dict[int, list[int]] = {}
        while len(self.training) < self.concurrency and (stretch := self.next_stretch()) is not None:
            number, epochs = stretch
            self.training[number] = epochs
            stretches.setdefault(epochs, []).append(number)
        return [
            TrialGroup(tuple(self.trials[number] for number in sorted(numbers)), Budget(epochs), f"to epoch {epochs}")
            for epochs, numbers in sorted(stretches.items(), reverse=True)
        ]

    def observe(self, report: Report) -> list[Decision]:
        """Take note of a report; one in the midst of a stretch, or of a trial that is not being trained, says nothing.

        Raises:
            AlgorithmError: the trial is unknown, or beyond its budget.
            TaskError: the report lacks the metric.
        """
        number = report.trial
        self.check_begun(number, len(self.trials))
        value = self.problem.at_end(report, self.training.get(number))
        if value is None:
            return []
        epochs = self.training.pop(number)
        if report.state is TrialState.FAILED:
            return self.failed(number)
        return self.reached(number, epochs, value)

    @property
    def finished(self) -> bool:
        """Whether all trials have begun and ended."""
        self.check_bound()
        return len(self.trials) == self.n and not self.training and not self.has_paused
