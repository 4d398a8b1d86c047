"""The reference point of a study's hypervolume, which its first trials with values fix."""

from collections.abc import Iterable, Sequence

from shoal.core.hypervolume import MAX_METRICS, REFERENCE_KEY, reference_point
from shoal.core.objective import Objective
from shoal.core.rows import StudyValue, values
from shoal.study.trials import TrialTable

__all__ = ["ReferenceTracker"]

_REFERENCE_TRIALS = 10
"""Number of trials with values from which the reference follows."""


class ReferenceTracker:
    """Fixes the reference once enough trials have values and each metric has a finite one, so that later hypervolumes
    can be compared. Which trials have values, the ranking says; only the reported ones are looked at.

    Args:
        is_fixed: Whether the study has its reference already.
    """

    def __init__(self, objectives: tuple[Objective, ...], trials: TrialTable, *, is_fixed: bool) -> None:
        self._objectives = objectives
        self._trials = trials
        self._is_done = is_fixed or not 1 < len(objectives) <= MAX_METRICS
        self._values: dict[int, Sequence[float]] | None = None  # of trials that have some; None before the first report

    def rows(self, reported: Iterable[int]) -> list[StudyValue]:
        """The row that fixes the reference, if reports of these trials, which the table already has, let it follow."""
        if self._is_done:
            return []
        if self._values is None:  # trials of earlier runs count
            self._values, reported = {}, [record.number for record in self._trials]
        for number in reported:
            if (shown := values(self._trials[number].row, self._objectives)) is None:
                self._values.pop(number, None)
            else:
                self._values[number] = shown
        enough = len(self._values) >= _REFERENCE_TRIALS
        point = reference_point(self._values.values(), self._objectives) if enough else None
        if point is None:
            return []
        self._is_done = True
        return [StudyValue(REFERENCE_KEY, list(point))]
