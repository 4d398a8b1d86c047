"""Whether the best value of a study still improves, trial by trial in the order of their numbers."""

import math

from shoal.algorithms.rules import Plateau
from shoal.core.trial import TrialState
from shoal.spec import StudySpec
from shoal.study.trials import TrialTable

__all__ = ["ImprovementTracker", "best_value"]


def best_value(trials: TrialTable, configuration: int, spec: StudySpec) -> float | None:
    """The value of the first metric that ranks a configuration; None if it has none, has failed or is infeasible."""
    records = [trials.get(number) for number in spec.repetition.trials(configuration)]
    rows = [record.row for record in records if record is not None]
    if len(rows) < len(records):
        return None
    (row,) = spec.configurations(rows)
    return None if row.violation or row.state is TrialState.FAILED else row.objective


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
            retried = any(number in trials.without_algorithm for number in self._spec.repetition.trials(self._next))
            best = None if retried else best_value(trials, self._next, self._spec)  # it had failed when it was counted
            loss = math.inf if best is None else objective.loss(best)
            self._plateau = self._plateau.followed_by(loss, self._next, rule.min_delta)
            self._next += 1
        since = f", since trial {self._spec.repetition.trials(self._plateau.at)[0]}" if self._plateau.at >= 0 else ""
        return f"the best {objective.metric} has not improved for {rule.trials} trials{since}"
