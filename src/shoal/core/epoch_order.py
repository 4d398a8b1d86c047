"""Which epoch of a trial is its best, by which it ranks and whose weights are kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.constraint import Constraint, violation, with_directions
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective, first_objective

__all__ = ["LAST_EPOCHS", "EpochOrder"]


@dataclass(frozen=True)
class EpochOrder:
    """The order of a trial's epochs: by the violation of constraints, then by one objective; of equal ones the earlier.

    Args:
        objectives: The one that decides, then the others of the study; empty if trials rank by their last epochs, so
            that none is the best.
    """

    objectives: tuple[Objective, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    @classmethod
    def of(
        cls,
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint],
        rank_by: str,
        best_by: str | Mapping[str, str] | None,
    ) -> "EpochOrder":
        """The order from the arguments of `tune`.

        Args:
            rank_by: "best" or "last".
            best_by: Metric of the objective that decides, or another metric with its mode; None: the first objective.

        Raises:
            AlgorithmError: `rank_by` is neither, or `best_by` names no metric with one mode.
        """
        if rank_by not in ("best", "last"):
            raise AlgorithmError(f'`rank_by` must be "best" or "last", got {rank_by!r}')
        first = _deciding(objectives, best_by)
        if best_by is not None and rank_by == "last":
            raise AlgorithmError(f'`best_by` chooses the best epoch, and rank_by="last" has none; got {best_by!r}')
        if rank_by == "last":
            return LAST_EPOCHS
        return cls(tuple(dict.fromkeys((first, *objectives))), tuple(constraints))

    @property
    def metric(self) -> str | None:
        """Name of the metric that decides; None if trials rank by their last epochs."""
        return self.objectives[0].metric if self.objectives else None

    def directions(self, objectives: Sequence[Objective], constraints: Iterable[Constraint]) -> tuple[Objective, ...]:
        """The objectives of a study, and this order's, as `with_directions` adds its constraints to them."""
        return with_directions((*objectives, *self.objectives), constraints)

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


def _deciding(objectives: Sequence[Objective], best_by: str | Mapping[str, str] | None) -> Objective:
    """The objective of the argument `best_by`, one of those of the study or another."""
    if best_by is None:
        return objectives[0]
    own = {objective.metric: objective for objective in objectives}
    if isinstance(best_by, str):
        if best_by in own:
            return own[best_by]
        raise AlgorithmError(
            f"`best_by` must be one of the metrics {', '.join(map(repr, own))}, got {best_by!r}; another metric needs "
            f'its mode: best_by={{{best_by!r}: "min"}}'
        )
    found = [Objective(metric, mode) for metric, mode in best_by.items() if mode in ("min", "max")]
    if len(best_by) != 1 or not found:
        raise AlgorithmError(f'`best_by` must be one metric with its mode, such as {{"loss": "min"}}, got {best_by!r}')
    if (mine := own.get(found[0].metric, found[0])) != found[0]:
        raise AlgorithmError(f"`best_by` must have the mode of the metric, {mine.mode!r}, got {best_by!r}")
    return found[0]


LAST_EPOCHS = EpochOrder()
"""The order of a study whose trials rank by their last epochs."""
