"""The reference point of a study's hypervolume, which its first trials with values fix."""

from collections.abc import Iterable
from math import isfinite

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
        self._valued: set[int] | None = None  # numbers of trials with values; None before the first report
        self._finite: list[set[int]] = [set() for _ in objectives]  # those with a finite value, for each metric

    def rows(self, reported: Iterable[int]) -> list[StudyValue]:
        """The row that fixes the reference, if reports of these trials, which the table already has, let it follow."""
        if self._is_done:
            return []
        if self._valued is None:  # trials of earlier runs count
            self._valued, reported = set(), [record.number for record in self._trials]
        for number in reported:
            self._note(number, self._valued)
        if len(self._valued) < _REFERENCE_TRIALS or not all(self._finite):
            return []
        shown = [values(self._trials[number].row, self._objectives) for number in sorted(self._valued)]
        if (point := reference_point(filter(None, shown), self._objectives)) is None:
            return []
        self._is_done = True
        return [StudyValue(REFERENCE_KEY, list(point))]

    def _note(self, number: int, valued: set[int]) -> None:
        shown = values(self._trials[number].row, self._objectives)
        for numbers in (valued, *self._finite):
            numbers.discard(number)
        if shown is not None:
            valued.add(number)
            for numbers, value in zip(self._finite, shown, strict=True):
                if isfinite(value):
                    numbers.add(number)
