"""What any of Optuna's samplers proposes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.algorithms.base import Problem, Totals, check_whole
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.algorithms.projection import projection
from shoal.algorithms.sampler import check_sampler
from shoal.core.trial import Decision, Report, TrialState

if TYPE_CHECKING:
    import optuna

__all__ = ["OptunaSearch"]


@dataclass(eq=False)
class OptunaSearch(ConcurrentAlgorithm):
    """Trains what an Optuna sampler proposes to the end, and tells it what came of that.

    Trials that are being trained are known to the sampler as running, so that with `concurrency` above 1 it is for the
    sampler to keep them apart; "tpe" and "gp" do. Of a trial that fails, or measures NaN, the sampler is told that it
    failed. Several metrics are taken by all named samplers but "cmaes".

    Args:
        n: number of trials.
        epochs: that each is trained.
        sampler: a name of `SAMPLERS`, or a function that makes a new Optuna sampler of a seed. With that seed it must
            propose the same again when it is told the same, or the study cannot be resumed. By default "tpe", or of
            several metrics "nsga2", whose first 50 trials are random ones.
        concurrency: most trials that are trained at a time, whatever devices there are: the more, the fuller the
            arrays, and the less the sampler knows.

    Raises:
        AlgorithmError: a setting is no integer, or out of range, or there is no such sampler.
    """

    takes_several_metrics: ClassVar[bool] = True

    n: int
    epochs: int
    sampler: "str | Callable[[int], optuna.samplers.BaseSampler] | None" = None
    concurrency: int = 8

    def __post_init__(self) -> None:
        check_whole("n", self.n)
        check_whole("epochs", self.epochs)
        check_whole("concurrency", self.concurrency)
        if self.sampler is not None:
            check_sampler(self.sampler)

    def begin(self, problem: Problem) -> None:
        """Nothing is known to the sampler.

        Raises:
            SpaceError: the sampler cannot search the space.
            AlgorithmError: it cannot search for another reason.
        """
        super().begin(problem)
        default = "nsga2" if problem.others else "tpe"
        self._projection = projection(problem, self.sampler or default, (self.epochs,), self.n)
        self._values: tuple[float, ...] = ()

    @property
    def totals(self) -> Totals | None:
        """`n` trials, each trained to the end."""
        return Totals(self.n, self.n * self.epochs, self.n * self.epochs)

    def next_stretch(self) -> tuple[int, int] | None:
        """What the sampler proposes."""
        return None if len(self.trials) == self.n else (self.begin_trial(self._projection.propose()), self.epochs)

    def observe(self, report: Report) -> list[Decision]:
        """As of all such algorithms; but every metric must be there."""
        self.check_bound()
        self._values = () if report.state is TrialState.FAILED else self.problem.values(report)
        return super().observe(report)

    def reached(self, number: int, epoch: int, value: float) -> list[Decision]:
        """Tell the sampler what a trial came to."""
        self._projection.saw(number, epoch, self._values)
        return [Decision(number, TrialState.COMPLETE)]

    def failed(self, number: int) -> list[Decision]:
        """Tell the sampler that nothing came of a trial."""
        self._projection.lost(number)
        return []

    @property
    def has_paused(self) -> bool:
        """Never: a trial is trained to the end."""
        return False
