"""Search with any of Optuna's samplers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.algorithms.base import Problem, Totals, check_integer
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.algorithms.projection import projection
from shoal.algorithms.sampler import check_sampler, learns_from_others
from shoal.core.plain import plain_fields
from shoal.core.score import Score
from shoal.core.trial import Decision, Report, TrialState

if TYPE_CHECKING:
    import optuna

__all__ = ["OptunaSearch"]


@dataclass(eq=False)
class OptunaSearch(ConcurrentAlgorithm):
    """Trains the proposals of an Optuna sampler to the end, and gives the sampler the values by which they rank.

    The sampler sees trials in training as running ones; with `concurrency` above 1 it must keep its proposals apart, as
    "tpe" and "gp" do. A trial that fails, or measures NaN, is a failed one to the sampler. All named samplers but
    "cmaes" take several metrics.

    Args:
        n: Number of trials.
        epochs: Epochs of each trial.
        sampler: Name of `SAMPLERS`, or a function that makes a new Optuna sampler of a seed. With the same seed and the
            same values it must repeat its proposals, or the study cannot be resumed.
        concurrency: Most trials in training at a time, whatever devices there are. More trials fill the arrays, but
            leave the sampler fewer values.

    Raises:
        AlgorithmError: a setting is not an integer, or out of range, or there is no such sampler.
    """

    takes_several_metrics = True
    models_best_epochs = True

    n: int
    epochs: int
    sampler: "str | Callable[[int], optuna.samplers.BaseSampler]" = "tpe"
    concurrency: int = 8

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n)
        check_integer("epochs", self.epochs)
        check_integer("concurrency", self.concurrency)
        check_sampler(self.sampler)

    def begin(self, problem: Problem) -> None:
        """Begin with a sampler without values.

        Raises:
            SpaceError: the sampler cannot search the space.
            AlgorithmError: it cannot search for another reason.
        """
        super().begin(problem)
        self._projection = projection(problem, self.sampler, (self.epochs,), self.n)
        self._best: dict[int, Mapping[str, float]] = {}  # of trials in training, metrics of the best epoch

    @property
    def totals(self) -> Totals | None:
        """`n` trials, each trained to the end."""
        return Totals(self.n, self.n * self.epochs, self.n * self.epochs)

    @property
    def modelled_budgets(self) -> Sequence[int]:
        """The budget of all trials, for a sampler that models trials of others."""
        return (self.epochs,) if learns_from_others(self.sampler) else ()

    def next_training(self) -> tuple[int, int] | None:
        """A new trial that the sampler proposes."""
        return None if len(self.trials) == self.n else (self.begin_trial(self._projection.propose()), self.epochs)

    def observe(self, report: Report) -> list[Decision]:
        """Process a report as the base class does, and note the best epoch of its trial."""
        self.check_bound()
        number, best = report.trial, self._best.get(report.trial, {})
        is_measured = number in self.training and report.state is not TrialState.FAILED
        if is_measured and self.problem.of_best.improves(report.metrics, best):
            self._best[number] = report.metrics
        return super().observe(report)

    def reached(self, report: Report, score: Score) -> list[Decision]:
        """Give the sampler the values of a trial by which it ranks; without a best epoch it counts as failed."""
        best = self._best.pop(report.trial, None) if self.problem.of_best.objectives else report.metrics
        if best is None:
            self._projection.mark_failed(report.trial)
        else:
            self._projection.add_report(replace(report, metrics=best))
        return [Decision(report.trial, TrialState.COMPLETE)]

    def failed(self, number: int) -> list[Decision]:
        """Report a failed trial to the sampler."""
        self._best.pop(number, None)
        self._projection.mark_failed(number)
        return []
