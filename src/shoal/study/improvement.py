"""The best value of a study over time, and whether it still improves, trial by trial in the order of their numbers."""

import math
from collections.abc import Sequence

from shoal.algorithms.rules import Plateau
from shoal.core.trial import TrialState
from shoal.spec import StudySpec
from shoal.study.trials import TrialTable

__all__ = ["BestTracker", "ImprovementTracker", "best_value"]


def best_value(trials: TrialTable, configuration: int, spec: StudySpec) -> float | None:
    """The value of the first metric that ranks a configuration; None if it has none, has failed or is infeasible."""
    records = [trials.get(number) for number in spec.repetition.trials(configuration)]
    rows = [record.row for record in records if record is not None]
    if len(rows) < len(records):
        return None
    (row,) = spec.configurations(rows)
    return None if row.violation or row.state is TrialState.FAILED else row.objective


class BestTracker:
    """Follows the value of the study's best configuration, by the first metric.

    It falls back if the best trial fails for good, or if what ranks trials, such as their last value, gets worse.
    """

    def __init__(self, spec: StudySpec, trials: TrialTable) -> None:
        self._spec, self._trials = spec, trials
        self._recorded: float | None = None
        self._losses: dict[int, float] = {}  # of each configuration with a value
        self._least = math.inf

    def restore(self, recorded: Sequence[float]) -> None:
        """Begin with the trials of the table, and the values that earlier runs have recorded, in order."""
        for configuration in {self._spec.repetition.configuration(record.number) for record in self._trials}:
            self._update(configuration)
        self._recorded = recorded[-1] if recorded else None

    def after(self, trial: int) -> float | None:
        """The best value after a report of a trial, which the table has; None if it is unchanged, or there is none."""
        self._update(self._spec.repetition.configuration(trial))
        best = self._spec.objectives[0].loss(self._least)  # changes the sign back
        if not self._losses or best == self._recorded:
            return None
        self._recorded = best
        return best

    def _update(self, configuration: int) -> None:
        before = self._losses.pop(configuration, math.inf)
        if (value := best_value(self._trials, configuration, self._spec)) is not None:
            self._losses[configuration] = loss = self._spec.objectives[0].loss(value)
            self._least = min(self._least, loss)
        if before == self._least != self._losses.get(configuration):
            self._least = min(self._losses.values(), default=math.inf)


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
