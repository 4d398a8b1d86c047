"""The grid of a study: how its trials fill the space that is searched."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import ShoalError
from shoal.journal.rows import TrialRow
from shoal.objective import Objective
from shoal.report.axis import Axis, axes
from shoal.report.text import finite
from shoal.space import Space, flatten
from shoal.trial import TrialState

__all__ = ["Cell", "StudyGrid", "grid_json", "study_grid"]


@dataclass(frozen=True)
class Cell:
    """The trials at one place of a grid.

    Args:
        states: number of trials in each state that occurs, in the order of `TrialState`.
        best: the best last value of the study's metric among trials that have not failed; None before the first.
        best_trial: number of the trial that has it.
    """

    states: Mapping[TrialState, int]
    best: float | None
    best_trial: int | None

    @property
    def trials(self) -> int:
        """Number of trials."""
        return sum(self.states.values())


@dataclass(frozen=True, repr=False)
class StudyGrid:
    """The trials of a study by the values of the parameters that are searched.

    Args:
        axes: one for each of these parameters.
        cells: position on each axis -> the trials there; places without trials are left out.
        metric: of the study; of several, the first.
        mode: of that metric, "min" or "max".
    """

    axes: tuple[Axis, ...]
    cells: Mapping[tuple[int, ...], Cell]
    metric: str
    mode: str

    def project(self, *names: str) -> "StudyGrid":
        """The same trials by some of the axes alone, in the order of these names.

        Raises:
            ShoalError: there is no such axis, one is named twice, or a name is no string.
        """
        places = {axis.name: place for place, axis in enumerate(self.axes)}
        for name in names:
            if not isinstance(name, str):
                raise ShoalError(f"an axis is named by a string, got {name!r}; write project('lr', 'width')")
            if name not in places:
                there = f"it has {', '.join(places)}" if places else "nothing is searched, so it has none"
                raise ShoalError(f"the grid has no axis {name!r}; {there}")
            if names.count(name) > 1:
                raise ShoalError(f"the axis {name!r} is named twice; the grid has {', '.join(places)}")
        kept = [places[name] for name in names]
        gathered = defaultdict(list)
        for position, cell in self.cells.items():
            gathered[tuple(position[place] for place in kept)].append(cell)
        cells = {position: _joined(gathered[position], self.mode) for position in sorted(gathered)}
        return StudyGrid(tuple(self.axes[place] for place in kept), cells, self.metric, self.mode)

    @property
    def main_axes(self) -> tuple[str, ...]:
        """The two that are likely to tell most at a glance: those with the most values or bins, the longer one first.

        Of axes that one choice decides together only one counts. There may be fewer than two.
        """
        longest = sorted(self.axes, key=lambda axis: -axis.bins.stop)
        by_chooser: dict[str, str] = {}
        for axis in longest:
            by_chooser.setdefault(axis.chooser, axis.name)
        return tuple(by_chooser.values())[:2]

    def __repr__(self) -> str:
        trials = sum(cell.trials for cell in self.cells.values())
        sizes = ", ".join(f"{axis.name}: {len(axis.labels)}" for axis in self.axes)
        return f"StudyGrid({sizes or 'no axes'}; {trials} trials in {len(self.cells)} cells)"


def study_grid(space: Space, rows: Iterable[TrialRow], objective: Objective) -> StudyGrid:
    """The grid of a study.

    Args:
        space: that is searched.
        rows: all its trials, as read from the journal.
        objective: of the study; of several, the first.
    """
    lines = axes(space)
    gathered = defaultdict(list)
    for row in rows:
        config = flatten(row.config)
        gathered[tuple(_place(line, config) for line in lines)].append(_cell(row))
    # A configuration from elsewhere than the space may lack what the space always has.
    lines = tuple(
        line.with_lack() if any(position[place] == line.bins.stop for position in gathered) else line
        for place, line in enumerate(lines)
    )
    cells = {position: _joined(gathered[position], objective.mode) for position in sorted(gathered)}
    return StudyGrid(lines, cells, objective.metric, objective.mode)


def grid_json(grid: StudyGrid) -> dict[str, Any]:
    """A grid as plain values; numbers that JSON has no word for are None."""
    return {
        "axes": [
            {"name": axis.name, "labels": list(axis.labels), "values": list(axis.values), "edges": list(axis.edges)}
            for axis in grid.axes
        ],
        "cells": [
            {
                "at": list(position),
                "trials": {str(state): count for state, count in cell.states.items()},
                "best": finite(cell.best),
                "best_trial": cell.best_trial,
            }
            for position, cell in grid.cells.items()
        ],
    }


def _place(axis: Axis, config: Mapping[str, Any]) -> int:
    return axis.position(config[axis.name]) if axis.name in config else axis.bins.stop


def _cell(row: TrialRow) -> Cell:
    if row.objective is None or row.state is TrialState.FAILED:
        return Cell({row.state: 1}, None, None)
    return Cell({row.state: 1}, row.objective, row.number)


def _joined(cells: Sequence[Cell], mode: str) -> Cell:
    if len(cells) == 1:
        return cells[0]
    counts: Counter[TrialState] = Counter()
    for cell in cells:
        counts.update(cell.states)
    states = {state: counts[state] for state in TrialState if counts[state]}
    sign = 1 if mode == "min" else -1
    scored = [(sign * cell.best, cell.best_trial) for cell in cells if cell.best is not None]
    if not scored:
        return Cell(states, None, None)
    best, trial = min(scored)
    return Cell(states, sign * best, trial)
