"""The algorithm of a study that names none."""

from dataclasses import dataclass
from importlib.util import find_spec

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm, check_integer
from shoal.algorithms.grid import Grid
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.random import Random
from shoal.core.errors import AlgorithmError
from shoal.core.space import Space

__all__ = ["DEFAULT_EPOCHS", "Chosen", "SearchBudget", "choose"]

DEFAULT_EPOCHS = 27
"""Epochs of the longest trials where neither the user nor the task says them: three halvings by three."""

ETA = 3

ENOUGH_EPOCHS = ETA**2
"""Epochs from which on halving pays: the first rungs then cost a small part of the longest trials."""

ENOUGH_TRIALS = ETA**2
"""Trials from which on there is enough to halve, or to model."""

WIDTH = 8
"""Members that an array is expected to have before anything is measured."""

MODEL_ROUNDS = 2
"""A model pays if the trials come in at least so many rounds: proposals of one round know nothing of each other."""

MOST_ENUMERATED = 10_000
"""Most points of a space with conditions that are enumerated to count those which the conditions allow."""


@dataclass(frozen=True)
class SearchBudget:
    """What a study may spend.

    Args:
        trials: Configurations to try at most.
        epochs: Epochs of the longest trials.
        devices: Devices that train at the same time.
        fuses: Whether trials may share an array.
        repeats: Trials of each configuration.
        max_concurrent: Most trials that train at the same time; None: no limit.

    Raises:
        AlgorithmError: a number is no integer of at least 1.
    """

    trials: int
    epochs: int
    devices: int
    fuses: bool
    repeats: int = 1
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        check_integer("trials", self.trials)
        check_integer("epochs", self.epochs)

    @property
    def slots(self) -> int:
        """Configurations that train at the same time: those of an array on each device, or one; at most all."""
        trials = self.devices * (WIDTH if self.fuses else 1)
        if self.max_concurrent is not None:
            trials = min(trials, self.max_concurrent)
        return max(1, min(self.trials, trials // self.repeats))


@dataclass(frozen=True)
class Chosen:
    """An algorithm, and why it was chosen, in words."""

    algorithm: Algorithm
    why: str


def choose(space: Space, budget: SearchBudget, metrics: int = 1, *, has_optuna: bool | None = None) -> Chosen:
    """The algorithm that suits a space and a budget; docs/benchmarks/regret.md has the figures behind the rule.

    Args:
        metrics: Number of metrics of the study.
        has_optuna: Whether Optuna is installed; None: find out.

    Raises:
        AlgorithmError: several metrics need Optuna, which is not installed.
    """
    trials, epochs, slots = budget.trials, budget.epochs, budget.slots
    optuna = find_spec("optuna") is not None if has_optuna is None else has_optuna
    if metrics > 1:
        if not optuna:
            raise AlgorithmError(
                f"a search by {metrics} metrics needs Optuna, which is not installed. Install it with: pip install "
                "optuna, or give one metric"
            )
        return Chosen(OptunaSearch(trials, epochs, concurrency=slots), f"there are {metrics} metrics")
    points = _points(space)
    if points is not None and points <= trials:
        return Chosen(Grid(epochs), f"the space has {points} points, and {trials} trials try them all")
    if trials < ENOUGH_TRIALS:
        return Chosen(Random(trials, epochs), f"{trials} trials are too few to learn from each other")
    models, model_why = _models(trials, slots, optuna)
    if epochs >= ENOUGH_EPOCHS:
        why = f"trials of {epochs} epochs are long enough to stop most of them early{model_why}"
        return Chosen(ASHA(trials, epochs, ETA, concurrency=slots, sampler="tpe" if models else None), why)
    why = f"trials of {epochs} epochs are too short to stop them early{model_why}"
    return Chosen(OptunaSearch(trials, epochs, concurrency=slots) if models else Random(trials, epochs), why)


def _points(space: Space) -> int | None:
    """Number of configurations of a space; of a large one with those that its conditions refuse."""
    size = space.size
    return len(space.grid()) if size is not None and size <= MOST_ENUMERATED and space.is_restricted else size


def _models(trials: int, slots: int, optuna: bool) -> tuple[bool, str]:
    """Whether a sampler models the results, and why."""
    if trials < MODEL_ROUNDS * slots:
        return False, f"; {slots} at a time leave too few results to model"
    if not optuna:
        return False, "; a model of the results needs Optuna, which is not installed"
    return True, f"; {slots} at a time leave results to model"
