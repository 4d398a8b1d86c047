"""ASHA: asynchronous successive halving."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from shoal.algorithms.base import Problem, Totals, check_integer
from shoal.algorithms.bracket import Rung, check_halving, milestones, totals_of
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.algorithms.projection import projection
from shoal.algorithms.sampler import check_sampler, learns_from_others
from shoal.core.errors import AlgorithmError
from shoal.core.fronts import SortedFronts
from shoal.core.plain import plain_fields
from shoal.core.score import Score, order
from shoal.core.trial import Decision, Report, TrialState

if TYPE_CHECKING:
    import optuna

__all__ = ["ASHA"]

VARIANTS = ("promotion", "stopping")


class _AsyncRung:
    """The trials on a rung, ranked by one metric: each trial has its rank by comparisons with the others."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.promoted: deque[int] = deque()
        self.scores: dict[int, Score] = {}
        self._ranking: list[tuple[Score, int]] = []  # ascending
        self._paused: list[tuple[Score, int]] = []  # a heap

    @property
    def count(self) -> int:
        """Number of trials that have reached the rung."""
        return len(self.scores)

    def add(self, number: int, score: Score) -> None:
        """Rank a trial."""
        self.scores[number] = score
        insort(self._ranking, (score, number))

    def rank(self, number: int) -> int:
        """Number of better trials on the rung."""
        return bisect_left(self._ranking, (self.scores[number], number))

    def pause(self, number: int) -> None:
        """Let a ranked trial wait for its promotion."""
        heappush(self._paused, (self.scores[number], number))

    @property
    def best_paused(self) -> tuple[int, int] | None:
        """The rank of the best waiting trial, and its number; None if none waits."""
        return (self.rank(self._paused[0][1]), self._paused[0][1]) if self._paused else None

    def pop_best(self) -> int:
        """Let the best waiting trial wait no more."""
        return heappop(self._paused)[1]

    def pop_all(self) -> list[int]:
        """Let no trial wait any more; return those that did, the best first."""
        keys, self._paused = sorted(self._paused), []
        return [number for _, number in keys]


class _SetRung(_AsyncRung):
    """The trials on a rung, ranked by several metrics as `shoal.core.score.order` does: each new one changes ranks."""

    def __init__(self, epochs: int) -> None:
        super().__init__(epochs)
        self._classes: list[tuple[bool, float]] = []  # of all trials, ascending; the front is compared within a class
        self._fronts: dict[tuple[bool, float], SortedFronts] = {}  # by class
        self._waiting: dict[tuple[bool, float], set[int]] = {}  # by class
        self._best: tuple[int, int] | None = None  # without the changes since

    def add(self, number: int, score: Score) -> None:
        self.scores[number] = score
        insort(self._classes, score[:2])
        self._fronts.setdefault(score[:2], SortedFronts()).add(number, score.losses)
        self._best = None

    def rank(self, number: int) -> int:
        group = self.scores[number][:2]
        return bisect_left(self._classes, group) + self._fronts[group].rank(number)

    def pause(self, number: int) -> None:
        self._waiting.setdefault(self.scores[number][:2], set()).add(number)
        self._best = None

    @property
    def best_paused(self) -> tuple[int, int] | None:
        if self._best is None and self._waiting:
            group = min(self._waiting)
            rank, number = self._fronts[group].best_of(self._waiting[group])
            self._best = bisect_left(self._classes, group) + rank, number
        return self._best

    def pop_best(self) -> int:
        if (best := self.best_paused) is None:
            raise IndexError("no trial waits")
        group = self.scores[best[1]][:2]
        self._waiting[group].remove(best[1])
        if not self._waiting[group]:
            del self._waiting[group]
        self._best = None
        return best[1]

    def pop_all(self) -> list[int]:
        waiting = set().union(*self._waiting.values())
        self._waiting, self._best = {}, None
        return [number for number in order(self.scores) if number in waiting]


