"""What an Optuna sampler is shown of trials whose training is paused and goes on, and what it proposes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.algorithms.base import Problem
from shoal.algorithms.sampler import check_searchable, directions, heard, made, quiet, sampler_text
from shoal.core.domain import Choice, Domain, QUniform
from shoal.core.errors import AlgorithmError, ShoalError
from shoal.core.trial import Config, derive_seed

if TYPE_CHECKING:
    import optuna

__all__ = ["Projection", "projection"]

_STARTUP = 10
"""Trials without which Optuna's TPE and GP do not model anything; below it, a new budget would make them random."""

_REHEARSED = 12
"""Proposals of a rehearsal: two more than that, so that a model is made and used."""


class Projection:
    """A study of Optuna's in memory, in which trials count by their values at one budget, the modelled one.

    That is, as in BOHB (Falkner et al. 2018, section 3), the highest budget at which there are enough observations;
    the lowest as long as none has. Enough are d + 3 for d parameters, BOHB's N_min + 2, and at least ten. A trial is
    shown to the sampler

    - as COMPLETE with its value at the modelled budget if it has one, whether it is paused, trained further, or ended
      since. Not as PRUNED: TPE ranks all pruned trials below all complete ones, and the other samplers pass them over;
    - as COMPLETE too if others went on to that budget and it did not: with its value at the highest budget that it got
      to, but as no better than the worst at the modelled one, for that is what halving found of it. BOHB leaves these
      out. Then all that is known of the space is where it is good, and TPE, which looks for places unlike those of all
      but the very best trials, goes where halving has found nothing;
    - as RUNNING until it has shown anything at all. TPE counts running trials as bad ones and GP expects of them what
      it models, both so that trials proposed at a time keep apart (constant liar). Who has got to a budget must not
      stay so: TPE would be pushed away from the best, which are trained longest;
    - as WAITING while it goes on towards the modelled budget: it is good, nobody knows how good. Every sampler passes
      these over, and what is cached of the space (IntersectionSearchSpace) allows for their coming back;
    - as FAIL if it failed, or measured NaN, before it had a value at that budget.

    Nothing else goes in, so the same seed and the same observations in the same order give the same proposals.

    Args:
        problem: of the study.
        sampler: proposes; it is used by nobody else.
        name: of the sampler, for errors.
        budgets: epochs after which trials show values, rising.
    """

    def __init__(
        self, problem: Problem, sampler: "optuna.samplers.BaseSampler", name: str, budgets: Sequence[int]
    ) -> None:
        from shoal.algorithms.projected_storage import ProjectedStorage, ProjectedStudy

        self._problem = problem
        self._name = name
        self._enough = max(_STARTUP, len(problem.space.domains()) + 3)
        self._modelled = budgets[0]
        self._storage = ProjectedStorage()
        with quiet():
            self._id = self._storage.create_new_study(directions(problem.objectives), "projection")
        self._study = ProjectedStudy("projection", self._storage, sampler)
        self._seen: list[dict[int, Sequence[float]]] = []  # of each trial, epochs -> values
        self._lost: set[int] = set()
        self._going: set[int] = set()  # that are trained on, beyond what they were seen at
        self._behind: set[int] = set()  # that have values, and none at the modelled budget
        self._worst = -math.inf  # loss at the modelled budget, finite ones alone
        self._reached: Counter[int] = Counter()  # epochs -> trials that have values there
        self._said: set[str] = set()

    @property
    def metrics(self) -> list[str]:
        """That trials show the values of."""
        return [objective.metric for objective in self._problem.objectives]

    def propose(self) -> Config:
        """The configuration of the next trial, its parameters named by their paths.

        Raises:
            AlgorithmError: the sampler has failed.
        """
        try:
            with heard(self._said):
                proposal = self._study.ask()
                config = self._problem.space.draw(lambda path, domain: _suggested(proposal, path, domain))
        except ShoalError:
            raise
        except Exception as error:
            raise self._fault(error) from error
        self._seen.append({})
        return config

    def saw(self, number: int, epochs: int, values: Sequence[float]) -> None:
        """A trial has got to one of the budgets.

        Args:
            number: of the trial, in the order of the proposals.
            epochs: the budget.
            values: of the metrics there; with one that is NaN the trial counts as failed.
        """
        if any(map(math.isnan, values)):
            self.lost(number)
            return
        if not self._seen[number]:
            self._conclude(number, values)
        self._seen[number][epochs] = values
        self._going.discard(number)
        self._reached[epochs] += 1
        modelled, worst = self._modelled, self._worst
        if epochs == self._modelled:
            self._worst = max(self._worst, self._loss(values))
        elif epochs > self._modelled and self._reached[epochs] >= self._enough:
            self._modelled = epochs
            self._worst = max(self._loss(seen[epochs]) for seen in self._seen if epochs in seen)
            self._behind = {other for other, seen in enumerate(self._seen) if seen and epochs not in seen}
        if self._modelled in self._seen[number]:
            self._behind.discard(number)
        else:
            self._behind.add(number)
        if modelled != self._modelled:
            changed: Iterable[int] = range(len(self._seen))
        else:
            changed = {number} if worst == self._worst else {number, *self._behind}
        for other in changed:
            self._show(other)

    def goes_on(self, number: int) -> None:
        """A trial that has got to a budget is trained further."""
        self._going.add(number)
        self._show(number)

    def lost(self, number: int) -> None:
        """A trial has failed."""
        if not self._seen[number]:
            self._conclude(number, None)
        self._lost.add(number)
        self._going.discard(number)
        self._show(number)

    def _loss(self, values: Sequence[float]) -> float:
        """Of the one metric that trials are halved by; -inf for what is infinite, as there is no worse to be told."""
        loss = self._problem.objectives[0].loss(values[0])
        return loss if math.isfinite(loss) else -math.inf

    def _show(self, number: int) -> None:
        from optuna.trial import TrialState as Shown

        seen, trial = self._seen[number], self._trial(number)
        if self._modelled in seen:
            self._storage.show(trial, Shown.COMPLETE, seen[self._modelled])
        elif number in self._lost:
            self._storage.show(trial, Shown.FAIL)
        elif number in self._going:
            self._storage.show(trial, Shown.WAITING)
        elif seen:
            self._storage.show(trial, Shown.COMPLETE, self._left_behind(seen[max(seen)]))

    def _left_behind(self, values: Sequence[float]) -> Sequence[float]:
        """The values of a trial that did not get to the modelled budget, as those who got there make them look."""
        loss = self._problem.objectives[0].loss
        return (loss(max(loss(values[0]), self._worst)),)

    def _trial(self, number: int) -> "optuna.trial.FrozenTrial":
        return self._storage.get_trial(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    def _conclude(self, number: int, values: Sequence[float] | None) -> None:
        """Tell the sampler once that something came of a trial, or nothing, as `Study.tell` does: some take notes.

        Raises:
            AlgorithmError: the sampler has failed.
        """
        from optuna.trial import TrialState as Told

        state = Told.FAIL if values is None else Told.COMPLETE
        try:
            with heard(self._said):
                self._study.sampler.after_trial(self._study, self._trial(number), state, values)
        except Exception as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> AlgorithmError:
        """What a sampler raised, with the parameters that it was asked for."""
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
    """An empty one; a sampler that is not ours has been tried out on the problem, with invented values.

    Args:
        problem: of the study.
        sampler: a name of `SAMPLERS`, or a function that makes an Optuna sampler of a seed.
        budgets: epochs after which trials show values, rising.
        n: number of trials there will be.

    Raises:
        SpaceError: the sampler cannot search the space.
        AlgorithmError: it cannot search for another reason, or raises, or proposes something else for the same seed.
    """
    check_searchable(sampler, problem)
    name, seed = sampler_text(sampler), problem.seed % 2**32
    own = made(sampler, seed)
    if not isinstance(sampler, str):
        others = [made(sampler, seed) for _ in range(2)]
        if len({id(each) for each in (own, *others)}) < 3:
            raise AlgorithmError(f"`sampler` must make a new sampler whenever it is called, {sampler!r} does not")
        first, second = (_rehearsed(Projection(problem, other, name, budgets), budgets[0], n) for other in others)
        if first != second:
            kind = type(own).__name__
            raise AlgorithmError(
                f"{name} does not propose the same again for the same seed, so that the study could not be resumed; "
                f"pass the seed on: lambda seed: {kind}(seed=seed)"
            )
    return Projection(problem, own, name, budgets)


def _rehearsed(rehearsal: Projection, budget: int, n: int) -> list[Config]:
    """What a sampler proposes when it is told invented values."""
    proposals = []
    for number in range(min(n, _REHEARSED)):
        proposals.append(rehearsal.propose())
        rehearsal.saw(number, budget, [derive_seed("rehearsal", number, x) / 2**63 for x in rehearsal.metrics])
    return proposals


def _suggested(proposal: "optuna.Trial", path: str, domain: Domain) -> Any:
    """What the sampler picks of a domain; of a choice, the position."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match domain.to_optuna():
        case FloatDistribution(low=low, high=high, step=step, log=log):
            value = proposal.suggest_float(path, low, high, step=step, log=log)
            return domain.nearest(value) if isinstance(domain, QUniform) else value
        case IntDistribution(low=low, high=high, step=step, log=log):
            return proposal.suggest_int(path, low, high, step=step, log=log)
        case CategoricalDistribution(choices=choices) if isinstance(domain, Choice):
            return domain.position(proposal.suggest_categorical(path, choices))
        case other:
            raise AlgorithmError(f"`{path}`: {domain} is {other} to Optuna, of which no sampler here knows")
