"""Population based training."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from shoal.algorithms.base import Algorithm, Problem, Totals, check_integer, check_number
from shoal.core.distributions import LogNormal, LogRange, Normal, Ordinal, QLogUniform
from shoal.core.domain import Choice, Domain, LogRandInt, LogUniform, QUniform, RandInt, Uniform
from shoal.core.errors import AlgorithmError, SpaceError
from shoal.core.plain import plain_fields
from shoal.core.score import Score, order
from shoal.core.trial import Budget, Config, Decision, Origin, Report, Trial, TrialGroup, TrialState, derive_seed

__all__ = ["PBT"]

_MOST_ATTEMPTS = 100
"""Most changes of a configuration of which one must be allowed by the space's conditions."""


@dataclass(eq=False)
class PBT(Algorithm):
    """A population trained together, in which copies of the best members with changed settings replace the worst
    (Jaderberg et al. 2017, truncation selection).

    Every `interval` epochs the worst floor(n · truncation) members, at least one, are stopped, as are those that failed
    or measured NaN. For each of them a new trial begins: it *exploits* a random one of equally many best members, by
    starting from its weights and its optimizer's state, and *explores* by changing its configuration. Its learning rate
    schedule is that of its own configuration, at the epoch where it begins.

    An explored parameter is drawn anew with probability `resample`, else its number is multiplied by 0.8 or 1.2 within
    its domain, or its option or its value of an `ordinal` or `logrange` is exchanged for an adjacent one. For a domain
    with computed bounds that is done to its quantile, and values computed from others follow them. A change that the
    conditions of the space refuse is drawn again, up to 100 times, after which the copy keeps its configuration. By
    default all numbers are explored: options often decide the structure of a model, whose weights then do not fit.

    Members wait for each other, so that the population trains as full arrays, and the result does not depend on the
    speed of a member.

    Args:
        n: Number of members.
        epochs: Epochs of the population.
        interval: Epochs from one selection to the next.
        truncation: Fraction of the population that is replaced, and that is copied; at most a half.
        resample: Probability that an explored parameter is drawn anew.
        explored: Names of parameters, with dots for nested ones; None for all numbers.

    Raises:
        AlgorithmError: a setting is out of range.
    """

    copies_trials = True
    takes_several_metrics = True

    n: int
    epochs: int
    interval: int = 1
    truncation: float = 0.2
    resample: float = 0.25
    explored: Sequence[str] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n, least=2)
        check_integer("epochs", self.epochs)
        check_integer("interval", self.interval)
        for name, most in (("truncation", 0.5), ("resample", 1.0)):
            check_number(name, getattr(self, name), 0, most)
        if isinstance(self.explored, str):
            raise AlgorithmError(f"`explored` must be a list of names, got {self.explored!r}; give [{self.explored!r}]")

    def begin(self, problem: Problem) -> None:
        """Draw a random first generation.

        Raises:
            SpaceError: a parameter that is to be explored does not exist.
        """
        if (given := len(problem.initial)) > self.n:
            raise AlgorithmError(f"{self!r} begins with {self.n} members, too few for {given} initial points")
        domains = problem.space.domains()
        for name in self.explored or ():
            if name not in domains:
                raise SpaceError(
                    f"`{name}` is to be explored, but the space has {', '.join(domains) or 'no parameters'}"
                )
        self._trials = [problem.trial(number, problem.sample(number)) for number in range(self.n)]
        self._epoch = 0
        self._scores: dict[int, Score] = {}  # of the members that reached the end of the generation
        self._training: set[int] = set()
        self._next = tuple(self._trials)  # members of the next generation

    @property
    def totals(self) -> Totals | None:
        """Sums over all generations, of equal size; in each but the first, new trials replace the worst.

        A member that fails or measures NaN is replaced, too: by one trial more than this number.
        """
        generations = -(-self.epochs // self.interval)
        trials = self.n + (generations - 1) * (self.n - self._kept(self.n))
        return Totals(trials, self.n * self.epochs, self.n * self.epochs)

    @property
    def _replaced(self) -> int:
        """Number of members that are replaced, and that are copied."""
        return max(1, int(self.n * self.truncation)) if self.truncation else 0

    def _kept(self, measured: int) -> int:
        """Number of members that continue, of `measured` whose metric is not NaN."""
        return min(measured, max(1, self._replaced, self.n - self._replaced))

    def next_groups(self, free: int) -> list[TrialGroup]:
        """A whole generation."""
        self.check_bound()
        if not self._next:
            return []
        members, self._next = self._next, ()
        self._training = {trial.number for trial in members}
        name = f"generation {self._epoch // self.interval}"
        return [TrialGroup(members, Budget(self._target), name)]

    @property
    def _target(self) -> int:
        """The last epoch of the generation."""
        return min(self._epoch + self.interval, self.epochs)

    def may_return(self, number: int) -> bool:
        """Whether the trial is of the newest generation, which the next one continues and copies."""
        if any(trial.number == number for trial in self._next):
            return True
        return self._target < self.epochs and (number in self._training or number in self._scores)

    def observe(self, report: Report) -> list[Decision]:
        """Process a report, and select when the last member of a generation has reported.

        Raises:
            AlgorithmError: the trial is unknown, or beyond its budget.
            TaskError: the report lacks the metric.
        """
        number = report.trial
        self.check_begun(number, len(self._trials))
        score = self.problem.score_at_target(report, self._target if number in self._training else None)
        if score is None:
            return []
        has_failed = report.state is TrialState.FAILED
        self._training.discard(number)
        if not has_failed:
            self._scores[number] = score
        if self._target == self.epochs:
            return [] if has_failed else [Decision(number, TrialState.COMPLETE)]
        return [] if self._training else self._select()

    def _select(self) -> list[Decision]:
        """Form the next generation of the better members, and of copies of the best in the places of the others."""
        self._epoch = self._target
        scores, self._scores = self._scores, {}
        ranking = order({number: score for number, score in scores.items() if not score.is_nan})
        if not ranking:
            reason = f"{self.problem.nan_reason(self._epoch)}, as for all trials of the generation"
            return [Decision(number, TrialState.STOPPED, reason) for number in sorted(scores)]
        best = ranking[: max(1, self._replaced)]
        kept = sorted(ranking[: self._kept(len(ranking))])
        copies = [self._copy_of(best) for _ in range(self.n - len(kept))]
        self._next = (*(self._trials[number] for number in kept), *copies)
        ranks = {number: f"ranks {rank} of {len(ranking)}" for rank, number in enumerate(ranking, start=1)}
        return [
            Decision(
                number,
                TrialState.STOPPED,
                f"{ranks.get(number, 'is nan')} at epoch {self._epoch}; copies of the best continue in its place",
            )
            for number in sorted(scores.keys() - set(kept))
        ]

    def _copy_of(self, best: Sequence[int]) -> Trial:
        """A new trial that starts from the checkpoint of one of the best."""
        number = len(self._trials)
        rng = Random(derive_seed(self.problem.seed, "explore", number))
        parent = self._trials[rng.choice(best)]
        config = self._explored(number, parent.config, rng)
        self._trials.append(self.problem.trial(number, config, Origin(parent.number, self._epoch)))
        return self._trials[-1]

    def _explored(self, number: int, config: Config, rng: Random) -> Config:
        """A changed configuration that the space allows; after too many refused ones, the unchanged."""
        known = self.problem.space.parameters(config)

        def pick(path: str, domain: Domain) -> Any:
            if path not in known:
                return domain.sample(rng)
            value = known[path][1]
            explored = not isinstance(domain, Choice) if self.explored is None else path in self.explored
            if not explored:
                return value
            return domain.sample(rng) if rng.random() < self.resample else _perturbed(domain, value, rng)

        for attempt in range(1, _MOST_ATTEMPTS + 1):
            changed = self.problem.draw(number, pick)
            if changed is not None:
                return changed
            rng = Random(derive_seed(self.problem.seed, "explore", number, attempt))
        return copy.deepcopy(config)

    @property
    def finished(self) -> bool:
        """Whether the last generation has ended, or none of its members is left."""
        self.check_bound()
        return not self._next and not self._training


def _perturbed(domain: Domain, value: Any, rng: Random) -> Any:
    """A value near another one; for a choice, both are positions."""
    up = rng.random() < 0.5
    match domain:
        case Choice(options=options):
            return min(max(value + (1 if up else -1), 0), len(options) - 1)
        case RandInt(low=low, high=high) | LogRandInt(low=low, high=high):
            near = max(round(value * 1.2), value + 1) if up else min(round(value * 0.8), value - 1)
            return min(max(near, low), high - 1)
        case QUniform(low=low, high=high, q=q):
            near = max(value * 1.2, value + q) if up else min(value * 0.8, value - q)
            return domain.nearest(min(max(near, low), high))
        case QLogUniform(step=step):
            return domain.nearest(max(value * 1.2, value + step) if up else min(value * 0.8, value - step))
        case Normal(step=step) | LogNormal(step=step):
            near = value * (1.2 if up else 0.8)
            return domain.nearest(near if step is None else max(near, value + step) if up else min(near, value - step))
        case LogRange() | Ordinal():
            position = domain.optuna_value(value) + (1 if up else -1)
            return domain.values[min(max(position, 0), domain.count() - 1)]
        case Uniform(low=low, high=high) | LogUniform(low=low, high=high):
            return min(max(value * (1.2 if up else 0.8), float(low)), float(high))
        case _:
            return domain.sample(rng)
