"""A projection of partly trained trials onto one budget, which an Optuna sampler models."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.algorithms.base import Problem
from shoal.algorithms.sampler import (
    check_constrained,
    check_searchable,
    directions,
    log_optuna_warnings,
    make_sampler,
    sampler_text,
    without_optuna_info,
)
from shoal.core.domain import Domain
from shoal.core.errors import AlgorithmError, ShoalError
from shoal.core.trial import Config, EarlierTrial, Report, derive_seed

if TYPE_CHECKING:
    import optuna

__all__ = ["Projection", "projection"]

_STARTUP = 10
"""Least number of trials for Optuna's TPE and GP to model anything; with fewer, a new budget would make them random."""

_MOST_ATTEMPTS = 50
"""Most proposals that the conditions of the space may refuse in a row, before a random configuration is taken."""

_TRIAL_PROPOSALS = 12
"""Proposals of a trial of a sampler: two more than `_STARTUP`, so that its model is built and used."""


_MAX_EXCESS = 1e9
"""Greatest excess that a sampler is shown, that of a NaN or a missing value: GP fits finite numbers only."""


class Projection:
    """An in-memory Optuna study in which trials count by their values at one budget, the modelled one.

    As in BOHB (Falkner et al. 2018, section 3), that is the highest budget with enough observations, or the lowest if
    none has. Enough are d + 3 for d parameters, BOHB's N_min + 2, and at least ten. The sampler sees a trial

    - as COMPLETE with its value at the modelled budget if it has one, whether it is paused, trained further, or ended
      since. Not as PRUNED: TPE ranks all pruned trials below all complete ones, and the other samplers ignore them;
    - as COMPLETE too if other trials were promoted to that budget and it was not: with its value at the highest budget
      it reached, but as no better than the worst at the modelled one, as halving found. BOHB leaves these trials out.
      Then the model contains only good regions, and TPE, which looks for places unlike those of all but the very best
      trials, goes where halving has found nothing;
    - as RUNNING until it has its first value. TPE counts running trials as bad ones and GP expects of them what it
      models, both so that concurrent proposals keep apart (constant liar). A trial with a value must not stay RUNNING:
      TPE would be pushed away from the best trials, which are trained longest;
    - as WAITING while it is trained towards the modelled budget: it is good, to an unknown degree. Every sampler
      ignores WAITING trials, and the cache of the space (IntersectionSearchSpace) allows for their return;
    - as FAIL if it failed, or measured NaN, before it had a value at that budget.

    A proposal that the conditions of the space refuse is COMPLETE with the worst value of each metric at that budget,
    and the sampler is asked again, up to 50 times, before a random configuration is taken. As FAIL it would be ignored:
    where the best values are expected beyond a condition, TPE and GP would propose nothing else.

    The study gets no other input, so the same seed and the same observations in the same order give the same proposals.

    Finished trials of earlier studies count as those of this one, by their values at its budgets; one that was not
    stopped, and has no value at the modelled budget, is WAITING.

    Constraints are shown with the values: each by its excess, a violated one above 0.

    Args:
        budgets: Epochs at which trials have values, rising.
    """

    def __init__(
        self, problem: Problem, sampler: "optuna.samplers.BaseSampler", name: str, budgets: Sequence[int]
    ) -> None:
        from shoal.algorithms.projected_storage import ProjectedStorage, ProjectedStudy

        self._problem = problem
        self._name = name
        self._min_observations = max(_STARTUP, len(problem.space.domains()) + 3)
        self._modelled_budget = budgets[0]
        self._storage = ProjectedStorage()
        with without_optuna_info():
            self._id = self._storage.create_new_study(directions(problem.objectives), "projection")
        self._study = ProjectedStudy("projection", self._storage, sampler)
        self._budgets = frozenset(budgets)
        self._begun = 0  # trials of this study; those of earlier ones have the numbers -1, -2 ...
        self._numbers: dict[int, int] = {}  # number in the Optuna study, where refused proposals have numbers, too
        self._results: dict[int, dict[int, Sequence[float]]] = {}  # for each trial, epochs -> values
        self._excesses: dict[int, dict[str, float]] = {}  # number of a trial -> its newest excesses by constraint
        self._failed: set[int] = set()
        self._training: set[int] = set()  # trials in training beyond their last value
        self._not_promoted: set[int] = set()  # trials with values, but none at the modelled budget
        self._worst = self._no_worst = (-math.inf,) * len(problem.objectives)  # greatest finite losses at that budget
        self._reached: Counter[int] = Counter()  # epochs -> number of trials with values there
        self._logged: set[str] = set()

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics whose values the sampler gets."""
        return [objective.metric for objective in self._problem.objectives]

    def propose(self) -> Config:
        """The configuration of the next trial, its parameters named by their paths."""
        number = self._begun
        self._begun += 1
        if number < len(self._problem.initial):
            return self._add_config(number, self._problem.sample(number))
        try:
            with log_optuna_warnings(self._logged):
                for _ in range(_MOST_ATTEMPTS):
                    proposal = self._study.ask()
                    config = self._problem.draw(number, lambda path, domain: _suggest(proposal, path, domain))  # noqa: B023
                    if config is not None:
                        self._add(number, proposal.number)
                        return config
                    self._refuse(proposal.number)
        except ShoalError:
            raise
        except Exception as error:
            raise self._search_error(error) from error
        return self._add_config(number, self._problem.sample(number))

    def add_earlier(self, earlier: EarlierTrial) -> None:
        """Add a trial of an earlier study, before the first proposal."""
        number = -len(self._results) - 1
        self._add_config(number, earlier.config)
        for epochs in sorted(earlier.metrics.keys() & self._budgets):
            self.add_report(Report(number, epochs, earlier.metrics[epochs]))
        if not earlier.stopped and number not in self._failed:
            self.mark_training(number)

    def _add(self, number: int, optuna_number: int) -> None:
        self._numbers[number] = optuna_number
        self._results[number] = {}

    def _refuse(self, optuna_number: int) -> None:
        """Tell the sampler of a proposal that the conditions of the space refuse: by the worst value of each metric at
        the modelled budget, and as far beyond all constraints; as failed before there is a value.
        """
        from optuna.trial import TrialState as OptunaState

        known = all(map(math.isfinite, self._worst))
        state = OptunaState.COMPLETE if known else OptunaState.FAIL
        goals = zip(self._problem.objectives, self._worst, strict=True)
        values = [goal.loss(worst) for goal, worst in goals] if known else None
        excesses = {str(each): _MAX_EXCESS for each in self._problem.constraints} if known else {}
        self._study.sampler.after_trial(self._study, self._optuna_trial(optuna_number), state, values)
        self._storage.show(self._optuna_trial(optuna_number), state, values, excesses)

    def _add_config(self, number: int, config: Config) -> Config:
        """The configuration of a trial that the sampler does not propose but sees: an initial point, a random one in
        place of proposals that are all refused, or one of an earlier study.
        """
        from optuna.trial import TrialState as OptunaState
        from optuna.trial import create_trial

        parameters = self._problem.space.parameters(config)
        trial = create_trial(
            state=OptunaState.RUNNING,
            params={path: domain.optuna_value(value) for path, (domain, value) in parameters.items()},
            distributions={path: domain.to_optuna() for path, (domain, _) in parameters.items()},
        )
        created = self._storage.create_new_trial(self._id, trial)
        self._add(number, self._storage.get_trial_number_from_id(created))
        return config

    def add_report(self, report: Report) -> None:
        """Add the values of a trial at one of the budgets, and its excesses."""
        self._excesses[report.trial] = {
            str(each): min(each.excess(report.metrics.get(each.metric)), _MAX_EXCESS)
            for each in self._problem.constraints
        }
        self.add_values(report.trial, report.epoch, self._problem.values(report))

    def add_values(self, number: int, epochs: int, values: Sequence[float]) -> None:
        """Add the values of a trial at one of the budgets; with a NaN the trial counts as failed."""
        if any(map(math.isnan, values)):
            self.mark_failed(number)
            return
        if not self._results[number]:
            self._tell_sampler(number, values)
        self._results[number][epochs] = values
        self._training.discard(number)
        self._reached[epochs] += 1
        previous_budget, worst = self._modelled_budget, self._worst
        if epochs == self._modelled_budget:
            self._worst = _worse(self._worst, self._losses(values))
        elif epochs > self._modelled_budget and self._reached[epochs] >= self._min_observations:
            self._modelled_budget = epochs
            reached = (self._losses(seen[epochs]) for seen in self._results.values() if epochs in seen)
            self._worst = functools.reduce(_worse, reached, self._no_worst)
            self._not_promoted = {other for other, seen in self._results.items() if seen and epochs not in seen}
        if self._modelled_budget in self._results[number]:
            self._not_promoted.discard(number)
        else:
            self._not_promoted.add(number)
        if previous_budget != self._modelled_budget:
            changed: Iterable[int] = self._results
        else:
            changed = {number} if worst == self._worst else {number, *self._not_promoted}
        for other in changed:
            self._update_state(other)

    def mark_training(self, number: int) -> None:
        """Mark a trial as in training beyond its last value."""
        self._training.add(number)
        self._update_state(number)

    def mark_failed(self, number: int) -> None:
        """Mark a trial as failed."""
        if not self._results[number]:
            self._tell_sampler(number, None)
        self._failed.add(number)
        self._training.discard(number)
        self._update_state(number)

    def _losses(self, values: Sequence[float]) -> tuple[float, ...]:
        """Losses by the metrics; -inf for an infinite loss, which is not a worst value."""
        losses = [goal.loss(value) for goal, value in zip(self._problem.objectives, values, strict=True)]
        return tuple(loss if math.isfinite(loss) else -math.inf for loss in losses)

    def _update_state(self, number: int) -> None:
        from optuna.trial import TrialState as OptunaState

        seen, trial = self._results[number], self._trial(number)
        excesses = self._excesses.get(number, {})
        if self._modelled_budget in seen:
            self._storage.show(trial, OptunaState.COMPLETE, seen[self._modelled_budget], excesses)
        elif number in self._failed:
            self._storage.show(trial, OptunaState.FAIL)
        elif number in self._training:
            self._storage.show(trial, OptunaState.WAITING)
        elif seen:
            self._storage.show(trial, OptunaState.COMPLETE, self._censored(seen[max(seen)]), excesses)

    def _censored(self, values: Sequence[float]) -> Sequence[float]:
        """The values of a trial that did not reach the modelled budget, at best equal to the worst there."""
        goals = zip(self._problem.objectives, values, self._worst, strict=True)
        return tuple(goal.loss(max(goal.loss(value), worst)) for goal, value, worst in goals)

    def _trial(self, number: int) -> "optuna.trial.FrozenTrial":
        return self._optuna_trial(self._numbers[number])

    def _optuna_trial(self, number: int) -> "optuna.trial.FrozenTrial":
        return self._storage.get_trial(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    def _tell_sampler(self, number: int, values: Sequence[float] | None) -> None:
        """Report the first result of a trial to the sampler once, as `Study.tell` does, because some samplers keep
        state."""
        from optuna.trial import TrialState as OptunaState

        state = OptunaState.FAIL if values is None else OptunaState.COMPLETE
        try:
            with log_optuna_warnings(self._logged):
                self._study.sampler.after_trial(self._study, self._trial(number), state, values)
        except Exception as error:
            raise self._search_error(error) from error

    def _search_error(self, error: Exception) -> AlgorithmError:
        """An error that names the sampler's exception, the parameters and the metrics."""
        space = ", ".join(f"`{path}` {domain}" for path, (domain, _) in self._problem.space.domains().items())
        return AlgorithmError(
            f"{self._name} cannot search {space or 'a space without parameters'} by "
            f"{', '.join(self.metrics)}: "
            f"{type(error).__name__}: {error}. Choose another sampler, such as 'tpe', or another space"
        )


