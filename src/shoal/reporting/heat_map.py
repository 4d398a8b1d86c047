"""A heat map of the study grid for the terminal: the best value and the trials of each pair of parameter values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from shoal.core.trial import TrialState
from shoal.reporting.axis import Axis
from shoal.reporting.grid import Cell, StudyGrid
from shoal.reporting.text import rounded, shown, state_text

__all__ = ["HeatMap"]

_SIGNS = {
    TrialState.COMPLETE: "✓",
    TrialState.STOPPED: "■",
    TrialState.FAILED: "✗",
    TrialState.PAUSED: "‖",
    TrialState.RUNNING: "▸",
    TrialState.PENDING: "…",
}
_SHADES = ("color(243)", "color(65)", "color(71)", "color(41)", "color(47)")
_FEW_SHADES = ("bright_black", "green", "bright_green")
"""From worst to best, the second for terminals of 16 colours: all are legible under black text, on black and white
terminals.
"""

_EMPTY = Cell({}, None, None)

_LONGEST_LABEL = 24
_Column = list[Text]
"""Lines of equal width: a heading, and below it the cells."""


@dataclass(frozen=True)
class _Form:
    """Size of a cell.

    Args:
        digits: Digits of its value.
        heading: Lines of the heading above it; the ends of a bin may stand on two.
        lines: 1: its trials stand beside its value; 2: below it; 3: ended trials above the others.
        longest: Greatest width of the heading of a value.
    """

    digits: int
    heading: int
    lines: int
    longest: int


_FORMS = (_Form(4, 1, 1, 14), _Form(4, 2, 1, 14), _Form(3, 2, 1, 14), _Form(4, 2, 2, 14), _Form(3, 2, 3, 8))
"""From wide to narrow; a map that is too wide even in the last form is cut into blocks below each other."""


@dataclass(frozen=True)
class HeatMap:
    """Rich output of a grid of one axis or two: the first goes down, the last across.

    A cell with a better best value has a stronger colour.

    Args:
        grid: Grid of a study, projected to one axis or two.
        runs: Whether a process runs the study.
    """

    grid: StudyGrid
    runs: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        names = [shown(axis.name) for axis in self.grid.axes]
        places = f"{names[0]} down, {names[1]} across" if len(names) == 2 else f"{names[0]} across"
        better = "lower" if self.grid.mode == "min" else "higher"
        yield _line(Text(f"best {shown(self.grid.metric)}, {better} is better: {places}", "bold"))
        shades = _FEW_SHADES if console.color_system in ("standard", "windows") else _SHADES
        for block in self._blocks(options.max_width, self._styles(shades)):
            for parts in zip(*block, strict=True):
                yield _line(*parts)
        yield Text(self._legend(), "dim")
        if told := self._explained():
            yield Text(told, "dim")

    def _styles(self, shades: Sequence[str]) -> dict[float, Style]:
        """Colour of each value by its rank, so that one outlier does not flatten the others."""
        values = {cell.best for cell in self.grid.cells.values() if cell.best is not None}
        ordered = sorted(values, reverse=self.grid.mode == "max")
        # The best value comes first, so a single value has the strongest colour, too.
        return {
            value: Style(color="black", bgcolor=shades[-1 - place * len(shades) // len(ordered)])
            for place, value in enumerate(ordered)
        }

    def _blocks(self, width: int, styles: Mapping[float, Style]) -> Iterator[list[_Column]]:
        """Blocks of columns that fit the width, each with the labels of the rows first."""
        for form in _FORMS:
            side = self._side(form, width // 3)
            columns = [self._column(position, form, styles) for position in range(len(self.grid.axes[-1].labels))]
            if _width([side, *columns]) <= width:
                break
        while columns:
            block = [side, columns.pop(0)]
            while columns and _width([*block, columns[0]]) <= width:
                block.append(columns.pop(0))
            yield block

    def _side(self, form: _Form, widest: int) -> _Column:
        down = self.grid.axes[:-1]
        name, labels = (shown(down[0].name), down[0].labels) if down else ("", ("",))
        width = min(max(map(cell_len, (name, *labels))), _LONGEST_LABEL, widest)
        heading = [""] * (form.heading - 1) + [name]
        lines = [text for label in labels for text in (label, *[""] * (form.lines - 1))]
        return [
            *(Text(_fitted(text, width) + " ", "bold") for text in heading),
            *(Text(_fitted(text, width) + " ") for text in lines),
        ]

    def _column(self, position: int, form: _Form, styles: Mapping[float, Style]) -> _Column:
        across, down = self.grid.axes[-1], self.grid.axes[:-1]
        rows = [(row,) for row in range(len(down[0].labels))] if down else [()]
        cells = [self.grid.cells.get((*row, position), _EMPTY) for row in rows]
        texts = [[_value_text(cell, form.digits), *_states_texts(cell, form.lines)] for cell in cells]
        if form.lines == 1:
            inner = max(len(value) for value, _ in texts)
            width = max(len(states) for _, states in texts)
            gap = " " if inner and width else ""
            texts = [[f"{value:>{inner}}{gap}{states:{width}}"] for value, states in texts]
        heading = _heading(across, position, form)
        width = max(map(cell_len, (*heading, *(line for lines in texts for line in lines))))
        align = str.ljust if form.lines == 1 else str.rjust
        column = [Text(f" {_fitted(text, width)} ", "bold") for text in heading]
        for cell, lines in zip(cells, texts, strict=True):
            style = "dim" if cell.best is None else styles[cell.best]
            column += [Text(f" {align(line, width)} ", style) for line in lines]
        return column

    def _legend(self) -> str:
        there = {state for cell in self.grid.cells.values() for state in cell.states}
        signs = [f"{sign} {state_text(state, self.runs)}" for state, sign in _SIGNS.items() if state in there]
        return " ".join(signs) or "no trials yet"

    def _explained(self) -> str:
        """Share of the ranking that the parameters of the map explain; "" while it is unknown."""
        known = self.grid.explained
        parts = [f"{shown(axis.name)} {known[axis.name]:.0%}" for axis in self.grid.axes if axis.name in known]
        return f"explained of the ranking so far: {', '.join(parts)}" if parts else ""


def _line(*parts: Text) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _width(block: Sequence[_Column]) -> int:
    return sum(column[0].cell_len for column in block)


def _heading(axis: Axis, position: int, form: _Form) -> list[str]:
    label = axis.labels[position]
    if form.heading == 2 and position in axis.bins:
        start, dots, end = label.partition("..")
        return [start + dots, end]
    if position not in axis.bins and cell_len(label) > form.longest:
        label = _fitted(label, form.longest)
    return [""] * (form.heading - 1) + [label]


def _value_text(cell: Cell, digits: int) -> str:
    if cell.best is None:
        return "" if cell.states else "·"
    return rounded(cell.best, digits)


def _states_texts(cell: Cell, lines: int) -> list[str]:
    """Number of trials in each state, on one line, or on two if the cell has three."""
    signs = [(state, f"{cell.states[state]}{sign}") for state, sign in _SIGNS.items() if state in cell.states]
    if lines < 3:
        return ["".join(text for _, text in signs)]
    return ["".join(text for state, text in signs if state.final is final) for final in (True, False)]


def _fitted(text: str, width: int) -> str:
    """The text in exactly `width` columns of the terminal."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
