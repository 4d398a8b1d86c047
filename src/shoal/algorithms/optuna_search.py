"""What any of Optuna's samplers proposes."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.algorithms.base import Problem, check_whole
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.domain import Choice, Domain, QUniform
from shoal.errors import AlgorithmError
from shoal.trial import Decision, TrialState

if TYPE_CHECKING:
    import optuna

__all__ = ["SAMPLERS", "OptunaSearch"]

SAMPLERS = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsga2": "NSGAIISampler",
    "random": "RandomSampler",
}
"""Optuna's classes by the names under which they can be asked for."""


@dataclass(eq=False)
class OptunaSearch(ConcurrentAlgorithm):
    """Trains what an Optuna sampler proposes to the end, and tells it what came of that.

    Trials that are being trained are known to the sampler as running, so that with `concurrency` above 1 it is for the
    sampler to keep them apart; "tpe" does (constant liar). Of a trial that fails, or measures NaN, the sampler is told
    that it failed.

    Args:
        n: number of trials.
        epochs: that each is trained.
        sampler: a name of `SAMPLERS`, or a function that makes an Optuna sampler of a seed. With that seed it must
            propose the same again when it is told the same, or the study cannot be resumed.
        concurrency: most trials that are trained at a time, whatever devices there are: the more, the fuller the
            arrays, and the less the sampler knows.

    Raises:
        AlgorithmError: a setting is no integer, or out of range, or there is no such sampler.
    """

    n: int
    epochs: int
    sampler: "str | Callable[[int], optuna.samplers.BaseSampler]" = "tpe"
    concurrency: int = 8

    def __post_init__(self) -> None:
        check_whole("n", self.n)
        check_whole("epochs", self.epochs)
        check_whole("concurrency", self.concurrency)
        if not callable(self.sampler) and self.sampler not in SAMPLERS:
            raise AlgorithmError(
                f"`sampler` must be one of {', '.join(SAMPLERS)}, or a function that makes one of a seed, "
                f"got {self.sampler!r}"
            )

    def begin(self, problem: Problem) -> None:
        """Open an empty study of Optuna's in memory."""
        super().begin(problem)
        self._study = _study(self._made(problem.seed % 2**32), problem.mode)
        self._proposals: list[optuna.Trial] = []

    def _made(self, seed: int) -> "optuna.samplers.BaseSampler":
        from optuna import samplers
        from optuna.exceptions import ExperimentalWarning

        if callable(self.sampler):
            return self.sampler(seed)
        kind = getattr(samplers, SAMPLERS[self.sampler])
        settings = {"constant_liar": True} if self.sampler == "tpe" else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                made: samplers.BaseSampler = kind(seed=seed, **settings)
        except ImportError as error:
            raise AlgorithmError(f"sampler {self.sampler!r} needs a package that is not installed: {error}") from error
        return made

    def next_stretch(self) -> tuple[int, int] | None:
        """What the sampler proposes, its parameters named by their paths."""
        if len(self.trials) == self.n:
            return None
        proposal = self._study.ask()
        self._proposals.append(proposal)
        config = self.problem.space.draw(lambda path, domain: _suggested(proposal, path, domain))
        return self.begin_trial(config), self.epochs

    def reached(self, number: int, epoch: int, value: float) -> list[Decision]:
        """Tell the sampler what a trial came to."""
        if math.isnan(value):
            self.failed(number)
        else:
            self._study.tell(self._proposals[number], value)
        return [Decision(number, TrialState.COMPLETE)]

    def failed(self, number: int) -> list[Decision]:
        """Tell the sampler that nothing came of a trial."""
        from optuna.trial import TrialState as Told

        self._study.tell(self._proposals[number], state=Told.FAIL)
        return []

    @property
    def has_paused(self) -> bool:
        """Never: a trial is trained to the end."""
        return False


def _study(sampler: "optuna.samplers.BaseSampler", mode: str) -> "optuna.Study":
    """An empty one, made without a word."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler, direction="minimize" if mode == "min" else "maximize")
    finally:
        optuna.logging.set_verbosity(before)


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