@dataclass(eq=False)
class ASHA(ConcurrentAlgorithm):
    """Successive halving that does not wait until a rung is complete (Li et al. 2020, Algorithm 2).

    Trials are trained for `min_epochs`, then `eta` times as long, and so on up to `max_epochs`: these are the rungs.
    Promotions follow from the results known at the time:

    - "promotion": when fewer than `concurrency` trials train, the best trial of a rung is promoted if it is among the
      top floor(m / eta) of the m trials there so far. The highest rung with such a trial comes first; without any, a
      new trial begins. A trial that is not promoted at first may be promoted when more trials have reached its rung.
    - "stopping": a trial that reaches a rung is promoted if it is among the top floor(m / eta) of the m trials there so
      far, or if m is below eta; else it is stopped at once.

    With several metrics the ranking is that of MO-ASHA (Schmucker et al. 2021), see `shoal.core.score.order`.

    The paper's search has no last trial, so one rule is added: when all trials have begun, none can be promoted, and
    none has a metric other than NaN at `max_epochs`, the best trial of the highest rung is promoted.

    New trials are random, or come from an Optuna sampler that models the results of the rungs (`Projection`). With
    "tpe" the model is that of BOHB (Falkner et al. 2018), without BOHB's synchronous rungs and its random third of the
    configurations; with "gp" the search resembles MOBSTER (Klein et al. 2020).

    Args:
        n: Number of trials.
        max_epochs: Longest training of a trial; R in the paper.
        eta: Reduction factor: one in `eta` trials is promoted.
        min_epochs: Epochs of the first rung; r in the paper.
        concurrency: Largest number of trials in training at a time, on any number of devices. With more trials the
            arrays are larger, but each promotion is decided from fewer results.
        variant: "promotion", as in the paper, or "stopping".
        sampler: None for random configurations, a name of `SAMPLERS`, or a function that makes a new Optuna sampler
            from a seed. "nsga2" and "cmaes" need generations of trials with a value at the modelled budget; few trials
            reach that budget, so these samplers improve late.
        group_by: Parameters by which configurations are ordered, see `Problem.group_by`.

    Raises:
        AlgorithmError: a setting is not an integer, out of range, or not the name of a variant or sampler.
    """

    takes_several_metrics = True

    n: int
    max_epochs: int
    eta: int = 3
    min_epochs: int = 1
    concurrency: int = 32
    variant: str = "promotion"
    sampler: "str | Callable[[int], optuna.samplers.BaseSampler] | None" = None
    group_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n)
        check_halving(self.min_epochs, self.max_epochs, self.eta)
        check_integer("concurrency", self.concurrency)
        if self.variant not in VARIANTS:
            raise AlgorithmError(f"`variant` must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        if self.sampler is not None:
            check_sampler(self.sampler)

    def begin(self, problem: Problem) -> None:
        """Begin with empty rungs.

        Raises:
            SpaceError: the sampler cannot search the space.
            AlgorithmError: the sampler cannot be used for another reason.
        """
        super().begin(problem)
        budgets = self._budgets
        self._rungs = [(_SetRung if problem.other_objectives else _AsyncRung)(epochs) for epochs in budgets]
        self._projection = None if self.sampler is None else projection(problem, self.sampler, budgets, self.n)
        self._has_final_value = False  # whether a trial has a metric other than NaN at `max_epochs`

    @property
    def _budgets(self) -> list[int]:
        """Epochs of the rungs."""
        return milestones(self.min_epochs, self.max_epochs, self.eta)

    @property
    def modelled_budgets(self) -> Sequence[int]:
        """Epochs of the rungs, for a sampler that models trials of others."""
        return self._budgets if self.sampler is not None and learns_from_others(self.sampler) else ()

    @property
    def totals(self) -> Totals | None:
        """`n` trials. The number of promotions depends on the order of the reports: at most all trials are promoted.

        The lower bound on the epochs is that of synchronous successive halving. For the variant "stopping" only the
        first eta - 1 trials of each rung are sure to be promoted, since they are not compared.
        """
        rungs: list[Rung] = []
        for epochs in self._budgets:
            before = rungs[-1].trials if rungs else 0
            promoted = min(before, self.eta - 1) if self.variant == "stopping" else max(1, before // self.eta)
            rungs.append(Rung(promoted if rungs else self.n, epochs))
        least = totals_of([rungs])
        return Totals(self.n, least.least, self.n * self.max_epochs)

    def next_training(self) -> tuple[int, int] | None:
        """A promoted trial, from the highest rung down; else a new trial."""
        for rung, above in zip(reversed(self._rungs[:-1]), reversed(self._rungs), strict=False):
            if rung.promoted:
                return self._resume_training(rung.promoted.popleft()), above.epochs
            if self._may_promote(rung):
                return self._resume_training(rung.pop_best()), above.epochs
        if len(self.trials) == self.n:
            return None
        config = None if self._projection is None else self._projection.propose()
        return self.begin_trial(config), self._rungs[0].epochs

    def _resume_training(self, number: int) -> int:
        if self._projection is not None:
            self._projection.mark_training(number)
        return number

    def _may_promote(self, rung: _AsyncRung) -> bool:
        places = rung.count // self.eta
        return places > 0 and (best := rung.best_paused) is not None and best[0] < places

    def reached(self, report: Report, score: Score) -> list[Decision]:
        """Decide on the trial; when no trial can be promoted any more, decide on all that are left."""
        if self._projection is not None:
            self._projection.add_report(report)
        rung = next(rung for rung in self._rungs if rung.epochs == report.epoch)
        return self._rank(report.trial, score, rung) + self._end_if_exhausted()

    def failed(self, number: int) -> list[Decision]:
        """Remove a failed trial from the search."""
        if self._projection is not None:
            self._projection.mark_failed(number)
        return self._end_if_exhausted()

    def _rank(self, number: int, score: Score, rung: _AsyncRung) -> list[Decision]:
        if rung is self._rungs[-1]:
            self._has_final_value = self._has_final_value or not score.is_nan
            return [Decision(number, TrialState.COMPLETE)]
        rung.add(number, score)
        if score.is_nan:
            return [Decision(number, TrialState.STOPPED, self.problem.nan_reason(rung.epochs))]
        if self.variant == "promotion":
            rung.pause(number)
            return []
        if rung.count < self.eta or rung.rank(number) < rung.count // self.eta:
            rung.promoted.append(number)
            return []
        return [self._stopped(number, rung)]

    def _end_if_exhausted(self) -> list[Decision]:
        """When no trial is in training and none can be promoted, promote one to `max_epochs`, or stop all others."""
        if self.training or len(self.trials) < self.n or any(rung.promoted for rung in self._rungs):
            return []
        if any(map(self._may_promote, self._rungs)):
            return []
        highest = next((rung for rung in reversed(self._rungs) if rung.best_paused), None)
        if highest is not None and not self._has_final_value:
            highest.promoted.append(highest.pop_best())
            return []
        return [self._stopped(number, rung) for rung in self._rungs for number in rung.pop_all()]

    def _stopped(self, number: int, rung: _AsyncRung) -> Decision:
        count = rung.count
        promotions = count // self.eta
        if promotions:
            rule = "only the best continues" if promotions == 1 else f"the best {promotions} continue"
        else:  # `_end_if_exhausted` promoted the best
            end = self.max_epochs
            rule = f"of fewer than {self.eta} trials the best continues only if no trial has reached epoch {end}"
        note = rung.scores[number].note
        reason = f"rank {rung.rank(number) + 1} of {count} at epoch {rung.epochs}; {rule}{note}"
        return Decision(number, TrialState.STOPPED, reason)

    @property
    def has_paused(self) -> bool:
        """Whether a trial on a rung may still be promoted."""
        return any(rung.promoted or rung.best_paused for rung in self._rungs)
