"""Which epoch of a trial is its best, by which it ranks and whose weights are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.constraint import Constraint, violation
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective, first_objective

__all__ = ["LAST_EPOCHS", "EpochOrder"]


@dataclass(frozen=True)
class EpochOrder:
    """The order of a trial's epochs: by the violation of constraints, then by one objective; of equal ones the earlier.

    Args:
        objectives: Those of the study, the one first that decides; empty if trials rank by their last epochs, so that
            none is the best.
    """

    objectives: tuple[Objective, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    @classmethod
    def of(
        cls, objectives: Sequence[Objective], constraints: Sequence[Constraint], rank_by: str, best_by: str | None
    ) -> "EpochOrder":
        """The order from the arguments of `tune`.

        Args:
            rank_by: "best" or "last".
            best_by: Metric of the objective that decides; None: the first.

        Raises:
            AlgorithmError: `rank_by` is neither, or no objective has the metric `best_by`.
        """
        if rank_by not in ("best", "last"):
            raise AlgorithmError(f'`rank_by` must be "best" or "last", got {rank_by!r}')
        names = [objective.metric for objective in objectives]
        if best_by is not None and best_by not in names:
            raise AlgorithmError(f"`best_by` must be one of the metrics {', '.join(map(repr, names))}, got {best_by!r}")
        if best_by is not None and rank_by == "last":
            raise AlgorithmError(f'`best_by` chooses the best epoch, and rank_by="last" has none; got {best_by!r}')
        if rank_by == "last":
            return LAST_EPOCHS
        first = best_by or names[0]
        return cls(tuple(sorted(objectives, key=lambda objective: objective.metric != first)), tuple(constraints))

    def improves(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether an epoch is better than the best one before it; not if a metric of the objectives is missing or NaN.

        Args:
            best: Metrics of the best epoch so far; empty without one.
        """
        if first_objective(metrics, self.objectives) is None:
            return False
        return not best or self._key(metrics) < self._key(best)

    def _key(self, metrics: Mapping[str, float]) -> tuple[float, float]:
        first = self.objectives[0]
        return violation(self.constraints, metrics), first.loss(metrics[first.metric])


LAST_EPOCHS = EpochOrder()
"""The order of a study whose trials rank by their last epochs."""