def projection(
    problem: Problem,
    sampler: "str | Callable[[int], optuna.samplers.BaseSampler]",
    budgets: Sequence[int],
    n: int,
) -> Projection:
    """Make a projection of the trials of earlier studies; a user's sampler must first repeat its proposals for a seed,
    with random values.
    """
    check_searchable(sampler, problem)
    name, seed = sampler_text(sampler), problem.seed % 2**32
    own = make_sampler(sampler, seed)
    check_constrained(own, name, problem)
    if not isinstance(sampler, str):
        others = [make_sampler(sampler, seed) for _ in range(2)]
        if len({id(each) for each in (own, *others)}) < 3:
            raise AlgorithmError(f"`sampler` must make a new sampler whenever it is called, {sampler!r} does not")
        first, second = (_trial_proposals(Projection(problem, other, name, budgets), budgets[0], n) for other in others)
        if first != second:
            kind = type(own).__name__
            raise AlgorithmError(
                f"{name} does not propose the same again for the same seed, so that the study could not be resumed; "
                f"pass the seed on: lambda seed: {kind}(seed=seed)"
            )
    found = Projection(problem, own, name, budgets)
    for earlier in problem.earlier:
        found.add_earlier(earlier)
    return found


def _worse(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """The greater of two losses by each metric."""
    return tuple(map(max, one, other))


def _trial_proposals(projection: Projection, budget: int, n: int) -> list[Config]:
    """The proposals of a sampler for random values."""
    proposals = []
    for number in range(min(n, _TRIAL_PROPOSALS)):
        proposals.append(projection.propose())
        projection.add_values(number, budget, [derive_seed("rehearsal", number, x) / 2**63 for x in projection.metrics])
    return proposals


def _suggest(proposal: "optuna.Trial", path: str, domain: Domain) -> Any:
    """The sampler's value of a domain; for a choice, the position."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match domain.to_optuna():
        case FloatDistribution(low=low, high=high, step=step, log=log):
            return domain.from_optuna_value(proposal.suggest_float(path, low, high, step=step, log=log))
        case IntDistribution(low=low, high=high, step=step, log=log):
            return domain.from_optuna_value(proposal.suggest_int(path, low, high, step=step, log=log))
        case CategoricalDistribution(choices=choices):
            return domain.from_optuna_value(proposal.suggest_categorical(path, choices))
        case other:
            raise AlgorithmError(f"`{path}`: {domain} is {other} to Optuna, which no sampler here supports")
