"""Whether the best value of a study still improves, trial by trial in the order of their numbers."""

import math

from shoal.algorithms.rules import Plateau
from shoal.core.constraint import violation, with_directions
from shoal.spec import StudySpec
from shoal.study.trials import TrialTable

__all__ = ["ImprovementTracker", "best_value"]


def best_value(trials: TrialTable, configuration: int, spec: StudySpec) -> float | None:
    """The best value of the first metric of a configuration, an aggregate if it is repeated; None if one of its trials
    has none or has failed. With constraints it is the last value, and None unless it is feasible.
    """
    records = [trials.get(number) for number in spec.repetition.trials(configuration)]
    sound = [record for record in records if record is not None and not record.has_failed]
    valued = [record.metrics if spec.constraints else record.best for record in sound]
    if len(valued) < len(records):
        return None
    metrics = spec.repetition.aggregated(valued, with_directions(spec.objectives, spec.bounds))
    return None if violation(spec.bounds, metrics) else metrics.get(spec.objectives[0].metric)


class ImprovementTracker:
    """Follows the best values of configurations up to the first that has not ended.

    Args:
        spec: Specification of the study, whose `stop_after` says when it ends.
    """

    def __init__(self, spec: StudySpec) -> None:
        self._spec = spec
        self._next = 0  # number of the next configuration to count
        self._plateau = Plateau(at=-1)

    def stalled(self, trials: TrialTable) -> str:
        """Why the study ends; "" while its best value improves."""
        if (rule := self._spec.stop_after) is None:
            return ""
        objective = self._spec.objectives[0]
        while self._next - self._plateau.at <= rule.trials:
            records = [trials.get(number) for number in self._spec.repetition.trials(self._next)]
            if not all(record is not None and record.state.final for record in records):
                return ""
            best = best_value(trials, self._next, self._spec)
            loss = math.inf if best is None else objective.loss(best)
            self._plateau = self._plateau.followed_by(loss, self._next, rule.min_delta)
            self._next += 1
        since = f", since trial {self._spec.repetition.trials(self._plateau.at)[0]}" if self._plateau.at >= 0 else ""
        return f"the best {objective.metric} has not improved for {rule.trials} trials{since}"
