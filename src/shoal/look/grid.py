"""The trials of a study by the values of the searched parameters, and a heat map of them for the terminal."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.rows import TrialRow
from shoal.core.space import Space, flatten
from shoal.core.trial import TrialState, state_name
from shoal.journal.view import JournalView
from shoal.look.axis import Axis, axes
from shoal.look.budget_values import budget_values
from shoal.look.importance import eta_squared
from shoal.look.text import counts_in_words, finite_or_none, printable, rounded

__all__ = ["Cell", "HeatMap", "StudyGrid", "grid_json", "journal_grid", "study_grid"]


_LEAST_EXPLAINED = 0.005
"""Share of the ranking below which an axis explains nothing, and is shown as 0 %."""


@dataclass(frozen=True)
class Cell:
    """The trials at one position of a grid.

    Args:
        states: Number of trials in each state that occurs, in the order of `TrialState`.
        best: Best value of the study's metric among trials that have not failed; None before the first.
        paused: Number of the pending trials that users have paused.
    """

    states: Mapping[TrialState, int]
    best: float | None
    best_trial: int | None
    paused: int = 0

    @property
    def trials(self) -> int:
        """Number of trials."""
        return sum(self.states.values())

    def status(self, runs: bool) -> dict[str, int]:
        """State in words, as of `trial_state_text` -> number of its trials; only states that occur."""
        return counts_in_words(self.states, self.paused, runs)


@dataclass(frozen=True, repr=False)
class StudyGrid:
    """The trials of a study by the values of the searched parameters.

    Args:
        cells: Position on each axis -> the trials there; positions without trials are left out.
        metric: Metric of the study; of several, the first.
        explained: Name of each axis -> `Study.importance` of the parameter by "eta2"; empty while there are too few
            values at one budget, or all are equal.
    """

    axes: tuple[Axis, ...]
    cells: Mapping[tuple[int, ...], Cell]
    metric: str
    mode: str
    explained: Mapping[str, float] = field(default_factory=dict)

    def project(self, *names: str) -> "StudyGrid":
        """Return the same trials by some of the axes alone, in the given order; ShoalError for another name."""
        indices = {axis.name: index for index, axis in enumerate(self.axes)}
        for name in names:
            if not isinstance(name, str):
                raise ShoalError(f"an axis is named by a string, got {name!r}; write project('lr', 'width')")
            if name not in indices:
                present = f"it has {', '.join(indices)}" if indices else "nothing is searched, so it has none"
                raise ShoalError(f"the grid has no axis {name!r}; {present}")
            if names.count(name) > 1:
                raise ShoalError(f"the axis {name!r} is named twice; the grid has {', '.join(indices)}")
        kept = [indices[name] for name in names]
        by_position = defaultdict(list)
        for position, cell in self.cells.items():
            by_position[tuple(position[index] for index in kept)].append(cell)
        cells = {position: _merged_cell(by_position[position], self.mode) for position in sorted(by_position)}
        return StudyGrid(tuple(self.axes[index] for index in kept), cells, self.metric, self.mode, self.explained)

    @property
    def has_results(self) -> bool:
        """Whether a trial has a value, or has failed."""
        return any(cell.best is not None or TrialState.FAILED in cell.states for cell in self.cells.values())

    @property
    def main_axes(self) -> tuple[str, ...]:
        """The two axes that explain most of the values, or one if no other does; while none does, the longest two.

        Of axes that one choice decides together only one counts. There may be fewer than two; the longer one is first.
        """
        longest = sorted(self.axes, key=lambda axis: -axis.bins.stop)
        by_chooser: dict[str, Axis] = {}
        for axis in sorted(longest, key=lambda axis: -self.explained.get(axis.name, 0.0)):
            by_chooser.setdefault(axis.chooser, axis)
        first = list(by_chooser.values())[:2]
        chosen = [axis for axis in first if self.explained.get(axis.name, 0.0) >= _LEAST_EXPLAINED] or first
        return tuple(axis.name for axis in longest if axis in chosen)

    def __repr__(self) -> str:
        trials = sum(cell.trials for cell in self.cells.values())
        sizes = ", ".join(f"{axis.name}: {len(axis.labels)}" for axis in self.axes)
        return f"StudyGrid({sizes or 'no axes'}; {trials} trials in {len(self.cells)} cells)"


def journal_grid(journal: JournalView) -> StudyGrid:
    """Read the grid of a study."""
    return study_grid(
        journal.space, journal.configurations(), journal.objectives[0], eta_squared(budget_values(journal))
    )


def study_grid(
    space: Space, rows: Iterable[TrialRow], objective: Objective, explained: Mapping[str, float] = MappingProxyType({})
) -> StudyGrid:
    """Build the grid of a study, by its first objective."""
    searched = axes(space)
    by_position = defaultdict(list)
    for row in rows:
        config = flatten(row.config)
        by_position[tuple(axis.position_in(config) for axis in searched)].append(_cell(row))
    # A configuration from outside the space may lack a parameter that the space always has.
    searched = tuple(
        axis.with_missing() if any(position[index] == axis.bins.stop for position in by_position) else axis
        for index, axis in enumerate(searched)
    )
    cells = {position: _merged_cell(by_position[position], objective.mode) for position in sorted(by_position)}
    return StudyGrid(searched, cells, objective.metric, objective.mode, explained)


def grid_json(grid: StudyGrid, *, runs: bool = True) -> dict[str, Any]:
    """A grid as plain values; None for NaN and infinities. Without a process, running trials are "interrupted".
    `trials` of a cell are by the public `TrialState`, `status` by its words, as `state` and `status` of `trial_json`.
    """
    return {
        "axes": [
            {"name": axis.name, "labels": list(axis.labels), "values": list(axis.values), "edges": list(axis.edges)}
            for axis in grid.axes
        ],
        "cells": [
            {
                "at": list(position),
                "trials": {state_name(state, runs): count for state, count in cell.states.items()},
                "status": cell.status(runs),
                "best": finite_or_none(cell.best),
                "best_trial": cell.best_trial,
            }
            for position, cell in grid.cells.items()
        ],
    }


def _cell(row: TrialRow) -> Cell:
    paused = int(row.state is TrialState.PENDING and bool(row.paused_by))
    if row.objective is None or row.violation or row.state is TrialState.FAILED:
        return Cell({row.state: 1}, None, None, paused)
    return Cell({row.state: 1}, row.objective, row.number, paused)


def _merged_cell(cells: Sequence[Cell], mode: str) -> Cell:
    if len(cells) == 1:
        return cells[0]
    counts: Counter[TrialState] = Counter()
    for cell in cells:
        counts.update(cell.states)
    states = {state: counts[state] for state in TrialState if counts[state]}
    paused = sum(cell.paused for cell in cells)
    sign = 1 if mode == "min" else -1
    scored = [(sign * cell.best, cell.best_trial) for cell in cells if cell.best is not None]
    if not scored:
        return Cell(states, None, None, paused)
    best, trial = min(scored)
    return Cell(states, sign * best, trial, paused)


_EMPTY = Cell({}, None, None)

_FINAL_SIGNS = {"complete": "✓", "stopped": "■", "failed": "✗"}
_SIGNS = {
    **_FINAL_SIGNS,
    "waiting for others": "‖",
    "paused": "□",
    "running": "▸",
    "interrupted": "▸",
    "waiting": "…",
}
"""By the words of states."""
_SHADES = ("color(243)", "color(65)", "color(71)", "color(41)", "color(47)")
_FEW_SHADES = ("bright_black", "green", "bright_green")
"""From worst to best, the second for terminals of 16 colours: all legible under black text, on black and on white."""

_MAX_LABEL_WIDTH = 24
_Column = list[Text]
"""Lines of equal width: a heading, and below it the cells."""


@dataclass(frozen=True)
class _GridLayout:
    digits: int
    heading: int
    lines: int
    longest: int


_LAYOUTS = (
    _GridLayout(4, 1, 1, 14),
    _GridLayout(4, 2, 1, 14),
    _GridLayout(3, 2, 1, 14),
    _GridLayout(4, 2, 2, 14),
    _GridLayout(3, 2, 3, 8),
)
"""From wide to narrow; a map that is too wide even in the last form is cut into blocks below each other."""


@dataclass(frozen=True)
class HeatMap:
    """Rich output of a grid of one axis or two: the first goes down, the last across.

    A cell with a better best value has a stronger colour.
    """

    grid: StudyGrid
    runs: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        names = [printable(axis.name) for axis in self.grid.axes]
        places = f"{names[0]} down, {names[1]} across" if len(names) == 2 else f"{names[0]} across"
        better = "lower" if self.grid.mode == "min" else "higher"
        yield _line(Text(f"best {printable(self.grid.metric)}, {better} is better: {places}", "bold"))
        shades = _FEW_SHADES if console.color_system in ("standard", "windows") else _SHADES
        for block in self._blocks(options.max_width, self._styles(shades)):
            for parts in zip(*block, strict=True):
                yield _line(*parts)
        yield Text(self._legend(), "dim")
        if note := self._explained():
            yield Text(note, "dim")

    def _styles(self, shades: Sequence[str]) -> dict[float, Style]:
        """Return the colour of each value by its rank, so that one outlier does not flatten the others."""
        values = {cell.best for cell in self.grid.cells.values() if cell.best is not None}
        ordered = sorted(values, reverse=self.grid.mode == "max")
        # The best value comes first, so a single value has the strongest colour, too.
        return {
            value: Style(color="black", bgcolor=shades[-1 - index * len(shades) // len(ordered)])
            for index, value in enumerate(ordered)
        }

    def _blocks(self, width: int, styles: Mapping[float, Style]) -> Iterator[list[_Column]]:
        """Blocks of columns that fit the width, each with the labels of the rows first."""
        for layout in _LAYOUTS:
            side = self._row_labels(layout, width // 3)
            columns = [self._column(position, layout, styles) for position in range(len(self.grid.axes[-1].labels))]
            if _width([side, *columns]) <= width:
                break
        while columns:
            block = [side, columns.pop(0)]
            while columns and _width([*block, columns[0]]) <= width:
                block.append(columns.pop(0))
            yield block

    def _row_labels(self, layout: _GridLayout, widest: int) -> _Column:
        down = self.grid.axes[:-1]
        name, labels = (printable(down[0].name), down[0].labels) if down else ("", ("",))
        width = min(max(map(cell_len, (name, *labels))), _MAX_LABEL_WIDTH, widest)
        heading = [""] * (layout.heading - 1) + [name]
        lines = [text for label in labels for text in (label, *[""] * (layout.lines - 1))]
        return [
            *(Text(_fit_width(text, width) + " ", "bold") for text in heading),
            *(Text(_fit_width(text, width) + " ") for text in lines),
        ]

    def _column(self, position: int, layout: _GridLayout, styles: Mapping[float, Style]) -> _Column:
        across, down = self.grid.axes[-1], self.grid.axes[:-1]
        rows = [(row,) for row in range(len(down[0].labels))] if down else [()]
        cells = [self.grid.cells.get((*row, position), _EMPTY) for row in rows]
        texts = [[_value_text(cell, layout.digits), *_state_lines(cell, layout.lines)] for cell in cells]
        if layout.lines == 1:
            inner = max(len(value) for value, _ in texts)
            width = max(len(states) for _, states in texts)
            gap = " " if inner and width else ""
            texts = [[f"{value:>{inner}}{gap}{states:{width}}"] for value, states in texts]
        heading = _heading(across, position, layout)
        width = max(map(cell_len, (*heading, *(line for lines in texts for line in lines))))
        align = str.ljust if layout.lines == 1 else str.rjust
        column = [Text(f" {_fit_width(text, width)} ", "bold") for text in heading]
        for cell, lines in zip(cells, texts, strict=True):
            style = "dim" if cell.best is None else styles[cell.best]
            column += [Text(f" {align(line, width)} ", style) for line in lines]
        return column

    def _legend(self) -> str:
        present = {status for cell in self.grid.cells.values() for status in cell.status(self.runs)}
        signs = [f"{sign} {status}" for status, sign in _SIGNS.items() if status in present]
        return " ".join(signs) or "no trials yet"

    def _explained(self) -> str:
        """Return the share of the ranking that the parameters of the map explain; "" while it is unknown."""
        known = self.grid.explained
        if known and max(known.values()) < _LEAST_EXPLAINED:
            return "importance at one budget: no parameter explains the ranking"
        parts = [f"{printable(axis.name)} {known[axis.name]:.0%}" for axis in self.grid.axes if axis.name in known]
        return f"importance at one budget: {', '.join(parts)}" if parts else ""


def _line(*parts: Text) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _width(block: Sequence[_Column]) -> int:
    return sum(column[0].cell_len for column in block)


def _heading(axis: Axis, position: int, layout: _GridLayout) -> list[str]:
    label = axis.labels[position]
    if layout.heading == 2 and position in axis.bins:
        start, dots, end = label.partition("..")
        return [start + dots, end]
    if position not in axis.bins and cell_len(label) > layout.longest:
        label = _fit_width(label, layout.longest)
    return [""] * (layout.heading - 1) + [label]


def _value_text(cell: Cell, digits: int) -> str:
    if cell.best is None:
        return "" if cell.states else "·"
    return rounded(cell.best, digits)


def _state_lines(cell: Cell, lines: int) -> list[str]:
    """Return the number of trials in each state, on one line, or on two if the cell has three."""
    counts = cell.status(runs=True)
    signs = [(status, f"{counts[status]}{sign}") for status, sign in _SIGNS.items() if status in counts]
    if lines < 3:
        return ["".join(text for _, text in signs)]
    return ["".join(text for status, text in signs if (status in _FINAL_SIGNS) is final) for final in (True, False)]


def _fit_width(text: str, width: int) -> str:
    """Return the text in exactly `width` columns of the terminal."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
